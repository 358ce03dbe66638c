"""Folding of scales and shifts per channel into the weights of the op before them.

Before, every operand but x a constant::

    y = R.nn.conv2d(x, w)
    a = R.add(y, b)
    m = R.multiply(a, s)
    z = R.add(m, t)

After::

    y = R.nn.conv2d(x, w * s)
    z = R.add(y, b * s + t)

A chain of additions, subtractions, multiplications and divisions by constants with one number per channel, whose values
have no other users, is one scale and one shift. After a convolution, plain or transposed, or a matrix product with
constant weights, the scale is folded into the weights; elsewhere a multiplication and an addition remain. Constants are
computed in float64 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax, tirx

from ...op.traits import traits_of
from ..ir.blocks import Block, Emitter, shape_of, with_replaced
from ..ir.constant_values import ConstantValues, constant_like
from ..ir.rewriting import op_name, typed, with_args

_AFFINE_OPS = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide")
_FLOATS = ("float32", "float64")


@dataclass
class _Affine:
    """Affine function ``y * scale + shift`` with numbers per channel of one axis."""

    # Channel axis, counted from the front, and its extent.
    axis: int
    channels: int
    scale: np.ndarray
    shift: np.ndarray
    members: list[int]  # indices of the bindings that compute it, in order
    additions: int = 0  # number of members that only shift


@dataclass(frozen=True)
class _Weights:
    """The constant weights of an op, with the axes of the result's channels in them and in the result."""

    array: np.ndarray
    axis: int
    groups: int
    channel_axis: int

    def scaled(self, scale: np.ndarray) -> np.ndarray:
        """The weights for a scaled result."""
        if self.groups == 1:
            shape = [1] * self.array.ndim
            shape[self.axis] = -1
            return self.array * scale.reshape(shape)
        # A transposed convolution: channels (g, o) of the result are weights (g, i) x o.
        grouped = self.array.reshape(self.groups, -1, *self.array.shape[1:])
        spread = scale.reshape(self.groups, 1, -1, *[1] * (self.array.ndim - 2))
        return (grouped * spread).reshape(self.array.shape)


def fold_channel_scales(block: Block) -> list[relax.Binding] | None:
    """The block with scales folded into weights; None if there are none."""
    values = ConstantValues(block)
    removed: set[int] = set()
    replacements: dict[int, list[relax.Binding]] = {}
    scalar_chains: set[int] = set()
    for index, binding in enumerate(block.bindings):
        if index in removed or not isinstance(binding, relax.VarBinding) or not _is_float(binding.var):
            continue
        weights = _weights(values, binding.value)
        if weights is not None:
            folded = _fold(block, values, index, weights)
        else:
            folded = _merge(block, values, index, scalar_chains)
        if folded is not None:
            members, replacements[index] = folded
            removed.update(members)
    return with_replaced(block, replacements, removed)


def _is_float(var: relax.Var) -> bool:
    return isinstance(var.ty, relax.TensorType) and str(var.ty.dtype) in _FLOATS and shape_of(var) is not None


def _weights(values: ConstantValues, call: relax.Expr) -> _Weights | None:
    """The weights of an op that multiplies its operand with constants; None for any other op."""
    name = op_name(call) or ""
    if traits_of(name).kind not in ("product", "conv", "conv_transpose"):
        return None
    array = values.of(call.args[1])
    if array is None or str(array.dtype) != str(call.ty.dtype):
        return None
    if name == "relax.matmul":
        rank = int(call.ty.ndim)
        return _Weights(array, 1, 1, rank - 1) if array.ndim == 2 and int(call.args[0].ty.ndim) > 1 else None
    channel_axis = str(call.attrs.out_layout or call.attrs.data_layout).find("C")
    axis = str(call.attrs.kernel_layout).find("O")
    if len(str(call.attrs.kernel_layout)) != array.ndim or channel_axis < 0 or axis < 0:
        return None
    is_transposed = name.endswith("_transpose")
    if is_transposed and (axis != 1 or str(call.attrs.kernel_layout)[0] != "I"):
        return None
    return _Weights(array, axis, int(call.attrs.groups) if is_transposed else 1, channel_axis)


def _fold(
    block: Block, values: ConstantValues, index: int, weights: _Weights
) -> tuple[list[int], list[relax.Binding]] | None:
    root = block.bindings[index]
    channels = (shape_of(root.var) or [])[weights.channel_axis]
    if not isinstance(channels, tirx.IntImm):
        return None
    affine = _Affine(weights.channel_axis, int(channels), np.ones(int(channels)), np.zeros(int(channels)), [])
    _extend(block, values, root.var, affine)
    is_scaled = bool(np.any(affine.scale != 1))
    if op_name(root.value) == "relax.matmul" and np.all(affine.scale == affine.scale[:1]):
        return None  # a single number: attention is matched by it, and kernels scale at no cost
    if not (is_scaled or affine.additions > 1) or not np.all(np.isfinite(affine.scale)):
        return None
    emitter = Emitter(block.is_dataflow)
    last = block.bindings[affine.members[-1]].var
    call = root.value
    if is_scaled:
        kernel = constant_like(weights.scaled(affine.scale), call.args[1].ty)
        call = typed(with_args(call, [call.args[0], kernel]), call.ty)
    if np.any(affine.shift != 0):
        emitter.bind(root.var, call)
        emitter.emit_as(last, relax.op.add(root.var, _constant(affine, affine.shift, last)))
    else:
        emitter.bind(last, call)
    return affine.members, emitter.bindings


