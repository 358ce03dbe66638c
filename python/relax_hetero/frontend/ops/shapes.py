"""Ops that read, make or change shapes: Shape, Constant, Reshape, Expand, ConstantOfShape, Size."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import tvm_ffi
from tvm import relax, te, tirx

from .node import Dim, Node, Position, const, dtype_of
from .table import converts


@converts("Constant")
def constant(node: Node) -> relax.Expr:
    """All forms of Constant but strings and sparse tensors."""
    forms = {"value_int": "int64", "value_ints": "int64", "value_float": "float32", "value_floats": "float32"}
    for name, dtype in forms.items():
        if name in node.attributes:
            return const(node.attributes[name], dtype)
    if "value" not in node.attributes:
        given = [name for name in node.attributes if name != "tvm_custom"]
        raise node.refusal(f"a constant given as {', '.join(given)} cannot be imported")
    array = onnx.numpy_helper.to_array(node.attributes["value"])
    if array.dtype == object:
        raise node.refusal("string tensors cannot be imported")
    return const(array)


@converts("Shape")
def shape(node: Node) -> relax.Expr:
    """A constant for a static shape, a shape value for a symbolic one."""
    value = node.inputs[0]
    if isinstance(value, relax.Expr) and not isinstance(value, relax.ShapeExpr):
        value = node.tensor(0)
        if value.ty.shape is None:
            return _shape_at_run_time(node, value)
    dims: list[Dim] = [len(value.values)] if isinstance(value, relax.ShapeExpr) else node.shape(value)
    dims = dims[slice(node.attribute("start", 0), node.attribute("end", None))]
    if all(isinstance(dim, int) for dim in dims):
        return const(dims, "int64")
    return relax.ShapeExpr(dims)


def _shape_at_run_time(node: Node, value: relax.Expr) -> relax.Expr:
    rank = node.rank(value)
    vector = sizes_of(node, value)
    chosen = range(rank)[slice(node.attribute("start", 0), node.attribute("end", None))]
    if len(chosen) == rank:
        return vector
    return relax.op.strided_slice(vector, [0], [chosen.start], [chosen.stop], [1])


@converts("Size")
def size(node: Node) -> relax.Expr:
    """The number of elements, a constant where it is known."""
    value = node.tensor(0)
    if value.ty.shape is None:
        return relax.op.size(value)
    product: Dim = 1
    for dim in node.shape(value):
        product = dim if isinstance(product, int) and product == 1 else product * dim
    return const(product, "int64") if isinstance(product, int) else relax.op.size(value)


def dims_at_run_time(node: Node, vector: relax.Expr, prefix: str) -> list[tirx.Var]:
    """Symbolic dimensions that take the values of an int64 vector of static length when the model runs."""
    (length,) = node.static_shape(vector)
    if dtype_of(vector) != "int64":
        vector = node.emit(relax.op.astype(vector, "int64"))
    shape_value = node.emit(relax.op.tensor_to_shape(vector))
    dims = [tirx.Var(f"{prefix}_{i}", "int64") for i in range(length)]
    node.builder.match_cast(shape_value, relax.ShapeType(dims))
    return dims


def sizes_of(node: Node, value: relax.Expr) -> relax.Expr:
    """The shape of a tensor as an int64 vector."""
    return node.emit(relax.op.shape_to_tensor(relax.op.shape_of(value)))


@converts("Reshape")
def reshape(node: Node) -> relax.Expr:
    """With a target shape that is known or symbolic as stock, else computed when the model runs."""
    if isinstance(node.inputs[0], relax.ShapeExpr) and node.dims(1) == [-1]:
        return node.inputs[0]
    data = node.tensor(0)
    target = node.dims(1) if node.has(1) else list(node.attribute("shape", ()))
    if target is None:
        return relax.op.reshape(data, relax.ShapeExpr(_target_at_run_time(node, data)))
    has_zero = any(isinstance(dim, int) and dim == 0 for dim in target)
    if has_zero and node.attribute("allowzero", 0):  # no elements: only the shape is left to say
        return node.filled(target, 0, dtype_of(data))
    dims = node.shape(data) if has_zero else []
    resolved = [dims[i] if isinstance(dim, int) and dim == 0 else dim for i, dim in enumerate(target)]
    return relax.op.reshape(data, resolved)


def _target_at_run_time(node: Node, data: relax.Expr) -> list[tirx.Var]:
    """Dimensions of the result where the target is an input: 0 copies a dimension, -1 takes the remaining elements."""
    target = node.tensor(1)
    (length,) = node.static_shape(target)
    zero, one = relax.const(0, "int64"), relax.const(1, "int64")
    sizes = sizes_of(node, data)
    if not node.attribute("allowzero", 0):
        rank = node.rank(data)
        if rank < length:
            sizes = node.emit(relax.op.concat([sizes, const(np.ones(length - rank), "int64")], axis=0))
        elif rank > length:
            sizes = node.emit(relax.op.strided_slice(sizes, [0], [0], [length], [1]))
        target = node.emit(relax.op.where(relax.op.equal(target, zero), sizes, target))
    is_open = node.emit(relax.op.equal(target, relax.const(-1, "int64")))
    known = node.emit(relax.op.prod(relax.op.where(is_open, one, target), keepdims=True))
    elements = node.emit(relax.op.prod(sizes_of(node, data), keepdims=True))
    rest = node.emit(relax.op.floor_divide(elements, relax.op.maximum(known, one)))
    return dims_at_run_time(node, node.emit(relax.op.where(is_open, rest, target)), "reshape_dim")


def _joined(node: Node, own: Dim, wanted: Dim) -> Dim:
    """One dimension of a tensor of size `own` broadcast with `wanted`, either of which may turn out to be 1."""
    if isinstance(own, int) and isinstance(wanted, int):
        if own != wanted and 1 not in (own, wanted):
            raise node.refusal(f"size {own} does not broadcast to {wanted}")
        return wanted if own == 1 else own
    if isinstance(own, int):
        return wanted if own == 1 else own
    if isinstance(wanted, int):
        return own if wanted == 1 else wanted
    return own if tvm_ffi.structural_equal(own, wanted) else tirx.max(own, wanted)


def broadcast(node: Node, data: relax.Expr, target: list[Dim]) -> relax.Expr:
    """`data` with its last axes stretched to `target`; an axis whose size is only known by name may be 1 or equal."""
    dims = node.shape(data)
    aligned: list[Dim] = [1] * (len(target) - len(dims)) + dims
    pairs = list(zip(aligned, target, strict=True))
    if all(dim == 1 if isinstance(dim, int) else tvm_ffi.structural_equal(dim, size) for dim, size in pairs) or all(
        isinstance(dim, int) and isinstance(size, int) for dim, size in pairs
    ):
        return node.emit(relax.op.broadcast_to(data, relax.ShapeExpr(target)))

    # Held inside the axis, the index is 0 where the size is 1 and itself where it is the target's.
    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        own = i[len(target) - len(dims) :]
        return x(*(tirx.min(place, size - 1) for place, size in zip(own, x.shape, strict=True)))

    return node.kernel("broadcast", element, data, shape=target)


@converts("Expand")
def expand(node: Node) -> relax.Expr:
    """Broadcast both ways: a 1 in the target keeps the input's dimension."""
    data = node.tensor(0)
    target = node.dims(1)
    if target is None:
        return _expand_at_run_time(node, data)
    dims = node.shape(data)
    rank = max(len(dims), len(target))
    aligned: list[Dim] = [1] * (rank - len(dims)) + dims
    wanted: list[Dim] = [1] * (rank - len(target)) + target
    # Exporters write -1 for a dimension that stays.
    wanted = [dim if isinstance(size, int) and size == -1 else size for dim, size in zip(aligned, wanted, strict=True)]
    return broadcast(node, data, [_joined(node, dim, size) for dim, size in zip(aligned, wanted, strict=True)])


