"""Batch norms of constants become one multiplication and one addition per channel.

Before::

    t = R.nn.batch_norm(x, gamma, beta, mean, variance, axis=1, epsilon=1e-5, ...)
    y = t[0]

After, with constants of shape (1, c, 1, 1)::

    y_scaled = R.multiply(x, gamma / sqrt(variance + epsilon))
    y = R.add(y_scaled, beta - mean * gamma / sqrt(variance + epsilon))

Only inference, where the running mean and variance are returned as they came.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from ..ir.blocks import Block, Emitter, renamed, shape_of
from ..ir.constant_values import ConstantValues, constant_like
from ..ir.rewriting import op_name

BATCH_NORM = "relax.nn.batch_norm"
_FLOATS = ("float32", "float64")


def expand_batch_norms(block: Block) -> list[relax.Binding] | None:
    """The block with batch norms as multiplications and additions; None where there are none to expand."""
    values = ConstantValues(block)
    emitter = Emitter(block.is_dataflow)
    fields: dict[relax.Var, list[relax.Expr]] = {}
    names: dict[relax.Var, relax.Expr] = {}
    for binding in block.bindings:
        affine = _affine(block, values, binding)
        now = renamed(binding, names)
        if affine is not None:
            fields[binding.var] = [_applied(emitter, now, *affine), *now.value.args[3:5]]
            continue
        field = _field(now.value, fields)
        if field is None:
            emitter.bindings.append(now)
        elif block.is_local(binding.var):
            names[binding.var] = field
        else:
            emitter.bind(binding.var, field)
    return emitter.bindings if fields else None


def _field(value: relax.Expr, fields: dict[relax.Var, list[relax.Expr]]) -> relax.Expr | None:
    """Field of a tuple, of a batch norm's results or of a tuple that is written out."""
    if not isinstance(value, relax.TupleGetItem):
        return None
    if isinstance(value.tuple_value, relax.Tuple):
        return value.tuple_value.fields[value.index]
    known = fields.get(value.tuple_value) if isinstance(value.tuple_value, relax.Var) else None
    return None if known is None else known[value.index]


def _affine(block: Block, values: ConstantValues, binding: relax.Binding) -> tuple[np.ndarray, np.ndarray] | None:
    """Scale and shift per channel of a batch norm of constants that is only taken apart, in float64."""
    call = binding.value
    if op_name(call) != BATCH_NORM or call.attrs.training or str(call.args[0].ty.dtype) not in _FLOATS:
        return None
    users = [block.bindings[index].value for index in block.users.get(binding.var, [])]
    if not block.is_local(binding.var) or not all(isinstance(user, relax.TupleGetItem) for user in users):
        return None
    found = [values.of(arg) for arg in call.args[1:]]
    arrays = [array.astype("float64") for array in found if array is not None]
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
