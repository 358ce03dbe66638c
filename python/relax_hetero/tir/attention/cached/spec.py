"""Tensors, sizes, and offsets in scratch that the parts of a kernel of cached attention share."""

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

# Rows (a query of one head each) that share a widened page where there are many. Measured (AVX-512, one core, 512
# queries of 4 heads of 256): 64, 128 and 256 rows are within 6 % of each other.
CHUNK_ROWS = 64
BLOCK_PAGES = 2
"""Pages of a block, the granularity at which several units share a row; smaller blocks take longer to merge."""

MIN_SCORE = -1e30
"""Score of hidden keys: its power of e is 0 beside any other's."""


@dataclass(frozen=True)
class Plan:
    """Sizes of a kernel.

    Attributes
    ----------
    lanes : int
        Lanes of vectors along tokens.
    width_lanes : int
        Lanes of vectors along a head's numbers: a divisor of its size.
    tile_rows, tile_vectors : int
        Rows and vectors of a tile of sums.
    queries : int
        Positions of a unit's rows: 1 of "decode".
    rows : int
        Rows of a unit, with those that fill the last tile.
    tasks : int
    splits : int
        Units that share the blocks of a row's pages; 1: one unit reads them all.
    max_blocks : int
        Blocks that a row sees at most.
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
        """Panels of so many tokens in a page."""
        return PAGE // self.columns

    @property
    def value_panels(self) -> list[tuple[int, int]]:
        """Where each panel of a head's numbers begins, and its vectors; the last may have fewer."""
        vectors = self.size // self.width_lanes
        firsts = range(0, vectors, self.tile_vectors)
        return [(first * self.width_lanes, min(self.tile_vectors, vectors - first)) for first in firsts]

    @property
    def offsets(self) -> dict[str, int]:
        """Where the parts of a task's scratch begin, in floats; "end" is its size, a multiple of cache lines."""
        found, end = {}, 0
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
            found[name], end = end, ceil_div(end + count, 16) * 16
        return {**found, "end": end}


