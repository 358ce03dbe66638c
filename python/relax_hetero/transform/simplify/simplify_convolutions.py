"""SimplifyConvolutions: rewrite convolutions to forms that kernels support, and fold batch norms.

Before::

    y = R.nn.conv2d(x, w)
    t = R.nn.batch_norm(y, gamma, beta, mean, variance)
    z = t[0]

After::

    y = R.nn.conv2d(x, w * scale)
    z = R.add(y, shift)

Its steps: expressions of constants are folded (`fold_constants`), batch norms become multiplications and additions
(`expand_batch_norms`), which are folded into weights (`fold_channel_scales`), padding is folded into the convolution
(`fold_pads`), transposed convolutions become plain ones (`expand_transposed_convolutions`), and small groups are merged
for tensor cores (`join_groups`).

TVM's FoldBatchnormToConv2D only folds a norm right after a `conv2d`; its DecomposeOpsForInference infers types, and
loses devices.

Assumes nothing of devices, keeps existing ones, and merges groups by the resolver of the device. A second run changes
nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
from tvm import relax

from ...encoding.resolver import resolver_or_default
from ...op.traits import traits_of
from ..ir.blocks import Block, Emitter, renamed, rewrite_blocks, shape_of, without_unused
from ..ir.callee_devices import target_of
from ..ir.constant_values import ConstantValues, constant_like, fold_constants
from ..ir.declare import declare_pass
from ..ir.remarks import record_missed
from ..ir.rewriting import op_name, relax_functions, typed, walk_bindings, with_args
from .channel_scales import fold_channel_scales
from .transposed_convolutions import TRANSPOSED, expand_transposed_convolutions

# Merging of neighbouring groups of few channels, with zeros between them, for tensor cores.
#
# Before::
#
#     y = R.nn.conv2d(x, w, groups=32)      # w of (1024, 32, 3, 3)
#
# After::
#
#     y = R.nn.conv2d(x, v, groups=16)      # v of (1024, 64, 3, 3), half of it zeros
#
# Tiles of tensor cores have as many columns as several such groups: most columns would be empty, or plain threads would
# multiply. Merging more than `_MAX_JOINED` groups is slower. Infinite numbers in a group also make NaN of its
# neighbours, but only after float16 has overflowed.

_KERNEL_LAYOUTS = {"relax.nn.conv1d": "OIW", "relax.nn.conv2d": "OIHW", "relax.nn.conv3d": "OIDHW"}
_MAX_JOINED = 8


def join_groups(block: Block) -> list[relax.Binding] | None:
    """The block with fewer, larger groups in its convolutions; None if no groups are merged."""
    values = ConstantValues(block)
    bindings, changed = [], False
    for binding in block.bindings:
        joined = _joined(binding, values) if isinstance(binding, relax.VarBinding) else None
        bindings.append(joined or binding)
        changed = changed or joined is not None
    return bindings if changed else None


def _joined(binding: relax.VarBinding, values: ConstantValues) -> relax.VarBinding | None:
    call = binding.value
    layout = _KERNEL_LAYOUTS.get(op_name(call) or "")
    if layout is None or int(call.attrs.groups) == 1 or str(call.attrs.kernel_layout) != layout:
        return None
    data, weight = call.args
    shape, groups, dtype = shape_of(weight), int(call.attrs.groups), str(weight.ty.dtype)
    target = target_of(binding.var.ty.vdevice)
    tile_columns = resolver_or_default(target).group_columns(target, dtype) if str(data.ty.dtype) == dtype else 0
    if not tile_columns or shape is None:
        return None
    columns, channels = int(shape[0]) // groups, int(shape[1])
    count = tile_columns // columns
    if channels == 1 or tile_columns % columns or not 1 < count <= _MAX_JOINED or groups % count:
        return None
    array = values.of(weight)
    if array is None:
        return None
    grouped = array.reshape(groups // count, count, columns, 1, channels, *array.shape[2:])
    is_diagonal = np.eye(count, dtype=bool).reshape(1, count, 1, count, 1, *(1 for _ in array.shape[2:]))
    blocks = np.where(is_diagonal, grouped, np.zeros((), array.dtype))
    weights = constant_like(blocks.reshape(-1, count * channels, *array.shape[2:]), weight.ty)
    merged = with_args(call, [data, weights], groups=groups // count)
    return relax.VarBinding(binding.var, typed(merged, call.ty))


# Folding of padding: zeros before a convolution or average pooling, or -inf before max pooling, into the op.
#
# Before::
#
#     p = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1])
#     y = R.nn.conv2d(p, w, padding=[0, 0, 0, 0])
#
# After::
#
#     y = R.nn.conv2d(x, w, padding=[1, 1, 1, 1])

PAD = "relax.nn.pad"


def fold_pads(block: Block) -> list[relax.Binding] | None:
    """The block with padding folded into ops that pad with the same value; None if there is none."""
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
    op_padding = [int(width) for width in call.attrs.padding]
    fields: dict[str, Any] = {"padding": [a + b for a, b in zip(op_padding, widths, strict=True)]}
    if kind == "max_pool" and call.attrs.ceil_mode:
        return binding
    if kind == "avg_pool":
        if any(op_padding) and not call.attrs.count_include_pad or call.attrs.ceil_mode:
            return binding
        fields["count_include_pad"] = True
    new = typed(with_args(call, [pad.args[0], *call.args[1:]], **fields), call.ty)
    return relax.VarBinding(binding.var, new, binding.span)


def _widths(pad: relax.Expr, layout: str, value: float) -> list[int] | None:
    """Padding before each spatial axis, then after each; None for padding with another value or along other axes."""
    if op_name(pad) != PAD or str(pad.attrs.pad_mode) != "constant" or float(pad.attrs.pad_value) != value:
        return None
    widths = [int(width) for width in pad.attrs.pad_width]
    spatial = [axis for axis, letter in enumerate(layout) if letter not in "NC"]
    other_axes = [axis for axis in range(len(layout)) if axis not in spatial]
    if not layout.isupper() or len(widths) != 2 * len(layout) or min(widths) < 0:
        return None
    if any(widths[2 * axis] or widths[2 * axis + 1] for axis in other_axes):
        return None
    return [widths[2 * axis] for axis in spatial] + [widths[2 * axis + 1] for axis in spatial]


# Expansion of batch norms with constants to one multiplication and one addition per channel.
#
# Before::
#
#     t = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=1e-5, ...)
#     y = t[0]
#
# After, with constants of shape (1, c, 1, 1)::
#
#     y_scaled = R.multiply(x, gamma / sqrt(variance + epsilon))
#     y = R.add(y_scaled, beta - mean * gamma / sqrt(variance + epsilon))
#
# Only for inference, which returns the running mean and variance unchanged.

BATCH_NORM = "relax.nn.batch_norm"
_FLOATS = ("float32", "float64")


def expand_batch_norms(block: Block) -> list[relax.Binding] | None:
    """The block with batch norms as multiplications and additions; None if there are none to expand."""
    values = ConstantValues(block)
    emitter = Emitter(block.is_dataflow)
    fields: dict[relax.Var, list[relax.Expr]] = {}
    names: dict[relax.Var, relax.Expr] = {}
    for binding in block.bindings:
        affine = _affine(block, values, binding)
        new = renamed(binding, names)
        if affine is not None:
            fields[binding.var] = [_applied(emitter, new, *affine), *new.value.args[3:5]]
            continue
        field = _field(new.value, fields)
        if field is None:
            emitter.bindings.append(new)
        elif block.is_local(binding.var):
            names[binding.var] = field
        else:
            emitter.bind(binding.var, field)
    return emitter.bindings if fields else None


def _field(value: relax.Expr, fields: dict[relax.Var, list[relax.Expr]]) -> relax.Expr | None:
    """The field of a batch norm's results or of an explicit tuple; None for any other value."""
    if not isinstance(value, relax.TupleGetItem):
        return None
    if isinstance(value.tuple_value, relax.Tuple):
        return value.tuple_value.fields[value.index]
    results = fields.get(value.tuple_value) if isinstance(value.tuple_value, relax.Var) else None
    return None if results is None else results[value.index]


