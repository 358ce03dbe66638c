"""Keys and values of a block in scratch, as the products of an attention read them; and queries that are widened."""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, ceil_div, either, lane_indices, loop, settled, smaller, vector_type, zeros
from ..pack.tile_transpose import riffle
from .attention_spec import AttentionPlace


def pack_keys(place: AttentionPlace, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of keys as panels ``[n / columns, d, columns]``; what is beyond the last key is one of the keys.

    Of pairs, ``d`` counts words of two elements, which lie as they do in memory.
    """
    blocks, view = place.blocks, place.key
    lanes, columns, together = blocks.lanes, blocks.columns, blocks.together
    width = place.sizes["d"] // together
    base = settled(view.address({**at, "n": first}) // together)
    along, across = view.stride("n") // together, view.stride("d")
    words = view.pairs() if blocks.is_paired else None

    def there(column: Expr, k: Expr) -> Expr:
        return place.at("keys") + (column // columns * (width * columns) + k * columns + column % columns)

    def vector(start: Expr) -> Expr:
        return view.load(start, "d", lanes) if words is None else words[lane_indices(start, lanes)]

    def transposed(column: Expr, rows: list[Expr]) -> None:
        with loop(ceil_div(width, lanes)) as number:
            # The last vector ends with the row: what it has in common with the one before is copied twice.
            k = settled(smaller(number * lanes, width - lanes))
            loaded = [T.bind(vector(base + row * along + k)) for row in rows]
            for i, values in enumerate(riffle(loaded, lanes)):
                T.buffer_store(place.room, values, [lane_indices(there(column, k + i), lanes)])

    def copied(column: Expr, rows: list[Expr]) -> None:
        with loop(width) as k:
            one = view.element if words is None else lambda index: words[index]
            values = T.Shuffle([one(base + row * along + k * across) for row in rows], list(range(lanes)))
            T.buffer_store(place.room, values, [lane_indices(there(column, k), lanes)])

    with loop(settled(ceil_div(size, lanes))) as number:
        column = settled(number * lanes)
        rows = [settled(smaller(column + lane, size - 1)) for lane in range(lanes)]
        (transposed if isinstance(across, int) and across == 1 and width >= lanes else copied)(column, rows)


def pack_values(place: AttentionPlace, at: dict[str, Expr], first: Expr, size: Expr) -> None:
    """A block of values as panels ``[e / columns, n, columns]``, zeros beyond the last column.

    Of pairs, ``n`` counts words of two neighbours of a column; zero stands for a last one that is not there.
    """
    blocks, view = place.blocks, place.value
    lanes = blocks.lanes
    base = settled(view.address({**at, "n": first}))

    def each(row: Expr, load: Callable[[Expr, Expr | None], Expr]) -> None:
        for number, mask in enumerate(place.value_masks):
            panel, within = divmod(number * lanes, blocks.columns)
            there = place.at("values") + (panel * (blocks.keys // blocks.together) + row) * blocks.columns + within
            value = load(number * lanes * view.stride("e"), mask)
            T.buffer_store(place.room, value, [lane_indices(there, lanes)])

    def start_of(row: Expr) -> Expr:
        return base + row * view.stride("n")

    if not blocks.is_paired:
        with loop(size) as row:
            each(row, lambda offset, mask: view.load(start_of(row) + offset, "e", lanes, mask))
        return

    def pair(row: Expr, is_whole: bool) -> None:
        def load(offset: Expr, mask: Expr | None) -> Expr:
            even = view.load_bits(start_of(row * 2) + offset, "e", lanes, mask)
            odd = zeros("uint16", lanes)
            if is_whole:
                odd = view.load_bits(start_of(row * 2 + 1) + offset, "e", lanes, mask)
            order = [lane + half * lanes for lane in range(lanes) for half in range(2)]
            return T.reinterpret(vector_type("float32", lanes), T.Shuffle([even, odd], order))

        each(row, load)

    with loop(settled(size // 2)) as row:
        pair(row, True)
    either(size % 2 > 0, lambda: pair(settled(size // 2), False), lambda: None)


def widen_queries(place: AttentionPlace, at: dict[str, Expr], row: Expr, rows: int) -> None:
    """The queries of a tile as float32, ``[rows, d]``."""
    view, width, lanes = place.query, int(place.sizes["d"]), place.blocks.lanes
    base = settled(view.address({**at, "m": row}))
    for i in range(rows):
        for k in range(0, width, lanes):
            count = min(lanes, width - k)
            value = view.load(base + i * view.stride("m") + k * view.stride("d"), "d", count)
            T.buffer_store(place.room, value, [lane_indices(place.at("queries") + (i * width + k), count)])
