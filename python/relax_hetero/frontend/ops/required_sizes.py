"""Requirements on dynamic sizes that several converters share, and broadcasting of symbolic sizes.

Requirements on static sizes are checked at import, others in each call.

Two different symbolic dimensions may be equal, or one of them 1 (`JoinedSizes`). Stock inference and kernels broadcast
only static sizes of 1. For symbolic ones the operands are broadcast to a common shape before the op, by kernels that
fuse into it and read element 0 if the size is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import tvm
import tvm_ffi
from tvm import relax, te, tirx

from ...transform.ir.named_sizes import name_size
from ...transform.ir.requirements import text_of
from ..joined_sizes import analyzer_for, known_sizes
from ..symbolic_sizes import compute_sizes, is_size_where_not_empty, sizes_of
from .node import Dim, Node, Position, as_dim, const

MAX_ELEMENTS = 2**47  # address space of a 64-bit process, in bytes


def as_expr(size: Any) -> tirx.Expr:
    """Convert a size to an int64 expression."""
    return tirx.IntImm("int64", size) if isinstance(size, int) else size


def equal(a: Dim, b: Dim) -> Any:
    """The condition that two sizes are equal."""
    return a == b if isinstance(a, int) and isinstance(b, int) else tirx.EQ(as_expr(a), as_expr(b))


def any_of(conditions: Sequence[Any]) -> Any:
    """The disjunction of conditions, with short-circuit evaluation."""
    if any(isinstance(condition, bool) and condition for condition in conditions):
        return True
    unknown = [condition for condition in conditions if not isinstance(condition, bool)]
    return tirx.any(*unknown) if unknown else False


def require_equal(node: Node, actual: Dim, expected: Dim, subject: str) -> None:
    """Require that two sizes are equal; the error begins with `subject`: "its scale has"."""
    node.require(equal(actual, expected), lambda: f"{subject} {text_of(actual)} elements, expected {text_of(expected)}")


def require_shape(node: Node, value: relax.Expr, expected: Sequence[Dim], subject: str) -> relax.Expr:
    """Require a tensor's shape, and return the tensor with these symbolic sizes; the error begins with `subject`.

    Raises FrontendError if its rank differs, or one of its sizes can never be equal.
    """
    actual = node.shape(value)

    def message() -> str:
        return f"{subject} has shape {shown(actual)}, expected {shown(expected)}"

    if len(actual) != len(expected):
        raise node.refusal(message())
    pairs = list(zip(actual, expected, strict=True))
    for size, expected_size in pairs:
        node.require(equal(size, expected_size), message)
    return renamed(node, value, [size if isinstance(size, int) else expected_size for size, expected_size in pairs])


def renamed(node: Node, value: relax.Expr, dims: Sequence[Dim]) -> relax.Expr:
    """Rename the sizes of a tensor to expressions that are required to be equal."""
    pairs = zip(node.shape(value), dims, strict=True)
    is_unchanged = all(tvm_ffi.structural_equal(as_expr(size), as_expr(dim)) for size, dim in pairs)
    return value if is_unchanged else node.emit(relax.op.reshape(value, list(dims)))


def with_sizes_of(node: Node, data: relax.Expr, value: relax.Expr, first: int) -> relax.Expr:
    """Give `data` the static sizes of a tensor that is required to match its axes from `first` on."""
    dims, value_dims = node.shape(data), node.shape(value)
    for axis, size in enumerate(value_dims, first):
        if axis < len(dims) and isinstance(size, int) and size != 1 and not isinstance(dims[axis], int):
            dims[axis] = size
    return renamed(node, data, dims)


def require_fits(node: Node, value: relax.Expr, target: Sequence[Dim], subject: str) -> None:
    """Require that a tensor broadcasts to the shape `target` without enlarging it.

    Raises FrontendError if it has more axes, or one of its sizes can never fit.
    """
    actual = node.shape(value)

    def message() -> str:
        return f"{subject} has shape {shown(actual)}, which does not broadcast to {shown(target)}"

    if len(actual) > len(target):
        raise node.refusal(message())
    for size, target_size in zip(reversed(actual), reversed(target), strict=False):
        node.require(any_of([equal(size, 1), equal(size, target_size)]), message)


def require_multiple(node: Node, size: Dim, divisor: int, subject: str) -> None:
    """Require that a size is a multiple of a number; the error begins with `subject`: "its image has a height of"."""
    remainder = size % divisor if isinstance(size, int) else tirx.floormod(size, divisor)
    node.require(equal(as_dim(remainder), 0), f"{subject} {size}, expected a multiple of {divisor}")


def computed_sizes(node: Node, proto: onnx.NodeProto) -> Any:
    """Evaluate a node on sizes by `compute_sizes`, and require that divisors are not 0."""
    sizes = compute_sizes(proto, node.inputs)
    if isinstance(sizes, relax.ShapeExpr):
        sizes = relax.ShapeExpr([shortened(node, size) for size in sizes.values])
    elif sizes is not None and tvm.ir.is_prim_expr(sizes):
        sizes = shortened(node, sizes)
    if sizes is None or proto.op_type not in ("Div", "Mod"):
        return sizes
    dividends, divisors = map(sizes_of, node.inputs)
    assert dividends is not None and divisors is not None, "compute_sizes takes sizes only"
    for divisor in divisors.flat:
        if not isinstance(divisor, int):
            node.require(tirx.NE(divisor, as_expr(0)), f"divides by {divisor}")
    if proto.op_type == "Div":
        for size, divisor in zip(*(array.flat for array in np.broadcast_arrays(dividends, divisors)), strict=True):
            if is_size_where_not_empty(size, divisor):
                node.require(size >= 0, "divides a negative size")
    return sizes


def shown(dims: Sequence[Dim]) -> str:
    """Format a shape."""
    return f"[{', '.join(map(text_of, dims))}]"


def joined(node: Node, a: Dim, b: Dim) -> Dim:
    """The broadcast size of two dimensions, either of which may be 1."""
    is_open, sizes = not (isinstance(a, int) or isinstance(b, int)), known_sizes()
    for minimum, size in ((a, b), (b, a)) if is_open else ():
        bound = sizes.bound_by(minimum, size)
        if bound is not None:
            sizes.note_bound(size, bound)
            node.require(as_expr(size) <= bound, f"size {text_of(size)} is at most {bound}")
            return size
    size_of_both = sizes.one_of(a, b) if is_open else None
    if size_of_both is not None:
        return size_of_both
    symbol, value = sizes.joined(a, b) if is_open else (None, None)
    if symbol is None or value is not None:
        agree = any_of([equal(a, b), equal(a, 1), equal(b, 1)])
        node.require(agree, lambda: f"size {text_of(a)} does not broadcast to {text_of(b)}")
    if isinstance(a, int):
        return b if a == 1 else a
    if isinstance(b, int):
        return a if b == 1 else b
    if value is not None:
        name_size(node.builder, symbol, value)
    return symbol


def shortened(node: Node, size: Dim) -> Dim:
    """Replace a long size by a symbol."""
    short, value = known_sizes().shortened(size)
    if value is not None:
        name_size(node.builder, short, value)
    return short


def with_short_sizes(node: Node, value: relax.Expr) -> relax.Expr:
    """Replace long sizes of a tensor by symbols."""
    if not isinstance(value.ty, relax.TensorType) or not isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    dims = node.shape(value)
    short = [shortened(node, dim) for dim in dims]
    known_sizes().note_extents(short)
    is_unchanged = all(dim is size for dim, size in zip(dims, short, strict=True))
    return value if is_unchanged else renamed(node, node.emit(value), short)


def _is_provably_same(a: Dim, b: Dim) -> bool:
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int) and a == b
    return bool(tvm_ffi.structural_equal(a, b)) or analyzer_for(a, b).can_prove_equal(a, b)


def broadcast(node: Node, data: relax.Expr, target: list[Dim]) -> relax.Expr:
    """Broadcast `data` to `target`; a symbolic size may be 1 or equal to the target's."""
    dims = node.shape(data)
    aligned: list[Dim] = [1] * (len(target) - len(dims)) + dims
    pairs = list(zip(aligned, target, strict=True))
    if all(dim == 1 if isinstance(dim, int) else tvm_ffi.structural_equal(dim, size) for dim, size in pairs) or all(
        isinstance(dim, int) and isinstance(size, int) for dim, size in pairs
    ):
        return node.emit(relax.op.broadcast_to(data, relax.ShapeExpr(target)))

    # Clamped to the axis, the index is 0 if the size is 1, else unchanged.
    def element(i: Position, x: te.Tensor) -> tirx.Expr:
        indices = i[len(target) - len(dims) :]
        return x(*(tirx.min(index, size - 1) for index, size in zip(indices, x.shape, strict=True)))

    return node.kernel("broadcast", element, data, shape=target)


