"""SimplifyConvolutions: every convolution becomes a form that kernels know; batch norms are folded.

Before::

    y = R.nn.conv2d(x, w)
    t = R.nn.batch_norm(y, gamma, beta, mean, variance)
    z = t[0]

After::

    y = R.nn.conv2d(x, w * scale)
    z = R.add(y, shift)

Step by step, each in its own file: expressions of constants are computed (`constant_values`), batch norms become
multiplications and additions (`batch_norms`), which are taken into weights (`channel_scales`), padding becomes the
convolution's own (`fold_pads`), transposed convolutions become plain ones (`transposed_convolutions`), and small groups
join where tensor cores multiply (`joined_groups`).

TVM's FoldBatchnormToConv2D knows a norm right behind a `conv2d`; its DecomposeOpsForInference infers types anew, and
devices with them.

Assumes nothing of devices, keeps those that are written, and asks theirs how wide groups are to be. A second run
changes nothing.
"""

from __future__ import annotations

import tvm

from ..ir.blocks import rewrite_blocks
from ..ir.constant_values import fold_constants
from ..ir.declare import declare_pass
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, walk_bindings
from .batch_norms import expand_batch_norms
from .channel_scales import fold_channel_scales
from .fold_pads import fold_pads
from .merged_group_convolutions import join_groups
from .transposed_convolutions import TRANSPOSED, expand_transposed_convolutions

_STEPS = (
    fold_constants,
    expand_batch_norms,
    fold_channel_scales,
    fold_pads,
    expand_transposed_convolutions,
    join_groups,
)


def simplify_convolutions(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; the very module where there is nothing to do."""
    for step in _STEPS:
        mod = rewrite_blocks(mod, step)
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            name = op_name(binding.value) or ""
            if name in TRANSPOSED:
                reason = "stays transposed: its weights or the size of its image are not known at compile time"
                record_missed(gv.name_hint, binding.var.name, name.removeprefix("relax."), reason)
    return mod


SimplifyConvolutions = declare_pass("SimplifyConvolutions", simplify_convolutions)
