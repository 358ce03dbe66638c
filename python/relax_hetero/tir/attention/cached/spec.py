"""Tensors, sizes and the layout of scratch, shared by the parts of a kernel of cached attention."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....encoding.problem import CachedAttentionProblem
from ....target.cpu_target import CpuTarget
from ....target.tiles import tile_sizes
from ...core.builder import Expr, Function, ceil_div, flat, int64, lane_indices, let, materialize, vector_type
from ...math.casts import cast

# Rows (a query of one head each) of a unit of a chunk, which share a widened page. Measured (AVX-512, one core, 512
# queries of 4 heads of 256): 64, 128 and 256 rows are within 6 % of each other.
CHUNK_ROWS = 64
BLOCK_PAGES = 2
"""Pages of a block, the granularity at which several units share a row; smaller blocks take longer to merge."""

MIN_SCORE = -1e30
"""Score of masked keys, whose softmax weight is 0."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel.

    Attributes
    ----------
    lanes : int
        Lanes of vectors along tokens.
    width_lanes : int
        Lanes of vectors along a head's elements: a divisor of its size.
    tile_rows, tile_vectors : int
        Rows and vectors of a register tile.
    queries : int
        Queries of a unit: 1 for "decode".
    rows : int
        Rows of a unit, including padding of the last tile.
    tasks : int
    splits : int
        Units that share the blocks of a row's pages.
    max_blocks : int
        Maximum number of blocks that are visible to a row.
    """

    lanes: int
    width_lanes: int
    tile_rows: int
    tile_vectors: int
    queries: int
    rows: int
    size: int
    tasks: int
    splits: int
    max_blocks: int
    is_widened: bool

    @property
    def columns(self) -> int:
        """Tokens of a tile of scores."""
        return self.tile_vectors * self.lanes

    @property
    def key_panels(self) -> int:
        """Number of panels of `columns` tokens in a page."""
        return PAGE // self.columns

    @property
    def value_panels(self) -> list[tuple[int, int]]:
        """First element and number of vectors of each panel of a head; the last panel may have fewer vectors."""
        vectors = self.size // self.width_lanes
        firsts = range(0, vectors, self.tile_vectors)
        return [(first * self.width_lanes, min(self.tile_vectors, vectors - first)) for first in firsts]

    @property
    def offsets(self) -> dict[str, int]:
        """Offsets of the buffers in a task's scratch, in floats; "end" is its size, a multiple of cache lines."""
        offsets, end = {}, 0
        for name, count in {
            "queries": self.rows * self.size,
            "scores": self.rows * PAGE,
            "sums": self.rows * self.size,
            "all_sums": self.rows * self.size,
            "all_maxima": self.rows,
            "all_totals": self.rows,
            "keys": PAGE * self.size if self.is_widened else 0,
            "values": PAGE * self.size if self.is_widened else 0,
            "maxima": self.rows,
            "totals": self.rows,
            "factors": self.rows,
        }.items():
            offsets[name], end = end, ceil_div(end + count, 16) * 16
        return {**offsets, "end": end}


