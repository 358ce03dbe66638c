"""Attention of tensors in one kernel: scores, mask, softmax and values.

The loops, outermost first: tasks, heads and blocks of queries, blocks of keys, tiles of rows. A block of keys is packed
transposed to scratch, so that scores are an ordinary product; the values of the block are copied too. Heads that share
keys share their packed block. The scores of a tile of rows and a block of keys stay in the L1 cache. With several
blocks of keys, softmax is online (Dao et al., "FlashAttention").
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import AttentionProblem
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ...target.element_types import HALF_TYPES
from ..core.builder import (
    Expr,
    Function,
    Masks,
    Registers,
    ceil_div,
    either,
    int64,
    loop,
    materialize,
    minimum,
    when,
)
from ..core.work_split import part
from ..microkernel import amx
from ..microkernel.fp16_partial_sums import mark_fp16_partial_sums
from ..microkernel.k_step import llvm_import
from .amx_rows import AmxRows, begin_amx_task
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
from .attention_tile import VectorRows
from .key_values import DenseKeyValues, LeftFactors


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
