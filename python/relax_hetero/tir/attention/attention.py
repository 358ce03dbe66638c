"""Attention of tensors in one kernel: scores, mask, softmax and values.

The loops, outermost first: tasks, heads and blocks of queries, blocks of keys, tiles of rows. A block of keys is packed
transposed to scratch, so that scores are an ordinary product; the values of the block are copied too. Heads that share
keys share their packed block. The scores of a tile of rows and a block of keys stay in the L1 cache. With several
blocks of keys, softmax is online (Dao et al., "FlashAttention").

With Intel AMX, scores and sums of values are products of tiles, softmax works on rows. A pair of tiles holds up to 32
queries. Keys and values of a block are packed as for vectors that multiply pairs of bfloat16 (`key_values`), which is
also the layout of right tiles; queries are copied, with zeros after their width. Products have whole k-steps: after the
end of k one factor, a key or a softmax weight, is zero and the other is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import AttentionProblem
from ...errors import EncodingError
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS
from ...target.cpu_target import CpuTarget
from ...target.element_types import HALF_TYPES, bytes_of
from ..core.builder import (
    Expr,
    Function,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    either,
    int64,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from ..core.work_split import part
from ..math.vector_math import constant
from ..microkernel import amx
from ..microkernel.fp16_partial_sums import mark_fp16_partial_sums
from ..microkernel.k_step import llvm_import
from ..microkernel.microkernel import AmxTile, pair_heights
from .attention_spec import (
    DECODE_QUERIES,
    AttentionPlan,
    DenseSpec,
    HeadsView,
    accumulation,
    amx_plan,
    for_decode,
    vector_plan,
)
from .attention_tile import SOFTMAX_ROWS, AttentionRows, VectorRows, store_weights
from .key_values import DenseKeyValues, LeftFactors

_WORD_BYTES = 4  # an element of scratch: a float32, or a pair of bfloat16


def begin_amx_task(spec: DenseSpec) -> None:
    """Begin a task: configure tiles, and clear packed keys after their width, up to a whole k-step."""
    _amx_tile(spec).configure()
    plan = spec.plan
    padded_pairs, pairs = plan.width // 2, spec.sizes["d"] // 2
    if padded_pairs == pairs:
        return
    with loop(plan.keys // plan.columns) as panel, loop((padded_pairs - pairs) * plan.vectors) as vector:
        index = (panel * padded_pairs + pairs) * plan.columns + vector * plan.lanes
        spec.store("keys", index, zeros("float32", plan.lanes), plan.lanes)


def _amx_tile(spec: DenseSpec) -> AmxTile:
    """The accumulators of queries by keys, or by elements of values."""
    assert spec.plan.amx is not None
    return AmxTile(spec.plan.amx, pair_heights(spec.plan.rows), spec.plan.vectors)


class AmxRows(AttentionRows):
    """Code of a pair of tiles of queries, or of one tile."""

    spec: DenseSpec
    source: DenseKeyValues

    def __init__(self, spec: DenseSpec, source: DenseKeyValues, row: Expr, within: Expr, rows: Expr) -> None:
        super().__init__(spec, source, row, 0 if spec.plan.is_single else within, rows)
        self.tile = _amx_tile(spec)
        self.steps = materialize(ceil_div(self.count, spec.plan.columns))
        """Number of pairs of tiles of keys, and of k-steps along keys."""

    def _multiply(self, left: Expr, distance: int, right: Expr) -> None:
        """Write a k-step of 64 bytes: left factors, with rows `distance` elements apart, times right factors."""
        columns, scratch = self.spec.plan.columns, self.spec.scratch

        def address(start: Expr, distance: int) -> tuple[Expr, Expr]:
            return amx.address(scratch, start), distance * _WORD_BYTES

        self.tile.step(
            lambda i: address(left + self.tile.first_row(i) * distance, distance),
            lambda j: address(right + j * self.lanes, columns),
        )

    # -- scores

    def copy_queries(self) -> None:
        """Copy the queries to scratch, with zeros after their width."""
        spec, view = self.spec, self.spec.query
        width_bytes = spec.sizes["d"] * bytes_of(view.nominal)
        with loop(self.rows) as r:
            source = materialize(view.address(self.source.coordinates(self.row + r)))
            target = materialize(spec.at("queries") + r * spec.plan.query_distance)
            amx.copy_bytes((view.data, source), (spec.scratch, target), width_bytes)

    def scores(self) -> None:
        """Write products of queries and keys to scratch."""
        spec, plan = self.spec, self.spec.plan
        depth = plan.width // 2
        queries, scores = materialize(spec.at("queries")), materialize(spec.at("scores"))
        with loop(self.steps) as panel:
            keys = materialize(spec.at("keys") + panel * (depth * plan.columns))
            self.tile.clear()
            for step in range(depth // TILE_ROWS):
                left = queries + step * (TILE_BYTES // _WORD_BYTES)
                self._multiply(left, plan.query_distance, keys + step * (TILE_ROWS * plan.columns))
            self.tile.store(spec.scratch, scores + panel * plan.columns, plan.score_distance)

    # -- softmax

    def softmax(self) -> None:
        """Replace scores by softmax weights in pairs, with zeros up to a whole k-step."""
        groups = materialize(self.rows // SOFTMAX_ROWS)
        with loop(groups) as group:
            self._softmax_of_rows(materialize(group * SOFTMAX_ROWS), SOFTMAX_ROWS)
        with loop(materialize(self.rows - groups * SOFTMAX_ROWS)) as r:
            self._softmax_of_rows(materialize(groups * SOFTMAX_ROWS + r), 1)

    def _softmax_of_rows(self, first: Expr, count: int) -> None:
        spec, lanes = self.spec, self.lanes
        rows = [first + i for i in range(count)]
        visible = [self.source.count(self.row, r + 1) for r in rows]
        row_maxima = Registers(count, "float32", lanes)
        for i in range(count):
            row_maxima[i] = constant(zeros("float32", lanes), -float("inf"))

        def emit_scores(column: Expr, masks: list[Expr | None]) -> None:
            cache: dict[tuple[int, Expr], Expr] = {}
            for i, r in enumerate(rows):
                index = self._score_at(r, column)
                product = let(spec.load("scores", index, lanes))
                value = self._score(product, r, column, (masks[i], masks[i]), cache if masks[i] is None else {})
                spec.store("scores", index, value, lanes)
                row_maxima[i] = T.max(row_maxima[i], value)

        whole_vectors, vectors = materialize(visible[0] // lanes), materialize(ceil_div(visible[-1], lanes))
        with loop(whole_vectors) as vector:
            emit_scores(materialize(vector * lanes), [None] * count)
        if not isinstance(whole_vectors, int) or whole_vectors != vectors:
            with loop(materialize(vectors - whole_vectors)) as vector:
                column = materialize((whole_vectors + vector) * lanes)
                emit_scores(column, [lane_mask(minimum(end - column, lanes), lanes) for end in visible])
        factors = self._weigh(rows, [row_maxima[i] for i in range(count)], vectors)
        with loop(materialize(self.steps * self.vectors - vectors)) as vector:
            for r in rows:
                store_weights(spec, r, materialize(vectors + vector), zeros("float32", lanes))
        for factor, r in zip(factors, rows, strict=True):
            spec.store("factors", r, factor)

    # -- values

    def values(self) -> None:
        """Accumulate values with their softmax weights; after the last block, write averages to the result."""
        spec, plan, masks = self.spec, self.spec.plan, self.spec.value_masks
        lanes, distance, is_first = self.lanes, plan.value_distance, self.source.is_first
        if self.online:
            with when(tirx.Not(is_first)), loop(self.rows) as r:
                factor = let(broadcast(spec.load("factors", r), lanes))
                for j in range(len(masks)):
                    index = self._partial_at(r, j * lanes)
                    spec.store("partial", index, spec.load("partial", index, lanes) * factor, lanes)
        weights = materialize(spec.at("weights"))
        with loop(plan.value_panels) as panel:
            values = materialize(spec.at("values") + panel * (plan.keys // 2 * plan.columns))
            start = materialize(spec.at("partial", self._partial_at(0, panel * plan.columns)))
            if self.online:
                either(is_first, self.tile.clear, partial(self.tile.load, spec.scratch, start, distance))
            else:
                self.tile.clear()
            with loop(self.steps) as step:
                left = materialize(weights + step * (TILE_BYTES // _WORD_BYTES))
                self._multiply(left, plan.weight_distance, materialize(values + step * (TILE_ROWS * plan.columns)))
            self.tile.store(spec.scratch, start, distance)
        with when(self.source.is_last if self.online else True), loop(self.rows) as r:
            total = self._state("sums", r) if self.online else let(spec.load("factors", r))
            row_sums = [let(spec.load("partial", self._partial_at(r, j * lanes), lanes)) for j in range(len(masks))]
            spec.write(self.source.coordinates(self.row + r), total, 0, row_sums, masks)


class _DenseRows(VectorRows):
    """Code of a register tile of queries."""

    spec: DenseSpec
    source: DenseKeyValues

    def _multiply_keys(self, panel: Expr, columns: Sequence[Expr], masks: Masks) -> None:
        if not self.spec.plan.is_in_place:
            super()._multiply_keys(panel, columns, masks)
            return
        # A loop, because the code of a product is long.
        with loop(self.rows) as i:
            for column, mask in zip(columns, masks, strict=True):
                product = self.source.products(materialize(self.row + i), column, mask is None)
                self.spec.store("scores", self._score_at(i, column), product, self.lanes)
        for acc in range(self.rows * len(columns)):
            i, j = divmod(acc, len(columns))
            self.spec.registers[acc] = self.spec.load("scores", self._score_at(i, columns[j]), self.lanes)

    def _queries(self) -> LeftFactors:
        plan, view = self.spec.plan, self.spec.query
        if plan.scratch_queries:
            return self._scratch_queries(0)
        word_elements = plan.word_elements
        start = materialize(view.address(self.source.coordinates(self.row)) // word_elements)
        if plan.pair_dtype:
            words = view.pairs()
            return lambda k, i, lanes=1: T.reinterpret(
                "int32", words[start + self._query_offset(i) // word_elements + k]
            )
        return lambda k, i, lanes=1: view.load(start + self._query_offset(i) + k * view.stride("d"), "d", lanes)

    def _query_offset(self, i: int) -> Expr:
        """Distance of a row's query from the first of the tile, whose row is a multiple of `AttentionPlan.heads`."""
        view, (query, head) = self.spec.query, divmod(i, self.spec.plan.heads)
        return query * view.stride("m") + head * view.stride("h")

    def copy_queries(self) -> None:
        """Write the queries of 16 bits to scratch as float32, ``[rows, d]``, unless they are read in pairs."""
        spec, view, width, lanes = self.spec, self.spec.query, self.spec.plan.width, self.lanes
        if not spec.plan.scratch_queries:
            return
        base = materialize(view.address(self.source.coordinates(self.row)))
        for i in range(self.rows):
            for k in range(0, width, lanes):
                count = min(lanes, width - k)
                value = view.load(base + self._query_offset(i) + k * view.stride("d"), "d", count)
                spec.store("queries", i * width + k, value, count)

    def _end_panel(self, first: Expr, masks: Masks) -> None:
        """Write the result after the last block of keys."""

        def finish() -> None:
            for i in range(self.rows):
                total = self._state("sums", i) if self.online else self.factors[i]
                sums = [self._sum(i, j, first, len(masks)) for j in range(len(masks))]
                self.spec.write(self.source.coordinates(self.row + i), total, first, sums, masks)

        base = super()._end_panel
        either(self.source.is_last if self.online else True, finish, lambda: base(first, masks))