def _merge(
    block: Block, values: ConstantValues, index: int, scalar_chains: set[int]
) -> tuple[list[int], list[relax.Binding]] | None:
    """Merge a chain without weights before it to one multiplication and one addition.

    `scalar_chains` has the bindings of chains of single numbers, so that a chain is only visited once.
    """
    if index in scalar_chains:
        return None
    first = block.bindings[index]
    data = _data(values, first.value)
    if data is None or shape_of(data) is None:
        return None
    axis = _channel_axis(block, values, index, scalar_chains)
    shape = shape_of(first.var) or []
    if axis is None or not isinstance(shape[axis], tirx.IntImm) or len(shape_of(data) or []) != len(shape):
        return None
    channels = int(shape[axis])
    affine = _Affine(axis, channels, np.ones(channels), np.zeros(channels), [])
    if not _extend_by(values, block, index, data, affine):
        return None
    _extend(block, values, first.var, affine)
    has_scale, has_shift = bool(np.any(affine.scale != 1)), bool(np.any(affine.shift != 0))
    is_finite = np.all(np.isfinite(affine.scale)) and np.all(np.isfinite(affine.shift))
    if has_scale + has_shift >= len(affine.members) or not (has_scale or has_shift) or not is_finite:
        return None
    emitter = Emitter(block.is_dataflow)
    last = block.bindings[affine.members[-1]].var
    if has_scale:
        call = relax.op.multiply(data, _constant(affine, affine.scale, last))
        if not has_shift:
            emitter.emit_as(last, call)
            return affine.members, emitter.bindings
        data = emitter.emit(call, last.ty, f"{last.name}_scaled")
    emitter.emit_as(last, relax.op.add(data, _constant(affine, affine.shift, last)))
    return affine.members, emitter.bindings


def _extend(block: Block, values: ConstantValues, var: relax.Var, affine: _Affine) -> None:
    """Extend the chain by the ops after `var` that are affine per channel."""
    user = block.sole_user(var)
    while user is not None and _extend_by(values, block, user, var, affine):
        var = block.bindings[user].var
        user = block.sole_user(var)


def _extend_by(values: ConstantValues, block: Block, index: int, var: relax.Expr, affine: _Affine) -> bool:
    """Extend the chain by one op, and return whether that is possible: `var` with numbers per channel."""
    binding = block.bindings[index]
    name, call = op_name(binding.value), binding.value
    if name not in _AFFINE_OPS or not isinstance(binding, relax.VarBinding) or binding.var.ty.vdevice != var.ty.vdevice:
        return False
    is_first = call.args[0].same_as(var)
    if call.args[0].same_as(call.args[1]) or (name == "relax.divide" and not is_first):
        return False
    array = values.of(call.args[1 if is_first else 0])
    rank = len(shape_of(binding.var) or [])
    numbers = None if array is None or array.ndim > rank else _per_channel(array, affine, rank)
    if numbers is None or len(shape_of(var) or []) != rank:
        return False
    if name in ("relax.add", "relax.subtract"):
        sign = 1.0 if name == "relax.add" else -1.0
        if is_first:
            affine.shift = affine.shift + sign * numbers
        else:
            affine.scale, affine.shift = affine.scale * sign, affine.shift * sign + numbers
        affine.additions += 1
    else:
        with np.errstate(all="ignore"):
            factor = numbers if name == "relax.multiply" else 1.0 / numbers
        affine.scale, affine.shift = affine.scale * factor, affine.shift * factor
    affine.members.append(index)
    return True


def _per_channel(array: np.ndarray, affine: _Affine, rank: int) -> np.ndarray | None:
    """A constant as one number per channel; None if it varies along other axes, or would enlarge the tensor."""
    shape = (1,) * (rank - array.ndim) + array.shape
    extents = [extent for axis, extent in enumerate(shape) if axis != affine.axis]
    if any(extent != 1 for extent in extents) or shape[affine.axis] not in (1, affine.channels):
        return None
    return np.broadcast_to(array.astype("float64").reshape(-1), (affine.channels,))


def _data(values: ConstantValues, call: relax.Expr) -> relax.Expr | None:
    """The operand of an affine op that is not constant; None for any other op."""
    if op_name(call) not in _AFFINE_OPS:
        return None
    is_constant = [values.of(arg) is not None for arg in call.args]
    return call.args[is_constant.index(False)] if sum(is_constant) == 1 else None


def _channel_axis(block: Block, values: ConstantValues, index: int, scalar_chains: set[int]) -> int | None:
    """The axis along which the constants of the chain from `index` vary; None for a chain of single numbers."""
    binding: relax.Binding | None = block.bindings[index]
    rank = len(shape_of(block.bindings[index].var) or [])
    visited: list[int] = []
    # Constants after a scalar may have more dimensions.
    while binding is not None and op_name(binding.value) in _AFFINE_OPS and len(shape_of(binding.var) or []) == rank:
        for arg in binding.value.args:
            array = values.of(arg)
            for axis, extent in enumerate(array.shape if array is not None else ()):
                if extent != 1:
                    return axis + rank - len(array.shape) if array is not None else None
        visited.append(block.positions[binding.var])
        user = block.sole_user(binding.var)
        binding = None if user is None else block.bindings[user]
    scalar_chains.update(visited)
    return None


def _constant(affine: _Affine, numbers: np.ndarray, result: relax.Var) -> relax.Expr:
    shape = [1] * len(shape_of(result) or [])
    shape[affine.axis] = affine.channels
    return constant_like(numbers.reshape(shape), result.ty)
