"""Neighbouring groups of few channels become one, with zeros between them, where tensor cores are to multiply.

Before::

    y = R.nn.conv2d(x, w, groups=32)      # w of (1024, 32, 3, 3)

After::

    y = R.nn.conv2d(x, v, groups=16)      # v of (1024, 64, 3, 3), half of it zeros

Tiles of tensor cores have as many columns as several such groups: they would stay empty, or plain threads would
multiply. More than `_MAX_JOINED` groups are slower joined. A group whose numbers are infinite makes NaN of its
neighbours, too: float16 has overflown by then.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ...encoding.resolver import answers_of
from ..ir.blocks import Block, shape_of
from ..ir.constant_values import ConstantValues, constant_like
from ..ir.rewriting import op_name, typed
from ..ir.targets import target_of

_CONVOLUTIONS = {
    "relax.nn.conv1d": (relax.op.nn.conv1d, "OIW"),
    "relax.nn.conv2d": (relax.op.nn.conv2d, "OIHW"),
    "relax.nn.conv3d": (relax.op.nn.conv3d, "OIDHW"),
}
_MAX_JOINED = 8


def join_groups(block: Block) -> list[relax.Binding] | None:
    """The block with fewer, larger groups in its convolutions; None where none has groups to join."""
    values = ConstantValues(block)
    bindings, changed = [], False
    for binding in block.bindings:
        joined = _joined(binding, values) if isinstance(binding, relax.VarBinding) else None
        bindings.append(joined or binding)
        changed = changed or joined is not None
    return bindings if changed else None


def _joined(binding: relax.VarBinding, values: ConstantValues) -> relax.VarBinding | None:
    call = binding.value
    found = _CONVOLUTIONS.get(op_name(call) or "")
    if found is None or int(call.attrs.groups) == 1 or str(call.attrs.kernel_layout) != found[1]:
        return None
    data, weight = call.args
    shape, groups, dtype = shape_of(weight), int(call.attrs.groups), str(weight.ty.dtype)
    target = target_of(binding.var.ty.vdevice)
    wanted = answers_of(target).group_columns(target, dtype) if str(data.ty.dtype) == dtype else 0
    if not wanted or shape is None:
        return None
    columns, channels = int(shape[0]) // groups, int(shape[1])
    count = wanted // columns
    if channels == 1 or wanted % columns or not 1 < count <= _MAX_JOINED or groups % count:
        return None
    array = values.of(weight)
    if array is None:
        return None
    apart = array.reshape(groups // count, count, columns, 1, channels, *array.shape[2:])
    own = np.eye(count, dtype=bool).reshape(1, count, 1, count, 1, *(1 for _ in array.shape[2:]))
    blocks = np.where(own, apart, np.zeros((), array.dtype))
    weights = constant_like(blocks.reshape(-1, count * channels, *array.shape[2:]), weight.ty)
    attrs = call.attrs
    layouts = (str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout), attrs.out_dtype)
    sizes = ([int(size) for size in each] for each in (attrs.strides, attrs.padding, attrs.dilation))
    wider = found[0](data, weights, *sizes, groups // count, *layouts)
    return relax.VarBinding(binding.var, typed(wider, call.ty))
