"""Domains made simple: axes split where positions are taken apart, then boxes cut where conditions change.

`split_axes` makes every access linear again. Before, what a reshape and a transpose leave behind::

    for c in 24: y[c] = x[c % 3 * 8 + c // 3]

After::

    for a in 8: for b in 3: y[a * 3 + b] = x[b * 8 + a]

`cut` leaves no condition on positions inside a loop. Before::

    for i in 30: y[i] = if_then_else(1 <= i and i < 29, x[i - 1], 0)

After::

    for i in 0..1: y[i] = 0;   for i in 1..29: y[i] = x[i - 1];   for i in 29..30: y[i] = 0

Conditions that remain, of several variables or of unknown extents, stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import tvm
from tvm import tirx
from tvm.sym import Analyzer, detect_linear_equation
from tvm_ffi import structural_map, structural_walk

from ..core.builder import Expr
from .nests import Nest
from .stages import Axis, replaced, variables

# More pieces of code than this cost more to compile than they save; those of reductions are larger.
_MAX_BOXES, _MAX_REDUCTIONS = 40, 9

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

_APART = (tirx.FloorDiv, tirx.FloorMod)


def split_axes(nest: Nest) -> Nest:
    """The nest with axes split that are divided by a constant.

    Axes that are divided by several constants stay as they are, and so do the axes of reductions.
    """
    if nest.sums:
        return nest
    nest = _rewritten(nest, nest.axes, {})
    found: dict[tirx.Var, set[int]] = {}
    for value in nest.expressions():
        for node in _taken_apart(value):
            if isinstance(node.a, tvm.ir.Var) and isinstance(node.b, tirx.IntImm):
                found.setdefault(node.a, set()).add(int(node.b))
    axes: list[Axis] = []
    split: dict[tirx.Var, Expr] = {}
    for axis in nest.axes:
        by = next(iter(found.get(axis.var, ())), 1)
        fits = isinstance(axis.extent, int) and 1 < by < axis.extent and axis.extent % by == 0
        if not fits or len(found[axis.var]) != 1:
            axes.append(axis)
            continue
        outer, inner = tirx.Var(f"{axis.var.name}_o", "int64"), tirx.Var(f"{axis.var.name}_i", "int64")
        axes += [Axis(outer, axis.extent // by), Axis(inner, by)]
        split[axis.var] = outer * by + inner
    return replace(_rewritten(nest, axes, split), axes=tuple(axes), split=split) if split else nest


def _rewritten(nest: Nest, axes: Sequence[Axis], values: dict[tirx.Var, Expr]) -> Nest:
    """The nest with variables replaced, and quotients and remainders simplified."""
    if not any(_taken_apart(value) for value in nest.expressions()):
        return nest
    analyzer = Analyzer()
    for axis in axes:
        analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))

    def rewritten(value: Expr) -> Expr:
        return structural_map(replaced(value, values), [(kind, analyzer.simplify) for kind in _APART])

    return replace(nest, steps=[(buffer, rewritten(value)) for buffer, value in nest.steps])


def _taken_apart(value: Expr) -> list[Expr]:
    found: list[Expr] = []
    structural_walk(value, [(kind, found.append) for kind in _APART])
    return found


@dataclass(frozen=True)
class Box:
    """A part of a nest's domain.

    Attributes
    ----------
    nest : Nest
        Its expressions as they are inside.
    bounds : tuple of (begin, end)
        Bounds of each axis.
    """

    nest: Nest
    bounds: tuple[Bounds, ...]


def is_choice(node: Expr) -> bool:
    """Return whether a call evaluates one of two values only."""
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
        count = prod(len(found) + 1 for found in points)
        if count > (_MAX_REDUCTIONS if nest.sums else _MAX_BOXES):
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
    structural_walk(expr, (tirx.Select, lambda select: found.append(select.condition)))
    return [*choices_of(expr), *found]


def choices_of(expr: Expr) -> list[Expr]:
    """The conditions of the choices in an expression that evaluate one of two values only."""
    found: list[Expr] = []
    structural_walk(expr, (tvm.ir.Call, found.append))
    return [call.args[0] for call in found if is_choice(call)]


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


def analyzer_of(nest: Nest, bounds: Sequence[Bounds]) -> Analyzer:
    """It knows the bounds of every axis of a nest, the reduced ones included."""
    analyzer = Analyzer()
    for axis, (begin, end) in zip(nest.axes, bounds, strict=True):
        analyzer.bind(axis.var, tvm.ir.Range(begin, end))
    for axis in nest.reduced:
        analyzer.bind(axis.var, tvm.ir.Range(0, axis.extent))
    return analyzer


def _inside(nest: Nest, bounds: Sequence[Bounds]) -> Nest:
    """The nest as it is inside a box: its choices are made where the bounds decide them."""
    analyzer = analyzer_of(nest, bounds)

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
