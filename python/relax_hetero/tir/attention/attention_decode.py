"""Attention of hardly a query, as of a decoder that makes one token after the other: keys are read once, as they lie.

Laying keys out for one query would cost more than its scores: these are sums of products along the keys' own rows.
"""

from __future__ import annotations

from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, lane_mask, let, minimum, opaque
from ..math.vector_math import once
from ..pack.tile_transpose import riffle_orders
from .attention_spec import AttentionSpec


def products_of_keys(
    spec: AttentionSpec, at: dict[str, Expr], query: Expr, first: Expr, column: Expr, size: Expr | None
) -> Expr:
    """The products of a query with a vector of keys.

    Parameters
    ----------
    spec : AttentionSpec
    at : dict
        Batch and head.
    query : PrimExpr
        Its number.
    first : PrimExpr
        The first key of the block.
    column : PrimExpr
        The first of the vector's keys in the block.
    size : PrimExpr or None
        How many keys the block has: for what is beyond the last, the last is taken. None: all of the vector's exist.
    """
    lanes, width = spec.blocks.lanes, spec.sizes["d"]
    keys = opaque(spec.key.address({**at, "n": first}))
    start = opaque(spec.query.address({**at, "m": query}))
    step = spec.key.stride("n")
    if size is None:
        begin = opaque(keys + column * step)
        rows = [begin + step * lane for lane in range(lanes)]
    else:
        rows = [opaque(keys + minimum(column + lane, size - 1) * step) for lane in range(lanes)]
    sums: list[Expr] = []
    for chunk in range(0, width, lanes):
        mask = lane_mask(width - chunk, lanes)
        factor = let(spec.query.load(start + spec.query.stride("d") * chunk, "d", lanes, mask))
        products = [factor * spec.key.load(row + chunk, "d", lanes, mask) for row in rows]
        sums = [once(one if chunk == 0 else sums[lane] + one) for lane, one in enumerate(products)]
    return sums_of(sums, lanes)


def sums_of(vectors: list[Expr], lanes: int) -> Expr:
    """The vector of the sums of as many vectors as each has lanes.

    Two halves of the vectors are merged element by element and their halves added, as a transpose would go.
    """
    low, high = riffle_orders(lanes)
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [once(T.Shuffle([a, b], low) + T.Shuffle([a, b], high)) for a, b in pairs]
    return vectors[0]
