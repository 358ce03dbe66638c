"""Requirements on sizes that several converters state: checked at import where they are known, else at each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


def require_shape(node: Node, value: relax.Expr, expected: Sequence[Dim], subject: str) -> None:
    """Require that a tensor has a shape; the error begins with `subject`: "its scale".

    Raises
    ------
    FrontendError: if its rank is another, or one of its sizes can never agree.
    """
    found = node.shape(value)
    message = f"{subject} has shape {shown(found)}, expected {shown(expected)}"
    if len(found) != len(expected):
        raise node.refusal(message)
    for size, wanted in zip(found, expected, strict=True):
        node.require(equal(size, wanted), message)


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