def _expand_at_run_time(node: Node, data: relax.Expr) -> relax.Expr:
    target = node.tensor(1)
    (length,) = node.static_shape(target)
    rank = node.rank(data)
    sizes = sizes_of(node, data)
    if rank < length:
        sizes = node.emit(relax.op.concat([const(np.ones(length - rank), "int64"), sizes], axis=0))
    elif rank > length:
        target = node.emit(relax.op.concat([const(np.ones(rank - length), "int64"), target], axis=0))
    # A broadcast of an empty tensor stays empty: only a 1 gives way to the other's size.
    is_one = relax.op.equal(target, relax.const(1, "int64"))
    dims = dims_at_run_time(node, node.emit(relax.op.where(is_one, sizes, target)), "expand_dim")
    return broadcast(node, data, list(dims))


@converts("ConstantOfShape")
def constant_of_shape(node: Node) -> relax.Expr:
    """A tensor filled with one value, of a known, symbolic or computed shape."""
    given = node.attribute("value")
    value = np.zeros(1, "float32") if given is None else onnx.numpy_helper.to_array(given)
    dims: list[Any] | None = node.dims(0)
    if dims is None:
        dims = dims_at_run_time(node, node.tensor(0), "filled_dim")
    scalar = const(value.reshape(()))
    return relax.op.broadcast_to(scalar, relax.ShapeExpr(dims))
