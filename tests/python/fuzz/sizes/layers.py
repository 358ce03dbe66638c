"""Attacks on norms, attention and layers of recurrence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.sizes.attack import Attack, data, ints, one_op


def norms(rng: np.random.Generator) -> Iterator[Attack]:
    """Norms whose vectors have to be as long as an axis."""
    lengths = [(3, 3), (3, 1), (3, 4), (3, 2), (1, 3), (0, 0), (3, 0), (0, 3)]
    four = {"s": ["k"], "b": ["k"], "m": ["k"], "v": ["k"]}
    inputs = [{"x": data(2, c, 2), **{name: data(k) for name in four}} for c, k in lengths]
    yield one_op("BatchNormalization", {"x": [2, "c", 2], **four}, inputs, opset=15)
    fixed = {name: data(3) for name in four}
    yield one_op(
        "BatchNormalization",
        {"x": [2, "c", 2]},
        [{"x": data(2, c, 2)} for c in (3, 1, 4, 2, 0, 5)],
        fixed,
        opset=15,
        label="constants",
    )
    each = {"s": ["p"], "b": ["q"], "m": ["r"], "v": ["t"]}
    uneven = [
        {"x": data(2, 3, 2), **{name: data(k if name == one else 3) for name in each}}
        for one in each
        for k in (1, 2, 4)
    ]
    yield one_op("BatchNormalization", {"x": [2, "c", 2], **each}, uneven, opset=15, label="uneven")
    pair = [{"x": data(2, c, 2), "s": data(k), "b": data(k)} for c, k in lengths]
    three = {"x": ["n", "c", 2], "s": ["k"], "b": ["l"]}
    yield one_op("InstanceNormalization", three, [*pair, {"x": data(2, 3, 2), "s": data(3), "b": data(1)}])
    yield one_op(
        "GroupNormalization",
        {"x": [2, 4, 2], "s": ["k"], "b": ["k"]},
        [{"x": data(2, 4, 2), "s": data(k), "b": data(k)} for k in (4, 1, 2, 3, 0)],
        num_groups=2,
        opset=21,
    )
    last = [{"x": data(2, 2, c), "s": data(k), "b": data(k)} for c, k in lengths]
    yield one_op("LayerNormalization", {"x": ["n", 2, "c"], "s": ["k"], "b": ["l"]}, last)
    yield one_op(
        "LayerNormalization",
        {"x": ["n", 2, "c"]},
        [{"x": data(2, 2, c)} for c in (3, 1, 4, 0)],
        {"s": data(3), "b": data(3)},
        label="constants",
    )
    yield one_op(
        "RMSNormalization",
        {"x": ["n", 2, "c"], "s": ["k"]},
        [{"x": call["x"], "s": call["s"]} for call in last],
        opset=23,
    )
    for op in ("LRN",):
        yield one_op(op, {"x": ["n", "c", 2, 2]}, [{"x": data(1, c, 2, 2)} for c in (3, 1, 0)], size=3)
    yield one_op(
        "PRelu", {"x": [2, "c", 2], "s": ["k", 1]}, [{"x": -data(2, c, 2), "s": data(k, 1)} for c, k in lengths]
    )


def attention(rng: np.random.Generator) -> Iterator[Attack]:
    """Attention, layers of recurrence, and the sizes that their inputs share."""
    dims = {"q": ["b", 2, "s", 4], "k": ["b", 2, "t", 4], "v": ["b", 2, "u", 4]}
    calls = [
        {"q": data(1, 2, 3, 4), "k": data(1, 2, t, 4), "v": data(1, 2, u, 4)}
        for t, u in ((5, 5), (5, 3), (3, 5), (1, 4))
    ]
    yield one_op("Attention", dims, calls, opset=23, label="keys and values")
    heads = {"q": ["b", 4, "s", "d"], "k": ["c", 2, 5, "e"], "v": ["p", 2, 5, 4]}
    calls = [
        {"q": data(*q), "k": data(*k), "v": data(*v)}
        for q, k, v in (
            ((1, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 4, 3, 4), (1, 2, 5, 3), (1, 2, 5, 4)),
            ((2, 4, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
            ((1, 4, 3, 4), (1, 2, 5, 4), (2, 2, 5, 4)),
        )
    ]
    yield one_op("Attention", heads, calls, opset=23, label="groups and batches")
    masked = {**dims, "m": ["f", "g"]}
    calls = [
        {"q": data(1, 2, 3, 4), "k": data(1, 2, 5, 4), "v": data(1, 2, 5, 4), "m": data(*m)}
        for m in ((3, 5), (1, 5), (3, 1), (3, 4), (2, 5), (1, 1))
    ]
    yield one_op("Attention", masked, calls, opset=23, label="mask")
    flat = {"q": ["b", 3, "x"], "k": ["b", "t", "y"], "v": ["b", "u", "z"]}
    calls = [
        {"q": data(1, 3, x), "k": data(1, 5, y), "v": data(1, u, z)}
        for x, y, z, u in ((8, 8, 8, 5), (8, 6, 8, 5), (8, 8, 6, 5), (7, 7, 7, 5), (8, 8, 8, 3))
    ]
    yield one_op("Attention", flat, calls, opset=23, q_num_heads=2, kv_num_heads=2, label="3 axes")
    weights = {"w": data(1, 8, 3), "r": data(1, 8, 2)}
    yield one_op("LSTM", {"x": [2, "b", "i"]}, [{"x": data(2, 1, i)} for i in (3, 2, 4)], weights, hidden_size=2)
    yield one_op(
        "LSTM",
        {"x": [2, 2, 3], "l": ["b"]},
        [{"x": data(2, 2, 3), "l": ints(*v, dtype="int32")} for v in ((2, 1), (2,), (2, 2, 2), (9, -1))],
        weights,
        order=["x", "w", "r", "", "l"],
        hidden_size=2,
        label="lengths",
    )
    yield one_op(
        "LSTM",
        {"x": [2, 2, 3], "h": [1, "b", "k"], "c": [1, "d", "e"]},
        [
            {"x": data(2, 2, 3), "h": data(1, *h), "c": data(1, *c)}
            for h, c in (((2, 2), (2, 2)), ((1, 2), (2, 2)), ((2, 2), (1, 2)), ((2, 1), (2, 2)), ((3, 2), (2, 2)))
        ],
        weights,
        order=["x", "w", "r", "", "", "h", "c"],
        hidden_size=2,
        label="states",
    )
    for op, gates in (("GRU", 3), ("RNN", 1)):
        yield one_op(
            op,
            {"x": [2, "b", "i"], "w": [1, "g", 3], "r": [1, "h", 2]},
            [
                {"x": data(2, 1, i), "w": data(1, g, 3), "r": data(1, h, 2)}
                for i, g, h in (
                    (3, 2 * gates, 2 * gates),
                    (4, 2 * gates, 2 * gates),
                    (3, 2 * gates + 1, 2 * gates),
                    (3, 2 * gates, 2 * gates + 2),
                )
            ],
            hidden_size=2,
        )
