"""Views of heads, plans, and the layout of scratch, shared by the parts of an attention kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression
from ...encoding.problem import AttentionProblem, Operand
from ...target.amx_instructions import TILE_ROWS, AmxInstruction, amx_instruction_for
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import FLOAT32_FMA, DotInstruction, dot_instruction_for
from ...target.element_types import HALF_TYPES, bytes_of
from ...target.tiles import tile_sizes
from ..core.builder import (
    Expr,
    Function,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    lane_indices,
    lane_mask,
    let,
    load_lanes,
    materialize,
    plain_extent,
    store_lanes,
    zeros,
)
from ..core.view import View
from ..core.work_split import tasks_for
from ..math.casts import cast

# Keys of a block: their scores with a tile of 8 queries take a third of the L1 cache, keys and values of width 64
# together a quarter of the L2 cache.
BLOCK_KEYS = 512
BLOCK_QUERIES = 256  # queries of a block: packing a block of keys for them costs 1 % of their computation
# Maximum number of queries for which keys and values are read in place. Measured (AVX-512, 512 keys of width 64):
# packing them takes two thirds of the time of one query.
DECODE_QUERIES = 2
AMX_BLOCK_KEYS = 256  # keys of a block with AMX: the scores of 32 queries fill the L1 cache

_PAIRED_FORMS = ("bf16_dot", "f16_sums")  # forms of instructions that multiply pairs of neighbours in memory

Coordinates = Mapping[str, Expr]  # a position by the names of iteration dimensions, int64; missing names are at 0


class HeadsView(View):
    """A parameter of an attention kernel whose elements are addressed by iteration coordinates; see `View`."""

    _materialize = staticmethod(materialize)  # function that makes a stride a value that is computed once

    def __init__(
        self,
        function: Function,
        name: str,
        # Operand whose dimensions may each run along several iteration dimensions, outermost first: ``"h*d"``.
        operand: Operand,
        starts: Sequence[int],  # start in each dimension
        sizes: Mapping[str, Expr],  # extents of every iteration dimension
    ) -> None:
        self._dims = [text.split("*") for text in operand.index_map]
        self._starts, self._sizes = list(starts), sizes
        super().__init__(function, name, [function.extent(dim) for dim in operand.shape], operand.dtype)

    def open(self, raw: bool = False) -> None:
        """Declare the elements, bool as bytes and bfloat16 as bits: TVM can neither bind nor mask vectors of these."""
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
                step = self._materialize(_product(step, self._sizes.get(name, 1)))
            distance = self._materialize(_product(distance, plain_extent(extent)))
        self._start = self._materialize(self._start)

    def runs_along(self, name: str) -> bool:
        """Return whether the tensor has the iteration dimension (else it is broadcast along it)."""
        return name in self._strides

    def stride(self, name: str) -> Expr:
        """Distance of neighbours along an iteration dimension, 0 where it is broadcast."""
        return self._strides.get(name, 0)

    def address(self, at: Coordinates) -> Expr:
        """Position of an element in the flat view; coordinates of dimensions it lacks are ignored."""
        offset = sum((at[name] * self._strides[name] for name in at if name in self._strides), self._start)
        return tirx.const(offset, "int64") if isinstance(offset, int) else offset

    def pairs(self) -> Any:
        """A flat view of 16-bit elements in words of two; contiguous dimensions must be even."""
        return self.elements("float32")

    def element(self, start: Expr) -> Expr:
        """The element at an address, in the type of arithmetic."""
        return self._widen(self.data[start])

    def load(self, start: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements from an address on along an iteration dimension, in the type of arithmetic, masked ones zero."""
        return self._widen(self.load_bits(start, along, lanes, mask))

    def _widen(self, value: Expr) -> Expr:
        return cast(self.typed(value), "float32") if self.nominal in HALF_TYPES else value

    def store(self, start: Expr, value: Expr, lanes: int, mask: Expr | None) -> None:
        """Write contiguous elements, masked if `mask` is given."""
        store_lanes(self.data, start, self.bits(cast(value, self.nominal)), lanes, mask)

    def load_bits(self, start: Expr, along: str, lanes: int, mask: Expr | None = None) -> Expr:
        """The elements of `load` in the stored type, bfloat16 as uint16."""
        if not self.runs_along(along) or lanes == 1:
            return broadcast(self.data[start], lanes)
        dtype = self.dtype
        if self.stride(along) == 1:
            return load_lanes(self.data, start, lanes, mask)
        elements = []
        for lane in range(lanes):
            exists = True if mask is None else T.Shuffle([mask], [lane])
            value = self.data[start + self.stride(along) * lane]
            elements.append(value if exists is True else T.if_then_else(exists, value, tirx.const(0, dtype)))
        return T.Shuffle(elements, list(range(lanes)))


