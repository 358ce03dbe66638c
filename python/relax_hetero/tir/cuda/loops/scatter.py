"""Scatters on GPUs: a copy of the data, then updates over some of its elements, of which the last in order wins.

Updates for one element must come one after another, and nothing says before the run which these are. Where updates that
may meet are few, a thread goes through all of them (`scatter_in_order`): each for its element of the slices, or for its
line along the axis. Where they are many, they are sorted by what they are for (`scatter_targets`, then a sort of the
targets that keeps their order, then `scatter_sorted`): a thread goes through those of one run, which are for the same
element. No result depends on which thread was first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ...core.bounds import BOUNDED
from ...core.builder import Expr, Function, ceil_div, flat, int64, lane_indices
from ...core.work_split import ravel, unravel
from ...scatter import REDUCTIONS, ScatterProblem
from .arithmetic import for_cuda
from .lanes import WORD, register
from .launch import inside, launch

SEVERAL_LAUNCHES = "relax_hetero.several_launches"
"""On a kernel that binds its own threads, in several launches that become kernels of their own."""

MAX_IN_ORDER = 64
"""Updates that a thread goes through one after another, where sorting them is the other way."""

_THREADS, _VECTOR_BYTES = 256, 16


@dataclass(frozen=True)
class GpuScatter:
    """A scatter and how its updates lie.

    Attributes
    ----------
    problem : ScatterProblem
    axis : int or None
        Along which indices say where elements go; None: rows of indices say where slices go.
    """

    problem: ScatterProblem
    axis: int | None

    @property
    def targets(self) -> int | None:
        """How many updates there are: elements, or slices; None where only the run knows."""
        known = self.problem.updates if self.axis is not None else self.problem.indices[:-1]
        return prod(e for e in known if isinstance(e, int)) if all(isinstance(e, int) for e in known) else None

    @property
    def target_type(self) -> str:
        """Element type of places in the data."""
        extents = self.problem.data
        return "int32" if all(isinstance(e, int) for e in extents) and prod(map(int, extents)) < 2**31 else "int64"

    @property
    def is_sorted(self) -> bool:
        """True if updates are sorted by what they are for."""
        meet = self.problem.updates[self.axis] if self.axis is not None else self.targets
        return self.targets is not None and isinstance(meet, int) and meet > MAX_IN_ORDER and self.targets < 2**31


def scatter_in_order(scatter: GpuScatter) -> tirx.PrimFunc:
    """A kernel of data, indices, updates and result."""
    with _kernel("scatter", scatter, ("data", "indices", "updates", "result"), {SEVERAL_LAUNCHES: True}) as kernel:
        kernel.copy()
        updates, axis = kernel.extents["updates"], scatter.axis
        if axis is None:
            rows = prod(kernel.extents["indices"][:-1])
            size = kernel.slice_size()
            with kernel.threads(size) as i, T.serial(int64(rows)) as row:
                kernel.at_target(row, lambda target: kernel.update(target * size + i, row * size + i))
        else:
            lines = prod(extent for d, extent in enumerate(updates) if d != axis)
            with kernel.threads(lines) as line, T.serial(int64(updates[axis])) as step:
                others = iter(unravel(line, [_positive(e) for d, e in enumerate(updates) if d != axis]))
                place = [step if d == axis else next(others) for d in range(len(updates))]
                source = ravel(place, updates)
                kernel.at_target(source, lambda target: kernel.update(target, source), place)
    return kernel.result


def scatter_targets(scatter: GpuScatter) -> tirx.PrimFunc:
    """A kernel of indices and, for each update, the number of the element or slice that it is for; -1 for none."""
    with (
        _kernel("scatter_targets", scatter, ("indices", "targets"), {}) as kernel,
        kernel.threads(scatter.targets) as i,
    ):
        found = register(scatter.target_type, 1)
        T.buffer_store(found, tirx.const(-1, scatter.target_type), [int64(0)])
        kernel.at_target(i, lambda target: kernel.store(found, target, int64(0)))
        T.buffer_store(kernel.view("targets"), found[int64(0)], [i])
    return kernel.result


def scatter_sorted(scatter: GpuScatter) -> tirx.PrimFunc:
    """A kernel of data, updates, targets, the order of the targets and result."""
    parts = ("data", "updates", "targets", "order", "result")
    with _kernel("scatter", scatter, parts, {SEVERAL_LAUNCHES: True}) as kernel:
        kernel.copy()
        size, count = (1 if scatter.axis is not None else kernel.slice_size()), scatter.targets
        assert count is not None
        with kernel.threads(count * size) as unit:
            width = _positive(size)
            row, i = unit // width, unit % width

            def target(row: Expr) -> Expr:
                return kernel.view("targets")[tirx.Cast("int64", kernel.view("order")[row])]

            def update(row: Expr) -> None:
                source = tirx.Cast("int64", kernel.view("order")[row]) * size + i
                kernel.update(tirx.Cast("int64", target(row)) * size + i, source)

            own = register(scatter.target_type, 1)
            T.buffer_store(own, target(row), [int64(0)])
            mine = own[int64(0)]
            if scatter.problem.reduction == "update":  # the last of a run
                other = T.min(row + 1, int64(count - 1))
                is_end = tirx.any(tirx.EQ(row, int64(count - 1)), tirx.NE(target(other), mine))
                with T.If(tirx.all(mine >= 0, is_end)), T.Then():
                    update(row)
            else:  # the first one goes through it
                other = T.max(row - 1, int64(0))
                is_begin = tirx.any(tirx.EQ(row, int64(0)), tirx.NE(target(other), mine))
                with T.If(tirx.all(mine >= 0, is_begin)), T.Then():
                    step = register("int64", 1)
                    T.buffer_store(step, row, [int64(0)])
                    now = step[int64(0)]
                    is_mine = tirx.EQ(target(T.min(now, int64(count - 1))), mine)
                    with T.While(tirx.all(now < count, is_mine)):
                        update(now)
                        T.buffer_store(step, now + 1, [int64(0)])
    return kernel.result


def _positive(extent: Expr) -> Expr:
    # TVM's analyzer must not find a division by zero, not even where nothing runs.
    return max(extent, 1) if isinstance(extent, int) else T.max(extent, int64(1))


@contextmanager
def _kernel(name: str, scatter: GpuScatter, parts: Sequence[str], attrs: dict[str, Any]) -> Iterator[_Kernel]:
    function = Function(name)
    with function:
        kernel = _Kernel(function, scatter, parts)
        with function.body():
            yield kernel
    kernel.result = function.result.with_attrs({BOUNDED: True, **attrs})


class _Kernel:
    """A kernel while it is written.

    Attributes
    ----------
    extents : dict
        Extents of each part.
    result : PrimFunc
        When it is written.
    """

    result: tirx.PrimFunc

    def __init__(self, function: Function, scatter: GpuScatter, parts: Sequence[str]) -> None:
        self._scatter, problem = scatter, scatter.problem
        count = (scatter.targets,) if scatter.targets is not None else ()
        known = {
            "data": (problem.data, problem.dtype),
            "indices": (problem.indices, problem.index_dtype),
            "updates": (problem.updates, problem.dtype),
            "targets": (count, scatter.target_type),
            "order": (count, "int32"),
            "result": (problem.data, problem.dtype),
        }
        self._arguments, self._shapes = {}, {}
        for part in parts:
            shape, dtype = known[part]
            self._shapes[part] = [function.extent(dim) for dim in shape]
            self._arguments[part] = function.argument(part, self._shapes[part], dtype)
        self.extents = {
            part: [function.symbol(dim) if isinstance(dim, str) else dim for dim in known[part][0]] for part in known
        }
        self._views: dict[str, Any] = {}

    @contextmanager
    def threads(self, units: Expr) -> Iterator[Expr]:
        """A launch with a thread for each of some units; the number of the thread's unit."""
        with launch(ceil_div(units, _THREADS), _THREADS) as (block, thread):
            self._views = {part: flat(self._arguments[part], shape) for part, shape in self._shapes.items()}
            number = block * _THREADS + thread
            with inside(number, units, _THREADS):
                yield number

    def view(self, part: str) -> Any:
        """The elements of a parameter, within a launch."""
        return self._views[part]

    def slice_size(self) -> Expr:
        """Elements of a slice."""
        depth = self._scatter.problem.indices[-1]
        assert isinstance(depth, int), "slices have a known rank"
        return prod(self.extents["data"][depth:])

    def copy(self) -> None:
        """Copy the data to the result, in vectors where their number is known."""
        total, dtype = prod(self.extents["data"]), self._scatter.problem.dtype
        lanes = _VECTOR_BYTES // bytes_of(dtype)
        if not isinstance(total, int):
            with self.threads(total) as i:
                T.buffer_store(self.view("result"), self.view("data")[i], [i])
            return
        vectors, rest = divmod(total, lanes)
        with self.threads(vectors + rest) as unit:
            if vectors:
                into, out_of = (flat(self._arguments[p], self._shapes[p], "uint32") for p in ("result", "data"))
                words = lane_indices(unit * (_VECTOR_BYTES // WORD), _VECTOR_BYTES // WORD)
                with T.If(unit < vectors), T.Then():
                    T.buffer_store(into, out_of[words], [words])
            if rest:
                with T.If(unit >= vectors), T.Then():
                    at = unit - vectors + vectors * lanes
                    T.buffer_store(self.view("result"), self.view("data")[at], [at])

    def at_target(self, number: Expr, visit: Callable[[Expr], None], place: Sequence[Expr] | None = None) -> None:
        """Do something with the element or slice that an update is for, if it is in the data.

        Parameters
        ----------
        number : PrimExpr
            Number of the update.
        place : sequence of PrimExpr, optional
            Where an element is in the updates.
        """
        axis, data, indices = self._scatter.axis, self.extents["data"], self.extents["indices"]
        if axis is None:
            depth = indices[-1]
            found = [register("int64", 1) for _ in range(depth)]
            for d, at in enumerate(found):
                T.buffer_store(at, self._index(number * depth + d), [int64(0)])
            where = [at[int64(0)] for at in found]
            is_inside = [w >= 0 for w in where] + [w < extent for w, extent in zip(where, data, strict=False)]
            target = ravel(where, data[:depth]) if where else int64(0)
        else:
            updates = self.extents["updates"]
            place = unravel(number, [_positive(extent) for extent in updates]) if place is None else place
            index = register("int64", 1)
            T.buffer_store(index, self._index(ravel(list(place), indices)), [int64(0)])
            along = index[int64(0)]
            with T.If(along < 0), T.Then():
                T.buffer_store(index, along + data[axis], [int64(0)])
            is_inside = [along >= 0, along < data[axis]]
            target = ravel([along if d == axis else p for d, p in enumerate(place)], data)
        if not is_inside:
            visit(target)
            return
        with T.If(tirx.all(*is_inside)), T.Then():
            visit(target)

    def store(self, buffer: Any, value: Expr, at: Expr) -> None:
        """Store a number as what a buffer has."""
        dtype = str(buffer.dtype)
        T.buffer_store(buffer, value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value), [at])

    def update(self, target: Expr, source: Expr) -> None:
        """One update, by the places of both in memory."""
        result = self.view("result")
        new = REDUCTIONS[self._scatter.problem.reduction](result[target], self.view("updates")[source])
        T.buffer_store(result, for_cuda(new), [target])

    def _index(self, place: Expr) -> Expr:
        return tirx.Cast("int64", self.view("indices")[place])
