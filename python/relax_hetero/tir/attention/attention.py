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
from ...target.cpu_target import Machine
from ..core.builder import Expr, Function, Registers, ceil_div, either, loop, settled, smaller, when
from ..core.work_split import part
from ..matmul.inner_product import llvm_import
from .attention_operands import pack_keys, pack_values
from .attention_rows import emit_rows
from .attention_spec import FEW_QUERIES, HALVES, AttentionPlace, HeadsView, accumulation, block_sizes, for_few_queries


def attention_kernel(problem: AttentionProblem, machine: Machine) -> tirx.PrimFunc:
    """The kernel of an attention.

    Parameters
    ----------
    problem : AttentionProblem
        Of float32, bfloat16 or float16 operands, whose scores are of float32; batch, queries and keys may be symbolic.
    machine : Machine
        One with vectors.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `AttentionProblem` says; it is parallel over the machine's cores. The last one,
        scratch, has a row of its own for every task.

    Raises
    ------
    EncodingError
        If an operand is of another type, or the machine has no vectors.
    """
    tensors = [problem.query, problem.key, problem.value, problem.result]
    types = {tensor.dtype for tensor in tensors}
    if machine.lanes("float32") < 2 or len(types) > 1 or not types <= {"float32", *HALVES}:
        raise EncodingError(
            f"attention of {[tensor.dtype for tensor in tensors]} on {machine.isa.name}: expected operands of one of "
            f"float32, {', '.join(HALVES)}, and a machine with vectors"
        )
    function = Function("attention")
    with function:
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        blocks = block_sizes(problem, machine)
        query, key, value = (
            HeadsView(function, name, operand, start, sizes)
            for name, operand, start in zip(("query", "key", "value"), tensors[:3], problem.starts, strict=True)
        )
        masks = tuple(
            HeadsView(function, f"x{i + 1}", operand, (0,) * len(operand.shape), sizes)
            for i, operand in enumerate(problem.scores.operands)
        )
        result = HeadsView(function, "result", problem.result, (0,) * len(problem.result.shape), sizes)
        scratch = function.argument("scratch", (blocks.tasks, blocks.scratch), "float32")
        with function.body():
            for view in (query, key, value, *masks, result):
                view.open()
            room = T.decl_buffer((blocks.tasks * blocks.scratch,), "float32", data=scratch.data)
            product = accumulation(problem, machine)
            with _imported(llvm_import(product, blocks.lanes)):
                with loop(blocks.tasks, parallel=blocks.tasks > 1) as task:
                    registers = Registers(blocks.rows * blocks.vectors, "float32", blocks.lanes)
                    start = settled(task * blocks.scratch)
                    operands = (query, key, value)
                    place = AttentionPlace(
                        problem, sizes, blocks, operands, masks, result, room, start, registers, product
                    )
                    _emit_forms(place, machine, task)
    return function.result


def _imported(text: str | None) -> AbstractContextManager[Any]:
    """What stands inside may call the functions of LLVM IR."""
    return nullcontext() if text is None else T.attr(0, "pragma_import_llvm", text)


def _emit_forms(place: AttentionPlace, machine: Machine, task: Expr) -> None:
    """A task, in the form for as many queries as the run has."""
    few = for_few_queries(place, machine)
    if few is None:
        _emit_task(place, task)
    else:
        either(place.sizes["m"] <= FEW_QUERIES, lambda: _emit_task(few, task), lambda: _emit_task(place, task))


def _emit_task(place: AttentionPlace, task: Expr) -> None:
    blocks, sizes = place.blocks, place.sizes
    parts = settled(ceil_div(sizes["m"], blocks.queries))
    units = settled(sizes["b"] * sizes["h"] * parts)
    begin, end = part(units, blocks.tasks, task)
    with loop(settled(end - begin)) as number:
        unit = settled(begin + number)
        head = settled(unit // parts)
        at = {"b": settled(head // sizes["h"]), "h": settled(head % sizes["h"])}
        at["g"] = settled(at["h"] // (sizes["h"] // sizes["g"]))
        first = settled(unit % parts * blocks.queries)
        _emit_queries(place, at, first, settled(smaller(first + blocks.queries, sizes["m"])))


def _emit_queries(place: AttentionPlace, at: dict[str, Expr], begin: Expr, end: Expr) -> None:
    """A block of queries of one head against every block of keys."""
    blocks, keys = place.blocks, place.sizes["n"]
    count = 1 if blocks.is_single else settled(ceil_div(keys, blocks.keys))
    with loop(count) as number:
        first = settled(number * blocks.keys)
        size = keys if blocks.is_single else settled(smaller(keys - first, blocks.keys))
        if not blocks.is_few:
            pack_keys(place, at, first, size)
            pack_values(place, at, first, size)
        span = (first, size, number < 1, number >= count - 1)
        whole = settled((end - begin) // blocks.rows)
        with loop(whole) as tile:
            emit_rows(place, at, settled(begin + tile * blocks.rows), tile * blocks.rows, blocks.rows, span)
        _emit_rest(place, at, begin, end, whole, span)


def _emit_rest(
    place: AttentionPlace, at: dict[str, Expr], begin: Expr, end: Expr, whole: Expr, span: tuple[Expr, ...]
) -> None:
    """The queries that fill no tile."""
    rows, queries = place.blocks.rows, place.sizes["m"]
    done = settled(whole * rows)
    if isinstance(queries, int):
        if queries % rows:
            with when(begin + done < end):
                emit_rows(place, at, settled(begin + done), done, queries % rows, span)
        return
    for form in dict.fromkeys((max(1, rows // 2), 1)):
        left = settled(end - begin - done)
        with loop(settled(left // form)) as tile:
            emit_rows(place, at, settled(begin + done + tile * form), done + tile * form, form, span)
        done = settled(done + left // form * form)