def _product(left: Expr, right: Expr) -> Expr:
    return right if isinstance(left, int) and left == 1 else left * right


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of blocks and tiles, tasks, and the layout of scratch of an attention. A row is a query of one head."""

    tasks: int
    # Rows and keys of a block; multiples of `rows` and `columns`.
    queries: int
    keys: int
    is_single: bool  # whether one block holds all keys
    # Register tile of scores: rows, vectors of keys, and keys of a vector.
    rows: int
    vectors: int
    lanes: int
    value_panels: int  # number of panels of `columns` in the width of a value
    width: int  # width of query and key, including zeros up to whole k-steps with AMX
    is_in_place: bool = False  # whether keys and values are read in place, not packed to scratch
    # Type of the operands, if two terms are multiplied per step; else "", and packed operands are float32.
    pair_dtype: str = ""
    heads: int = 1  # heads whose rows read the same keys: row ``q * heads + i`` is query q of head i
    scratch_queries: int = 0  # rows of queries that are copied to scratch; keys and values are converted when packed
    # Instruction that multiplies, if AMX does: `rows` are then those of a pair of tiles, and terms are paired.
    amx: AmxInstruction | None = None
    left_steps: int = 1  # steps of float32 whose left factors one load fetches, for instructions that multiply by lanes

    @property
    def word_elements(self) -> int:
        """Elements of a 32-bit word of packed operands."""
        return 2 if self.pair_dtype else 1

    @property
    def columns(self) -> int:
        """Keys of a tile."""
        return self.vectors * self.lanes

    @property
    def value_distance(self) -> int:
        """Elements of scratch between rows of sums of values."""
        return self.value_panels * self.columns

    @property
    def query_distance(self) -> int:
        """Elements of scratch between the queries of a tile."""
        return self._row_distance(self.width // self.word_elements)

    @property
    def weight_distance(self) -> int:
        """Elements of scratch between rows of paired softmax weights."""
        return self._row_distance(self.keys // self.word_elements)

    @property
    def score_distance(self) -> int:
        """Elements of scratch between rows of scores."""
        return self._row_distance(self.keys)

    def _row_distance(self, elements: int) -> int:
        """The distance of rows of `elements`: with AMX, an odd number of cache lines."""
        return (ceil_div(elements, 16) | 1) * 16 if self.amx else elements

    @property
    def buffers(self) -> dict[str, int]:
        """Sizes of the buffers in a task's scratch, in elements."""
        state = self.rows if self.amx else 0
        state = state if self.is_single else self.queries
        return {
            "keys": 0 if self.is_in_place else self.keys * self.width // self.word_elements,
            "values": 0 if self.is_in_place else self.keys // self.word_elements * self.value_distance,
            "queries": self.scratch_queries * self.query_distance,
            "weights": self.rows * self.weight_distance if self.pair_dtype else 0,
            "scores": self.rows * self.score_distance,
            "factors": self.rows if self.amx else 0,
            "partial": state * self.value_distance,
            "maxima": state,
            "sums": state,
        }

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Offsets of the buffers in a task's scratch; "end" is its size, a multiple of cache lines."""
        offsets, end = {}, 0
        for name, size in self.buffers.items():
            offsets[name], end = end, ceil_div(end + size, 16) * 16
        return {**offsets, "end": end}

    @property
    def scratch(self) -> int:
        """Elements of a task's scratch."""
        return self.offsets["end"]


