"""Attacks on ops that read or write at places, and on images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from fuzz.sizes.attack import HUGE, LARGEST, LEAST, Attack, data, ints, one_op, scalar


def places(rng: np.random.Generator) -> Iterator[Attack]:
    """Ops that read or write at places, and count them."""
    for k in (0, 1, 3, 5, -1, HUGE, LARGEST):
        yield one_op(
            "TopK",
            {"x": ["n"]},
            [{"x": data(n)} for n in (3, 5, 0, 1)],
            {"k": ints(k)},
            outputs=2,
            results=[TensorProto.FLOAT, TensorProto.INT64],
            label=f"k = {k}",
        )
    yield one_op(
        "TopK",
        {"x": ["n"], "k": [1]},
        [{"x": data(n), "k": ints(k)} for n in (3, 0) for k in (0, 1, 3, 4, -1, HUGE, LARGEST, LEAST)],
        outputs=2,
        results=[TensorProto.FLOAT, TensorProto.INT64],
    )
    yield one_op(
        "TopK",
        {"x": [2, "n"]},
        [{"x": data(2, n)} for n in (3, 2, 1)],
        {"k": ints(2)},
        outputs=2,
        results=[TensorProto.FLOAT, TensorProto.INT64],
        label="rows",
    )
    for op in ("ArgMax", "ArgMin"):
        yield one_op(
            op,
            {"x": ["n", "m"]},
            [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0), (0, 0))],
            result=TensorProto.INT64,
            axis=0,
        )
        yield one_op(
            op,
            {"x": ["n", "m"]},
            [{"x": data(*s, dtype="int32")} for s in ((2, 3), (0, 3), (2, 0))],
            result=TensorProto.INT64,
            axis=1,
            label="integers",
            select_last_index=1,
        )
    for op in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceProd", "ReduceLogSumExp", "ReduceL2"):
        axes = {"a": ints(0)}
        yield one_op(op, {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (2, 0), (0, 0))], axes)
    yield one_op(
        "Gather",
        {"x": ["n", 2], "i": ["k"]},
        [{"x": data(n, 2), "i": ints(*i)} for n in (3, 0) for i in ((0,), (), (2, -1))],
    )
    yield one_op(
        "GatherElements",
        {"x": ["n", 2], "i": ["k", "m"]},
        [{"x": data(3, 2), "i": np.zeros(s, "int64")} for s in ((3, 2), (1, 2), (4, 2), (3, 3), (3, 1), (0, 2))],
    )
    yield one_op(
        "GatherND",
        {"x": ["n", "m"], "i": ["k", 2]},
        [{"x": data(*s), "i": np.zeros((k, 2), "int64")} for s in ((2, 3), (0, 3), (2, 0)) for k in (1, 0)],
    )
    yield one_op(
        "GatherND",
        {"x": ["b", "m"], "i": ["c", 1]},
        [{"x": data(b, 3), "i": np.zeros((c, 1), "int64")} for b, c in ((2, 2), (2, 3), (3, 2), (1, 2))],
        batch_dims=1,
        label="batches",
    )
    updates = [
        ((3, 2), (2, 2), (2, 2)),
        ((3, 2), (2, 2), (1, 2)),
        ((3, 2), (1, 2), (2, 2)),
        ((3, 2), (4, 2), (4, 2)),
        ((3, 2), (1, 3), (1, 3)),
    ]
    yield one_op(
        "ScatterElements",
        {"x": ["n", "m"], "i": ["a", "b"], "u": ["c", "d"]},
        [{"x": data(*x), "i": np.zeros(i, "int64"), "u": data(*u)} for x, i, u in updates],
    )
    updates = [
        ((3, 2), (2, 1), (2, 2)),
        ((3, 2), (2, 1), (1, 2)),
        ((3, 2), (2, 1), (2, 3)),
        ((3, 2), (2, 1), (2, 1)),
        ((3, 2), (0, 1), (0, 2)),
    ]
    yield one_op(
        "ScatterND",
        {"x": ["n", "m"], "i": ["a", 1], "u": ["c", "d"]},
        [{"x": data(*x), "i": np.zeros(i, "int64"), "u": data(*u)} for x, i, u in updates],
    )
    values = ints(0, 1)
    yield one_op(
        "OneHot",
        {"i": ["n"], "d": []},
        [{"i": ints(0, 1), "d": scalar(d)} for d in (3, 1, 0, -1, HUGE * 2, LARGEST, LEAST)],
        {"v": values},
        result=TensorProto.INT64,
    )
    for depth in (0, -1, 2**40):
        yield one_op(
            "OneHot",
            {"i": ["n"]},
            [{"i": ints(0, 1)}],
            {"d": scalar(depth), "v": values},
            result=TensorProto.INT64,
            label=f"depth {depth}",
        )
    yield one_op(
        "OneHot",
        {"i": ["n"], "v": ["k"]},
        [{"i": ints(0, 1), "v": data(k)} for k in (2, 1, 3, 0)],
        {"d": scalar(3)},
        order=["i", "d", "v"],
        label="values",
    )
    yield one_op("EyeLike", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3), (3, 3))])
    yield one_op("NonZero", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3))], result=TensorProto.INT64)
    yield one_op("Unique", {"x": ["n"]}, [{"x": data(n)} for n in (3, 1, 0)])
    yield one_op(
        "Compress",
        {"x": ["n", 2], "c": ["k"]},
        [{"x": data(n, 2), "c": np.ones(k, bool)} for n in (3, 0) for k in (3, 2, 4, 0, 9)],
        axis=0,
    )
    yield one_op(
        "Compress",
        {"x": ["n", 2], "c": ["k"]},
        [{"x": data(3, 2), "c": np.ones(k, bool)} for k in (3, 6, 7, 0)],
        label="flat",
    )
    boxes = {"b": [1, "n", 4], "s": [1, 1, "m"]}
    yield one_op(
        "NonMaxSuppression",
        boxes,
        [{"b": data(1, n, 4), "s": data(1, 1, m)} for n, m in ((3, 3), (3, 2), (2, 3), (0, 0))],
        {"k": ints(2)},
        result=TensorProto.INT64,
    )
    yield one_op(
        "NonMaxSuppression",
        {"b": [1, 3, 4], "s": [1, 1, 3], "k": [1]},
        [{"b": data(1, 3, 4), "s": data(1, 1, 3), "k": ints(k)} for k in (0, 1, 3, 9, -1, LARGEST, LEAST)],
        result=TensorProto.INT64,
        label="limit",
    )
    yield one_op(
        "RoiAlign",
        {"x": [1, 1, 4, 4], "r": ["n", 4], "b": ["m"]},
        [{"x": data(1, 1, 4, 4), "r": data(n, 4), "b": ints(*[0] * m)} for n, m in ((2, 2), (2, 1), (1, 2), (0, 0))],
        output_height=2,
        output_width=2,
    )
    yield one_op(
        "ReverseSequence",
        {"x": ["t", "b"], "l": ["n"]},
        [{"x": data(t, b), "l": ints(*[1] * n)} for t, b, n in ((3, 2, 2), (3, 2, 1), (3, 2, 3), (0, 2, 2))]
        + [{"x": data(3, 2), "l": ints(*v)} for v in ((4, 1), (0, 1), (-1, 2), (LARGEST, LEAST))],
    )
    for op in ("CumSum",):
        yield one_op(
            op, {"x": ["n"], "a": []}, [{"x": data(n), "a": scalar(a)} for n in (3, 0) for a in (0, -1, 1, -2)]
        )
        yield one_op(op, {"x": ["n", 2], "a": []}, [{"x": data(3, 2), "a": scalar(a)} for a in (0, 1, -1, 2)])
    yield one_op(
        "TensorScatter",
        {"x": ["b", "s", 2], "u": ["c", "t", 2], "i": ["k"]},
        [
            {"x": data(b, s, 2), "u": data(c, t, 2), "i": ints(*[0] * k)}
            for b, s, c, t, k in ((1, 4, 1, 2, 1), (1, 4, 2, 2, 1), (2, 4, 1, 2, 2), (1, 4, 1, 5, 1), (2, 4, 2, 2, 1))
        ],
        opset=24,
    )
    yield one_op(
        "MaxUnpool",
        {"x": [1, 1, 2, 2], "i": [1, 1, "h", "w"]},
        [{"x": data(1, 1, 2, 2), "i": np.zeros((1, 1, *s), "int64")} for s in ((2, 2), (1, 2), (3, 2))],
        kernel_shape=[2, 2],
        strides=[2, 2],
    )


def images(rng: np.random.Generator) -> Iterator[Attack]:
    """Resize and its kin, GridSample, windows and transforms."""
    sizes = [
        (1, 1, 4, 4),
        (1, 1, 8, 2),
        (1, 1, 0, 4),
        (1, 1, -1, 4),
        (1, 1, HUGE, HUGE),
        (1, 1, LARGEST, 1),
        (2, 1, 4, 4),
        (1, 1, 2, 2),
    ]
    for mode in ("nearest", "linear", "cubic"):
        yield one_op(
            "Resize",
            {"x": [1, 1, 2, 2], "z": [4]},
            [{"x": data(1, 1, 2, 2), "z": ints(*z)} for z in sizes],
            order=["x", "", "", "z"],
            label=f"sizes {mode}",
            mode=mode,
        )
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, h, w)} for h, w in ((2, 2), (4, 4), (1, 3), (0, 2))],
            {"z": ints(1, 1, 4, 4)},
            order=["x", "", "", "z"],
            label=f"n to 4 {mode}",
            mode=mode,
        )
    scales = [
        (1, 1, 2, 2),
        (1, 1, 0.5, 3),
        (1, 1, 0, 1),
        (1, 1, -1, 1),
        (1, 1, 1e9, 1e9),
        (1, 1, np.nan, 1),
        (1, 1, np.inf, 1),
    ]
    for mode in ("nearest", "linear"):
        yield one_op(
            "Resize",
            {"x": [1, 1, 2, 2], "f": [4]},
            [{"x": data(1, 1, 2, 2), "f": np.array(f, "float32")} for f in scales],
            order=["x", "", "f"],
            label=f"scales {mode}",
            mode=mode,
        )
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, h, w)} for h, w in ((2, 2), (4, 4), (1, 3), (0, 2))],
            {"f": np.array([1, 1, 2, 2], "float32")},
            order=["x", "", "f"],
            label=f"doubled {mode}",
            mode=mode,
        )
    for scale in scales[2:]:
        yield one_op(
            "Resize",
            {"x": [1, 1, "h", "w"]},
            [{"x": data(1, 1, 2, 2)}],
            {"f": np.array(scale, "float32")},
            order=["x", "", "f"],
            label=f"static scales {scale}",
        )
    yield one_op(
        "Resize",
        {"x": [1, 1, 2, 2]},
        [{"x": data(1, 1, 2, 2)}],
        {"z": ints(1, 1, HUGE, HUGE)},
        order=["x", "", "", "z"],
        label="static huge",
    )
    yield one_op(
        "Upsample",
        {"x": [1, 1, "h", "w"], "f": [4]},
        [{"x": data(1, 1, 2, 2), "f": np.array(f, "float32")} for f in scales],
        opset=9,
    )
    yield one_op(
        "GridSample",
        {"x": ["n", 1, 3, 3], "g": ["m", "h", "w", "k"]},
        [
            {"x": data(n, 1, 3, 3), "g": np.zeros(g, "float32")}
            for n, g in ((1, (1, 2, 2, 2)), (2, (1, 2, 2, 2)), (1, (2, 2, 2, 2)), (1, (1, 2, 2, 3)), (1, (1, 0, 2, 2)))
        ],
    )
    yield one_op(
        "AffineGrid",
        {"t": ["n", 2, 3], "z": [4]},
        [
            {"t": data(n, 2, 3), "z": ints(*z)}
            for n, z in ((1, (1, 1, 2, 2)), (2, (1, 1, 2, 2)), (1, (1, 1, -1, 2)), (1, (1, 1, HUGE, HUGE)))
        ],
        opset=20,
    )
    for op in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        yield one_op(op, {"n": []}, [{"n": scalar(n)} for n in (4, 1, 0, -1, LARGEST, 2**40)])
    yield one_op(
        "DFT",
        {"x": [1, "n", 1], "l": []},
        [{"x": data(1, n, 1), "l": scalar(k)} for n in (4, 0) for k in (4, 2, 6, 0, -1, LARGEST)],
        opset=20,
    )
    yield one_op("DFT", {"x": [1, "n", 1]}, [{"x": data(1, n, 1)} for n in (4, 1, 0, 3)], opset=20)
    yield one_op(
        "STFT",
        {"x": [1, "n", 1], "w": ["k"]},
        [{"x": data(1, n, 1), "w": data(k)} for n, k in ((8, 4), (4, 4), (3, 4), (8, 3))],
        {"s": scalar(2)},
        order=["x", "s", "w"],
    )
    yield one_op("Dropout", {"x": ["n", "m"]}, [{"x": data(*s)} for s in ((2, 3), (0, 3))])
    yield one_op(
        "Where",
        {"c": ["a"], "x": ["b"], "z": ["d"]},
        [
            {"c": np.ones(a, bool), "x": data(b), "z": data(d)}
            for a, b, d in ((3, 3, 3), (1, 3, 1), (3, 2, 3), (3, 1, 0), (0, 1, 1))
        ],
    )
    for op in ("Add", "Pow", "Max", "Equal"):
        kind = TensorProto.BOOL if op == "Equal" else TensorProto.FLOAT
        yield one_op(
            op,
            {"x": ["a", 2], "z": ["b", 2]},
            [{"x": data(a, 2), "z": data(b, 2)} for a, b in ((2, 2), (1, 3), (3, 1), (2, 3), (0, 1), (0, 2), (3, 2))],
            result=kind,
        )
    yield (
        one_op(
            "SequenceConstruct",
            {"x": ["a"]},
            [{"x": data(2)}],
            result=TensorProto.FLOAT,
            label="skipped",
        )
        if False
        else one_op("Identity", {"x": ["a"]}, [{"x": data(n)} for n in (0, 2)])
    )