def stretched(node: Node, values: Sequence[relax.Expr], kept: int = 0) -> list[relax.Expr]:
    """Broadcast tensors to common symbolic sizes; static sizes of 1 are kept.

    `kept`: number of last axes that do not broadcast.
    """
    shapes = [_broadcast_dims(node, value, kept) for value in values]
    target: list[Dim] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(shape, len(target) - len(shape)):
            target[axis] = joined(node, size, target[axis])
    return [stretched_to(node, value, target, kept) for value in values]


def stretched_to(node: Node, value: relax.Expr, target: Sequence[Dim], kept: int = 0) -> relax.Expr:
    """Broadcast a tensor's symbolic sizes, which may be 1, to those of `target`; static sizes of 1 are kept."""
    value_dims = _broadcast_dims(node, value, kept)
    value_target = [
        size if isinstance(size, int) and size == 1 else goal
        for size, goal in zip(value_dims, target[len(target) - len(value_dims) :], strict=True)
    ]
    dims = node.shape(value)
    target = [*value_target, *dims[len(dims) - kept :]]
    pairs = list(zip(value_dims, value_target, strict=True))
    # Sizes that are equal only up to a bound get a kernel, so that an error has the bound.
    is_within = [not isinstance(size, int) and known_sizes().bound_by(size, goal) is not None for size, goal in pairs]
    if any(is_within) or not all(_is_provably_same(*pair) for pair in pairs):
        return broadcast(node, value, target)
    if all(tvm_ffi.structural_equal(*pair) for pair in pairs):
        return value
    # Legalizations prove less than `_is_provably_same`, which assumes non-negative sizes.
    return node.emit(relax.op.reshape(value, relax.ShapeExpr(target)))