def plan_for(problem: CachedAttentionProblem, cpu: CpuTarget) -> Plan:
    """The sizes for a problem on a CPU."""
    lanes, tile = max(cpu.lanes("float32"), 1), tile_sizes(cpu)
    is_chunk, rows = problem.rows == "chunk", problem.out.shape[0]
    queries = max(1, CHUNK_ROWS // problem.group) if is_chunk else 1
    if is_chunk and isinstance(rows, int):
        queries = max(1, min(queries, rows))
    count = queries * problem.group
    tile_rows = ceil_div(count, ceil_div(count, tile.rows))
    # Few rows leave registers for more vectors: as many sums hide the latency of multiply-adds.
    vectors = min(max(tile.vectors, tile.rows * tile.vectors // tile_rows), 4)
    splits = 1
    units = rows * problem.kv_heads if isinstance(rows, int) else 0
    columns = problem.operands[2].shape[1]
    max_blocks = ceil_div(int(columns), BLOCK_PAGES) if isinstance(columns, int) else 0
    if problem.window:
        max_blocks = min(max_blocks, (problem.window - 2) // (PAGE * BLOCK_PAGES) + 2)
    if not is_chunk and 0 < units < 2 * cpu.cores and max_blocks > 1:
        splits = next(s for s in range(1, cpu.cores + 1) if units * s >= cpu.cores and units * s % cpu.cores == 0)
    most = units * splits if not is_chunk and units else cpu.cores
    return Plan(
        lanes=lanes,
        width_lanes=gcd(problem.size, lanes),
        tile_rows=tile_rows,
        tile_vectors=_divisor(vectors, PAGE // lanes),
        queries=queries,
        rows=ceil_div(count, tile_rows) * tile_rows,
        size=problem.size,
        tasks=max(1, min(cpu.cores, most)),
        splits=splits,
        max_blocks=max_blocks,
        is_widened=is_chunk and count > 2 * tile_rows,
    )


def _divisor(most: int, of: int) -> int:
    return next(count for count in range(most, 0, -1) if of % count == 0)


class Tensors:
    """The parameters of a kernel, and what is read of them.

    Parameters
    ----------
    function : Function
    problem : CachedAttentionProblem
    """

    def __init__(self, function: Function, problem: CachedAttentionProblem) -> None:
        self._problem = problem
        names = ["qkv", "pages", "table", "sequences", "positions"]
        others = [name for name in ("rotation", "q_norm", "k_norm") if problem.operand_index(name) is not None]
        operands = [*zip([*names, *others], problem.operands, strict=True), ("out", problem.out)]
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
        """How many rows there are."""
        return self.extent("qkv", 0)

    @property
    def page_elements(self) -> int:
        """Elements of one head of a page."""
        return int(self.extent("pages", 2))

    def integer(self, name: str, index: Expr) -> Expr:
        """An element of one of the tensors of int32, int64."""
        return materialize(tirx.Cast("int64", self.data[name][index]))

    def number(self, name: str, index: Expr, lanes: int) -> Expr:
        """Elements of one of the tensors of floats from an index on, as float32."""
        return cast(self.data[name][lane_indices(index, lanes)], "float32")


class Unit:
    """One unit's place: rows of one head of keys, its task's scratch.

    Parameters
    ----------
    room : Buffer
        Scratch, in one dimension.
    start : PrimExpr
        Where the task's begins.
    """

    def __init__(self, problem: CachedAttentionProblem, plan: Plan, tensors: Tensors, room: Any, start: Expr) -> None:
        self.problem, self.plan, self.tensors, self.room = problem, plan, tensors, room
        self._start = start

    def at(self, part: str, index: Expr = 0) -> Expr:
        """The place of an element of a part of the scratch."""
        return self._start + (self.plan.offsets[part] + index)

    def load(self, part: str, index: Expr, lanes: int = 1) -> Expr:
        """Floats of a part of the scratch."""
        return self.room[lane_indices(int64(self.at(part, index)), lanes)]

    def store(self, part: str, index: Expr, value: Expr, lanes: int = 1) -> None:
        """Write floats to a part of the scratch."""
        T.buffer_store(self.room, value, [lane_indices(int64(self.at(part, index)), lanes)])


@dataclass(frozen=True)
class Page:
    """A head of a page: where it begins, in elements, and its type."""

    tensors: Tensors
    start: Expr
    size: int
    dtype: str

    @property
    def values(self) -> Expr:
        """Where the values begin."""
        return self.start + PAGE * self.size

    def load(self, index: Expr, lanes: int) -> Expr:
        """Numbers from an element on, as float32, not yet scaled."""
        return let(self._as_float(self.tensors.data["pages"][lane_indices(index, lanes)], lanes))

    def _as_float(self, value: Expr, lanes: int) -> Expr:
        if self.dtype == "int8":
            return T.cast(T.cast(value, vector_type("int32", lanes)), vector_type("float32", lanes))
        return cast(value, "float32")

    def scale_at(self, which: int, token: Expr) -> Expr:
        """Where the scale of a token's key (0) or value (1) is, among floats."""
        return tirx.floordiv(self.start, 4) + (2 * PAGE * self.size // 4 + which * PAGE) + token

    def scales(self, which: int, token: Expr, lanes: int) -> Expr:
        """The scales of keys (0) or values (1) from a token on."""
        return self.tensors.data["scales"][lane_indices(self.scale_at(which, token), lanes)]


def page_of(tensors: Tensors, problem: CachedAttentionProblem, number: Expr, head: Expr) -> Page:
    """A head of the page with a number."""
    start = materialize((number * problem.kv_heads + head) * tensors.page_elements)
    return Page(tensors, start, problem.size, problem.page_type)


def slot_position(tensors: Tensors, row: Expr, sequence: Expr) -> tuple[Expr, Expr]:
    """The slot (0 for none) and the position (-1 for none) of a row of a sequence."""
    position = tensors.integer("positions", row)
    slots, most = tensors.extent("table", 0), tensors.extent("table", 1)
    known = [sequence >= 0, sequence < slots, position >= 0, position < most * PAGE]
    is_there = tirx.all(*known)
    return (
        materialize(tirx.Select(is_there, sequence, int64(0))),
        materialize(tirx.Select(is_there, position, int64(-1))),
    )


def table_entry(tensors: Tensors, slot: Expr, number: Expr) -> Expr:
    """The page of a slot's tokens from 64 * number on; -1 where there is none, or the number is none of a page."""
    page = tensors.integer("table", slot * tensors.extent("table", 1) + number)
    return materialize(tirx.Select(page < tensors.extent("pages", 0), page, int64(-1)))
