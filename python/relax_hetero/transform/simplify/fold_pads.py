"""Padding with zeros before a convolution or a mean over windows, or with -inf before a maximum, becomes the op's own.

Before::

    p = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])
    y = R.nn.conv2d(p, w, padding=[0, 0, 0, 0])

After::

    y = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from ...op.traits import traits_of
from ..ir.blocks import Block, without_unused
from ..ir.rewriting import changed, op_name

PAD = "relax.nn.pad"


def fold_pads(block: Block) -> list[relax.Binding] | None:
    """The block with padding taken into the ops that would pad alike; None where there is none."""
    bindings = [_folded(block, binding) for binding in block.bindings]
    if all(new is old for new, old in zip(bindings, block.bindings, strict=True)):
        return None
    return without_unused(bindings, block, lambda value: op_name(value) == PAD)


def _folded(block: Block, binding: relax.Binding) -> relax.Binding:
    call = binding.value
    kind = traits_of(op_name(call)).kind
    if kind not in ("conv", "max_pool", "avg_pool") or not isinstance(call.args[0], relax.Var):
        return binding
    pad = block.definition(call.args[0])
    layout = str(call.attrs.data_layout if kind == "conv" else call.attrs.layout)
    widths = _widths(pad, layout, float("-inf") if kind == "max_pool" else 0.0)
    if widths is None:
        return binding
    own = [int(width) for width in call.attrs.padding]
    fields: dict[str, Any] = {"padding": [a + b for a, b in zip(own, widths, strict=True)]}
    if kind == "max_pool" and call.attrs.ceil_mode:
        return binding
    if kind == "avg_pool":
        if any(own) and not call.attrs.count_include_pad or call.attrs.ceil_mode:
            return binding
        fields["count_include_pad"] = True
    args = [pad.args[0], *call.args[1:]]
    new = relax.Call(call.op, args, changed(call.attrs, **fields), call.ty_args, call.span, ret_ty=call.ty)
    return relax.VarBinding(binding.var, new, binding.span)


def _widths(pad: relax.Expr, layout: str, value: float) -> list[int] | None:
    """Elements before each spatial axis, then after each; None for a padding with another value, or of other axes."""
    if op_name(pad) != PAD or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != value:
        return None
    widths = [int(width) for width in pad.attrs.pad_width]
    spatial = [axis for axis, letter in enumerate(layout) if letter not in "NC"]
    others = [axis for axis in range(len(layout)) if axis not in spatial]
    if not layout.isupper() or len(widths) != 2 * len(layout) or min(widths) < 0:
        return None
    if any(widths[2 * axis] or widths[2 * axis + 1] for axis in others):
        return None
    return [widths[2 * axis] for axis in spatial] + [widths[2 * axis + 1] for axis in spatial]
