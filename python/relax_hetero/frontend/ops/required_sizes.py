"""Requirements on sizes that several converters state: checked at import where they are known, else at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm_ffi
from tvm import relax, tirx

from .node import Dim, Node, as_dim

MOST_ELEMENTS = 2**47
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
    node.require(equal(found, expected), f"{subject} {found} elements, expected {expected}")


def require_shape(node: Node, value: relax.Expr, expected: Sequence[Dim], subject: str) -> relax.Expr:
    """Require that a tensor has a shape, and return it with symbolic sizes named so; the error begins with `subject`.

    Raises
    ------
    FrontendError: if its rank is another, or one of its sizes can never agree.
    """
    found = node.shape(value)
    message = f"{subject} has shape {shown(found)}, expected {shown(expected)}"
    if len(found) != len(expected):
        raise node.refusal(message)
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
    FrontendError: if it has more axes, or one of its sizes can never fit.
    """
    found = node.shape(value)
    message = f"{subject} has shape {shown(found)}, which does not broadcast to {shown(target)}"
    if len(found) > len(target):
        raise node.refusal(message)
    for size, wanted in zip(reversed(found), reversed(target), strict=False):
        node.require(any_of([equal(size, 1), equal(size, wanted)]), message)


def require_multiple(node: Node, size: Dim, divisor: int, subject: str) -> None:
    """Require that a size is a multiple of a number; the error begins with `subject`: "its image has a height of"."""
    rest = size % divisor if isinstance(size, int) else tirx.floormod(size, divisor)
    node.require(equal(as_dim(rest), 0), f"{subject} {size}, expected a multiple of {divisor}")


def shown(dims: Sequence[Dim]) -> str:
    """A shape as text."""
    return f"[{', '.join(str(dim) for dim in dims)}]"