def plan_for(problem: CachedAttentionProblem, cpu: CpuTarget) -> Plan:
    """The sizes for a problem on a CPU."""
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
    return Plan(
        lanes=lanes,
        width_lanes=gcd(problem.size, lanes),
        tile_rows=tile_rows,
        tile_vectors=_max_divisor(vectors, PAGE // lanes),
        queries=queries,
        rows=ceil_div(count, tile_rows) * tile_rows,
        size=problem.size,
        tasks=max(1, min(cpu.cores, max_tasks)),
        splits=splits,
        max_blocks=max_blocks,
        is_widened=is_chunk and count > 2 * tile_rows,
    )


def _max_divisor(limit: int, number: int) -> int:
    return next(count for count in range(limit, 0, -1) if number % count == 0)


class Tensors:
    """The parameters of a kernel, and reads of their elements.

    Parameters
    ----------
    function : Function
    problem : CachedAttentionProblem
    """

    def __init__(self, function: Function, problem: CachedAttentionProblem) -> None:
        self._problem = problem
        names = ["qkv", "pages", "table", "sequences", "positions"]
        optional = [name for name in ("rotation", "q_norm", "k_norm") if problem.operand_index(name) is not None]
        operands = [*zip([*names, *optional], problem.operands, strict=True), ("out", problem.out)]
        self._extents = {name: [function.extent(dim) for dim in operand.shape] for name, operand in operands}
        self._buffers = {
            name: function.argument(name, self._extents[name], operand.dtype) for name, operand in operands
        }
        self.data: dict[str, Any] = {}

    def open(self) -> None:
        """Declare the elements of each, in one dimension; inside the function's body."""
        self.data = {name: flat(buffer, self._extents[name]) for name, buffer in self._buffers.items()}
        if self._problem.page_type == "int8":
            self.data["scales"] = flat(self._buffers["pages"], self._extents["pages"], "float32")

    def extent(self, name: str, dim: int) -> Expr:
        """An extent of a parameter."""
        extent = self._extents[name][dim]
        return int(extent) if isinstance(extent, tirx.IntImm) else extent

    @property
    def rows(self) -> Expr:
        """Number of rows."""
        return self.extent("qkv", 0)

    @property
    def page_elements(self) -> int:
        """Elements of one head of a page."""
        return int(self.extent("pages", 2))

    def integer(self, name: str, index: Expr) -> Expr:
        """An element of an int32 tensor, as int64."""
        return materialize(tirx.Cast("int64", self.data[name][index]))

    def number(self, name: str, index: Expr, lanes: int) -> Expr:
        """Elements of a float tensor from an index on, as float32."""
        return cast(self.data[name][lane_indices(index, lanes)], "float32")


class Unit:
    """A unit of work, some rows of one key head, with the scratch of its task.

    Parameters
    ----------
    scratch : Buffer
        Scratch, in one dimension.
    start : PrimExpr
        Offset of the task's scratch.
    """

    def __init__(
        self, problem: CachedAttentionProblem, plan: Plan, tensors: Tensors, scratch: Any, start: Expr
    ) -> None:
        self.problem, self.plan, self.tensors, self.scratch = problem, plan, tensors, scratch
        self._start = start

    def at(self, name: str, index: Expr = 0) -> Expr:
        """Offset of an element of a buffer in scratch."""
        return self._start + (self.plan.offsets[name] + index)

    def load(self, name: str, index: Expr, lanes: int = 1) -> Expr:
        """Floats of a buffer in scratch."""
        return self.scratch[lane_indices(int64(self.at(name, index)), lanes)]

    def store(self, name: str, index: Expr, value: Expr, lanes: int = 1) -> None:
        """Write floats to a buffer in scratch."""
        T.buffer_store(self.scratch, value, [lane_indices(int64(self.at(name, index)), lanes)])


@dataclass(frozen=True)
class Page:
    """A head of a page: its offset in elements, and its type."""

    tensors: Tensors
    start: Expr
    size: int
    dtype: str

    @property
    def values(self) -> Expr:
        """Offset of the values."""
        return self.start + PAGE * self.size

    def load(self, index: Expr, lanes: int) -> Expr:
        """Elements from an index on, as float32, not yet scaled."""
        return let(self._as_float(self.tensors.data["pages"][lane_indices(index, lanes)], lanes))

    def _as_float(self, value: Expr, lanes: int) -> Expr:
        if self.dtype == "int8":
            return T.cast(T.cast(value, vector_type("int32", lanes)), vector_type("float32", lanes))
        return cast(value, "float32")

    def scale_at(self, key_or_value: int, token: Expr) -> Expr:
        """Offset in floats of the scale of a token's key (0) or value (1)."""
        return tirx.floordiv(self.start, 4) + (2 * PAGE * self.size // 4 + key_or_value * PAGE) + token

    def scales(self, key_or_value: int, token: Expr, lanes: int) -> Expr:
        """The scales of keys (0) or values (1) from a token on."""
        return self.tensors.data["scales"][lane_indices(self.scale_at(key_or_value, token), lanes)]


def page_of(tensors: Tensors, problem: CachedAttentionProblem, number: Expr, head: Expr) -> Page:
    """A head of the page with a number."""
    start = materialize((number * problem.kv_heads + head) * tensors.page_elements)
    return Page(tensors, start, problem.size, problem.page_type)


def slot_position(tensors: Tensors, row: Expr, sequence: Expr) -> tuple[Expr, Expr]:
    """The slot (0 for none) and the position (-1 for none) of a row of a sequence."""
    position = tensors.integer("positions", row)
    slots, max_pages = tensors.extent("table", 0), tensors.extent("table", 1)
    conditions = [sequence >= 0, sequence < slots, position >= 0, position < max_pages * PAGE]
    is_valid = tirx.all(*conditions)
    return (
        materialize(tirx.Select(is_valid, sequence, int64(0))),
        materialize(tirx.Select(is_valid, position, int64(-1))),
    )


def table_entry(tensors: Tensors, slot: Expr, number: Expr) -> Expr:
    """Page `number` of a slot, which holds the tokens from 64 * number on; -1 if the entry is not a page."""
    page = tensors.integer("table", slot * tensors.extent("table", 1) + number)
    return materialize(tirx.Select(page < tensors.extent("pages", 0), page, int64(-1)))
