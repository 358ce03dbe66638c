"""Kernels of elementwise expressions alone; their arithmetic is that of `expression_code`."""

from __future__ import annotations

from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import ElementwiseProblem
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, Function, lane_indices, loop, plain_extent
from ..core.packed_storage import (
    PackedStorage,
    gather_vector,
    is_multiple,
    load_vector,
    split_run,
    split_tail,
    tail_mask,
)
from ..core.ties import tied_to
from ..core.work_split import for_parts, nest_loops
from ..math.casts import computed_in
from .expression_code import emit


class ElementwiseStorages:
    """Parameters of an elementwise kernel on any device, in order: operands, then the result.

    Raises EncodingError if the layout of a packed operand differs from the result's.
    """

    def __init__(self, function: Function, problem: ElementwiseProblem) -> None:
        bound: set[str] = set()
        parameters = [(f"x{i}", operand) for i, operand in enumerate(problem.operands)] + [("result", problem.result)]
        *self.operands, self.result = (
            PackedStorage(function, name, operand.shape, operand.dtype, operand.layout, bound)
            for name, operand in parameters
        )
        index_map, layout = problem.result.index_map, problem.result.layout
        # Whether each operand has the layout of the result.
        self.alike = [o.index_map == index_map and o.layout == layout for o in problem.operands]
        for i, operand in enumerate(problem.operands):
            if not operand.layout.is_identity and not self.alike[i]:
                raise EncodingError(
                    f"elementwise {problem.expression}: x{i} is stored as {operand.layout}; expected the result's "
                    f"{layout}, or row-major"
                )
        # Extents of the result's dimensions, rounded up to whole tiles where no parameter shows the exact one.
        self.extents = [self._extent(problem, d, name) for d, name in enumerate(index_map)]

    def _extent(self, problem: ElementwiseProblem, d: int, name: str) -> Expr:
        extents = [self.result.extents[d]]
        for operand, storage in zip(problem.operands, self.operands, strict=True):
            if name in operand.index_map:
                extents.append(storage.extents[operand.index_map.index(name)])
        whole_tiles = self.result.tiles[d] * self.result.layout.tile(d)
        return next((extent for extent in extents if extent is not None), whole_tiles)


