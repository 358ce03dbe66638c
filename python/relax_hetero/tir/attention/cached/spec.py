"""Tensors, sizes and the layout of scratch, shared by the parts of a kernel of cached attention."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.cpu_target import CpuTarget
from ....target.tiles import tile_sizes
from ...core.builder import (
    Expr,
    Function,
    ceil_div,
    int64,
    load_lanes,
    materialize,
    plain_extent,
    store_lanes,
    vector_type,
)
from ...core.view import View
from ...math.casts import cast
from ..attention_spec import AttentionPlan, AttentionSpec, left_steps

# Rows (a query of one head each) of a unit of a chunk, which share a widened page. Measured (AVX-512, one core, 512
# queries of 4 heads of 256): 64, 128 and 256 rows are within 6 % of each other.
CHUNK_ROWS = 64
BLOCK_PAGES = 2
"""Pages of a block, the granularity at which several units share a row; smaller blocks take longer to merge."""


@dataclass(frozen=True)
class CachedPlan(AttentionPlan):
    """Plan of an attention to pages. A block of keys is a page; `queries` are all rows of a unit, in whole tiles."""

    unit_queries: int = 1  # queries of a unit: 1 for "decode"
    splits: int = 1  # units that share the blocks of a row's pages
    max_blocks: int = 0  # maximum number of blocks of pages that are visible to a row

    @property
    def buffers(self) -> dict[str, int]:
        """Sizes of the buffers in a task's scratch, in elements; "all_" are rows' states over all blocks of pages."""
        states = {"all_partial": self.value_distance, "all_maxima": 1, "all_sums": 1}
        return {**super().buffers, **{name: self.queries * size for name, size in states.items()}}


def cached_plan(problem: CachedAttentionProblem, cpu: CpuTarget) -> CachedPlan:
    """The plan of a problem on a CPU."""
    lanes, tile = max(cpu.lanes("float32"), 1), tile_sizes(cpu)
    is_chunk, rows = problem.rows == "chunk", problem.out.shape[0]
    queries = max(1, CHUNK_ROWS // problem.group) if is_chunk else 1
    if is_chunk and isinstance(rows, int):
        queries = max(1, min(queries, rows))
    count = queries * problem.group
    tile_rows = ceil_div(count, ceil_div(count, tile.rows))
    # Few rows leave registers for more vectors, so that enough sums hide the latency of multiply-adds.
    vectors = min(max(tile.vectors, tile.rows * tile.vectors // tile_rows), 4)
    splits = 1
    units = rows * problem.kv_heads if isinstance(rows, int) else 0
    columns = problem.operands[2].shape[1]
    max_blocks = ceil_div(int(columns), BLOCK_PAGES) if isinstance(columns, int) else 0
    if problem.window:
        max_blocks = min(max_blocks, (problem.window - 2) // (PAGE * BLOCK_PAGES) + 2)
    if not is_chunk and 0 < units < 2 * cpu.cores and max_blocks > 1:
        splits = next(s for s in range(1, cpu.cores + 1) if units * s >= cpu.cores and units * s % cpu.cores == 0)
    max_tasks = units * splits if not is_chunk and units else cpu.cores
    padded_rows = ceil_div(count, tile_rows) * tile_rows
    vectors = _max_divisor(vectors, PAGE // lanes)
    return CachedPlan(
        tasks=max(1, min(cpu.cores, max_tasks)),
        queries=padded_rows,
        keys=PAGE,
        is_single=False,
        rows=tile_rows,
        vectors=vectors,
        lanes=lanes,
        value_panels=ceil_div(problem.value_size, vectors * lanes),
        width=problem.size,
        # Keys that are values are in the order of values: they are transposed to scratch.
        left_steps=left_steps(cpu),
        is_in_place=not problem.shared_values and (not is_chunk or count <= 2 * tile_rows),
        scratch_queries=padded_rows,
        unit_queries=queries,
        splits=splits,
        max_blocks=max_blocks,
    )


def _max_divisor(limit: int, number: int) -> int:
    return next(count for count in range(limit, 0, -1) if number % count == 0)


class Tensors:
    """The parameters of a kernel, and reads of their elements.

    `lanes`: maximum number of lanes of a vector of floats.
    """

    def __init__(self, function: Function, problem: CachedAttentionProblem, lanes: int) -> None:
        self._problem, self.lanes = problem, lanes
        names = ["qkv", "pages", "table", "sequences", "positions", *problem.optional_operands]
        operands = [*zip(names, problem.operands, strict=True), ("out", problem.out)]
        self.views = {
            name: View(function, name, [function.extent(dim) for dim in operand.shape], operand.dtype)
            for name, operand in operands
        }

    def open(self) -> None:
        """Declare the elements of each, in one dimension; inside the function's body."""
        for view in self.views.values():
            view.open(raw=view.nominal == "bfloat16")  # TVM can neither bind nor mask vectors of bfloat16
        if self.page_type == "int8":
            self.scales = self.views["pages"].elements("float32")

    def extent(self, name: str, dim: int) -> Expr:
        """An extent of a parameter."""
        return plain_extent(self.views[name].physical[dim])

    @property
    def rows(self) -> Expr:
        """Number of rows."""
        return self.extent("qkv", 0)

    @property
    def row_elements(self) -> int:
        """Elements of a row of `qkv`."""
        return int(self.extent("qkv", 1))

    @property
    def page_type(self) -> str:
        """Element type of the pages."""
        return self._problem.page_type

    @property
    def page_elements(self) -> int:
        """Elements of one head of a page."""
        return int(self.extent("pages", 2))

    def integer(self, name: str, index: Expr) -> Expr:
        """An element of an int32 tensor, as int64."""
        return materialize(tirx.Cast("int64", self.views[name].data[index]))

    def number(self, name: str, index: Expr, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements of a tensor from an index on, as float32; masked ones are zero."""
        view = self.views[name]
        value = view.typed(load_lanes(view.data, index, lanes, mask))
        if view.nominal == "int8":
            value = T.cast(value, vector_type("int32", lanes))
        return cast(value, "float32")

    def store(self, name: str, index: Expr, value: Expr, lanes: int, mask: Expr | None = None) -> None:
        """Write elements of a tensor from an index on, in its type."""
        view = self.views[name]
        store_lanes(view.data, index, view.bits(cast(value, view.nominal)), lanes, mask)

    def slot_position(self, row: Expr, sequence: Expr) -> tuple[Expr, Expr]:
        """The slot (0 for none) and the position (-1 for none) of a row of a sequence."""
        position = self.integer("positions", row)
        slots, max_pages = self.extent("table", 0), self.extent("table", 1)
        is_valid = tirx.all(sequence >= 0, sequence < slots, position >= 0, position < max_pages * PAGE)
        return (
            materialize(tirx.Select(is_valid, sequence, int64(0))),
            materialize(tirx.Select(is_valid, position, int64(-1))),
        )

    def table_entry(self, slot: Expr, number: Expr) -> Expr:
        """Page `number` of a slot, which holds the tokens from 64 * number on; -1 if the entry is not a page."""
        page = self.integer("table", slot * self.extent("table", 1) + number)
        return materialize(tirx.Select(page < self.extent("pages", 0), page, int64(-1)))


@dataclass(frozen=True)
class CachedSpec(AttentionSpec):
    """An attention to pages; its rows are those of a unit: queries times heads of a group, heads innermost."""

    plan: CachedPlan
    problem: CachedAttentionProblem
    tensors: Tensors
