"""Scatters: a copy of the data, then deterministic updates of some of its elements; the last update wins.

Updates of the same element must be applied in order, and which ones collide is known only at run time. Where few
updates can collide, one thread applies all of them in order (`scatter_in_order`): a thread per element of a slice, or
per line along the axis. Where many can, updates are sorted by target (`scatter_targets`, a stable sort, then
`scatter_sorted`): one thread applies a run of updates of the same element. No result depends on thread order.
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
from ....target.gpu_target import VECTOR_BYTES
from ...core.bounds import BOUNDED
from ...core.builder import Expr, Function, ceil_div, flat, int64, lane_indices
from ...core.work_split import ravel, unravel
from ...scatter import REDUCTIONS, ScatterProblem
from ..core.launch import at_least_one
from .arithmetic import for_cuda
from .lanes import WORD_BYTES, register
from .launch import inside, launch

SEVERAL_LAUNCHES = "relax_hetero.several_launches"
"""Attribute of a kernel that consists of several launches, each of which becomes a PrimFunc of its own."""

MAX_IN_ORDER = 64  # maximum updates that a thread applies in order; more are sorted

_THREADS = 256


@dataclass(frozen=True)
class GpuScatter:
    """A scatter and the form of its updates."""

    problem: ScatterProblem
    # Axis whose coordinates of elements are the indices; None: rows of indices are the coordinates of slices.
    axis: int | None

    @property
    def targets(self) -> int | None:
        """Number of updates (elements or slices); None if it is symbolic."""
        extents = self.problem.updates if self.axis is not None else self.problem.indices[:-1]
        return prod(e for e in extents if isinstance(e, int)) if all(isinstance(e, int) for e in extents) else None

    @property
    def target_type(self) -> str:
        """Integer type of targets: row-major element or slice numbers in the data."""
        extents = self.problem.data
        return "int32" if all(isinstance(e, int) for e in extents) and prod(map(int, extents)) < 2**31 else "int64"

    @property
    def is_sorted(self) -> bool:
        """True if updates are sorted by target."""
        count = self.problem.updates[self.axis] if self.axis is not None else self.targets
        return self.targets is not None and isinstance(count, int) and count > MAX_IN_ORDER and self.targets < 2**31


def scatter_in_order(scatter: GpuScatter) -> tirx.PrimFunc:
    """Kernel that applies updates in order; parameters are data, indices, updates and result."""
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
            with kernel.threads(lines) as line, T.serial(int64(updates[axis])) as along:
                outer = iter(unravel(line, [at_least_one(e) for d, e in enumerate(updates) if d != axis]))
                position = [along if d == axis else next(outer) for d in range(len(updates))]
                source = ravel(position, updates)
                kernel.at_target(source, lambda target: kernel.update(target, source), position)
    return kernel.result


def scatter_targets(scatter: GpuScatter) -> tirx.PrimFunc:
    """Kernel that computes each update's target, -1 if it is out of bounds; parameters are indices and targets."""
    with (
        _kernel("scatter_targets", scatter, ("indices", "targets"), {}) as kernel,
        kernel.threads(scatter.targets) as i,
    ):
        target_register = register(scatter.target_type, 1)
        T.buffer_store(target_register, tirx.const(-1, scatter.target_type), [int64(0)])
        kernel.at_target(i, lambda target: kernel.store(target_register, target, int64(0)))
        T.buffer_store(kernel.view("targets"), target_register[int64(0)], [i])
    return kernel.result


def scatter_sorted(scatter: GpuScatter) -> tirx.PrimFunc:
    """Kernel that applies sorted updates; parameters are data, updates, targets, their sorted order and result."""
    names = ("data", "updates", "targets", "order", "result")
    with _kernel("scatter", scatter, names, {SEVERAL_LAUNCHES: True}) as kernel:
        kernel.copy()
        size, count = (1 if scatter.axis is not None else kernel.slice_size()), scatter.targets
        assert count is not None
        with kernel.threads(count * size) as unit:
            width = at_least_one(size)
            row, i = unit // width, unit % width

            def target(row: Expr) -> Expr:
                return kernel.view("targets")[tirx.Cast("int64", kernel.view("order")[row])]

            def update(row: Expr) -> None:
                source = tirx.Cast("int64", kernel.view("order")[row]) * size + i
                kernel.update(tirx.Cast("int64", target(row)) * size + i, source)

            own = register(scatter.target_type, 1)
            T.buffer_store(own, target(row), [int64(0)])
            own_target = own[int64(0)]
            if scatter.problem.reduction == "update":  # the last update of a run wins
                neighbour = T.min(row + 1, int64(count - 1))
                is_end = tirx.any(tirx.EQ(row, int64(count - 1)), tirx.NE(target(neighbour), own_target))
                with T.If(tirx.all(own_target >= 0, is_end)), T.Then():
                    update(row)
            else:  # the thread of the first update applies the whole run
                neighbour = T.max(row - 1, int64(0))
                is_begin = tirx.any(tirx.EQ(row, int64(0)), tirx.NE(target(neighbour), own_target))
                with T.If(tirx.all(own_target >= 0, is_begin)), T.Then():
                    cursor = register("int64", 1)
                    T.buffer_store(cursor, row, [int64(0)])
                    current = cursor[int64(0)]
                    is_same_target = tirx.EQ(target(T.min(current, int64(count - 1))), own_target)
                    with T.While(tirx.all(current < count, is_same_target)):
                        update(current)
                        T.buffer_store(cursor, current + 1, [int64(0)])
    return kernel.result