def attention_kernel(problem: AttentionProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention.

    `problem`: attention of float32, bfloat16 or float16 operands with float32 scores; batch, queries and keys may be
    symbolic. Returns the kernel with the parameters of `AttentionProblem`, parallel over the CPU's cores. The last
    parameter, scratch, has a row for every task. Raises EncodingError if an operand has another type.
    """
    tensors = [problem.query, problem.key, problem.value, problem.result]
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1 or not types <= {"float32", *HALF_TYPES}:
        raise EncodingError(
            f"attention of {[tensor.dtype for tensor in tensors]} on {cpu.isa.name}: expected operands of one of "
            f"float32, {', '.join(HALF_TYPES)}"
        )
    with Function("attention") as function:
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        vectors, tiles = vector_plan(problem, cpu), amx_plan(problem, cpu)
        scratch_size = max(plan.scratch for plan in (vectors, tiles) if plan is not None)
        query, key, value = (
            HeadsView(function, name, operand, start, sizes)
            for name, operand, start in zip(("query", "key", "value"), tensors[:3], problem.starts, strict=True)
        )
        masks = tuple(
            HeadsView(function, f"x{i + 1}", operand, (0,) * len(operand.shape), sizes)
            for i, operand in enumerate(problem.scores.operands)
        )
        result = HeadsView(function, "result", problem.result, (0,) * len(problem.result.shape), sizes)
        scratch_argument = function.argument("scratch", (vectors.tasks, scratch_size), "float32")
        with function.body():
            for view in (query, key, value, *masks, result):
                view.open()
            scratch = T.decl_buffer((vectors.tasks * scratch_size,), "float32", data=scratch_argument.data)
            dot = accumulation(problem, cpu)

            def emit_tasks(plan: AttentionPlan) -> None:
                with loop(plan.tasks, parallel=plan.tasks > 1) as task:
                    registers = Registers(0 if plan.amx else plan.rows * plan.vectors, "float32", plan.lanes)
                    kernel = (problem.scores.expression, masks, sizes, plan, scratch, materialize(task * scratch_size))
                    spec = DenseSpec(*kernel, registers, dot, problem, query, key, value, result)
                    (_emit_task if plan.amx else _emit_task_cases)(spec, cpu, task)

            texts = [llvm_import(dot, vectors.lanes), amx.LLVM_TEXT if tiles else None]
            with _with_llvm_ir("".join(text for text in texts if text)):
                if tiles is None:
                    emit_tasks(vectors)
                else:
                    use_amx = amx.may_use_amx()
                    if not isinstance(sizes["m"], int):
                        use_amx = tirx.And(sizes["m"] > DECODE_QUERIES, use_amx)
                    either(use_amx, lambda: emit_tasks(tiles), lambda: emit_tasks(vectors))
    return mark_fp16_partial_sums(function.result, dot)


def _with_llvm_ir(text: str) -> AbstractContextManager[Any]:
    """The context of code that calls functions in LLVM IR."""
    return T.attr(0, "pragma_import_llvm", text) if text else nullcontext()


def _emit_task_cases(spec: DenseSpec, cpu: CpuTarget, task: Expr) -> None:
    """Write a task: for few queries and for many, if their number is symbolic."""
    decode = for_decode(spec, cpu)
    if decode is None:
        _emit_task(spec, cpu, task)
    else:
        is_decode = spec.sizes["m"] <= DECODE_QUERIES
        either(is_decode, lambda: _emit_task(decode, cpu, task), lambda: _emit_task(spec, cpu, task))


def _emit_task(spec: DenseSpec, cpu: CpuTarget, task: Expr) -> None:
    plan, sizes = spec.plan, spec.sizes
    if plan.amx:
        begin_amx_task(spec)
    rows, head_blocks = sizes["m"] * plan.heads, sizes["h"] // plan.heads
    query_blocks = max(1, ceil_div(rows, plan.queries)) if isinstance(rows, int) else ceil_div(rows, plan.queries)
    query_blocks = materialize(query_blocks)
    block_count = materialize(sizes["b"] * head_blocks * query_blocks)
    begin, end = part(block_count, plan.tasks, task)
    with loop(materialize(end - begin)) as index:
        block = materialize(begin + index)
        head = materialize(block // query_blocks)
        at = {"b": materialize(head // head_blocks), "h": materialize(head % head_blocks * plan.heads)}
        at["g"] = materialize(at["h"] // (sizes["h"] // sizes["g"]))
        first_row = materialize(block % query_blocks * plan.queries)
        end_row = materialize(minimum(first_row + plan.queries, rows))
        _emit_rows(spec, at, first_row, end_row)
    if plan.amx:
        amx.release()


def _emit_rows(spec: DenseSpec, at: dict[str, Expr], begin: Expr, end: Expr) -> None:
    """Write the attention of a block of rows to every block of keys."""
    plan, keys = spec.plan, spec.sizes["n"]
    count = 1 if plan.is_single else materialize(ceil_div(keys, plan.keys))
    with loop(count) as key_block:
        first_key = materialize(key_block * plan.keys)
        size = keys if plan.is_single else materialize(minimum(keys - first_key, plan.keys))
        source = DenseKeyValues(spec, first_key, size, key_block < 1, key_block >= count - 1, at)
        source.pack()
        whole_tiles = materialize(ceil_div(end - begin, plan.rows) if plan.amx else (end - begin) // plan.rows)
        with loop(whole_tiles) as tile:
            within = materialize(tile * plan.rows)
            row = materialize(begin + within)
            if plan.amx:
                AmxRows(spec, source, row, within, materialize(T.min(end - row, int64(plan.rows)))).emit()
            else:
                _DenseRows(spec, source, row, within, plan.rows).emit()
        if not plan.amx:
            _emit_tail_tiles(spec, source, begin, end, whole_tiles)


def _emit_tail_tiles(spec: DenseSpec, source: DenseKeyValues, begin: Expr, end: Expr, whole_tiles: Expr) -> None:
    """Write the rows that do not fill a tile."""
    rows, heads = spec.plan.rows, spec.plan.heads
    count = spec.sizes["m"] * heads
    rows_done = materialize(whole_tiles * rows)
    if isinstance(count, int):
        if count % rows:
            with when(begin + rows_done < end):
                _DenseRows(spec, source, materialize(begin + rows_done), rows_done, count % rows).emit()
        return
    for height in sorted({max(1, rows // heads // 2) * heads, heads} - {rows}, reverse=True):
        rows_left = materialize(end - begin - rows_done)
        with loop(materialize(rows_left // height)) as tile:
            row = materialize(begin + rows_done + tile * height)
            _DenseRows(spec, source, row, rows_done + tile * height, height).emit()
        rows_done = materialize(rows_done + rows_left // height * height)
