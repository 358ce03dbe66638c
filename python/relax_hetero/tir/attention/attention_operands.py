"""Operands of the two products of an attention: keys and values packed in scratch, and the left factors.

Scores are queries times keys; results are powers of e, which weigh values, times values. Right factors are packed, a
block of keys at a time; left factors are queries, widened where they are of 16 bits, and the powers of e.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import DotInstruction, widened_instruction
from ..core.builder import (
    Expr,
    Registers,
    ceil_div,
    either,
    lane_indices,
    let,
    loop,
    materialize,
    minimum,
    vector_type,
    when,
    zeros,
)
from ..math.casts import cast
from ..matmul.fp16_partial_sums import Fp16PartialSums, is_out_of_range
from ..matmul.k_step import emit_step
from ..pack.tile_transpose import riffle
from .attention_spec import AttentionSpec


def pack_keys(spec: AttentionSpec, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of keys as panels ``[n / columns, d, columns]``; what is beyond the last key is one of the keys.

    Of pairs, ``d`` counts words of two elements, which lie as they do in memory.
    """
    blocks, view = spec.blocks, spec.key
    lanes, columns, together = blocks.lanes, blocks.columns, blocks.together
    width, depth = spec.sizes["d"] // together, blocks.width // together
    base = materialize(view.address({**at, "n": first}) // together)
    along, across = view.stride("n") // together, view.stride("d")
    words = view.pairs() if blocks.is_paired else None

    def there(column: Expr, k: Expr) -> Expr:
        return spec.at("keys") + (column // columns * (depth * columns) + k * columns + column % columns)

    def vector(start: Expr) -> Expr:
        return view.load(start, "d", lanes) if words is None else words[lane_indices(start, lanes)]

    def transposed(column: Expr, rows: list[Expr]) -> None:
        with loop(ceil_div(width, lanes)) as number:
            # The last vector ends with the row: what it has in common with the one before is copied twice.
            k = materialize(minimum(number * lanes, width - lanes))
            loaded = [T.bind(vector(base + row * along + k)) for row in rows]
            for i, values in enumerate(riffle(loaded, lanes)):
                T.buffer_store(spec.room, values, [lane_indices(there(column, k + i), lanes)])

    def copied(column: Expr, rows: list[Expr]) -> None:
        with loop(width) as k:
            one = view.element if words is None else lambda index: words[index]
            values = T.Shuffle([one(base + row * along + k * across) for row in rows], list(range(lanes)))
            T.buffer_store(spec.room, values, [lane_indices(there(column, k), lanes)])

    with loop(materialize(ceil_div(size, lanes))) as number:
        column = materialize(number * lanes)
        rows = [materialize(minimum(column + lane, size - 1)) for lane in range(lanes)]
        (transposed if isinstance(across, int) and across == 1 and width >= lanes else copied)(column, rows)


def pack_values(spec: AttentionSpec, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of values as panels ``[e / columns, n, columns]``, zeros beyond the last column.

    Of pairs, ``n`` counts words of two neighbours of a column; zero stands for a last one that is not there.
    """
    blocks, view = spec.blocks, spec.value
    lanes = blocks.lanes
    base = materialize(view.address({**at, "n": first}))

    def each(row: Expr, load: Callable[[Expr, Expr | None], Expr]) -> None:
        for number, mask in enumerate(spec.value_masks):
            panel, within = divmod(number * lanes, blocks.columns)
            there = spec.at("values") + (panel * (blocks.keys // blocks.together) + row) * blocks.columns + within
            value = load(number * lanes * view.stride("e"), mask)
            T.buffer_store(spec.room, value, [lane_indices(there, lanes)])

    def start_of(row: Expr) -> Expr:
        return base + row * view.stride("n")

    if not blocks.is_paired:
        with loop(size) as row:
            each(row, lambda offset, mask: view.load(start_of(row) + offset, "e", lanes, mask))
        return

    def pair(row: Expr, is_whole: bool) -> None:
        def load(offset: Expr, mask: Expr | None) -> Expr:
            even = view.load_bits(start_of(row * 2) + offset, "e", lanes, mask)
            odd = zeros(view.dtype, lanes)
            if is_whole:
                odd = view.load_bits(start_of(row * 2 + 1) + offset, "e", lanes, mask)
            order = [lane + half * lanes for lane in range(lanes) for half in range(2)]
            return T.reinterpret(vector_type("float32", lanes), T.Shuffle([even, odd], order))

        each(row, load)

    with loop(materialize(size // 2)) as row:
        pair(row, True)
    either(size % 2 > 0, lambda: pair(materialize(size // 2), False), lambda: None)


def widen_queries(spec: AttentionSpec, at: dict[str, Expr], row: Expr, rows: int) -> None:
    """The queries of a tile as float32, ``[rows, d]``."""
    view, width, lanes = spec.query, int(spec.sizes["d"]), spec.blocks.lanes
    base = materialize(view.address({**at, "m": row}))
    for i in range(rows):
        for k in range(0, width, lanes):
            count = min(lanes, width - k)
            value = view.load(base + i * view.stride("m") + k * view.stride("d"), "d", count)
            T.buffer_store(spec.room, value, [lane_indices(spec.at("queries") + (i * width + k), count)])


Factor = Callable[[int, Expr], Expr]
"""Function of a row of the tile and a step: one number, or a pair as an int32."""


def accumulate(
    spec: AttentionSpec,
    size: tuple[int, int],
    steps: Expr,
    left: Factor,
    right: Callable[[Expr, int], Expr],
    exact: tuple[list[Expr | None], float] = ([], 0.0),
) -> None:
    """Accumulate ``left(i, k) * right(k, j)`` over steps k, from zeros, for so many rows i and vectors j.

    Of short sums, `exact` has the lanes of each vector that matter (None: all), and the least mean square of products
    (`is_out_of_range`).
    """
    (rows, vectors), accs, lanes = size, spec.registers, spec.blocks.lanes
    count = rows * vectors

    def emit(dot: DotInstruction, first: Expr, size: Expr, registers: Registers) -> None:
        with loop(size) as number:
            k = first + number
            rights = [let(right(k, j)) for j in range(vectors)]
            for i in range(rows):
                one = let(left(i, k))
                for j in range(vectors):
                    at = i * vectors + j
                    registers[at] = emit_step(dot, registers[at], one, rights[j], lanes)

    def clear() -> None:
        for number in range(count):
            accs[number] = zeros("float32", lanes)

    clear()
    if not spec.dot.short:
        emit(spec.dot, 0, steps, accs)
        return
    short = Fp16PartialSums(spec.dot, accs, count, lanes)
    short.add(steps, short.length, lambda first, size, registers: emit(spec.dot, first, size, registers))
    masks, least = exact
    nothing = zeros("float32", lanes)
    existing = []
    for number in range(count):
        mask = masks[number % vectors]
        existing.append(accs[number] if mask is None else T.Select(mask, accs[number], nothing))
    with when(is_out_of_range(existing, steps * spec.dot.k0, lanes, least)):
        clear()
        emit(widened_instruction(spec.dot), 0, steps, accs)


def factors_of_scores(spec: AttentionSpec, at: dict[str, Expr], row: Expr) -> Factor:
    """The queries of a tile from `row` on."""
    blocks, view, width = spec.blocks, spec.query, spec.sizes["d"]
    if blocks.is_widened:
        queries = materialize(spec.at("queries"))
        return lambda i, k: spec.room[queries + i * width + k]
    start = materialize(view.address({**at, "m": row}) // blocks.together)
    along, across = view.stride("m") // blocks.together, view.stride("d")
    if blocks.is_paired:
        words = view.pairs()
        return lambda i, k: T.reinterpret("int32", words[start + i * along + k])
    return lambda i, k: view.element(start + i * along + k * across)


def factors_of_values(spec: AttentionSpec) -> Factor:
    """The powers of e of a tile."""
    blocks = spec.blocks
    if blocks.is_paired:
        weights = materialize(spec.at("weights"))
        return lambda i, k: T.reinterpret("int32", spec.room[weights + i * blocks.weight_distance + k])
    scores = materialize(spec.at("scores"))
    return lambda i, k: spec.room[scores + i * blocks.score_distance + k]


def store_weights(spec: AttentionSpec, i: Expr, vector: Expr, power: Expr) -> None:
    """A vector of powers of e of row i, rounded, as the pairs that `factors_of_values` reads."""
    lanes = spec.blocks.lanes
    pairs = T.reinterpret(vector_type("float32", lanes // 2), cast(power, spec.problem.value.dtype))
    start = spec.at("weights") + i * spec.blocks.weight_distance + vector * (lanes // 2)
    T.buffer_store(spec.room, pairs, [lane_indices(start, lanes // 2)])