def _broadcast_dims(node: Node, value: relax.Expr, kept: int) -> list[Dim]:
    dims = node.shape(value)
    return dims[: max(len(dims) - kept, 0)]


def with_one_shape(node: Node) -> Node:
    """Broadcast the inputs of a node to common symbolic sizes."""
    present = [index for index in range(len(node.inputs)) if node.has(index)]
    shapes = [getattr(getattr(node.inputs[index], "ty", None), "shape", None) for index in present]
    symbolic = [shape.values for shape in shapes if isinstance(shape, relax.ShapeExpr)]
    if len(symbolic) < len(shapes) or all(isinstance(dim, tirx.IntImm) for dims in symbolic for dim in dims):
        return node
    values = stretched(node, [node.tensor(index) for index in present])
    inputs = list(node.inputs)
    for index, value in zip(present, values, strict=True):
        inputs[index] = value
    return replace(node, inputs=inputs)


def laid_by_axis(node: Node) -> Node:
    """Convert the attribute `axis` of broadcasting before opset 7 to a reshape of the second input.

    Raises FrontendError if the second input has more axes than the first from `axis` on.
    """
    attributes = {name: value for name, value in node.attributes.items() if name not in ("axis", "broadcast")}
    inputs = list(node.inputs)
    if node.attribute("broadcast", 0) and "axis" in node.attributes:
        rank, dims = node.rank(node.tensor(0)), node.shape(node.tensor(1))
        num_trailing = rank - node.axis(node.attribute("axis"), rank) - len(dims)
        if num_trailing < 0:
            raise node.refusal(f"input 1 of shape {shown(dims)} does not fit after axis {node.attribute('axis')}")
        constant, shape = node.constant(1), [*dims, *[1] * num_trailing]
        reshaped = relax.op.reshape(node.tensor(1), shape) if constant is None else const(constant.reshape(shape))
        inputs[1] = node.builder.normalize(reshaped) if constant is not None else node.emit(reshaped)
    return replace(node, inputs=inputs, attributes=attributes)


def require_broadcast(node: Node, value: relax.Expr, target: Sequence[Dim], subject: str) -> relax.Expr:
    """Broadcast a tensor to `target` without enlarging it (`require_fits`); `subject`: "its slope"."""
    require_fits(node, value, target, subject)
    return stretched_to(node, value, target)
