"""Attention in one kernel: scores, mask, softmax and values, head by head.

The loops, from outside: tasks, heads and blocks of queries, blocks of keys, tiles of queries. A block of keys is
packed transposed into scratch, so that scores are an ordinary product; the values of the block are copied beside
them. The scores of a tile of queries against a block of keys stay in the first-level cache. Where there are several
blocks of keys, softmax runs on: sums so far are rescaled by the maximum that grew (Milakov and Gimelshein,
"Online normalizer calculation for softmax"; Dao et al., "FlashAttention").
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.problem import AttentionProblem
from ...errors import EncodingError
from ...target.amx_instructions import AmxInstruction, amx_instruction_for
from ...target.cpu_target import CpuTarget
from ...target.element_types import HALF_TYPES
from ..core.builder import Expr, Function, Registers, ceil_div, either, loop, materialize, minimum, when
from ..core.work_split import part
from ..matmul import amx
from ..matmul.fp16_partial_sums import marked
from ..matmul.k_step import llvm_import
from .amx_attention import begin_tiles, emit_query_tiles, pad_values
from .attention_operands import pack_keys, pack_values
from .attention_spec import (
    DECODE_QUERIES,
    AttentionSpec,
    Blocks,
    HeadsView,
    accumulation,
    amx_blocks,
    block_sizes,
    for_decode,
)
from .attention_tile import emit_tile


def attention_kernel(problem: AttentionProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention.

    Parameters
    ----------
    problem : AttentionProblem
        Attention of float32, bfloat16 or float16 operands, whose scores are of float32; batch, queries and keys may be
        symbolic.
    cpu : CpuTarget
        One with vectors.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `AttentionProblem` says; it is parallel over the CPU's cores. The last one,
        scratch, has a row of its own for every task.

    Raises
    ------
    EncodingError
        If an operand is of another type, or the CPU has no vectors.
    """
    tensors = [problem.query, problem.key, problem.value, problem.result]
    types = {tensor.dtype for tensor in tensors}
    if cpu.lanes("float32") < 2 or len(types) > 1 or not types <= {"float32", *HALF_TYPES}:
        raise EncodingError(
            f"attention of {[tensor.dtype for tensor in tensors]} on {cpu.isa.name}: expected operands of one of "
            f"float32, {', '.join(HALF_TYPES)}, and a machine with vectors"
        )
    function = Function("attention")
    with function:
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        blocks, in_tiles = block_sizes(problem, cpu), amx_blocks(problem, cpu)
        size = max(form.scratch for form in (blocks, in_tiles) if form is not None)
        query, key, value = (
            HeadsView(function, name, operand, start, sizes)
            for name, operand, start in zip(("query", "key", "value"), tensors[:3], problem.starts, strict=True)
        )
        masks = tuple(
            HeadsView(function, f"x{i + 1}", operand, (0,) * len(operand.shape), sizes)
            for i, operand in enumerate(problem.scores.operands)
        )
        result = HeadsView(function, "result", problem.result, (0,) * len(problem.result.shape), sizes)
        scratch = function.argument("scratch", (blocks.tasks, size), "float32")
        with function.body():
            for view in (query, key, value, *masks, result):
                view.open()
            room = T.decl_buffer((blocks.tasks * size,), "float32", data=scratch.data)
            dot = accumulation(problem, cpu)

            def tasks(form: Blocks) -> None:
                with loop(form.tasks, parallel=form.tasks > 1) as task:
                    registers = Registers(0 if form.by_tiles else form.rows * form.vectors, "float32", form.lanes)
                    start = materialize(task * size)
                    operands = (query, key, value)
                    spec = AttentionSpec(problem, sizes, form, operands, masks, result, room, start, registers, dot)
                    (_emit_task if form.by_tiles else _emit_forms)(spec, cpu, task)

            texts = [llvm_import(dot, blocks.lanes), amx.LLVM_TEXT if in_tiles else None]
            with _imported("".join(text for text in texts if text)):
                if in_tiles is None:
                    tasks(blocks)
                else:
                    allowed = amx.may_use_tiles()
                    if not isinstance(sizes["m"], int):
                        allowed = tirx.And(sizes["m"] > DECODE_QUERIES, allowed)
                    either(allowed, lambda: tasks(in_tiles), lambda: tasks(blocks))
    return marked(function.result, dot)