def elementwise_kernel(problem: ElementwiseProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """A kernel of an elementwise expression on packed or row-major storage.

    The result's padding is the expression of the operands' padding; consumers never read it. `problem`: operands with
    the result's layout are read tile by tile; row-major ones are broadcast against it. Raises EncodingError if the
    layout of a packed operand differs from the result's; see also `emit`.
    """
    with Function("elementwise") as function:
        storages = ElementwiseStorages(function, problem)
        with function.body():
            for storage in (*storages.operands, storages.result):
                # TVM has no masked loads of bfloat16.
                storage.open(raw=storage.dtype == "bfloat16")
            work = _Work(problem, storages, cpu)
            if all(work.alike[i] or not work.axes(i) for i in range(len(problem.operands))):
                work.emit_flat()
            else:
                work.emit_tiles()
    return tied_to(function.result, problem.operands, 0, problem.result)


class _Work:
    """Code of the loops of an elementwise kernel."""

    def __init__(self, problem: ElementwiseProblem, storages: ElementwiseStorages, cpu: CpuTarget) -> None:
        self.problem, self.operands, self.result, self.cpu = problem, storages.operands, storages.result, cpu
        self.alike, self.extents = storages.alike, storages.extents
        self.names = list(problem.result.index_map)
        types = [operand.dtype for operand in (*problem.operands, problem.result)]
        self.lanes = min(cpu.lanes(computed_in(dtype)) for dtype in types)

    def axes(self, index: int) -> list[int]:
        """The result's dimensions along which an operand is not broadcast."""
        return [self.names.index(name) for name in self.problem.operands[index].index_map if name != "1"]

    def emit_flat(self) -> None:
        """Loop over flat storage: every operand has the result's layout or is a scalar."""
        total: Expr = prod(map(plain_extent, self.result.physical))
        vectors = total // self.lanes if isinstance(total, int) else tirx.floordiv(total, self.lanes)

        def emit_at(start: Expr, width: int) -> None:
            values = []
            for i, storage in enumerate(self.operands):
                index = lane_indices(start, width) if self.alike[i] else tirx.const(0, "int64")
                values.append(load_vector(storage, index, None, width))
            self._store(values, lane_indices(start, width), width)

        for_parts(
            [vectors], self.result.bytes(), self.cpu, lambda positions: emit_at(positions[0] * self.lanes, self.lanes)
        )
        if self.lanes > 1 and not (isinstance(total, int) and total % self.lanes == 0):
            with loop(total - vectors * self.lanes) as rest:
                emit_at(vectors * self.lanes + rest, 1)

    def emit_tiles(self) -> None:
        """Loop over vectors of the result's innermost axis, with broadcast operands read at their positions."""
        layout = self.result.layout
        outer_dims, inner_dims = list(layout.outer_perm), list(layout.inner_dims)
        last = inner_dims.pop() if inner_dims else outer_dims.pop()

        def visit(positions: list[Expr]) -> None:
            outer = dict(zip(outer_dims, positions, strict=True))
            nest_loops(
                [layout.tile(d) for d in inner_dims],
                lambda within: self._emit_tile(last, outer, dict(zip(inner_dims, within, strict=True))),
            )

        for_parts([self.result.tiles[d] for d in outer_dims], self.result.bytes(), self.cpu, visit)

    def _emit_tile(self, last: int, outer: dict[int, Expr], inner: dict[int, Expr]) -> None:
        layout = self.result.layout
        if layout.inner_dims:
            tile, extent = layout.tile(last), self.extents[last]
            first = outer[last] * tile

            def vectors(full: bool) -> None:
                for start, width in split_run(tile, self.lanes):
                    mask = None if full else tail_mask(extent, tile, first, start, width)
                    self._emit_vector(outer, {**inner, last: tirx.const(start, "int64")}, last, width, mask)

            split_tail(extent, tile, outer[last], vectors)
            return
        extent = self.extents[last]
        count = extent // self.lanes if isinstance(extent, int) else tirx.floordiv(extent, self.lanes)
        with loop(count) as vector:
            self._emit_vector({**outer, last: vector * self.lanes}, inner, last, self.lanes, None)
        if self.lanes > 1 and not is_multiple(extent, self.lanes):
            with loop(extent - count * self.lanes) as rest:
                self._emit_vector({**outer, last: count * self.lanes + rest}, inner, last, 1, None)

    def _emit_vector(
        self, outer: dict[int, Expr], inner: dict[int, Expr], last: int, width: int, mask: Expr | None
    ) -> None:
        layout = self.result.layout
        index = lane_indices(self.result.offset(outer, inner), width)
        values = []
        for i, storage in enumerate(self.operands):
            if self.alike[i]:
                values.append(load_vector(storage, index, None, width))
                continue
            emit_at: dict[int, Expr] = {}
            step: Expr | None = None
            for operand_dim, name in enumerate(self.problem.operands[i].index_map):
                if name == "1":
                    continue
                d = self.names.index(name)
                position = outer[d] * layout.tile(d) + inner.get(d, 0)
                if d == last:
                    step = storage.outer_stride(operand_dim)
                elif not is_multiple(self.extents[d], layout.tile(d)):
                    position = T.min(position, self.extents[d] - 1)
                emit_at[operand_dim] = position
            offset = storage.offset(emit_at, {})
            if step is None:
                values.append(load_vector(storage, offset, None, width))
            elif isinstance(step, int) and step == 1:
                values.append(load_vector(storage, lane_indices(offset, width), mask, width))
            else:
                values.append(gather_vector(storage, offset, step, mask, width))
        self._store(values, index, width)

    def _store(self, values: list[tirx.Expr], where: Expr, width: int) -> None:
        dtypes = [operand.dtype for operand in self.problem.operands]
        value = emit(self.problem.expression, values, dtypes, width)
        T.buffer_store(self.result.data, self.result.bits(value), [where])
