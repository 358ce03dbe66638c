"""Iteration-domain splitting: axes that are divided by constants, then boxes at the breakpoints of conditions.

`split_axes` makes every access linear. Before, the result of a reshape and a transpose::

    for c in 24: y[c] = x[c % 3 * 8 + c // 3]

After::

    for a in 8: for b in 3: y[a * 3 + b] = x[b * 8 + a]

`cut` removes conditions on positions from loops. Before::

    for i in 30: y[i] = if_then_else(1 <= i and i < 29, x[i - 1], 0)

After::

    for i in 0..1: y[i] = 0;   for i in 1..29: y[i] = x[i - 1];   for i in 29..30: y[i] = 0

Conditions on several variables, or with unknown extents, stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import structural_map

from ..core.builder import Expr
from ..core.walks import nodes, replaced
from .nests import Nest
from .stages import Axis, variables

_MAX_BOXES, _MAX_REDUCTION_BOXES = 40, 9  # more boxes cost more to compile than they save; code of reductions is larger

_MAX_BORDER_ROWS = 2

Bounds = tuple[Expr, Expr]

# Comparisons with zero, and the values of the other side from which on their result changes.
_EDGES: dict[Any, tuple[int, ...]] = {
    tirx.LT: (0,),
    tirx.GE: (0,),
    tirx.LE: (1,),
    tirx.GT: (1,),
    tirx.EQ: (0, 1),
    tirx.NE: (0, 1),
}

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod)


def split_axes(nest: Nest) -> Nest:
    """The nest with each axis split that is divided by one constant; nests of reductions stay as they are."""
    if nest.sums:
        return nest
    nest = _substitute(nest, nest.axes, {})
    divisors: dict[tirx.Var, set[int]] = {}
    for value in nest.expressions():
        for node in _divisions_in(value):
            if isinstance(node.a, tvm.ir.Var) and isinstance(node.b, tirx.IntImm):
                divisors.setdefault(node.a, set()).add(int(node.b))
    axes: list[Axis] = []
    split: dict[tirx.Var, Expr] = {}
    for axis in nest.axes:
        divisor = next(iter(divisors.get(axis.var, ())), 1)
        fits = isinstance(axis.extent, int) and 1 < divisor < axis.extent and axis.extent % divisor == 0
        if not fits or len(divisors[axis.var]) != 1:
            axes.append(axis)
            continue
        outer, inner = tirx.Var(f"{axis.var.name}_o", "int64"), tirx.Var(f"{axis.var.name}_i", "int64")
        axes += [Axis(outer, axis.extent // divisor), Axis(inner, divisor)]
        split[axis.var] = outer * divisor + inner
    return replace(_substitute(nest, axes, split), axes=tuple(axes), split=split) if split else nest


def _substitute(nest: Nest, axes: Sequence[Axis], values: dict[tirx.Var, Expr]) -> Nest:
    """The nest with variables replaced, and quotients and remainders simplified."""
    if not any(_divisions_in(value) for value in nest.expressions()):
        return nest
    analyzer = Analyzer()
    for axis in axes:
        _bind(analyzer, axis.var, 0, axis.extent)

    def substituted(value: Expr) -> Expr:
        return structural_map(replaced(value, values), [(kind, analyzer.simplify) for kind in _DIVISIONS])

    return replace(nest, steps=[(buffer, substituted(value)) for buffer, value in nest.steps])


def _divisions_in(value: Expr) -> list[Expr]:
    return nodes(value, *_DIVISIONS)


@dataclass(frozen=True)
class Box:
    """A rectangular part of a nest's domain."""

    nest: Nest  # the nest with its expressions simplified inside of the bounds
    bounds: tuple[Bounds, ...]  # bounds of each axis


def is_choice(node: Expr) -> bool:
    """Return whether a call is an if_then_else, which evaluates only one of its values."""
    return isinstance(node, tvm.ir.Call) and node.op.name == "prim.if_then_else"


def cut(nest: Nest) -> list[Box]:
    """The boxes of a nest; a single one without conditions."""
    domain = tuple((0, axis.extent) for axis in nest.axes)
    conditions = [c for value in nest.expressions() for c in conditions_of(value)]
    if not conditions:
        return [Box(nest, domain)]
    points: list[set[int]] = [set() for _ in nest.axes]
    for condition in conditions:
        for atom in _atoms(condition):
            for d, point in _breakpoints(atom, nest.axes, nest.reduced):
                extent = nest.axes[d].extent
                if isinstance(extent, int) and 0 < point < extent:
                    points[d].add(point)
    for d in range(len(points)):  # outermost first: vectors need the innermost axis split
        count = prod(len(axis_points) + 1 for axis_points in points)
        if count > (_MAX_REDUCTION_BOXES if nest.sums else _MAX_BOXES):
            points[d] = set()
    intervals = []
    for axis, axis_points in zip(nest.axes, points, strict=True):
        edges = [0, *sorted(axis_points), axis.extent]
        intervals.append(list(zip(edges[:-1], edges[1:], strict=True)))
    return [Box(_inside(nest, bounds), bounds) for bounds in _bounds(intervals, domain)]