def _imported(text: str) -> AbstractContextManager[Any]:
    """Let the code inside call the functions of LLVM IR."""
    return T.attr(0, "pragma_import_llvm", text) if text else nullcontext()


def _emit_forms(spec: AttentionSpec, cpu: CpuTarget, task: Expr) -> None:
    """A task, in the form for as many queries as the run has."""
    decode = for_decode(spec, cpu)
    if decode is None:
        _emit_task(spec, cpu, task)
    else:
        few = spec.sizes["m"] <= DECODE_QUERIES
        either(few, lambda: _emit_task(decode, cpu, task), lambda: _emit_task(spec, cpu, task))


def _emit_task(spec: AttentionSpec, cpu: CpuTarget, task: Expr) -> None:
    blocks, sizes = spec.blocks, spec.sizes
    instruction = amx_instruction_for(cpu, "bfloat16", "bfloat16", "float32") if blocks.by_tiles else None
    if instruction is not None:
        begin_tiles(spec)
    parts = materialize(ceil_div(sizes["m"], blocks.queries))
    units = materialize(sizes["b"] * sizes["h"] * parts)
    begin, end = part(units, blocks.tasks, task)
    with loop(materialize(end - begin)) as number:
        unit = materialize(begin + number)
        head = materialize(unit // parts)
        at = {"b": materialize(head // sizes["h"]), "h": materialize(head % sizes["h"])}
        at["g"] = materialize(at["h"] // (sizes["h"] // sizes["g"]))
        first = materialize(unit % parts * blocks.queries)
        _emit_queries(spec, instruction, at, (first, materialize(minimum(first + blocks.queries, sizes["m"]))))
    if instruction is not None:
        amx.release()


def _emit_queries(
    spec: AttentionSpec, instruction: AmxInstruction | None, at: dict[str, Expr], queries: tuple[Expr, Expr]
) -> None:
    """A block of queries of one head against every block of keys."""
    begin, end = queries
    blocks, keys = spec.blocks, spec.sizes["n"]
    count = 1 if blocks.is_single else materialize(ceil_div(keys, blocks.keys))
    with loop(count) as number:
        first = materialize(number * blocks.keys)
        size = keys if blocks.is_single else materialize(minimum(keys - first, blocks.keys))
        if not blocks.is_decode:
            pack_keys(spec, at, first, size)
            pack_values(spec, at, first, size)
        span = (first, size, number < 1, number >= count - 1)
        if instruction is not None:
            pad_values(spec, size)
            emit_query_tiles(spec, instruction, at, queries, span)
        else:
            whole = materialize((end - begin) // blocks.rows)
            with loop(whole) as tile:
                emit_tile(spec, at, materialize(begin + tile * blocks.rows), tile * blocks.rows, blocks.rows, span)
            _emit_rest(spec, at, begin, end, whole, span)


def _emit_rest(
    spec: AttentionSpec, at: dict[str, Expr], begin: Expr, end: Expr, whole: Expr, span: tuple[Expr, ...]
) -> None:
    """The queries that fill no tile."""
    rows, queries = spec.blocks.rows, spec.sizes["m"]
    done = materialize(whole * rows)
    if isinstance(queries, int):
        if queries % rows:
            with when(begin + done < end):
                emit_tile(spec, at, materialize(begin + done), done, queries % rows, span)
        return
    for form in dict.fromkeys((max(1, rows // 2), 1)):
        left = materialize(end - begin - done)
        with loop(materialize(left // form)) as tile:
            emit_tile(spec, at, materialize(begin + done + tile * form), done + tile * form, form, span)
        done = materialize(done + left // form * form)
