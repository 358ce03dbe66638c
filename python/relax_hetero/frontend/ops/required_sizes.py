"""Sizes that only a call knows: requirements that several converters state, and broadcasting.

Requirements are checked at import where the sizes are known, else at each call.

Two dimensions of other names may be equal, or one of them 1 (`JoinedSizes`). Stock inference and kernels broadcast
where types say which dimension is 1. Where they do not, the operands are stretched to the shape of all of them before
the op: by kernels that fuse into it, and read element 0 where the size turns out 1.
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

MAX_ELEMENTS = 2**47
"""As many bytes as a process of 64 bits can address."""


def as_expr(size: Any) -> tirx.Expr:
    """A size as an int64 expression."""
    return tirx.IntImm("int64", size) if isinstance(size, int) else size


def equal(one: Dim, other: Dim) -> Any:
    """The condition that two sizes are the same."""
    return one == other if isinstance(one, int) and isinstance(other, int) else tirx.EQ(as_expr(one), as_expr(other))


def any_of(conditions: Sequence[Any]) -> Any:
    """The condition that one of `conditions` holds; operands after the first that does are not evaluated."""
    if any(isinstance(condition, bool) and condition for condition in conditions):
        return True
    unknown = [condition for condition in conditions if not isinstance(condition, bool)]
    return tirx.any(*unknown) if unknown else False


def require_equal(node: Node, found: Dim, expected: Dim, subject: str) -> None:
    """Require that two sizes agree; the error begins with `subject`: "its scale has"."""
    node.require(equal(found, expected), lambda: f"{subject} {text_of(found)} elements, expected {text_of(expected)}")


def require_shape(node: Node, value: relax.Expr, expected: Sequence[Dim], subject: str) -> relax.Expr:
    """Require that a tensor has a shape, and return it with symbolic sizes named so; the error begins with `subject`.

    Raises
    ------
    FrontendError
        If its rank is another, or one of its sizes can never agree.
    """
    found = node.shape(value)

    def message() -> str:
        return f"{subject} has shape {shown(found)}, expected {shown(expected)}"

    if len(found) != len(expected):
        raise node.refusal(message())
    pairs = list(zip(found, expected, strict=True))
    for size, wanted in pairs:
        node.require(equal(size, wanted), message)
    return renamed(node, value, [size if isinstance(size, int) else wanted for size, wanted in pairs])


def renamed(node: Node, value: relax.Expr, dims: Sequence[Dim]) -> relax.Expr:
    """A tensor under other names of its sizes, which are required to be the same."""
    pairs = zip(node.shape(value), dims, strict=True)
    is_same = all(tvm_ffi.structural_equal(as_expr(size), as_expr(wanted)) for size, wanted in pairs)
    return value if is_same else node.emit(relax.op.reshape(value, list(dims)))


def with_sizes_of(node: Node, data: relax.Expr, value: relax.Expr, first: int) -> relax.Expr:
    """`data` with sizes that a vector or tensor along its axes from `first` on is known to have, and requires."""
    dims, own = node.shape(data), node.shape(value)
    for axis, size in enumerate(own, first):
        if axis < len(dims) and isinstance(size, int) and size != 1 and not isinstance(dims[axis], int):
            dims[axis] = size
    return renamed(node, data, dims)


def require_fits(node: Node, value: relax.Expr, target: Sequence[Dim], subject: str) -> None:
    """Require that a tensor broadcasts to the shape `target`, which it may not enlarge.

    Raises
    ------
    FrontendError
        If it has more axes, or one of its sizes can never fit.
    """
    found = node.shape(value)

    def message() -> str:
        return f"{subject} has shape {shown(found)}, which does not broadcast to {shown(target)}"

    if len(found) > len(target):
        raise node.refusal(message())
    for size, wanted in zip(reversed(found), reversed(target), strict=False):
        node.require(any_of([equal(size, 1), equal(size, wanted)]), message)


def require_multiple(node: Node, size: Dim, divisor: int, subject: str) -> None:
    """Require that a size is a multiple of a number; the error begins with `subject`: "its image has a height of"."""
    rest = size % divisor if isinstance(size, int) else tirx.floormod(size, divisor)
    node.require(equal(as_dim(rest), 0), f"{subject} {size}, expected a multiple of {divisor}")


def computed_sizes(node: Node, proto: onnx.NodeProto) -> Any:
    """The output of a node that computes sizes, as `compute_sizes`; none of them may be divided by 0."""
    sizes = compute_sizes(proto, node.inputs)
    if isinstance(sizes, relax.ShapeExpr):
        sizes = relax.ShapeExpr([shortened(node, size) for size in sizes.values])
    elif sizes is not None and tvm.ir.is_prim_expr(sizes):
        sizes = shortened(node, sizes)
    if sizes is None or proto.op_type not in ("Div", "Mod"):
        return sizes
    divided, divisors = map(sizes_of, node.inputs)
    assert divided is not None and divisors is not None, "compute_sizes takes sizes only"
    for divisor in divisors.flat:
        if not isinstance(divisor, int):
            node.require(tirx.NE(divisor, as_expr(0)), f"divides by {divisor}")
    if proto.op_type == "Div":
        for size, divisor in zip(*(array.flat for array in np.broadcast_arrays(divided, divisors)), strict=True):
            if is_size_where_not_empty(size, divisor):
                node.require(size >= 0, "divides a negative size")
    return sizes


def shown(dims: Sequence[Dim]) -> str:
    """A shape as text."""
    return f"[{', '.join(map(text_of, dims))}]"


def joined(node: Node, own: Dim, wanted: Dim) -> Dim:
    """One dimension of a tensor of size `own` broadcast with `wanted`, either of which may turn out to be 1."""
    is_open, sizes = not (isinstance(own, int) or isinstance(wanted, int)), known_sizes()
    for minimum, size in ((own, wanted), (wanted, own)) if is_open else ():
        bound = sizes.bound_by(minimum, size)
        if bound is not None:
            sizes.note_bound(size, bound)
            node.require(as_expr(size) <= bound, f"size {text_of(size)} is at most {bound}")
            return size
    one = sizes.one_of(own, wanted) if is_open else None
    if one is not None:
        return one
    symbol, value = sizes.joined(own, wanted) if is_open else (None, None)
    if symbol is None or value is not None:
        agree = any_of([equal(own, wanted), equal(own, 1), equal(wanted, 1)])
        node.require(agree, lambda: f"size {text_of(own)} does not broadcast to {text_of(wanted)}")
    if isinstance(own, int):
        return wanted if own == 1 else own
    if isinstance(wanted, int):
        return own if wanted == 1 else wanted
    if value is not None:
        name_size(node.builder, symbol, value)
    return symbol


def shortened(node: Node, size: Dim) -> Dim:
    """A size in few terms: itself, or a symbol for it."""
    short, value = known_sizes().shortened(size)
    if value is not None:
        name_size(node.builder, short, value)
    return short


def with_short_sizes(node: Node, value: relax.Expr) -> relax.Expr:
    """A tensor whose sizes are expressions of few terms."""
    if not isinstance(value.ty, relax.TensorType) or not isinstance(value.ty.shape, relax.ShapeExpr):
        return value
    dims = node.shape(value)
    short = [shortened(node, dim) for dim in dims]
    known_sizes().note_extents(short)
    is_same = all(dim is size for dim, size in zip(dims, short, strict=True))
    return value if is_same else renamed(node, node.emit(value), short)


def _is_same(one: Dim, other: Dim) -> bool:
    if isinstance(one, int) or isinstance(other, int):
        return isinstance(one, int) and isinstance(other, int) and one == other
    return bool(tvm_ffi.structural_equal(one, other)) or analyzer_for(one, other).can_prove_equal(one, other)


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


def stretched(node: Node, values: Sequence[relax.Expr], kept: int = 0) -> list[relax.Expr]:
    """Tensors with their sizes made one where types do not say whether they are; sizes that are known to be 1 stay.

    Parameters
    ----------
    kept : int
        How many of the last axes are no matter of broadcasting.
    """
    shapes = [_broadcast_dims(node, value, kept) for value in values]
    whole: list[Dim] = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for axis, size in enumerate(shape, len(whole) - len(shape)):
            whole[axis] = joined(node, size, whole[axis])
    return [stretched_to(node, value, whole, kept) for value in values]


def stretched_to(node: Node, value: relax.Expr, target: Sequence[Dim], kept: int = 0) -> relax.Expr:
    """A tensor with sizes that may be 1 or those of `target`, as its types do not say, made those of `target`."""
    own = _broadcast_dims(node, value, kept)
    wanted = [
        size if isinstance(size, int) and size == 1 else goal
        for size, goal in zip(own, target[len(target) - len(own) :], strict=True)
    ]
    dims = node.shape(value)
    target = [*wanted, *dims[len(dims) - kept :]]
    pairs = list(zip(own, wanted, strict=True))
    # Sizes that are one within a bound only are read one by one: the bound is what an error should name.
    is_within = [not isinstance(size, int) and known_sizes().bound_by(size, goal) is not None for size, goal in pairs]
    if any(is_within) or not all(_is_same(*pair) for pair in pairs):
        return broadcast(node, value, target)
    if all(tvm_ffi.structural_equal(*pair) for pair in pairs):
        return value
    # Legalizations prove less than `_is_same`, which knows that no size is negative: they read one expression.
    return node.emit(relax.op.reshape(value, relax.ShapeExpr(target)))


def _broadcast_dims(node: Node, value: relax.Expr, kept: int) -> list[Dim]:
    dims = node.shape(value)
    return dims[: max(len(dims) - kept, 0)]


def with_one_shape(node: Node) -> Node:
    """A node all of whose inputs broadcast, with inputs whose sizes agree or are known to be 1."""
    given = [index for index in range(len(node.inputs)) if node.has(index)]
    shapes = [getattr(getattr(node.inputs[index], "ty", None), "shape", None) for index in given]
    known = [shape.values for shape in shapes if isinstance(shape, relax.ShapeExpr)]
    if len(known) < len(shapes) or all(isinstance(dim, tirx.IntImm) for dims in known for dim in dims):
        return node
    values = stretched(node, [node.tensor(index) for index in given])
    inputs = list(node.inputs)
    for index, value in zip(given, values, strict=True):
        inputs[index] = value
    return replace(node, inputs=inputs)


def laid_by_axis(node: Node) -> Node:
    """A node of an opset before 7 whose second input lies along the first from `axis` on, without that attribute.

    Raises
    ------
    FrontendError
        If the second input has more axes than there are from that one on.
    """
    attributes = {name: value for name, value in node.attributes.items() if name not in ("axis", "broadcast")}
    inputs = list(node.inputs)
    if node.attribute("broadcast", 0) and "axis" in node.attributes:
        rank, dims = node.rank(node.tensor(0)), node.shape(node.tensor(1))
        behind = rank - node.axis(node.attribute("axis"), rank) - len(dims)
        if behind < 0:
            raise node.refusal(f"input 1 of shape {shown(dims)} does not fit behind axis {node.attribute('axis')}")
        known, shape = node.constant(1), [*dims, *[1] * behind]
        laid = relax.op.reshape(node.tensor(1), shape) if known is None else const(known.reshape(shape))
        inputs[1] = node.builder.normalize(laid) if known is not None else node.emit(laid)
    return replace(node, inputs=inputs, attributes=attributes)


def require_broadcast(node: Node, value: relax.Expr, target: Sequence[Dim], subject: str) -> relax.Expr:
    """A tensor stretched to `target`, which it may not enlarge (`require_fits`); `subject`: "its slope"."""
    require_fits(node, value, target, subject)
    return stretched_to(node, value, target)