def vector_plan(problem: AttentionProblem, cpu: CpuTarget) -> AttentionPlan:
    """The plan of a problem with vectors: blocks as large as caches and cores allow."""
    tile, queries = tile_sizes(cpu), _static_queries(problem)
    is_in_place, dtype = _is_decode(problem), problem.query.dtype
    heads = _shared_heads(problem, cpu, tile.rows)
    columns = tile.vectors * cpu.lanes("float32")
    rows = min(tile.rows, queries * heads) if queries else tile.rows
    plan = _plan_of(problem, cpu, rows, columns, BLOCK_KEYS // columns * columns, heads)
    pair_dtype = dtype if accumulation(problem, cpu).k0 == 2 else ""
    is_widened = dtype in HALF_TYPES and not is_in_place and not pair_dtype
    return replace(
        plan,
        is_in_place=is_in_place,
        pair_dtype=pair_dtype,
        scratch_queries=rows * is_widened,
        left_steps=left_steps(cpu),
    )


def left_steps(cpu: CpuTarget) -> int:
    """`AttentionPlan.left_steps` of a CPU."""
    return max(1, tile_sizes(cpu).left_bytes // bytes_of("float32"))


def _static_queries(problem: AttentionProblem) -> int:
    """The number of queries; 0 if it is symbolic, 1 for none."""
    queries = dict(problem.sizes)["m"]
    return max(queries, 1) if isinstance(queries, int) else 0


def _shared_heads(problem: AttentionProblem, cpu: CpuTarget, max_rows: int) -> int:
    """The number of heads whose rows share keys: it divides the rows of a tile, and leaves no core idle."""
    sizes: dict[str, Any] = dict(problem.sizes)
    queries, batch = _static_queries(problem) or BLOCK_QUERIES, sizes["b"] if isinstance(sizes["b"], int) else 1
    group = sizes["h"] // sizes["g"] if _static_queries(problem) < BLOCK_QUERIES else 1  # packing is rare for more

    def fits(count: int) -> bool:
        rows = min(max_rows, queries * count)
        tiles = batch * sizes["h"] // count * ceil_div(queries * count, rows)
        return group % count == 0 and rows % count == 0 and tiles >= cpu.cores

    return max(filter(fits, range(1, max_rows + 1)), default=1)


def amx_plan(problem: AttentionProblem, cpu: CpuTarget) -> AttentionPlan | None:
    """The plan of a problem with AMX; None if the CPU lacks it, or operands cannot be read in pairs."""
    amx = amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32")
    if amx is None or not _is_paired(problem, "bfloat16"):
        return None
    columns = max_rows = 2 * TILE_ROWS
    heads = _shared_heads(problem, cpu, max_rows)
    count = _static_queries(problem) * heads
    rows = ceil_div(count, ceil_div(count, max_rows)) if count else max_rows
    plan = _plan_of(problem, cpu, rows, columns, AMX_BLOCK_KEYS, heads)
    width = ceil_div(plan.width, columns) * columns
    return replace(plan, width=width, pair_dtype="bfloat16", scratch_queries=rows, amx=amx)


def _plan_of(
    problem: AttentionProblem, cpu: CpuTarget, rows: int, columns: int, max_keys: int, heads: int
) -> AttentionPlan:
    """The plan for a register tile of `rows` by `columns`."""
    sizes: dict[str, Any] = dict(problem.sizes)
    sizes["h"] //= heads
    sizes["m"] = _static_queries(problem) * heads
    keys, lanes = sizes["n"], cpu.lanes("float32")
    block_keys = min(max_keys, ceil_div(keys, columns) * columns) if isinstance(keys, int) else max_keys
    tasks, block_rows = _split_rows(sizes, cpu.cores, rows)
    return AttentionPlan(
        tasks=tasks,
        queries=block_rows,
        keys=block_keys,
        is_single=isinstance(keys, int) and keys <= block_keys,
        rows=rows,
        vectors=columns // lanes,
        lanes=lanes,
        value_panels=ceil_div(int(sizes["e"]), columns),
        width=int(sizes["d"]),
        heads=heads,
    )


def _is_decode(problem: AttentionProblem) -> bool:
    return 0 < _static_queries(problem) <= DECODE_QUERIES and problem.key.index_map[-1].split("*")[-1] == "d"


def accumulation(problem: AttentionProblem, cpu: CpuTarget) -> DotInstruction:
    """The instruction that accumulates products: two terms per step if the CPU and the layouts allow it."""
    dtype = problem.query.dtype
    dot = dot_instruction_for(cpu, dtype, dtype, "float32", by_rows=True) if dtype in HALF_TYPES else None
    return dot if dot is not None and dot.form in _PAIRED_FORMS and _is_paired(problem, dtype) else FLOAT32_FMA


def _is_paired(problem: AttentionProblem, dtype: str) -> bool:
    """True if operands of a type can be read in pairs, and there are enough queries to pack keys for."""
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


def _split_rows(sizes: Mapping[str, Any], cores: int, rows: int) -> tuple[int, int]:
    """Numbers of tasks and of rows of a block: cores share heads, or parts of heads if that avoids idle cores."""
    head_rows = sizes["m"] or BLOCK_QUERIES
    heads = sizes["h"] * (sizes["b"] if isinstance(sizes["b"], int) else 1)
    max_rows = max(rows, BLOCK_QUERIES // rows * rows)
    is_static = sizes["m"] and all(isinstance(sizes[name], int) for name in ("b", "n"))
    work = heads * head_rows * (sizes["n"] if is_static else BLOCK_KEYS) * (sizes["d"] + sizes["e"])
    if tasks_for(cores, "multiply-adds", work if is_static else None) == 1:
        return 1, min(max_rows, ceil_div(head_rows, rows) * rows)
    parts = next((parts for parts in range(1, cores + 1) if heads * parts % cores == 0), cores)
    if heads >= 4 * cores:
        parts = 1
    size = ceil_div(ceil_div(head_rows, parts), rows) * rows
    return cores, min(max_rows, size)


@dataclass(frozen=True)
class AttentionSpec:
    """The plan of a kernel and the scratch of a task, for rows of queries and any source of keys and values."""

    scores: Expression  # function that is applied to a product before softmax; see `AttentionProblem`
    masks: tuple[HeadsView, ...]  # operands of `scores`
    sizes: Mapping[str, Expr]  # extents of iteration dimensions; "d" and "e" are ints
    plan: AttentionPlan
    scratch: Any  # scratch of all tasks, as one dimension
    task: Expr  # offset of the task's scratch
    registers: Registers  # accumulators of a tile
    dot: DotInstruction  # instruction that accumulates

    def at(self, name: str, index: Expr = 0) -> Expr:
        """Offset of an element of a buffer in the task's scratch."""
        return self.task + (self.plan.offsets[name] + index)

    def load(self, name: str, index: Expr, lanes: int = 1) -> Expr:
        """Elements of a buffer in the task's scratch."""
        return self.scratch[lane_indices(self.at(name, index), lanes)]

    def store(self, name: str, index: Expr, value: Expr, lanes: int = 1) -> None:
        """Write elements of a buffer in the task's scratch."""
        T.buffer_store(self.scratch, value, [lane_indices(self.at(name, index), lanes)])

    @property
    def value_masks(self) -> list[Expr | None]:
        """Masks of existing lanes of the vectors of a value; None: all."""
        lanes, width = self.plan.lanes, self.sizes["e"]
        return [lane_mask(width - first, lanes) for first in range(0, width, lanes)]


@dataclass(frozen=True)
class DenseSpec(AttentionSpec):
    """An attention of tensors: query, key, value and result."""

    problem: AttentionProblem
    query: HeadsView
    key: HeadsView
    value: HeadsView
    result: HeadsView

    def write(self, at: Coordinates, total: Expr, first: Expr, sums: Sequence[Expr], masks: Masks) -> None:
        """Store vectors of a row of the result from element `first` on: sums of values over the sum of weights."""
        zero, one = (tirx.const(value, "float32") for value in (0.0, 1.0))
        # The sum is zero if every score is -inf.
        is_nan_zero, lanes = self.problem.nan_to_zero, self.plan.lanes
        average = broadcast(let(T.Select(total > zero, one / total, zero) if is_nan_zero else one / total), lanes)
        for j, (row_sums, mask) in enumerate(zip(sums, masks, strict=True)):
            value = row_sums * average
            if is_nan_zero:
                value = T.Select(average > zeros("float32", lanes), value, zeros("float32", lanes))
            start = self.result.address({**at, "e": first + tirx.const(j * lanes, "int64")})
            self.result.store(start, value, lanes, mask)


def for_decode(spec: DenseSpec, cpu: CpuTarget) -> DenseSpec | None:
    """The attention of few queries, which reads keys in place; None unless the number of queries is symbolic."""
    if isinstance(spec.sizes["m"], int):
        return None
    # Tiles of one query: two would double the code, and are rare.
    sizes = tuple((name, 1 if name == "m" else size) for name, size in spec.problem.sizes)
    problem = replace(spec.problem, sizes=sizes)
    if not _is_decode(problem):
        return None
    plan = replace(vector_plan(problem, cpu), tasks=spec.plan.tasks)
    return replace(spec, plan=plan, dot=accumulation(problem, cpu))
