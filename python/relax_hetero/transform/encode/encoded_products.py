"""Matrix products on encoded operands: their encoding by shapes, and their bindings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import relax, tirx

from ...encoding.encoding import DYNAMIC, LHS, RESULT, RHS, Encoding, IndexMap
from ...op import encoded as op
from ..ir.blocks import Emitter, broadcast, is_one, same_extent, same_shape, shape_of, tensor_type

ONE = tirx.IntImm("int64", 1)


@dataclass
class ProductWriter(Emitter):
    """Emitter of products, which packs an operand once for all products that read it in the same encoding."""

    # Encoded variable by operand and encoding.
    packed: dict[tuple[relax.Var, str], relax.Var] = field(default_factory=dict)

    def product(
        self, lhs: relax.Expr, rhs: relax.Expr, encoding: Encoding, name: str, init: relax.Expr | None = None
    ) -> relax.Var:
        """The encoded product of two plain tensors of two or more dimensions; any operand's `encoding` will do."""
        encoded_lhs = self.encode(lhs, encoding.of(LHS), name)
        encoded_rhs = self.encode(rhs, encoding.of(RHS), name)
        extents: dict[str, Any] = {"1": ONE}
        for index, operand in ((LHS, lhs), (RHS, rhs)):
            extents.update(zip(encoding.index_maps[index], shape_of(operand) or [], strict=True))
        result = encoding.of(RESULT)
        ty = tensor_type([extents[name] for name in result.index_map], result.element_type, lhs.ty)
        return self.emit(op.matmul(encoded_lhs, encoded_rhs, init, encoding=result), ty, f"{name}_encoded")

    def plain(self, x: relax.Var, encoding: Encoding, name: str) -> relax.Var:
        """Unpack an encoded tensor."""
        return self.emit(op.unset_encoding(x, encoding), x.ty, name)

    def binary(self, op: Callable[..., relax.Call], a: relax.Expr, b: relax.Expr, name: str) -> relax.Var:
        """An op of two tensors that broadcast, with the element type of the first."""
        shape = broadcast(shape_of(a) or [], shape_of(b) or []) or []
        return self.emit(op(a, b), tensor_type(shape, str(a.ty.dtype), a.ty), name)

    def matrix(self, x: relax.Expr, index: int, name: str) -> relax.Expr:
        """Operand `index` of a product as a matrix or batch of them: a vector becomes a row (lhs) or a column (rhs)."""
        shape = shape_of(x) or []
        return x if len(shape) > 1 else self.reshape(x, as_matrix(shape, index), f"{name}_matrix")

    def matched(self, x: relax.Expr, shape: Sequence[Any], name: str) -> relax.Expr:
        """`x` with a run-time check that it has a shape; `x` itself if its type has the shape."""
        if same_shape(shape_of(x) or [], shape):
            return x
        ty = tensor_type(shape, str(x.ty.dtype), x.ty)
        var = self.new_var(name, ty)
        self.bindings.append(relax.MatchCast(var, x, ty))
        return var

    def end_as(self, result: relax.Var, var: relax.Var) -> None:
        """Bind the value of the last binding, which is `result`, to the product's original variable `var` instead."""
        if len(shape_of(result) or []) > len(shape_of(var) or []):
            result = self.reshape(result, shape_of(var) or [], var.name)
        self.bind(var, self.bindings.pop().value)

    def encode(self, x: relax.Expr, encoding: Encoding, name: str) -> relax.Var:
        """Encode `x`; the same operand and encoding give the same variable."""
        key = (x, str(encoding))
        if isinstance(x, relax.Var) and key in self.packed:
            return self.packed[key]
        var = self.emit(op.set_encoding(x, encoding), x.ty, f"{name}_{encoding.operand_name}")
        if isinstance(x, relax.Var):
            self.packed[key] = var
        return var


def as_matrix(shape: Sequence[Any], index: int) -> list[Any]:
    """The shape of an operand as a matrix, by numpy's rule for vectors."""
    if len(shape) > 1:
        return list(shape)
    return [ONE, *shape] if index == LHS else [*shape, ONE]


def with_one_k(lhs: Sequence[Any], rhs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Shapes of the operands with equal extents along k; `matched` checks at run time what types do not prove.

    ``(m, k)`` times ``(6, n)`` is ``(m, 6)`` times ``(6, n)``: no other k makes the product valid.
    """
    lhs_shape, rhs_shape = list(lhs), list(rhs)
    is_static = [isinstance(extent, tirx.IntImm) for extent in (lhs_shape[-1], rhs_shape[-2])]
    if not all(is_static) and not same_extent(lhs_shape[-1], rhs_shape[-2]):
        lhs_shape[-1] = rhs_shape[-2] = rhs_shape[-2] if is_static[1] else lhs_shape[-1]
    return lhs_shape, rhs_shape


def product_encoding(
    # lhs, rhs: shapes of at least two dimensions; leading ones broadcast.
    lhs: Sequence[Any],
    rhs: Sequence[Any],
    element_types: tuple[str, str, str],  # element types of left operand, right operand, accumulator
    index: int = RESULT,  # operand index of the encoding
) -> Encoding | None:
    """The encoding of a product of tensors of these shapes, by numpy's rules for two and more dimensions.

    Returns the encoding; None if extents that must be equal are not provably equal.
    """
    if not same_extent(lhs[-1], rhs[-2]):
        return None
    batch = broadcast(lhs[:-2], rhs[:-2])
    if batch is None:
        return None
    names = [f"b{axis}" for axis in range(len(batch))]
    sizes = [*zip(names, map(_size, batch), strict=True), ("m", _size(lhs[-2])), ("n", _size(rhs[-1]))]
    maps = (
        (*_batch_map(lhs[:-2], batch), "m", "k"),
        (*_batch_map(rhs[:-2], batch), "k", "n"),
        (*names, "m", "n"),
    )
    op_type = "batch_matmul" if names else "matmul"
    return Encoding(op_type, index, element_types, maps, (*sizes, ("k", _size(lhs[-1]))))


def _batch_map(shape: Sequence[Any], batch: Sequence[Any]) -> IndexMap:
    """Names of an operand's batch dimensions; "1" for a dimension of size one that is broadcast."""
    first = len(batch) - len(shape)
    return tuple(
        "1" if is_one(extent) and not is_one(batch[axis]) else f"b{axis}" for axis, extent in enumerate(shape, first)
    )


def _size(extent: Any) -> int:
    return int(extent) if isinstance(extent, (int, tirx.IntImm)) else DYNAMIC