def _bounds(
    intervals: list[list[Bounds]], whole: Sequence[Bounds], border: bool = False
) -> Iterable[tuple[Bounds, ...]]:
    """The bounds of all boxes. A thin border is not split further, except along the innermost axis."""
    if not intervals:
        yield ()
        return
    for interval in intervals[0] if len(intervals) == 1 or not border else [whole[0]]:
        thin = len(intervals[0]) > 1 and interval[1] - interval[0] <= _MAX_BORDER_ROWS
        for inner in _bounds(intervals[1:], whole[1:], border or thin):
            yield (interval, *inner)


def conditions_of(expr: Expr) -> list[Expr]:
    """Conditions on positions in an expression."""
    return [*choices_of(expr), *(select.condition for select in nodes(expr, tirx.Select))]


def choices_of(expr: Expr) -> list[Expr]:
    """Conditions of the if_then_else calls in an expression."""
    return [call.args[0] for call in nodes(expr, tvm.ir.Call) if is_choice(call)]


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


def _breakpoints(atom: Expr, axes: Sequence[Axis], reduced: Sequence[Axis]) -> list[tuple[int, int]]:
    """Positions (axis, index) where a comparison may change for some value of the reduced axes."""
    terms = detect_linear_equation(atom.a - atom.b, [axis.var for axis in [*axes, *reduced]])
    if not terms or not all(isinstance(term, tirx.IntImm) for term in terms):
        return []
    numbers = [int(term) for term in terms]
    dependent = [d for d in range(len(axes)) if numbers[d]]
    if len(dependent) != 1:
        return []
    low = high = numbers[-1]
    for axis, number in zip(reduced, numbers[len(axes) : -1], strict=True):
        if number and not isinstance(axis.extent, int):
            return []
        span = number * (axis.extent - 1) if number else 0
        low, high = low + min(span, 0), high + max(span, 0)
    step = numbers[dependent[0]]
    points = []
    for offset in {low, high}:
        # step * v + offset passes zero: the first v where it is at least zero, or more than zero.
        for edge in _EDGES[type(atom)]:
            points.append(-((offset - edge) // step) if step > 0 else (offset - edge) // -step + 1)
    return [(dependent[0], point) for point in points]


def analyzer_of(nest: Nest, bounds: Sequence[Bounds]) -> Analyzer:
    """An analyzer with the bounds of every axis of a nest, the reduced ones included."""
    analyzer = Analyzer()
    for axis, (begin, end) in zip(nest.axes, bounds, strict=True):
        _bind(analyzer, axis.var, begin, end)
    for axis in nest.reduced:
        _bind(analyzer, axis.var, 0, axis.extent)
    return analyzer


def _bind(analyzer: Analyzer, var: tirx.Var, begin: Expr, end: Expr) -> None:
    """Bind a variable to a range of its own type, as `begin` takes its place where the range has one element."""
    dtype = str(var.ty.dtype)
    bounds = (tirx.IntImm(dtype, each) if isinstance(each, int) else each for each in (begin, end))
    analyzer.bind(var, tvm.ir.Range(*bounds))


def _inside(nest: Nest, bounds: Sequence[Bounds]) -> Nest:
    """The nest inside of a box, without the selections that the bounds decide."""
    analyzer = analyzer_of(nest, bounds)

    def simplified(expr: Expr) -> Expr:
        return structural_map(expr, [(tvm.ir.Call, call), (tirx.Select, select)])

    def call(node: Expr) -> Expr:
        return choose(node, *node.args) if is_choice(node) else node

    def select(node: Expr) -> Expr:
        return choose(node, node.condition, node.true_value, node.false_value)

    def choose(node: Expr, condition: Expr, then: Expr, otherwise: Expr) -> Expr:
        axes = {axis.var for axis in (*nest.axes, *nest.reduced)}
        if not variables(condition) & axes:
            return node
        decision = analyzer.simplify(condition)
        if isinstance(decision, tirx.IntImm):
            return then if int(decision) else otherwise
        return node

    return replace(
        nest,
        sums=[replace(s, value=simplified(s.value)) for s in nest.sums],
        steps=[(buffer, simplified(value)) for buffer, value in nest.steps],
    )
