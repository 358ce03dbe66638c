"""Values and the orders in which they are at hand, while permutations move.

Variables that are permutations of one another are one `PermutedValue`. A permutation is written where an order is
first needed that no variable has, and is used again from then on. Where only dimensions of extent 1 change places it is
a reshape, which costs nothing, and a constant is permuted at compile time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax, tirx

from ..ir.axes import Axes, identity, inverse, is_order_preserving, then
from ..ir.blocks import Block, Emitter, is_one, shape_of, tensor_type

_NOMINAL_EXTENT = 64
"""Assumed extent of a symbolic dimension where bytes are compared."""


@dataclass
class PermutedValue:
    """A tensor in some orders: ``at_hand[axes]`` is ``permute_dims(root, axes)``.

    Attributes
    ----------
    shape : list of PrimExpr
        Shape of the root, which is the order identity; it need not be at hand.
    ty : relax.TensorType
        Type of the variable it was found as: its element type, size and device.
    """

    shape: list[Any]
    ty: relax.TensorType
    is_available: dict[Axes, relax.Expr] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """As `size_of` its type."""
        return size_of(self.ty)

    def source(self, key: Axes) -> tuple[relax.Expr, Axes, bool]:
        """Source to make an order from: the tensor, how it is permuted for that, and whether nothing moves then."""
        found: list[tuple[relax.Expr, Axes, bool]] = []
        for have, expr in self.is_available.items():
            axes = then(inverse(have), key)
            shape = [self.shape[axis] for axis in have]
            found.append((expr, axes, is_order_preserving(shape, axes)))
        return next((each for each in found if each[2]), found[0])


class PermutedValues:
    """The tensors of one block, by variable.

    Parameters
    ----------
    block : Block
    emitter : Emitter
        Where permutations are written.
    """

    def __init__(self, block: Block, emitter: Emitter) -> None:
        self.block, self.emitter = block, emitter
        self._known: dict[relax.Var, tuple[PermutedValue, Axes]] = {}
        self._constants: dict[tuple[int, str], PermutedValue] = {}
        self._wide: dict[tuple[relax.Var, int], relax.Expr] = {}

    def find(self, expr: relax.Expr) -> tuple[PermutedValue, Axes] | None:
        """The value that a tensor is, and its order; None for a tensor of unknown shape and what is no tensor."""
        if isinstance(expr, relax.Var) and expr in self._known:
            return self._known[expr]
        shape = shape_of(expr)
        if shape is None or expr.ty.dtype is None:
            return None
        if isinstance(expr, tvm.ir.GenericConst):
            key = hash(expr.value), str(expr.ty)  # by identity: the table keeps the tensor alive
            value = self._constants.setdefault(key, PermutedValue(shape, expr.ty, {identity(len(shape)): expr}))
            return value, identity(len(shape))
        if not isinstance(expr, relax.Var):
            return None
        return self.define(expr, PermutedValue(shape, expr.ty, {identity(len(shape)): expr}), identity(len(shape)))

    def define(self, var: relax.Var, value: PermutedValue, axes: Axes) -> tuple[PermutedValue, Axes]:
        """`var` is `value` in the order `axes`; written where it is needed, at once if it leaves the block."""
        self._known[var] = value, axes
        if not self.block.is_local(var) and not self._is_at_hand(var, value):
            self._write_as(var, value, axes)
        return value, axes

    def _is_at_hand(self, var: relax.Var, value: PermutedValue) -> bool:
        return any(isinstance(have, relax.Var) and have.same_as(var) for have in value.is_available.values())

    def _write_as(self, var: relax.Var, value: PermutedValue, axes: Axes) -> None:
        if axes in value.is_available:
            self.emitter.bind(var, value.is_available[axes])
        else:
            self._write(value, axes, var)

    def orders(self, expr: relax.Expr) -> list[Axes]:
        """The orders in which a tensor is at hand."""
        found = self.find(expr)
        if found is None:
            return []
        return [then(inverse(have), found[1]) for have in found[0].is_available]

    def cost(self, expr: relax.Expr, axes: Axes) -> int:
        """Bytes to move for a tensor in the order `axes`, to which it broadcasts where it has fewer dimensions."""
        found = self.find(expr)
        if found is None or isinstance(expr, tvm.ir.GenericConst):
            return 0
        value, order = found
        if len(order) < len(axes):
            shape = _widened([value.shape[axis] for axis in order], len(axes))
            return 0 if is_order_preserving(shape, inverse(axes)) else value.size
        key = then(order, inverse(axes))
        return 0 if key in value.is_available or value.source(key)[2] else value.size

    def at(self, expr: relax.Expr, axes: Axes | None = None) -> relax.Expr:
        """A tensor in an order (as the program says where it is None), written where it is not at hand."""
        found = self.find(expr)
        if found is None:
            return expr
        value, order = found
        axes = identity(len(order)) if axes is None else axes
        if len(order) < len(axes):
            return self._widened_at(expr, axes)
        key = then(order, inverse(axes))
        if key not in value.is_available:
            self._write(value, key, expr if isinstance(expr, relax.Var) and key == order else None)
        return value.is_available[key]

    def _write(self, value: PermutedValue, key: Axes, var: relax.Var | None) -> None:
        source, axes, is_free = value.source(key)
        shape = [value.shape[axis] for axis in key]
        if isinstance(source, tvm.ir.GenericConst):
            array = source.value.numpy().transpose(axes).copy()
            made: relax.Expr = tvm.ir.GenericConst(
                tvm.runtime.tensor(array), tensor_type(shape, _dtype(value), value.ty)
            )
            if var is not None:
                self.emitter.bind(var, made)
        else:
            call = relax.op.reshape(source, shape) if is_free else relax.op.permute_dims(source, list(axes))
            ty = tensor_type(shape, _dtype(value), value.ty)
            if var is None:
                made = self.emitter.emit(call, ty, f"{source.name.removesuffix('_permuted')}_permuted")
            else:
                self.emitter.bind(var, relax.Call(call.op, list(call.args), call.attrs, ret_ty=ty))
                made = var
        value.is_available[key] = made

    def _widened_at(self, expr: relax.Expr, axes: Axes) -> relax.Expr:
        plain = self.at(expr)
        shape = shape_of(plain) or []
        if all(is_one(extent) for extent in shape):
            return plain
        wide = _widened(shape, len(axes))
        ty = tensor_type(wide, str(plain.ty.dtype), plain.ty)
        if isinstance(plain, tvm.ir.GenericConst):
            array = plain.value.numpy().reshape([int(extent) for extent in wide])
            return self.at(tvm.ir.GenericConst(tvm.runtime.tensor(array), ty), axes)
        key = (plain, len(axes))
        if key not in self._wide:
            self._wide[key] = self.emitter.emit(relax.op.reshape(plain, wide), ty, f"{plain.name}_wide")
        return self.at(self._wide[key], axes)


def size_of(ty: relax.TensorType) -> int:
    """Bytes of a tensor; nominal ones where extents are symbolic, or not written."""
    if ty.dtype is None or not isinstance(ty.shape, relax.ShapeExpr):
        return _NOMINAL_EXTENT
    extents = [int(dim) if isinstance(dim, tirx.IntImm) else _NOMINAL_EXTENT for dim in ty.shape.values]
    return math.prod(extents) * max(1, (int(ty.dtype.dtype.bits) + 7) // 8)


def _widened(shape: list[Any], rank: int) -> list[Any]:
    return [tirx.IntImm("int64", 1)] * (rank - len(shape)) + shape


def _dtype(value: PermutedValue) -> str:
    return str(value.ty.dtype)
