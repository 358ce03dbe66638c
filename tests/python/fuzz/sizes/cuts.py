"""Attacks on ops that cut, join and pad."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fuzz.sizes.attack import HUGE, LARGEST, LEAST, Attack, data, ints, one_op, scalar


def cuts(rng: np.random.Generator) -> Iterator[Attack]:
    """Slice, Split, Pad, Squeeze, Unsqueeze, Concat, SpaceToDepth and its kin."""
    numbers = [0, 1, -1, 3, -3, 5, 100, -100, HUGE, LARGEST, LEAST, LEAST + 1]
    calls = []
    for _ in range(40):
        start, end = (numbers[int(rng.integers(len(numbers)))] for _ in range(2))
        step = [1, -1, 2, -2, LARGEST, LEAST, 0, 3, LEAST + 1][int(rng.integers(9))]
        calls.append(
            {"x": data(int(rng.integers(0, 6))), "s": ints(start), "e": ints(end), "a": ints(0), "p": ints(step)}
        )
    calls += [
        {"x": data(5), "s": ints(0), "e": ints(5), "a": ints(a), "p": ints(1)} for a in (-1, 0, 1, -2, HUGE, LEAST)
    ]
    calls += [
        {"x": data(5), "s": ints(s), "e": ints(e), "a": ints(0), "p": ints(p)}
        for s, e, p in (
            (0, 5, 0),
            (LARGEST, LEAST, -1),
            (LEAST, LARGEST, 1),
            (4, LEAST, -2),
            (LARGEST, LEAST, LEAST),
            (0, LARGEST, LARGEST),
            (3, 0, -1),
            (-1, -100, -1),
            (-100, 5, -1),
        )
    ]
    yield one_op("Slice", {"x": ["n"], "s": [1], "e": [1], "a": [1], "p": [1]}, calls)
    two = {"x": ["n", 3], "s": [2], "e": [2], "a": [2]}
    yield one_op(
        "Slice",
        two,
        [
            {"x": data(4, 3), "s": ints(1, 1), "e": ints(3, 3), "a": a}
            for a in (ints(0, 1), ints(1, 0), ints(0, 0), ints(-1, 1))
        ],
    )
    yield one_op(
        "Slice",
        {"x": ["n"]},
        [{"x": data(n)} for n in (0, 1, 2, 5)],
        {"s": ints(1), "e": ints(-1), "a": ints(0)},
        label="x[1:-1] symbolic",
    )
    yield one_op(
        "Slice",
        {"x": ["n"]},
        [{"x": data(n)} for n in (0, 1, 2, 5)],
        {"s": ints(-2), "e": ints(LEAST), "a": ints(0), "p": ints(-1)},
        label="x[-2::-1] symbolic",
    )
    parts = [
        ints(2, 3),
        ints(2, 4),
        ints(5, 0),
        ints(0, 5),
        ints(-1, 6),
        ints(6, -1),
        ints(LARGEST, LEAST + 6),
        ints(1, 1),
    ]
    yield one_op("Split", {"x": [5], "p": [2]}, [{"x": data(5), "p": p} for p in parts], outputs=2, axis=0)
    yield one_op(
        "Split", {"x": ["n"], "p": [2]}, [{"x": data(n), "p": p} for p in parts for n in (5, 0)], outputs=2, axis=0
    )
    for part in parts[:6]:
        yield one_op(
            "Split",
            {"x": ["n"]},
            [{"x": data(n)} for n in (5, 6, 4, 2, 0)],
            {"p": part},
            outputs=2,
            axis=0,
            label=f"n into {part.tolist()}",
        )
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (4, 5, 1, 0, 2, 3)], outputs=2, axis=0, num_outputs=2)
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (4, 5, 1, 0, 6)], outputs=2, axis=0, opset=13)
    yield one_op("Split", {"x": ["n"]}, [{"x": data(n)} for n in (3, 4, 7, 1)], outputs=3, axis=0, num_outputs=3)
    widths = [
        (0, 0),
        (1, 2),
        (-1, 0),
        (-2, -2),
        (-3, -3),
        (-5, 6),
        (HUGE, 0),
        (LARGEST, LARGEST),
        (LEAST, 1),
        (0, 2**62),
    ]
    for mode in ("constant", "edge", "reflect", "wrap"):
        yield one_op(
            "Pad",
            {"x": ["n"], "p": [2]},
            [{"x": data(n), "p": ints(*w)} for w in widths for n in (4, 1, 0)],
            label=f"run-time {mode}",
            mode=mode,
            opset=19,
        )
        for width in ((1, 2), (-2, 0), (-2, -1), (3, 3)):
            yield one_op(
                "Pad",
                {"x": ["n"]},
                [{"x": data(n)} for n in (4, 1, 0, 2, 3)],
                {"p": ints(*width)},
                label=f"{mode} {width} of n",
                mode=mode,
                opset=19,
            )
    yield one_op("Pad", {"x": [4]}, [{"x": data(4)}], {"p": ints(HUGE, 2**60)}, label="static huge")
    yield one_op("Squeeze", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((1, 3), (2, 3), (0, 3))], {"a": ints(0)})
    yield one_op("Squeeze", {"x": ["a", 3], "t": [1]}, [{"x": data(1, 3), "t": ints(a)} for a in (0, 1, -2, 5)])
    yield one_op("Squeeze", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((1, 3), (2, 3), (1, 1))], label="all")
    yield one_op("Unsqueeze", {"x": ["a"], "t": [1]}, [{"x": data(3), "t": ints(a)} for a in (0, 1, -1, 5, LARGEST)])
    both = {"x": ["a", "b"], "z": ["c", "d"]}
    sizes = [((2, 3), (2, 3)), ((2, 3), (4, 3)), ((2, 3), (2, 5)), ((0, 3), (2, 3)), ((1, 3), (2, 2)), ((0, 2), (2, 3))]
    pairs = [{"x": data(*p), "z": data(*q)} for p, q in sizes]
    for axis in (0, 1):
        yield one_op("Concat", both, pairs, label=f"axis {axis}", axis=axis)
    yield one_op(
        "DepthToSpace", {"x": [1, "c", 2, 2]}, [{"x": data(1, c, 2, 2)} for c in (4, 6, 8, 1, 0, 3)], blocksize=2
    )
    yield one_op(
        "DepthToSpace",
        {"x": [1, "c", 2, 2]},
        [{"x": data(1, c, 2, 2)} for c in (4, 6, 8)],
        blocksize=2,
        mode="CRD",
        label="CRD",
    )
    yield one_op(
        "SpaceToDepth",
        {"x": [1, 2, "h", "w"]},
        [{"x": data(1, 2, h, w)} for h, w in ((2, 2), (4, 2), (3, 2), (2, 5), (0, 2))],
        blocksize=2,
    )
    for axis in (0, 1, 2):
        yield one_op("Flatten", {"x": ["a", "b"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0))], axis=axis)
    yield one_op(
        "Trilu",
        {"x": ["a", "b"], "k": []},
        [{"x": data(*s), "k": scalar(k)} for s in ((2, 3), (0, 3), (3, 1)) for k in (0, 1, -1, 9, LARGEST, LEAST)],
    )
    yield one_op(
        "CenterCropPad",
        {"x": ["a", 4]},
        [{"x": data(a, 4)} for a in (0, 1, 2, 3, 7)],
        {"t": ints(3, 3)},
        label="to [3,3]",
    )
    yield one_op(
        "CenterCropPad",
        {"x": [4, 4], "t": [2]},
        [{"x": data(4, 4), "t": t} for t in (ints(3, 5), ints(-1, 2), ints(HUGE, HUGE))],
    )
    yield one_op(
        "Col2Im",
        {"x": [1, "c", "l"]},
        [{"x": data(1, c, n)} for c, n in ((4, 4), (8, 4), (6, 4), (4, 3), (4, 5), (3, 4), (0, 4))],
        {"i": ints(4, 4), "b": ints(2, 2)},
        strides=[2, 2],
    )
