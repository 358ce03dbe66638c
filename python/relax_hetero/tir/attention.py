"""Attention in one kernel: scores, mask, softmax and values, head by head.

The loops, from outside: tasks, heads and blocks of queries, blocks of keys, tiles of queries. A block of keys is
packed transposed into scratch, so that scores are an ordinary product; the values of the block are copied beside
them. The scores of a tile of queries against a block of keys stay in the first-level cache. Where there are several
blocks of keys, softmax runs on: sums so far are rescaled by the maximum that grew (Milakov and Gimelshein,
"Online normalizer calculation for softmax"; Dao et al., "FlashAttention").
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..encoding.machine import Machine
from ..encoding.problem import AttentionProblem
from ..errors import EncodingError
from .attention_place import AttentionPlace, block_sizes
from .attention_rows import emit_rows
from .builder import Expr, Function, Registers, ceil_div, lane_indices, loop, settled, smaller, when
from .heads_view import HeadsView
from .tile_transpose import riffle
from .work_split import part


def attention_kernel(problem: AttentionProblem, machine: Machine) -> tirx.PrimFunc:
    """The kernel of an attention.

    Parameters
    ----------
    problem : AttentionProblem
        Of float32 operands; batch, queries and keys may be symbolic.
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
        If an operand is not float32, or the machine has no vectors.
    """
    tensors = [problem.query, problem.key, problem.value, problem.result]
    if machine.lanes("float32") < 2 or any(tensor.dtype != "float32" for tensor in tensors):
        raise EncodingError(
            f"attention of {[tensor.dtype for tensor in tensors]} on {machine.isa.name}: expected float32 operands "
            "and a machine with vectors"
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
            with loop(blocks.tasks, parallel=blocks.tasks > 1) as task:
                registers = Registers(blocks.rows * blocks.vectors, "float32", blocks.lanes)
                start = settled(task * blocks.scratch)
                operands = (query, key, value)
                _emit_task(
                    AttentionPlace(problem, sizes, blocks, operands, masks, result, room, start, registers), task
                )
    return function.result


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
            _pack_keys(place, at, first, size)
            _copy_values(place, at, first, size)
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
    with loop(settled(end - begin - done)) as row:
        emit_rows(place, at, settled(begin + done + row), done + row, 1, span)


def _pack_keys(place: AttentionPlace, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of keys as panels ``[n / columns, d, columns]``; what is beyond the last key is one of the keys."""
    blocks, view, width = place.blocks, place.key, place.sizes["d"]
    lanes, columns = blocks.lanes, blocks.columns
    base = settled(view.address({**at, "n": first}))
    along, across = view.stride("n"), view.stride("d")

    def there(column: Expr, k: Expr) -> Expr:
        return place.at("keys") + (column // columns * (width * columns) + k * columns + column % columns)

    def transposed(column: Expr, rows: list[Expr]) -> None:
        with loop(ceil_div(width, lanes)) as number:
            # The last vector ends with the row: what it has in common with the one before is copied twice.
            k = settled(smaller(number * lanes, width - lanes))
            loaded = [T.bind(view.data[lane_indices(base + row * along + k, lanes)]) for row in rows]
            for i, values in enumerate(riffle(loaded, lanes)):
                T.buffer_store(place.room, values, [lane_indices(there(column, k + i), lanes)])

    def copied(column: Expr, rows: list[Expr]) -> None:
        with loop(width) as k:
            values = T.Shuffle([view.data[base + row * along + k * across] for row in rows], list(range(lanes)))
            T.buffer_store(place.room, values, [lane_indices(there(column, k), lanes)])

    with loop(settled(ceil_div(size, lanes))) as vector:
        column = settled(vector * lanes)
        rows = [settled(smaller(column + lane, size - 1)) for lane in range(lanes)]
        (transposed if isinstance(across, int) and across == 1 and width >= lanes else copied)(column, rows)


def _copy_values(place: AttentionPlace, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of values as panels ``[e / columns, n, columns]``, zeros beyond the last column."""
    blocks, view = place.blocks, place.value
    base = settled(view.address({**at, "n": first}))
    with loop(size) as row:
        for number, mask in enumerate(place.value_masks):
            panel, within = divmod(number * blocks.lanes, blocks.columns)
            values = view.load(
                base + row * view.stride("n") + number * blocks.lanes * view.stride("e"), "e", blocks.lanes, mask
            )
            there = place.at("values") + (panel * blocks.keys + row) * blocks.columns + within
            T.buffer_store(place.room, values, [lane_indices(there, blocks.lanes)])
