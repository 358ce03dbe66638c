"""Domains cut where conditions on positions change, so that none is left inside a loop.

Before::

    for i in 30: y[i] = if_then_else(1 <= i and i < 29, x[i - 1], 0)

After::

    for i in 0..1: y[i] = 0;   for i in 1..29: y[i] = x[i - 1];   for i in 29..30: y[i] = 0

Conditions that remain, of several variables or of unknown extents, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import structural_map, structural_walk

from ..core.builder import Expr
from .nests import Nest
from .stages import Axis, variables

# More pieces of code than this cost more to compile than they save; those of reductions are larger.
_MOST_BOXES, _MOST_REDUCTIONS = 40, 9

# So many rows are a border.
_THIN = 2

Bounds = tuple[Expr, Expr]

# Comparisons with zero, and the numbers of which they tell whether they are reached.
_EDGES: dict[Any, tuple[int, ...]] = {
    tirx.LT: (0,),
    tirx.GE: (0,),
    tirx.LE: (1,),
    tirx.GT: (1,),
    tirx.EQ: (0, 1),
    tirx.NE: (0, 1),
}


@dataclass(frozen=True)
class Box:
    """A part of a nest's domain.

    Attributes
    ----------
    nest : Nest
        Its expressions as they are inside.
    bounds : tuple of (begin, end)
        Of each axis.
    """

    nest: Nest
    bounds: tuple[Bounds, ...]


def is_choice(node: Expr) -> bool:
    """Whether a call evaluates one of two values only."""
    return isinstance(node, tvm.ir.Call) and node.op.name == "prim.if_then_else"


def cut(nest: Nest) -> list[Box]:
    """The boxes of a nest: one where it has no conditions."""
    whole = tuple((0, axis.extent) for axis in nest.axes)
    conditions = [c for value in nest.expressions() for c in conditions_of(value)]
    if not conditions:
        return [Box(nest, whole)]
    points: list[set[int]] = [set() for _ in nest.axes]
    for condition in conditions:
        for atom in _atoms(condition):
            for d, point in _turning_points(atom, nest.axes, nest.reduced):
                extent = nest.axes[d].extent
                if isinstance(extent, int) and 0 < point < extent:
                    points[d].add(point)
    for d in range(len(points)):  # the innermost is what vectors need
        count = 1
        for found in points:
            count *= len(found) + 1
        if count > (_MOST_REDUCTIONS if nest.sums else _MOST_BOXES):
            points[d] = set()
    pieces = []
    for axis, found in zip(nest.axes, points, strict=True):
        edges = [0, *sorted(found), axis.extent]
        pieces.append(list(zip(edges[:-1], edges[1:], strict=True)))
    return [Box(_inside(nest, bounds), bounds) for bounds in _bounds(pieces, whole)]


def _bounds(pieces: list[list[Bounds]], whole: Sequence[Bounds], border: bool = False) -> Iterable[tuple[Bounds, ...]]:
    """The bounds of all boxes. Few rows along a border are not cut further, but where vectors need it."""
    if not pieces:
        yield ()
        return
    for piece in pieces[0] if len(pieces) == 1 or not border else [whole[0]]:
        thin = len(pieces[0]) > 1 and piece[1] - piece[0] <= _THIN
        for rest in _bounds(pieces[1:], whole[1:], border or thin):
            yield (piece, *rest)


def conditions_of(expr: Expr) -> list[Expr]:
    """Conditions on positions in an expression."""
    found: list[Expr] = []

    def on_call(call: Expr) -> None:
        if is_choice(call):
            found.append(call.args[0])

    structural_walk(expr, [(tvm.ir.Call, on_call), (tirx.Select, lambda select: found.append(select.condition))])
    return found


def _atoms(condition: Any) -> Iterable[Any]:
    if isinstance(condition, (tirx.And, tirx.Or)):
        yield from _atoms(condition.a)
        yield from _atoms(condition.b)
    elif isinstance(condition, tirx.Not):
        yield from _atoms(condition.a)
    elif isinstance(condition, tvm.ir.Call) and condition.op.name == "prim.likely":
        yield from _atoms(condition.args[0])
    elif type(condition) in _EDGES and str(condition.a.ty.dtype).startswith("int"):
        yield condition


def _turning_points(atom: Expr, axes: Sequence[Axis], reduced: Sequence[Axis]) -> list[tuple[int, int]]:
    """Where, along which axis, a comparison may change for some value of the reduced axes: (axis, position)."""
    both = [*axes, *reduced]
    terms = detect_linear_equation(atom.a - atom.b, [axis.var for axis in both])
    if not terms or not all(isinstance(term, tirx.IntImm) for term in terms):
        return []
    numbers = [int(term) for term in terms]
    own = [d for d in range(len(axes)) if numbers[d]]
    if len(own) != 1:
        return []
    low = high = numbers[-1]
    for axis, number in zip(reduced, numbers[len(axes) : -1], strict=True):
        if number and not isinstance(axis.extent, int):
            return []
        span = number * (axis.extent - 1) if number else 0
        low, high = low + min(span, 0), high + max(span, 0)
    step = numbers[own[0]]
    found = []
    for offset in {low, high}:
        # step * v + offset passes zero: the first v where it is at least zero, or more than zero.
        for edge in _EDGES[type(atom)]:
            found.append(-((offset - edge) // step) if step > 0 else (offset - edge) // -step + 1)
    return [(own[0], point) for point in found]


def _inside(nest: Nest, bounds: Sequence[Bounds]) -> Nest:
    analyzer = Analyzer()
    for axis, (begin, end) in zip(nest.axes, bounds, strict=True):
        analyzer.bind(axis.var, tvm.ir.Range(begin, end))
    for axis in nest.reduced:
        analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def decided(expr: Expr) -> Expr:
        return structural_map(expr, [(tvm.ir.Call, call), (tirx.Select, select)])

    def call(node: Expr) -> Expr:
        return choose(node, *node.args) if is_choice(node) else node

    def select(node: Expr) -> Expr:
        return choose(node, node.condition, node.true_value, node.false_value)

    def choose(node: Expr, condition: Expr, then: Expr, otherwise: Expr) -> Expr:
        axes = {axis.var for axis in (*nest.axes, *nest.reduced)}
        if not variables(condition) & axes:
            return node
        known = analyzer.simplify(condition)
        if isinstance(known, tirx.IntImm):
            return then if int(known) else otherwise
        return node

    return replace(
        nest,
        sums=[replace(s, value=decided(s.value)) for s in nest.sums],
        steps=[(buffer, decided(value)) for buffer, value in nest.steps],
    )
