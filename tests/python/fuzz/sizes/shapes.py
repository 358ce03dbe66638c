"""Attacks on ops that take a shape, and on Range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx
from onnx import TensorProto

from fuzz.sizes.attack import HUGE, LARGEST, LEAST, Attack, Call, data, extremes, ints, one_op, scalar


def _targets(rng: np.random.Generator, length: int, count: int) -> list[np.ndarray]:
    """Random vectors of sizes, extreme ones among them."""
    small, all_of = [0, 1, 2, 3, 6, -1], extremes()
    targets = []
    for _ in range(count):
        pool = all_of if rng.random() < 0.4 else small
        targets.append(np.array([pool[int(rng.integers(len(pool)))] for _ in range(length)], "int64"))
    return targets


def shapes(rng: np.random.Generator) -> Iterator[Attack]:
    """Ops that take a shape."""
    targets = [ints(2, 3), ints(3, 2), ints(6, 1), ints(4, 4), ints(2, 2), ints(-1, 4), ints(-1, 3), ints(-1, -1)]
    targets += [ints(-2, -3), ints(0, 3), ints(0, 0), ints(3, 0), ints(0, -1), ints(-1, 0), ints(HUGE, HUGE)]
    targets += [ints(LARGEST, LARGEST), ints(LEAST, 1), ints(-1, LARGEST), ints(2**32, 2**32), ints(1, 6), ints(-1, -2)]
    targets += [
        ints(2**62, 4),
        ints(2**63 - 6, 1),
        ints(2**32 + 1, 6),
        ints(3 * 2**62 % 2**63, 2),
        *_targets(rng, 2, 12),
    ]
    for allow in (0, 1):
        yield one_op(
            "Reshape",
            {"x": [2, 3], "t": [2]},
            [{"x": data(2, 3), "t": t} for t in targets],
            label=f"target {allow}",
            allowzero=allow,
        )
        yield one_op(
            "Reshape",
            {"x": ["a", "b"], "t": [2]},
            [{"x": data(*s), "t": t} for t in targets for s in ((2, 3), (0, 3), (1, 0))],
            label=f"symbolic {allow}",
            allowzero=allow,
        )
    three = [
        ints(2, 3, 1),
        ints(0, 0, 1),
        ints(0, 0, 0),
        ints(1, 1, 1),
        ints(-1, 2, 3),
        ints(2, -1, 4),
        ints(HUGE, 1, 1),
    ]
    yield one_op("Reshape", {"x": ["n"], "t": [3]}, [{"x": data(n), "t": t} for t in three for n in (6, 1, 0)])
    yield one_op("Reshape", {"x": ["n"], "t": ["k"]}, [{"x": data(6), "t": t} for t in (ints(6), ints(2, 3))])
    for target in (
        ints(2, 6),
        ints(-1, 6),
        ints(0, 2, 2),
        ints(0, -1),
        ints(1, 4),
        ints(1, -1),
        ints(0, 4),
        ints(-1, 8),
    ):
        yield one_op(
            "Reshape",
            {"x": ["n", 4]},
            [{"x": data(n, 4)} for n in (3, 1, 2, 0, 5)],
            {"t": target},
            label=f"x[n,4] to {target.tolist()}",
        )
    grown = [ints(3), ints(5), ints(2), ints(1), ints(0), ints(-1), ints(-2), ints(HUGE), ints(LARGEST), ints(LEAST)]
    yield one_op("Expand", {"x": [3], "t": [1]}, [{"x": data(3), "t": t} for t in grown])
    yield one_op("Expand", {"x": [1], "t": [1]}, [{"x": data(1), "t": t} for t in [*grown, ints(2**62)]])
    yield one_op("Expand", {"x": ["n"], "t": [1]}, [{"x": data(n), "t": t} for t in grown for n in (3, 1, 0)])
    pairs = [*targets, ints(2, 3), ints(1, 3), ints(1, 1)]
    yield one_op("Expand", {"x": ["n", 1], "t": [2]}, [{"x": data(n, 1), "t": t} for t in pairs for n in (1, 2)])
    yield one_op("Expand", {"x": ["n"], "t": [2]}, [{"x": data(n), "t": t} for t in pairs for n in (1, 3)])
    yield one_op(
        "Expand", {"x": ["n", 3]}, [{"x": data(n, 3)} for n in (1, 2, 4, 0)], {"t": ints(4, 1)}, label="to [4,1]"
    )
    yield one_op("Expand", {"x": [1, 1]}, [{"x": data(1, 1)}], {"t": ints(HUGE, HUGE)}, label="static huge")
    yield one_op("Expand", {"x": [1, 1]}, [{"x": data(1, 1)}], {"t": ints(-1, -2)}, label="static negative")
    yield one_op("ConstantOfShape", {"t": [2]}, [{"t": t} for t in targets])
    yield one_op("ConstantOfShape", {"t": [1]}, [{"t": t} for t in grown])
    for target in (ints(HUGE, HUGE), ints(-1, 2), ints(LARGEST, 2), ints(2**40)):
        yield one_op(
            "ConstantOfShape",
            {"x": [1]},
            [{"x": data(1)}],
            {"t": target},
            order=["t"],
            label=f"static {target.tolist()}",
        )
    times = [ints(1), ints(2), ints(0), ints(-1), ints(HUGE), ints(LARGEST), ints(LEAST), ints(2**62)]
    yield one_op("Tile", {"x": [3], "r": [1]}, [{"x": data(3), "r": r} for r in times])
    yield one_op("Tile", {"x": ["n"], "r": [1]}, [{"x": data(n), "r": r} for r in times for n in (3, 0)])
    yield one_op("Tile", {"x": ["n", 2], "r": [2]}, [{"x": data(2, 2), "r": r} for r in targets])
    yield one_op("Tile", {"x": ["n"]}, [{"x": data(n)} for n in (0, 1, 3)], {"r": ints(HUGE * HUGE)}, label="huge")
    yield one_op("Tile", {"x": ["n"]}, [{"x": data(n)} for n in (0, 1, 3)], {"r": ints(-1)}, label="negative")


def ranges(rng: np.random.Generator) -> Iterator[Attack]:
    """Range: starts, limits and steps, zero and not numbers among them."""
    triples = [(0, 5, 1), (0, 5, 2), (5, 0, -1), (0, 5, 0), (0, 5, -1), (0, 0, 0), (5, 0, 1), (0, HUGE * HUGE // 2, 1)]
    triples += [(LEAST, LARGEST, 1), (LARGEST, LEAST, -1), (0, LARGEST, 1), (LEAST, 0, LEAST), (0, LARGEST, LARGEST)]
    triples += [
        (LARGEST - 2, LARGEST, 1),
        (LEAST, LARGEST, LARGEST),
        (LEAST, LARGEST, 2**62),
        (3, 3, LEAST),
        (-4, 7, 3),
    ]
    names = ("s", "l", "d")
    for dtype, kind in (("int64", TensorProto.INT64), ("int32", TensorProto.INT32)):
        fits = [t for t in triples if all(abs(v) < HUGE for v in t)] if dtype == "int32" else triples
        fits = fits if dtype == "int64" else [*fits, (-HUGE, HUGE - 1, HUGE - 1), (HUGE - 3, HUGE - 1, 1)]
        yield one_op(
            "Range",
            {n: [] for n in names},
            [dict(zip(names, (scalar(v, dtype) for v in t), strict=True)) for t in fits],
            result=kind,
            label=dtype,
        )
    floats = [(0, 1, 0.25), (0, 1, 0), (1, 0, -0.5), (0, 1, np.nan), (np.nan, 1, 1), (0, np.nan, 1), (0, np.inf, 1)]
    floats += [(0, 1, np.inf), (0, 1, 1e-30), (0, 1e30, 1), (-np.inf, 0, 1), (0, -1, 1), (0, 1, -0.0), (0, 0, 0)]
    floats += [(0, 1, 0.1), (0, 1, 0.3), (2, 10.5, 1.5)]
    for dtype, kind in (("float32", TensorProto.FLOAT), ("float64", TensorProto.DOUBLE)):
        yield one_op(
            "Range",
            {n: [] for n in names},
            [dict(zip(names, (scalar(v, dtype) for v in t), strict=True)) for t in floats],
            result=kind,
            label=dtype,
        )
    # The limit is a symbolic size, the step too.
    yield _range_of_sizes("n", "1", [{"x": data(n)} for n in (0, 1, 4)])
    yield _range_of_sizes("n", "n", [{"x": data(n)} for n in (0, 1, 4)])
    yield _range_of_sizes("n", "0", [{"x": data(n)} for n in (0, 4)])
    for delta in (0, 1, -1):
        yield one_op(
            "Range",
            {"l": []},
            [{"l": scalar(v)} for v in (0, 3, -3, LARGEST)],
            {"s": scalar(0), "d": scalar(delta)},
            order=["s", "l", "d"],
            result=TensorProto.INT64,
            label=f"step {delta}",
        )


def _range_of_sizes(limit: str, step: str, calls: Sequence[Call]) -> Attack:
    steps = {"n": "n", "1": "one", "0": "zero"}
    text = f"""
        <ir_version: 8, opset_import: ["" : 18]>
        g (float[n] x) => (int64[m] y) <int64 zero = {{0}}, int64 one = {{1}}> {{
            s = Shape(x)
            n = Gather(s, zero)
            y = Range(zero, {steps[limit]}, {steps[step]})
        }}"""
    return Attack(f"Range: symbolic, step {step}", onnx.parser.parse_model(text), list(calls))