def _affine(block: Block, values: ConstantValues, binding: relax.Binding) -> tuple[np.ndarray, np.ndarray] | None:
    """Scale and shift per channel, in float64, of a batch norm of constants whose users are its fields."""
    call = binding.value
    if op_name(call) != BATCH_NORM or call.attrs.training or str(call.args[0].ty.dtype) not in _FLOATS:
        return None
    users = [block.bindings[index].value for index in block.users.get(binding.var, [])]
    if not block.is_local(binding.var) or not all(isinstance(user, relax.TupleGetItem) for user in users):
        return None
    constants = [values.of(arg) for arg in call.args[1:]]
    arrays = [array.astype("float64") for array in constants if array is not None]
    if len(arrays) < 4 or shape_of(call.args[0]) is None:
        return None
    gamma, beta, mean, variance = arrays
    with np.errstate(all="ignore"):
        scale = (gamma if call.attrs.scale else 1.0) / np.sqrt(variance + call.attrs.epsilon)
        shift = (beta if call.attrs.center else 0.0) - mean * scale
    return scale, shift


def _applied(emitter: Emitter, binding: relax.Binding, scale: np.ndarray, shift: np.ndarray) -> relax.Var:
    data, name = binding.value.args[0], binding.var.name
    rank = len(shape_of(data) or [])
    shape = [1] * rank
    shape[int(binding.value.attrs.axis) % rank] = len(scale)
    scaled = relax.op.multiply(data, constant_like(scale.reshape(shape), data.ty))
    first = emitter.emit(scaled, data.ty, f"{name}_scaled")
    return emitter.emit(relax.op.add(first, constant_like(shift.reshape(shape), data.ty)), data.ty, name)


_STEPS = (
    fold_constants,
    expand_batch_norms,
    fold_channel_scales,
    fold_pads,
    expand_transposed_convolutions,
    join_groups,
)


def simplify_convolutions(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; it returns the same module if nothing changes."""
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