@contextmanager
def _kernel(name: str, scatter: GpuScatter, parts: Sequence[str], attrs: dict[str, Any]) -> Iterator[_Kernel]:
    function = Function(name)
    with function:
        kernel = _Kernel(function, scatter, parts)
        with function.body():
            yield kernel
    kernel.result = function.result.with_attrs({BOUNDED: True, **attrs})


class _Kernel:
    """Writer of a kernel."""

    result: tirx.PrimFunc  # the kernel, set when it is complete

    def __init__(self, function: Function, scatter: GpuScatter, parts: Sequence[str]) -> None:
        self._scatter, problem = scatter, scatter.problem
        count = (scatter.targets,) if scatter.targets is not None else ()
        specs = {
            "data": (problem.data, problem.dtype),
            "indices": (problem.indices, problem.index_dtype),
            "updates": (problem.updates, problem.dtype),
            "targets": (count, scatter.target_type),
            "order": (count, "int32"),
            "result": (problem.data, problem.dtype),
        }
        self._arguments, self._shapes = {}, {}
        for part in parts:
            shape, dtype = specs[part]
            self._shapes[part] = [function.extent(dim) for dim in shape]
            self._arguments[part] = function.argument(part, self._shapes[part], dtype)
        # Extents of each tensor.
        self.extents = {
            part: [function.symbol(dim) if isinstance(dim, str) else dim for dim in specs[part][0]] for part in specs
        }
        self._views: dict[str, Any] = {}

    @contextmanager
    def threads(self, units: Expr) -> Iterator[Expr]:
        """Context of a launch with a thread per unit, which yields the unit's number."""
        with launch(ceil_div(units, _THREADS), _THREADS) as (block, thread):
            self._views = {part: flat(self._arguments[part], shape) for part, shape in self._shapes.items()}
            number = block * _THREADS + thread
            with inside(number, units, _THREADS):
                yield number

    def view(self, part: str) -> Any:
        """Elements of a parameter, declared within the current launch."""
        return self._views[part]

    def slice_size(self) -> Expr:
        """Elements of a slice."""
        depth = self._scatter.problem.indices[-1]
        assert isinstance(depth, int), "slices have a known rank"
        return prod(self.extents["data"][depth:])

    def copy(self) -> None:
        """Copy the data to the result, in vectors where its size is known."""
        total, dtype = prod(self.extents["data"]), self._scatter.problem.dtype
        lanes = VECTOR_BYTES // bytes_of(dtype)
        if not isinstance(total, int):
            with self.threads(total) as i:
                T.buffer_store(self.view("result"), self.view("data")[i], [i])
            return
        vectors, remaining = divmod(total, lanes)
        with self.threads(vectors + remaining) as unit:
            if vectors:
                target, source = (flat(self._arguments[p], self._shapes[p], "uint32") for p in ("result", "data"))
                words = lane_indices(unit * (VECTOR_BYTES // WORD_BYTES), VECTOR_BYTES // WORD_BYTES)
                with T.If(unit < vectors), T.Then():
                    T.buffer_store(target, source[words], [words])
            if remaining:
                with T.If(unit >= vectors), T.Then():
                    index = unit - vectors + vectors * lanes
                    T.buffer_store(self.view("result"), self.view("data")[index], [index])

    def at_target(self, number: Expr, visit: Callable[[Expr], None], position: Sequence[Expr] | None = None) -> None:
        """Call `visit` with the target of an update, if it is within the data.

        `number`: number of the update. `position`: coordinates of an element in the updates; by default those of
        `number`.
        """
        axis, data, indices = self._scatter.axis, self.extents["data"], self.extents["indices"]
        if axis is None:
            depth = indices[-1]
            registers = [register("int64", 1) for _ in range(depth)]
            for d, coordinate in enumerate(registers):
                T.buffer_store(coordinate, self._index(number * depth + d), [int64(0)])
            values = [coordinate[int64(0)] for coordinate in registers]
            is_inside = [c >= 0 for c in values] + [c < extent for c, extent in zip(values, data, strict=False)]
            target = ravel(values, data[:depth]) if values else int64(0)
        else:
            updates = self.extents["updates"]
            position = unravel(number, [at_least_one(extent) for extent in updates]) if position is None else position
            index = register("int64", 1)
            T.buffer_store(index, self._index(ravel(list(position), indices)), [int64(0)])
            along = index[int64(0)]
            with T.If(along < 0), T.Then():
                T.buffer_store(index, along + data[axis], [int64(0)])
            is_inside = [along >= 0, along < data[axis]]
            target = ravel([along if d == axis else p for d, p in enumerate(position)], data)
        if not is_inside:
            visit(target)
            return
        with T.If(tirx.all(*is_inside)), T.Then():
            visit(target)

    def store(self, buffer: Any, value: Expr, index: Expr) -> None:
        """Store a value, cast to the buffer's type."""
        dtype = str(buffer.dtype)
        T.buffer_store(buffer, value if str(value.ty.dtype) == dtype else tirx.Cast(dtype, value), [index])

    def update(self, target: Expr, source: Expr) -> None:
        """Apply one update, given the element numbers of target and source."""
        result = self.view("result")
        new = REDUCTIONS[self._scatter.problem.reduction](result[target], self.view("updates")[source])
        T.buffer_store(result, for_cuda(new), [target])

    def _index(self, number: Expr) -> Expr:
        return tirx.Cast("int64", self.view("indices")[number])
