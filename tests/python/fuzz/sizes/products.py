"""Attacks on products, convolutions, pooling and quantized tensors, whose operands' sizes have to agree."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx import TensorProto

from fuzz.sizes.attack import Attack, data, one_op


def products(rng: np.random.Generator) -> Iterator[Attack]:
    """Products and convolutions whose operands' sizes have to agree."""
    pairs = [((2, 3), (3, 2)), ((2, 3), (4, 2)), ((2, 4), (3, 2)), ((0, 3), (3, 2)), ((2, 0), (0, 2)), ((2, 1), (3, 2))]
    pairs += [((2, 3), (1, 2)), ((2, 0), (3, 2)), ((2, 3), (0, 2))]
    yield one_op("MatMul", {"x": ["n", "a"], "w": ["b", 2]}, [{"x": data(*p), "w": data(*q)} for p, q in pairs])
    yield one_op(
        "MatMul", {"x": ["n", "a"]}, [{"x": data(*p)} for p, _ in pairs], {"w": data(3, 2)}, label="constant weight"
    )
    yield one_op("MatMul", {"x": ["n", 3], "w": ["b", "c"]}, [{"x": data(2, 3), "w": data(*q)} for _, q in pairs])
    batches = [
        ((2, 2, 3), (2, 3, 2)),
        ((2, 2, 3), (3, 3, 2)),
        ((1, 2, 3), (3, 3, 2)),
        ((2, 2, 3), (1, 3, 2)),
        ((0, 2, 3), (1, 3, 2)),
    ]
    yield one_op("MatMul", {"x": ["p", 2, 3], "w": ["q", 3, 2]}, [{"x": data(*p), "w": data(*q)} for p, q in batches])
    vectors = [((3,), (3,)), ((3,), (4,)), ((0,), (0,)), ((1,), (3,))]
    yield one_op("MatMul", {"x": ["a"], "w": ["b"]}, [{"x": data(*p), "w": data(*q)} for p, q in vectors])
    yield one_op(
        "Gemm",
        {"x": ["n", "a"], "w": ["b", "m"], "c": ["k"]},
        [{"x": data(*p), "w": data(*q), "c": data(k)} for p, q in pairs for k in (2, 1, 3, 0)],
    )
    yield one_op(
        "Gemm",
        {"x": ["a", "n"], "w": ["b", "m"]},
        [{"x": data(*p), "w": data(*q)} for p, q in pairs],
        transA=1,
        transB=1,
        label="transposed",
    )
    yield one_op(
        "Einsum",
        {"x": ["n", "a"], "w": ["b", "m"]},
        [{"x": data(*p), "w": data(*q)} for p, q in pairs],
        equation="ij,jk->ik",
    )
    yield one_op(
        "Einsum", {"x": ["n", "a"]}, [{"x": data(*s)} for s in ((3, 3), (2, 3), (3, 2), (1, 3))], equation="ii->i"
    )
    yield one_op(
        "Einsum",
        {"x": ["a", "b", "c"], "w": ["d", "e"]},
        [{"x": data(*p), "w": data(*q)} for p, q in (((2, 3, 4), (4, 5)), ((2, 3, 4), (3, 5)), ((2, 3, 1), (4, 5)))],
        equation="bij,jk->bik",
        label="batched",
    )
    images = [{"x": data(n, c, 4, 4)} for n, c in ((1, 3), (2, 3), (1, 5), (1, 1), (1, 0), (0, 3), (1, 6), (1, 20000))]
    yield one_op("Conv", {"x": ["n", "c", 4, 4]}, images, {"w": data(2, 3, 3, 3)}, label="channels")
    yield one_op("Conv", {"x": ["n", "c", 4, 4]}, images, {"w": data(6, 1, 3, 3)}, label="depthwise", group=3)
    yield one_op(
        "Conv",
        {"x": [1, 2, "h", "w"]},
        [{"x": data(1, 2, h, w)} for h, w in ((4, 4), (3, 3), (2, 4), (1, 1), (0, 4))],
        {"k": data(2, 2, 3, 3)},
        label="image smaller than the kernel",
    )
    yield one_op(
        "Conv",
        {"x": [1, 3, 4, 4], "w": ["o", "i", 3, 3]},
        [{"x": data(1, 3, 4, 4), "w": data(o, i, 3, 3)} for o, i in ((2, 3), (2, 2), (2, 4), (0, 3), (1, 1))],
        label="weight given",
    )
    yield one_op(
        "Conv",
        {"x": [1, 3, 4, 4], "b": ["k"]},
        [{"x": data(1, 3, 4, 4), "b": data(k)} for k in (2, 1, 3, 0)],
        {"w": data(2, 3, 3, 3)},
        order=["x", "w", "b"],
        label="bias",
    )
    yield one_op("ConvTranspose", {"x": ["n", "c", 4, 4]}, images[:-1], {"w": data(3, 2, 3, 3)}, label="channels")
    yield one_op(
        "ConvTranspose",
        {"x": [1, 2, "h", 4]},
        [{"x": data(1, 2, h, 4)} for h in (1, 0, 4)],
        {"w": data(2, 2, 3, 3)},
        pads=[2, 0, 2, 0],
        label="all cut away",
    )
    small = [{"x": data(1, 2, h, w)} for h, w in ((4, 4), (3, 3), (2, 4), (1, 1), (0, 4))]
    for op in ("MaxPool", "AveragePool", "LpPool"):
        yield one_op(op, {"x": [1, 2, "h", "w"]}, small, kernel_shape=[3, 3])
        yield one_op(
            op, {"x": [1, 2, "h", "w"]}, small, kernel_shape=[2, 2], strides=[2, 2], pads=[1, 1, 0, 0], label="padded"
        )
    for op in ("GlobalAveragePool", "GlobalMaxPool"):
        yield one_op(op, {"x": ["n", "c", "h", "w"]}, [*small, {"x": data(0, 2, 2, 2)}, {"x": data(1, 0, 2, 2)}])
    bytes_of = {"x": ["n", "a"], "w": ["b", 2]}
    yield one_op(
        "MatMulInteger",
        bytes_of,
        [{"x": data(*p, dtype="uint8"), "w": data(*q, dtype="uint8")} for p, q in pairs],
        result=TensorProto.INT32,
    )
    for axis in (0, 1):
        yield one_op(
            "DequantizeLinear",
            {"x": ["a", "b"], "s": ["k"]},
            [{"x": data(2, 3, dtype="uint8"), "s": data(k)} for k in (1, 2, 3, 4, 0)],
            label=f"scales of axis {axis}",
            axis=axis,
        )
        yield one_op(
            "QuantizeLinear",
            {"x": ["a", "b"]},
            [{"x": data(*s)} for s in ((2, 3), (3, 2), (1, 1), (3, 3), (0, 2))],
            {"s": data(3)},
            result=TensorProto.UINT8,
            label=f"3 scales of axis {axis}",
            axis=axis,
        )
        yield one_op(
            "DequantizeLinear",
            {"x": ["a", "b"]},
            [{"x": data(*s, dtype="uint8")} for s in ((2, 3), (3, 2), (1, 1), (3, 3), (0, 2))],
            {"s": data(3)},
            label=f"3 scales of axis {axis}",
            axis=axis,
        )
