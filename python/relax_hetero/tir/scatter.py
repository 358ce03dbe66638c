"""Scatter: a copy of the data, and updates written over some of its elements.

Before everything else the kernel copies the data to the result, element by element, and reads it no more: the two are
tied, and in place (`ties`) only the updates are left.
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
from .core.work_split import LEAST, is_worth_tasks, ravel
from .math.extremes import maximum, minimum

REDUCTIONS: dict[str, Callable[[Expr, Expr], Expr]] = {
    "update": lambda _, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": minimum,
    "max": maximum,
}
"""Functions of an element and its update."""

_CHUNK = LEAST["elements"]
"""Elements that one task copies."""


@dataclass(frozen=True)
class ScatterProblem:
    """Data of a shape, with updates.

    Attributes
    ----------
    data, indices, updates : tuple of int or str
        Shapes; symbolic extents are names.
    reduction : str
        One of `REDUCTIONS`.
    """

    data: tuple[Dim, ...]
    indices: tuple[Dim, ...]
    updates: tuple[Dim, ...]
    dtype: str
    index_dtype: str
    reduction: str


def scatter_elements_kernel(problem: ScatterProblem, axis: int) -> tirx.PrimFunc:
    """Each update goes where its own position says, but along one axis, where the index at that position does.

    Negative indices count from the end; updates beyond the data are left out. Of several for one element the last in
    order wins, or all are reduced.
    """

    def write(at: _Scatter) -> None:
        extents = at.updates_extents
        outside = [d for d in range(len(extents)) if d != axis]
        shared = next((d for d in outside if extents[d] != 1), None)
        order = [*([shared] if shared is not None else []), axis, *(d for d in outside if d != shared)]

        def visit(left: list[int], position: dict[int, Expr]) -> None:
            if left:
                is_shared = left[0] == shared and at.is_long
                with loop(extents[left[0]], parallel=is_shared) as i:
                    visit(left[1:], {**position, left[0]: i})
                return
            places = [position[d] for d in range(len(extents))]
            index = at.index(ravel(places, at.indices_extents))
            index = materialize(tirx.Select(index < 0, index + at.data_extents[axis], index))
            target = [index if d == axis else place for d, place in enumerate(places)]
            with when(_is_inside(index, at.data_extents[axis])):
                at.update(ravel(target, at.data_extents), ravel(places, extents))

        visit(order, {})

    return _kernel("scatter_elements", problem, write)


def scatter_nd_kernel(problem: ScatterProblem) -> tirx.PrimFunc:
    """Each slice of updates goes where a row of indices says; those that are not in the data are left out."""

    def write(at: _Scatter) -> None:
        *rows, depth = at.indices_extents
        count = prod(rows)
        size = prod(at.data_extents[depth:])
        with loop(count) as row:
            place = [materialize(at.index(row * depth + d)) for d in range(depth)]
            start = materialize(ravel(place, at.data_extents[:depth]) * size)
            is_inside = [_is_inside(index, extent) for index, extent in zip(place, at.data_extents, strict=False)]
            # Rows may be for the same elements; those of a slice are not.
            with when(tirx.all(*is_inside) if is_inside else True):
                with loop(size, parallel=isinstance(size, int) and is_worth_tasks("elements", size)) as i:
                    at.update(start + i, row * size + i)

    return _kernel("scatter_nd", problem, write)


class _Scatter:
    """The views of a kernel's parameters while it is being written."""

    def __init__(self, function: Function, problem: ScatterProblem) -> None:
        def extents(shape: Sequence[Dim]) -> list[Expr]:
            return [function.symbol(dim) if isinstance(dim, str) else dim for dim in shape]

        self.data_extents, self.indices_extents = extents(problem.data), extents(problem.indices)
        self.updates_extents = extents(problem.updates)
        total = prod(self.updates_extents)
        self.is_long = is_worth_tasks("elements", total)
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
        chunks = ceil_div(total, _CHUNK)
        with loop(chunks, parallel=not (isinstance(chunks, int) and chunks == 1)) as chunk:
            begin = chunk * _CHUNK
            # Not opaque: in place, nothing of these loops is to be left.
            with loop(T.min(total - begin, tirx.const(_CHUNK, "int64"))) as i:
                T.buffer_store(self._result.data, self._data.data[begin + i], [begin + i])

    def index(self, place: Expr) -> Expr:
        """An index as int64."""
        return tirx.Cast("int64", self._indices.data[place])

    def update(self, target: Expr, source: Expr) -> None:
        """One update, by the places of both in memory."""
        new = self._combine(self._result.data[target], self._updates.data[source])
        T.buffer_store(self._result.data, new, [target])


def _kernel(name: str, problem: ScatterProblem, write: Callable[[_Scatter], None]) -> tirx.PrimFunc:
    function = Function(name)
    with function:
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
