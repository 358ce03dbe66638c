"""Scatter: a copy of the data, and updates written over some of its elements.

The kernel first copies the data to the result, element by element, and does not read the data again: the two are tied,
and only the updates are left in place (`ties`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.problem import Dim
from .core.bounds import BOUNDED
from .core.builder import Expr, Function, ceil_div, loop, materialize, when
from .core.ties import with_ties
from .core.view import View
from .core.work_split import MIN_WORK, is_worth_tasks, ravel
from .math.extremes import maximum, minimum

REDUCTIONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "update": lambda _, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": minimum,
    "max": maximum,
}
"""Functions of an element and its update."""

_TASK_ELEMENTS = MIN_WORK["elements"]  # elements that one task copies


@dataclass(frozen=True)
class ScatterProblem:
    """Data of a shape, with updates."""

    # Shapes; symbolic extents are names.
    data: tuple[Dim, ...]
    indices: tuple[Dim, ...]
    updates: tuple[Dim, ...]
    dtype: str
    index_dtype: str
    reduction: str  # one of `REDUCTIONS`


def scatter_elements_kernel(problem: ScatterProblem, axis: int) -> tirx.PrimFunc:
    """Scatter of updates to their own positions, except that the index gives the position along one axis.

    Negative indices count from the end; updates beyond the data are left out. Several updates of one element are
    reduced, or the last one wins.
    """

    def write(at: _Scatter) -> None:
        extents = at.updates_extents
        outer_axes = [d for d in range(len(extents)) if d != axis]
        task_axis = next((d for d in outer_axes if extents[d] != 1), None)
        order = [*([task_axis] if task_axis is not None else []), axis, *(d for d in outer_axes if d != task_axis)]

        def visit(axes: list[int], coordinates: dict[int, Expr]) -> None:
            if axes:
                is_task_axis = axes[0] == task_axis and at.is_long
                with loop(extents[axes[0]], parallel=is_task_axis) as i:
                    visit(axes[1:], {**coordinates, axes[0]: i})
                return
            position = [coordinates[d] for d in range(len(extents))]
            index = at.index(ravel(position, at.indices_extents))
            index = materialize(tirx.Select(index < 0, index + at.data_extents[axis], index))
            target = [index if d == axis else place for d, place in enumerate(position)]
            with when(_is_inside(index, at.data_extents[axis])):
                at.update(ravel(target, at.data_extents), ravel(position, extents))

        visit(order, {})

    return _kernel("scatter_elements", problem, write)


def scatter_nd_kernel(problem: ScatterProblem) -> tirx.PrimFunc:
    """Scatter of slices of updates to the positions in rows of indices; slices outside of the data are left out."""

    def write(at: _Scatter) -> None:
        *rows, depth = at.indices_extents
        count = prod(rows)
        size = prod(at.data_extents[depth:])
        with loop(count) as row:
            indices = [materialize(at.index(row * depth + d)) for d in range(depth)]
            start = materialize(ravel(indices, at.data_extents[:depth]) * size)
            is_inside = [_is_inside(index, extent) for index, extent in zip(indices, at.data_extents, strict=False)]
            # Several rows may update one element, so rows stay in order; the elements of a slice are distinct.
            with when(tirx.all(*is_inside) if is_inside else True):
                with loop(size, parallel=isinstance(size, int) and is_worth_tasks("elements", size)) as i:
                    at.update(start + i, row * size + i)

    return _kernel("scatter_nd", problem, write)


class _Scatter:
    """The views of a kernel's parameters while it is being written."""

    def __init__(self, function: Function, problem: ScatterProblem) -> None:
        shapes = (problem.data, problem.indices, problem.updates)
        self.data_extents, self.indices_extents, self.updates_extents = (list(map(function.size, s)) for s in shapes)
        self.is_long = is_worth_tasks("elements", prod(self.updates_extents))
        self._combine = REDUCTIONS[problem.reduction]

        def view(name: str, shape: Sequence[Dim], dtype: str) -> View:
            return View(function, name, list(map(function.extent, shape)), dtype)

        self._data = view("data", problem.data, problem.dtype)
        self._indices = view("indices", problem.indices, problem.index_dtype)
        self._updates = view("updates", problem.updates, problem.dtype)
        self._result = view("result", problem.data, problem.dtype)

    def open(self) -> None:
        """Declare the elements of all parameters, inside of the body."""
        for view in (self._data, self._indices, self._updates, self._result):
            view.open()

    def copy(self) -> None:
        """Copy the data to the result."""
        total = prod(self.data_extents)
        chunks = ceil_div(total, _TASK_ELEMENTS)
        with loop(chunks, parallel=not (isinstance(chunks, int) and chunks == 1)) as chunk:
            begin = chunk * _TASK_ELEMENTS
            # Not materialized: nothing of these loops may be left in place.
            with loop(T.min(total - begin, tirx.const(_TASK_ELEMENTS, "int64"))) as i:
                T.buffer_store(self._result.data, self._data.data[begin + i], [begin + i])

    def index(self, offset: Expr) -> Expr:
        """An index as int64."""
        return tirx.Cast("int64", self._indices.data[offset])

    def update(self, target: Expr, source: Expr) -> None:
        """Apply the update at offset `source` to the element at offset `target`."""
        new = self._combine(self._result.data[target], self._updates.data[source])
        T.buffer_store(self._result.data, new, [target])


def _kernel(name: str, problem: ScatterProblem, write: Callable[[_Scatter], None]) -> tirx.PrimFunc:
    with Function(name) as function:
        scatter = _Scatter(function, problem)
        with function.body():
            scatter.open()
            if not any(isinstance(e, int) and e == 0 for e in scatter.data_extents):
                scatter.copy()
                write(scatter)
            else:
                T.evaluate(0)
    return with_ties(function.result.with_attr(BOUNDED, True), [(0, 3)])


def _is_inside(index: Expr, extent: Expr) -> Expr:
    return tirx.all(index >= 0, index < extent)
