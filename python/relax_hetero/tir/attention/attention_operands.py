"""Operands of the two products of an attention: packed keys and values in scratch, and the left factors.

Scores are queries times keys; results are softmax weights (not yet divided by their sum) times values. Right factors
are packed, a block of keys at a time; left factors are queries, widened if they have 16 bits, and softmax weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from ..core.builder import (
    Expr,
    Masks,
    ceil_div,
    either,
    lane_indices,
    loop,
    materialize,
    minimum,
    vector_type,
    zeros,
)
from ..math.casts import cast
from ..microkernel.fp16_partial_sums import Fp16PartialSums
from ..microkernel.microkernel import VectorTile
from ..pack.tile_transpose import riffle
from .attention_spec import AttentionSpec


def pack_keys(spec: AttentionSpec, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """Pack a block of keys to panels ``[n / columns, d, columns]``; padding repeats the last key.

    If elements are paired, ``d`` counts words of two elements, as in memory.
    """
    blocks, view = spec.blocks, spec.key
    lanes, columns, word_elements = blocks.lanes, blocks.columns, blocks.word_elements
    width, depth = spec.sizes["d"] // word_elements, blocks.width // word_elements
    base = materialize(view.address({**at, "n": first}) // word_elements)
    key_stride, element_stride = view.stride("n") // word_elements, view.stride("d")
    words = view.pairs() if blocks.is_paired else None

    def target_offset(column: Expr, k: Expr) -> Expr:
        return spec.at("keys") + (column // columns * (depth * columns) + k * columns + column % columns)

    def vector(start: Expr) -> Expr:
        return view.load(start, "d", lanes) if words is None else words[lane_indices(start, lanes)]

    def transpose_columns(column: Expr, rows: list[Expr]) -> None:
        with loop(ceil_div(width, lanes)) as number:
            # The last vector ends with the row: elements in common with the one before are copied twice.
            k = materialize(minimum(number * lanes, width - lanes))
            loaded = [T.bind(vector(base + row * key_stride + k)) for row in rows]
            for i, values in enumerate(riffle(loaded, lanes)):
                T.buffer_store(spec.scratch, values, [lane_indices(target_offset(column, k + i), lanes)])

    def gather_columns(column: Expr, rows: list[Expr]) -> None:
        with loop(width) as k:
            element = view.element if words is None else lambda index: words[index]
            values = T.Shuffle(
                [element(base + row * key_stride + k * element_stride) for row in rows], list(range(lanes))
            )
            T.buffer_store(spec.scratch, values, [lane_indices(target_offset(column, k), lanes)])

    with loop(materialize(ceil_div(size, lanes))) as number:
        column = materialize(number * lanes)
        rows = [materialize(minimum(column + lane, size - 1)) for lane in range(lanes)]
        (
            transpose_columns
            if isinstance(element_stride, int) and element_stride == 1 and width >= lanes
            else gather_columns
        )(column, rows)


def pack_values(spec: AttentionSpec, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """Pack a block of values to panels ``[e / columns, n, columns]``, with zeros after the last column.

    If elements are paired, ``n`` counts words of two neighbours of a column; a missing last one is zero.
    """
    blocks, view = spec.blocks, spec.value
    lanes = blocks.lanes
    base = materialize(view.address({**at, "n": first}))

    def store_row(row: Expr, load: Callable[[Expr, Expr | None], Expr]) -> None:
        for number, mask in enumerate(spec.value_masks):
            panel, panel_column = divmod(number * lanes, blocks.columns)
            target_offset = (
                spec.at("values")
                + (panel * (blocks.keys // blocks.word_elements) + row) * blocks.columns
                + panel_column
            )
            value = load(number * lanes * view.stride("e"), mask)
            T.buffer_store(spec.scratch, value, [lane_indices(target_offset, lanes)])

    def start_of(row: Expr) -> Expr:
        return base + row * view.stride("n")

    if not blocks.is_paired:
        with loop(size) as row:
            store_row(row, lambda offset, mask: view.load(start_of(row) + offset, "e", lanes, mask))
        return

    def pair(row: Expr, is_whole: bool) -> None:
        def load(offset: Expr, mask: Expr | None) -> Expr:
            even = view.load_bits(start_of(row * 2) + offset, "e", lanes, mask)
            odd = zeros(view.dtype, lanes)
            if is_whole:
                odd = view.load_bits(start_of(row * 2 + 1) + offset, "e", lanes, mask)
            order = [lane + half * lanes for lane in range(lanes) for half in range(2)]
            return T.reinterpret(vector_type("float32", lanes), T.Shuffle([even, odd], order))

        store_row(row, load)

    with loop(materialize(size // 2)) as row:
        pair(row, True)
    either(size % 2 > 0, lambda: pair(materialize(size // 2), False), lambda: None)


def widen_queries(spec: AttentionSpec, at: dict[str, Expr], row: Expr, rows: int) -> None:
    """Write the queries of a tile to scratch as float32, ``[rows, d]``."""
    view, width, lanes = spec.query, int(spec.sizes["d"]), spec.blocks.lanes
    base = materialize(view.address({**at, "m": row}))
    for i in range(rows):
        for k in range(0, width, lanes):
            count = min(lanes, width - k)
            value = view.load(base + i * view.stride("m") + k * view.stride("d"), "d", count)
            T.buffer_store(spec.scratch, value, [lane_indices(spec.at("queries") + (i * width + k), count)])


Factor = Callable[[Expr, int], Expr]
"""Function of a step and a row of the tile: one number, or a pair as an int32."""


def accumulate(
    spec: AttentionSpec,
    size: tuple[int, int],
    steps: Expr,
    left: Factor,
    right: Callable[[Expr, int], Expr],
    exact: tuple[Masks | None, float] = (None, 0.0),
) -> None:
    """Accumulate ``left(k, i) * right(k, j)`` over steps k, from zeros, for ``size`` rows i and vectors j.

    For fp16 partial sums, `exact` has the relevant lanes of each vector (None: all), and the minimum mean square of
    products (`is_out_of_range`).
    """
    tile = VectorTile(spec.dot, spec.registers, *size, spec.blocks.lanes)
    tile.clear()
    if not spec.dot.short:
        tile.multiply(steps, left, right)
        return
    partial_sums = Fp16PartialSums(spec.dot, tile.sums, tile.count, tile.lanes)
    partial_sums.add(
        steps,
        partial_sums.length,
        lambda first, count, sums: replace(tile, sums=sums).multiply(count, left, right, first),
    )
    tile.again_if_out_of_range(steps * spec.dot.k0, lambda wide: wide.multiply(steps, left, right), *exact)


def factors_of_scores(spec: AttentionSpec, at: dict[str, Expr], row: Expr) -> Factor:
    """The left factors of scores: the queries of a tile from `row` on."""
    blocks, view, width = spec.blocks, spec.query, spec.sizes["d"]
    if blocks.is_widened:
        queries = materialize(spec.at("queries"))
        return lambda k, i: spec.scratch[queries + i * width + k]
    start = materialize(view.address({**at, "m": row}) // blocks.word_elements)
    query_stride, element_stride = view.stride("m") // blocks.word_elements, view.stride("d")
    if blocks.is_paired:
        words = view.pairs()
        return lambda k, i: T.reinterpret("int32", words[start + i * query_stride + k])
    return lambda k, i: view.element(start + i * query_stride + k * element_stride)


def factors_of_values(spec: AttentionSpec) -> Factor:
    """The left factors of values: the softmax weights of a tile."""
    blocks = spec.blocks
    if blocks.is_paired:
        weights = materialize(spec.at("weights"))
        return lambda k, i: T.reinterpret("int32", spec.scratch[weights + i * blocks.weight_distance + k])
    scores = materialize(spec.at("scores"))
    return lambda k, i: spec.scratch[scores + i * blocks.score_distance + k]


def store_weights(spec: AttentionSpec, i: Expr, vector: Expr, weights: Expr) -> None:
    """Store a vector of softmax weights of row i, rounded, as the pairs that `factors_of_values` reads."""
    lanes = spec.blocks.lanes
    pairs = T.reinterpret(vector_type("float32", lanes // 2), cast(weights, spec.problem.value.dtype))
    start = spec.at("weights") + i * spec.blocks.weight_distance + vector * (lanes // 2)
    T.buffer_store(spec.scratch, pairs, [lane_indices(start, lanes // 2)])
