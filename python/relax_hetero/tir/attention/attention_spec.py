"""Views of the heads, block sizes, and offsets in scratch, which the parts of an attention kernel share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import AttentionProblem, Operand
from ...target.amx_instructions import TILE_ROWS, amx_instruction_for
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction, dot_instruction_for
from ...target.element_types import HALF_TYPES
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Function,
    Registers,
    broadcast,
    ceil_div,
    lane_indices,
    lane_mask,
    let,
    masked_store,
    materialize,
    plain_extent,
    vector_type,
    zeros,
)
from ..core.view import View
from ..core.work_split import tasks_for
from ..math.casts import cast

# Keys of a block: the scores of a tile of 8 queries against them take a third of the first-level cache, keys and
# values of width 64 together a quarter of the second-level one.
KEYS = 512
# Queries of a block: packing a block of keys for them costs 1 % of what they compute.
QUERIES = 256
# For no more queries than this, keys and values are read as they lie. Measured (AVX-512, 512 keys of width 64): packing
# them takes two thirds of the time of one query.
DECODE_QUERIES = 2
# Keys of a block where tile registers multiply: the scores of 32 queries against them fill the first-level cache.
TILE_KEYS = 256

# Forms of instructions that multiply pairs as they lie.
_PAIRED = ("bf16_dot", "f16_sums")

Coordinates = Mapping[str, Expr]
"""A position by the names of iteration dimensions, int64; names that are missing are at 0."""


class HeadsView(View):
    """A parameter of an attention kernel, its elements found by iteration coordinates; see `View`.

    Parameters
    ----------
    operand : Operand
        A dimension of it may run along several iteration dimensions, outermost first: ``"h*d"``.
    starts : sequence of int
        Where it begins in each dimension.
    sizes : mapping of str to PrimExpr
        Extents of every iteration dimension.
    """

    _held = staticmethod(materialize)
    """Function that keeps a stride at hand."""

    def __init__(
        self, function: Function, name: str, operand: Operand, starts: Sequence[int], sizes: Mapping[str, Expr]
    ) -> None:
        self._dims = [text.split("*") for text in operand.index_map]
        self._starts, self._sizes = list(starts), sizes
        super().__init__(function, name, [function.extent(dim) for dim in operand.shape], operand.dtype)

    def open(self, raw: bool = False) -> None:
        """As of any view. Conditions are read as bytes, bfloat16 as bits: vectors cannot be bound, nor be masked."""
        self.open_as({"bool": "int8", "bfloat16": "uint16"}.get(self.nominal, self.nominal))

    def open_as(self, dtype: str) -> None:
        """Declare the elements as those of another type of the same width."""
        super().open_as(dtype)
        self._strides: dict[str, Expr] = {}
        self._start: Expr = 0
        distance: Expr = 1
        for extent, names, start in reversed(list(zip(self.physical, self._dims, self._starts, strict=True))):
            if start:
                self._start = self._start + distance * start
            step = distance
            for name in reversed(names):
                self._strides[name] = step
                step = self._held(_product(step, self._sizes.get(name, 1)))
            distance = self._held(_product(distance, plain_extent(extent)))
        self._start = self._held(self._start)

    def runs_along(self, name: str) -> bool:
        """Return whether the tensor has the iteration dimension (else it is broadcast along it)."""
        return name in self._strides

    def stride(self, name: str) -> Expr:
        """Distance of neighbours along an iteration dimension, 0 where it is broadcast."""
        return self._strides.get(name, 0)

    def address(self, at: Coordinates) -> Expr:
        """Position of an element in the flat view; coordinates of dimensions it lacks are ignored."""
        offset: Expr = self._start
        for name, position in at.items():
            if name in self._strides:
                offset = offset + position * self._strides[name]
        return tirx.const(offset, "int64") if isinstance(offset, int) else offset

    def pairs(self) -> Any:
        """A flat view of elements of 16 bits, of which an even number lies in each dimension, in words of two."""
        return self.elements("float32")

    def element(self, start: Expr) -> Expr:
        """The element at an address, in the type that is computed in."""
        return self._computed(self.data[start])

    def load(self, start: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements from a place (of `address`) along an iteration dimension, in the type that is computed in.

        They are zero where the mask does not hold.
        """
        return self._computed(self.load_bits(start, along, lanes, mask))

    def _computed(self, value: Expr) -> Expr:
        return cast(self.typed(value), "float32") if self.nominal in HALF_TYPES else value

    def store(self, start: Expr, value: Expr, lanes: int, mask: Expr | None) -> None:
        """Write neighbours, those of the mask where there is one."""
        value = self.bits(cast(value, self.nominal))
        index = lane_indices(start, lanes)
        if mask is None:
            T.buffer_store(self.data, value, [index])
        else:
            masked_store(self.data, index, value, mask)

    def load_bits(self, start: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """As `load`, as they are stored: bfloat16 as uint16."""
        if not self.runs_along(along) or lanes == 1:
            return broadcast(self.data[start], lanes)
        dtype = self.dtype
        if self.stride(along) == 1:
            index = lane_indices(start, lanes)
            if mask is None:
                return self.data[index]
            # Lanes left out are poison until the choice, which becomes part of the load.
            loaded = let(T.masked_load(vector_type(dtype, lanes), self.data, index, mask))
            return T.Select(mask, loaded, zeros(dtype, lanes))
        parts = []
        for lane in range(lanes):
            inside = True if mask is None else T.Shuffle([mask], [lane])
            value = self.data[start + self.stride(along) * lane]
            parts.append(value if inside is True else T.if_then_else(inside, value, tirx.const(0, dtype)))
        return T.Shuffle(parts, list(range(lanes)))


def _product(left: Expr, right: Expr) -> Expr:
    if isinstance(left, int) and left == 1:
        return right
    return left * right


@dataclass(frozen=True)
class Blocks:
    """Sizes of the parts that an attention is cut into.

    Attributes
    ----------
    queries, keys : int
        Numbers of a block; multiples of `rows` and `columns`.
    is_single : bool
        One block holds all keys.
    rows, vectors, lanes : int
        Tile of scores: number of queries, of vectors of keys, and of keys of a vector.
    value_panels : int
        Panels of `columns` that the width of a value fills.
    width : int
        Width of query and key, with the zeros behind them that tile registers multiply.
    is_decode : bool
        Keys and values are read as they lie.
    is_paired : bool
        Terms are multiplied two at a time, in the operands' type.
    is_widened : bool
        Queries of 16 bits are made float32 in scratch first; keys and values are when they are packed.
    by_tiles : bool
        Tile registers multiply: `rows` are those of a pair of them. Terms are paired.
    """

    tasks: int
    queries: int
    keys: int
    is_single: bool
    rows: int
    vectors: int
    lanes: int
    value_panels: int
    width: int
    is_decode: bool
    is_paired: bool
    is_widened: bool
    by_tiles: bool = False

    @property
    def together(self) -> int:
        """Terms in one word of 32 bits."""
        return 2 if self.is_paired else 1

    @property
    def columns(self) -> int:
        """Keys of a tile."""
        return self.vectors * self.lanes

    @property
    def query_distance(self) -> int:
        """Elements of scratch between the queries of a tile."""
        return self._apart(self.width // self.together)

    @property
    def weight_distance(self) -> int:
        """Elements of scratch between rows of paired powers of e."""
        return self._apart(self.keys // self.together)

    @property
    def score_distance(self) -> int:
        """Elements of scratch between rows of scores."""
        return self._apart(self.keys)

    def _apart(self, elements: int) -> int:
        """The distance of rows of so many; rows that tiles meet are an odd number of cache lines apart."""
        return (ceil_div(elements, 16) | 1) * 16 if self.by_tiles else elements

    @property
    def offsets(self) -> dict[str, int]:
        """Where the parts of a task's scratch begin, in elements; "end" is its size, a multiple of cache lines."""
        found, end = {}, 0
        state = self.rows if self.by_tiles else 0
        state = state if self.is_single else self.queries
        for name, size in {
            "keys": 0 if self.is_decode else self.keys * self.width // self.together,
            "values": 0 if self.is_decode else self.keys // self.together * self.value_panels * self.columns,
            "queries": self.rows * self.query_distance if self.is_widened or self.by_tiles else 0,
            "weights": self.rows * self.weight_distance if self.is_paired else 0,
            "scores": self.rows * self.score_distance,
            "factors": self.rows if self.by_tiles else 0,
            "partial": state * self.value_panels * self.columns,
            "maxima": state,
            "sums": state,
        }.items():
            found[name], end = end, ceil_div(end + size, 16) * 16
        return {**found, "end": end}

    @property
    def scratch(self) -> int:
        """Elements of a task's scratch."""
        return self.offsets["end"]


def block_sizes(problem: AttentionProblem, cpu: CpuTarget) -> Blocks:
    """The blocks of a problem: as few as caches and cores allow."""
    sizes: dict[str, Any] = dict(problem.sizes)
    tile, lanes = tile_sizes(cpu), cpu.lanes("float32")
    columns = tile.vectors * lanes
    queries, keys = sizes["m"], sizes["n"]
    rows = min(tile.rows, queries) if isinstance(queries, int) else tile.rows
    max_keys = KEYS // columns * columns
    block_keys = min(max_keys, ceil_div(keys, columns) * columns) if isinstance(keys, int) else max_keys
    tasks, block_queries = _share(sizes, cpu.cores, rows)
    is_decode = _is_decode(problem)
    is_paired = accumulation(problem, cpu).k0 == 2
    return Blocks(
        tasks=tasks,
        queries=block_queries,
        keys=block_keys,
        is_single=isinstance(keys, int) and keys <= block_keys,
        rows=rows,
        vectors=tile.vectors,
        lanes=lanes,
        value_panels=ceil_div(int(sizes["e"]), columns),
        width=int(sizes["d"]),
        is_decode=is_decode,
        is_paired=is_paired,
        is_widened=problem.query.dtype in HALF_TYPES and not is_decode and not is_paired,
    )


def amx_blocks(problem: AttentionProblem, cpu: CpuTarget) -> Blocks | None:
    """The blocks where tile registers multiply; None where the CPU has none, or operands do not lie in pairs."""
    sizes: dict[str, Any] = dict(problem.sizes)
    if amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32") is None or not _lies_in_pairs(problem, "bfloat16"):
        return None
    lanes, columns, queries, keys = cpu.lanes("float32"), 2 * TILE_ROWS, sizes["m"], sizes["n"]
    most = 2 * TILE_ROWS
    rows = ceil_div(queries, ceil_div(queries, most)) if isinstance(queries, int) and queries else most
    block_keys = min(TILE_KEYS, ceil_div(keys, columns) * columns) if isinstance(keys, int) else TILE_KEYS
    tasks, block_queries = _share(sizes, cpu.cores, rows)
    return Blocks(
        tasks=tasks,
        queries=block_queries,
        keys=block_keys,
        is_single=isinstance(keys, int) and keys <= block_keys,
        rows=rows,
        vectors=columns // lanes,
        lanes=lanes,
        value_panels=ceil_div(int(sizes["e"]), columns),
        width=ceil_div(int(sizes["d"]), columns) * columns,
        is_decode=False,
        is_paired=True,
        is_widened=False,
        by_tiles=True,
    )


def _is_decode(problem: AttentionProblem) -> bool:
    queries = dict(problem.sizes)["m"]
    return isinstance(queries, int) and queries <= DECODE_QUERIES and problem.key.index_map[-1].split("*")[-1] == "d"


def accumulation(problem: AttentionProblem, cpu: CpuTarget) -> DotInstruction:
    """How products are accumulated: two terms a step where the CPU has an instruction for it, and pairs lie so."""
    single = dot_instruction_for(cpu, *("float32",) * 3)
    assert single is not None, "every machine multiplies float32"
    dtype = problem.query.dtype
    dot = dot_instruction_for(cpu, dtype, dtype, "float32", by_rows=True) if dtype in HALF_TYPES else None
    return dot if dot is not None and dot.form in _PAIRED and _lies_in_pairs(problem, dtype) else single


def _lies_in_pairs(problem: AttentionProblem, dtype: str) -> bool:
    """True if operands are of a type of which an even number lies together, and queries enough to pack keys for."""
    operands = (problem.query, problem.key, problem.value)
    if any(operand.dtype != dtype for operand in operands) or _is_decode(problem):
        return False
    for operand, starts, name in zip(operands, problem.starts, "dde", strict=True):
        last = operand.shape[-1]
        if operand.index_map[-1].split("*")[-1] != name or not isinstance(last, int):
            return False
        if name == "d" and (last % 2 or starts[-1] % 2 or int(dict(problem.sizes)["d"]) % 2):
            return False
    return True


def _share(sizes: Mapping[str, Any], cores: int, rows: int) -> tuple[int, int]:
    """Tasks, and queries of a block: heads are shared out, and parts of them where that leaves no core idle."""
    queries = sizes["m"] if isinstance(sizes["m"], int) else QUERIES
    heads = sizes["h"] * (sizes["b"] if isinstance(sizes["b"], int) else 1)
    most = max(rows, QUERIES // rows * rows)
    known = all(isinstance(sizes[name], int) for name in ("b", "m", "n"))
    work = heads * queries * (sizes["n"] if known else KEYS) * (sizes["d"] + sizes["e"])
    if tasks_for(cores, "multiply-adds", work if known else None) == 1:
        return 1, min(most, ceil_div(queries, rows) * rows)
    parts = next((parts for parts in range(1, cores + 1) if heads * parts % cores == 0), cores)
    if heads >= 4 * cores:
        parts = 1
    size = ceil_div(ceil_div(queries, parts), rows) * rows
    return cores, min(most, size)


@dataclass(frozen=True)
class AttentionSpec:
    """The views of a kernel, and its task's scratch.

    Attributes
    ----------
    sizes : mapping of str to PrimExpr or int
        Extents of every iteration dimension.
    operands : tuple of HeadsView
        Query, key and value.
    masks : tuple of HeadsView
        Operands of the scores' expression.
    room : tirx.Buffer
        Scratch of all tasks, as one dimension.
    task : PrimExpr
        Where the task's scratch begins.
    registers : Registers
        Accumulators of a tile.
    dot : DotInstruction
        How they accumulate.
    """

    problem: AttentionProblem
    sizes: Mapping[str, Expr]
    blocks: Blocks
    operands: tuple[HeadsView, HeadsView, HeadsView]
    masks: tuple[HeadsView, ...]
    result: HeadsView
    room: Any
    task: Expr
    registers: Registers
    dot: DotInstruction

    @property
    def query(self) -> HeadsView:
        """Where queries are."""
        return self.operands[0]

    @property
    def key(self) -> HeadsView:
        """Where keys are."""
        return self.operands[1]

    @property
    def value(self) -> HeadsView:
        """Where values are."""
        return self.operands[2]

    def at(self, name: str) -> Expr:
        """Where a part of the task's scratch begins."""
        return self.task + self.blocks.offsets[name]

    @property
    def value_masks(self) -> list[Expr | None]:
        """Masks of the vectors of a value: the lanes that exist, None where all do."""
        lanes, width = self.blocks.lanes, self.sizes["e"]
        return [lane_mask(width - first, lanes) for first in range(0, width, lanes)]


def for_decode(spec: AttentionSpec, cpu: CpuTarget) -> AttentionSpec | None:
    """The same attention where hardly a query turns up: None unless only the run knows, and keys may be read so."""
    if isinstance(spec.sizes["m"], int):
        return None
    # Tiles of one query: code for more would be twice as much, and few kernels ever see two.
    sizes = tuple((name, 1 if name == "m" else size) for name, size in spec.problem.sizes)
    problem = replace(spec.problem, sizes=sizes)
    if not _is_decode(problem):
        return None
    blocks = replace(block_sizes(problem, cpu), tasks=spec.blocks.tasks)
    return replace(spec, blocks=blocks, dot=accumulation(problem, cpu))
