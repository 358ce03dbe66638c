"""The two products of an attention, and their left factors: queries, and the powers of e that weigh values."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, held, lane_indices, loop, settled, vector_type, zeros
from ..elementwise.expression_ops import cast
from ..matmul.inner_product import emit_step
from .attention_spec import AttentionPlace

Factor = Callable[[int, Expr], Expr]
"""Of a row of the tile and a step: one number, or a pair as an int32."""


def accumulate(
    place: AttentionPlace, size: tuple[int, int], steps: Expr, left: Factor, right: Callable[[Expr, int], Expr]
) -> None:
    """Accumulate ``left(i, k) * right(k, j)`` over steps k, from zeros, for so many rows i and vectors j."""
    (rows, vectors), accs, lanes = size, place.registers, place.blocks.lanes
    for number in range(rows * vectors):
        accs[number] = zeros("float32", lanes)
    with loop(steps) as k:
        rights = [held(right(k, j)) for j in range(vectors)]
        for i in range(rows):
            one = held(left(i, k))
            for j in range(vectors):
                number = i * vectors + j
                accs[number] = emit_step(place.product, accs[number], one, rights[j], lanes)


def factors_of_scores(place: AttentionPlace, at: dict[str, Expr], row: Expr) -> Factor:
    """The queries of a tile from `row` on."""
    blocks, view, width = place.blocks, place.query, place.sizes["d"]
    if blocks.is_widened:
        queries = settled(place.at("queries"))
        return lambda i, k: place.room[queries + i * width + k]
    start = settled(view.address({**at, "m": row}) // blocks.together)
    along, across = view.stride("m") // blocks.together, view.stride("d")
    if blocks.is_paired:
        words = view.pairs()
        return lambda i, k: T.reinterpret("int32", words[start + i * along + k])
    return lambda i, k: view.element(start + i * along + k * across)


def factors_of_values(place: AttentionPlace) -> Factor:
    """The powers of e of a tile."""
    keys = place.blocks.keys
    if place.blocks.is_paired:
        weights = settled(place.at("weights"))
        return lambda i, k: T.reinterpret("int32", place.room[weights + i * (keys // 2) + k])
    scores = settled(place.at("scores"))
    return lambda i, k: place.room[scores + i * keys + k]


def store_weights(place: AttentionPlace, i: int, vector: Expr, power: Expr) -> None:
    """A vector of powers of e of row i, rounded, as the pairs that `factors_of_values` reads."""
    lanes = place.blocks.lanes
    pairs = T.reinterpret(vector_type("float32", lanes // 2), cast(power, "bfloat16"))
    start = place.at("weights") + i * (place.blocks.keys // 2) + vector * (lanes // 2)
    T.buffer_store(place.room, pairs, [lane_indices(start, lanes // 2)])
