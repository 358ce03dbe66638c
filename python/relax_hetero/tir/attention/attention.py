"""Attention in one kernel: scores, mask, softmax and values, head by head.

The loops, outermost first: tasks, heads and blocks of queries, blocks of keys, tiles of queries. A block of keys is
packed transposed to scratch, so that scores are an ordinary product; the values of the block are copied too. The scores
of a tile of queries and a block of keys stay in the L1 cache. With several blocks of keys, softmax is online: a larger
row maximum rescales earlier sums (Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al.,
"FlashAttention"). CPUs with Intel AMX compute scores and sums of values as products of tiles.
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
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction, amx_instruction_for
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
    Blocks,
    DenseSpec,
    HeadsView,
    accumulation,
    amx_blocks,
    block_sizes,
    for_decode,
)
from .attention_tile import SOFTMAX_ROWS, AttentionRows, VectorRows, store_weights
from .key_values import DenseKeyValues, Factors

# Attention with Intel AMX: scores and sums of values are products of tiles, softmax works on rows.
#
# A pair of tiles holds up to 32 queries. Keys and values of a block are packed as for vectors that multiply pairs of
# bfloat16 (`key_values`), which is also the layout of right tiles; queries are copied, with zeros after their
# width. Products have whole k-steps: after the end of k one factor, a key or a softmax weight, is zero and the other is
# finite.

_WORD_BYTES = 4  # an element of scratch: a float32, or a pair of bfloat16


def begin_amx_task(spec: DenseSpec, instruction: AmxInstruction) -> None:
    """Begin a task: configure tiles, and clear packed keys after their width, up to a whole k-step."""
    _amx_tile(spec, instruction).configure()
    blocks = spec.blocks
    padded_pairs, pairs = blocks.width // 2, spec.sizes["d"] // 2
    if padded_pairs == pairs:
        return
    with loop(blocks.keys // blocks.columns) as panel, loop((padded_pairs - pairs) * blocks.vectors) as vector:
        index = (panel * padded_pairs + pairs) * blocks.columns + vector * blocks.lanes
        spec.store("keys", index, zeros("float32", blocks.lanes), blocks.lanes)


def pad_values(spec: DenseSpec, size: Expr) -> None:
    """Write zeros after the last value of a block, up to a whole k-step."""
    blocks = spec.blocks
    step_pairs = TILE_ROWS
    if isinstance(size, int) and size % (2 * step_pairs) == 0:
        return
    pairs = materialize(ceil_div(size, 2))
    rows_left = materialize(ceil_div(pairs, step_pairs) * step_pairs - pairs)
    with loop(blocks.value_panels) as panel, loop(rows_left) as row, loop(blocks.vectors) as vector:
        index = (panel * (blocks.keys // 2) + pairs + row) * blocks.columns + vector * blocks.lanes
        spec.store("values", index, zeros("float32", blocks.lanes), blocks.lanes)


def emit_amx_queries(
    spec: DenseSpec, instruction: AmxInstruction, queries: tuple[Expr, Expr], source: DenseKeyValues
) -> None:
    """Write the attention of a range of queries to a block of keys."""
    begin, end = queries
    rows = spec.blocks.rows
    with loop(materialize(ceil_div(end - begin, rows))) as pair:
        row_in_block = materialize(pair * rows)
        count = materialize(T.min(end - begin - row_in_block, int64(rows)))
        tiles = _AmxRows(spec, instruction, source, materialize(begin + row_in_block), row_in_block, count)
        tiles.copy_queries()
        tiles.scores()
        tiles.softmax()
        tiles.values()


def _amx_tile(spec: DenseSpec, instruction: AmxInstruction) -> AmxTile:
    """The accumulators of queries by keys, or by elements of values."""
    return AmxTile(instruction, pair_heights(spec.blocks.rows), spec.blocks.vectors)


class _AmxRows(AttentionRows):
    """Code of a pair of tiles of queries, or of one tile."""

    spec: DenseSpec
    source: DenseKeyValues

    def __init__(
        self,
        spec: DenseSpec,
        instruction: AmxInstruction,
        source: DenseKeyValues,
        row: Expr,
        row_in_block: Expr,
        rows: Expr,
    ) -> None:
        super().__init__(spec, source, row, 0 if spec.blocks.is_single else row_in_block, rows)
        self.tile = _amx_tile(spec, instruction)
        self.steps = materialize(ceil_div(self.count, spec.blocks.columns))
        """Number of pairs of tiles of keys, and of k-steps along keys."""

    def _multiply(self, left: Expr, distance: int, right: Expr) -> None:
        """Write a k-step of 64 bytes: left factors, with rows `distance` elements apart, times right factors."""
        columns, scratch = self.spec.blocks.columns, self.spec.scratch

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
            target = materialize(spec.at("queries") + r * spec.blocks.query_distance)
            amx.copy_bytes((view.data, source), (spec.scratch, target), width_bytes)

    def scores(self) -> None:
        """Write products of queries and keys to scratch."""
        spec, blocks = self.spec, self.spec.blocks
        depth = blocks.width // 2
        queries, scores = materialize(spec.at("queries")), materialize(spec.at("scores"))
        with loop(self.steps) as panel:
            keys = materialize(spec.at("keys") + panel * (depth * blocks.columns))
            self.tile.clear()
            for step in range(depth // TILE_ROWS):
                left = queries + step * (TILE_BYTES // _WORD_BYTES)
                self._multiply(left, blocks.query_distance, keys + step * (TILE_ROWS * blocks.columns))
            self.tile.store(spec.scratch, scores + panel * blocks.columns, blocks.score_distance)

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
        spec, blocks, masks = self.spec, self.spec.blocks, self.spec.value_masks
        lanes, distance, is_first = self.lanes, blocks.value_distance, self.source.is_first
        if self.online:
            with when(tirx.Not(is_first)), loop(self.rows) as r:
                factor = let(broadcast(spec.load("factors", r), lanes))
                for j in range(len(masks)):
                    index = self._partial_at(r, j * lanes)
                    spec.store("partial", index, spec.load("partial", index, lanes) * factor, lanes)
        weights = materialize(spec.at("weights"))
        with loop(blocks.value_panels) as panel:
            values = materialize(spec.at("values") + panel * (blocks.keys // 2 * blocks.columns))
            start = materialize(spec.at("partial", self._partial_at(0, panel * blocks.columns)))
            if self.online:
                either(is_first, self.tile.clear, partial(self.tile.load, spec.scratch, start, distance))
            else:
                self.tile.clear()
            with loop(self.steps) as step:
                left = materialize(weights + step * (TILE_BYTES // _WORD_BYTES))
                self._multiply(left, blocks.weight_distance, materialize(values + step * (TILE_ROWS * blocks.columns)))
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
        if not self.spec.blocks.is_in_place:
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

    def _queries(self) -> Factors:
        blocks, view = self.spec.blocks, self.spec.query
        if blocks.scratch_queries:
            return self._scratch_queries(0)
        word_elements = blocks.word_elements
        start = materialize(view.address(self.source.coordinates(self.row)) // word_elements)
        row_stride, stride = view.stride("m") // word_elements, view.stride("d")
        if blocks.pair_dtype:
            words = view.pairs()
            return lambda k, i: T.reinterpret("int32", words[start + i * row_stride + k])
        return lambda k, i: view.element(start + i * row_stride + k * stride)

    def emit(self) -> None:
        """Write the attention of the tile."""
        if self.spec.blocks.scratch_queries:
            self._widen_queries()
        super().emit()

    def _widen_queries(self) -> None:
        """Write the queries to scratch as float32, ``[rows, d]``."""
        spec, view, width, lanes = self.spec, self.spec.query, self.spec.blocks.width, self.lanes
        base = materialize(view.address(self.source.coordinates(self.row)))
        for i in range(self.rows):
            for k in range(0, width, lanes):
                count = min(lanes, width - k)
                value = view.load(base + i * view.stride("m") + k * view.stride("d"), "d", count)
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

    Parameters
    ----------
    problem : AttentionProblem
        Attention of float32, bfloat16 or float16 operands with float32 scores; batch, queries and keys may be symbolic.
    cpu : CpuTarget
        CPU with vectors.

    Returns
    -------
    tirx.PrimFunc
        Kernel with the parameters of `AttentionProblem`, parallel over the CPU's cores. The last parameter, scratch,
        has a row for every task.

    Raises
    ------
    EncodingError
        If an operand has another type.
    """
    tensors = [problem.query, problem.key, problem.value, problem.result]
    types = {tensor.dtype for tensor in tensors}
    if len(types) > 1 or not types <= {"float32", *HALF_TYPES}:
        raise EncodingError(
            f"attention of {[tensor.dtype for tensor in tensors]} on {cpu.isa.name}: expected operands of one of "
            f"float32, {', '.join(HALF_TYPES)}"
        )
    function = Function("attention")
    with function:
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        blocks, amx_plan = block_sizes(problem, cpu), amx_blocks(problem, cpu)
        scratch_size = max(plan.scratch for plan in (blocks, amx_plan) if plan is not None)
        query, key, value = (
            HeadsView(function, name, operand, start, sizes)
            for name, operand, start in zip(("query", "key", "value"), tensors[:3], problem.starts, strict=True)
        )
        masks = tuple(
            HeadsView(function, f"x{i + 1}", operand, (0,) * len(operand.shape), sizes)
            for i, operand in enumerate(problem.scores.operands)
        )
        result = HeadsView(function, "result", problem.result, (0,) * len(problem.result.shape), sizes)
        scratch_argument = function.argument("scratch", (blocks.tasks, scratch_size), "float32")
        with function.body():
            for view in (query, key, value, *masks, result):
                view.open()
            scratch = T.decl_buffer((blocks.tasks * scratch_size,), "float32", data=scratch_argument.data)
            dot = accumulation(problem, cpu)

            def emit_tasks(plan: Blocks) -> None:
                with loop(plan.tasks, parallel=plan.tasks > 1) as task:
                    registers = Registers(0 if plan.uses_amx else plan.rows * plan.vectors, "float32", plan.lanes)
                    kernel = (problem.scores.expression, masks, sizes, plan, scratch, materialize(task * scratch_size))
                    spec = DenseSpec(*kernel, registers, dot, problem, query, key, value, result)
                    (_emit_task if plan.uses_amx else _emit_task_cases)(spec, cpu, task)

            texts = [llvm_import(dot, blocks.lanes), amx.LLVM_TEXT if amx_plan else None]
            with _with_llvm_ir("".join(text for text in texts if text)):
                if amx_plan is None:
                    emit_tasks(blocks)
                else:
                    use_amx = amx.may_use_amx()
                    if not isinstance(sizes["m"], int):
                        use_amx = tirx.And(sizes["m"] > DECODE_QUERIES, use_amx)
                    either(use_amx, lambda: emit_tasks(amx_plan), lambda: emit_tasks(blocks))
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
    blocks, sizes = spec.blocks, spec.sizes
    instruction = amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32") if blocks.uses_amx else None
    if instruction is not None:
        begin_amx_task(spec, instruction)
    rows, head_blocks = sizes["m"] * blocks.heads, sizes["h"] // blocks.heads
    query_blocks = max(1, ceil_div(rows, blocks.queries)) if isinstance(rows, int) else ceil_div(rows, blocks.queries)
    query_blocks = materialize(query_blocks)
    block_count = materialize(sizes["b"] * head_blocks * query_blocks)
    begin, end = part(block_count, blocks.tasks, task)
    with loop(materialize(end - begin)) as index:
        block = materialize(begin + index)
        head = materialize(block // query_blocks)
        at = {"b": materialize(head // head_blocks), "h": materialize(head % head_blocks * blocks.heads)}
        at["g"] = materialize(at["h"] // (sizes["h"] // sizes["g"]))
        first_row = materialize(block % query_blocks * blocks.queries)
        end_row = materialize(minimum(first_row + blocks.queries, rows))
        _emit_rows(spec, instruction, at, (first_row, end_row))
    if instruction is not None:
        amx.release()


def _emit_rows(
    spec: DenseSpec, instruction: AmxInstruction | None, at: dict[str, Expr], rows: tuple[Expr, Expr]
) -> None:
    """Write the attention of a block of rows to every block of keys."""
    begin, end = rows
    blocks, keys = spec.blocks, spec.sizes["n"]
    count = 1 if blocks.is_single else materialize(ceil_div(keys, blocks.keys))
    with loop(count) as key_block:
        first_key = materialize(key_block * blocks.keys)
        size = keys if blocks.is_single else materialize(minimum(keys - first_key, blocks.keys))
        source = DenseKeyValues(spec, first_key, size, key_block < 1, key_block >= count - 1, at)
        source.pack()
        if instruction is not None:
            pad_values(spec, size)
            emit_amx_queries(spec, instruction, rows, source)
        else:
            whole_tiles = materialize((end - begin) // blocks.rows)
            with loop(whole_tiles) as tile:
                row = materialize(begin + tile * blocks.rows)
                _DenseRows(spec, source, row, tile * blocks.rows, blocks.rows).emit()
            _emit_tail_tiles(spec, source, begin, end, whole_tiles)


def _emit_tail_tiles(spec: DenseSpec, source: DenseKeyValues, begin: Expr, end: Expr, whole_tiles: Expr) -> None:
    """Write the rows that do not fill a tile."""
    rows, count = spec.blocks.rows, spec.sizes["m"] * spec.blocks.heads
    rows_done = materialize(whole_tiles * rows)
    if isinstance(count, int):
        if count % rows:
            with when(begin + rows_done < end):
                _DenseRows(spec, source, materialize(begin + rows_done), rows_done, count % rows).emit()
        return
    if rows == spec.blocks.heads:
        return
    for height in dict.fromkeys((max(1, rows // 2), 1)):
        rows_left = materialize(end - begin - rows_done)
        with loop(materialize(rows_left // height)) as tile:
            row = materialize(begin + rows_done + tile * height)
            _DenseRows(spec, source, row, rows_done + tile * height, height).emit()
        rows_done = materialize(rows_done + rows_left // height * height)
