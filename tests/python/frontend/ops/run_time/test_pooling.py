"""Pooling with sizes rounded up, of images whose sizes only a call knows, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx.parser
import onnxruntime

import relax_hetero as rh

_NODES = [
    "MaxPool <kernel_shape = [3, 3], strides = [2, 2], ceil_mode = 1>",
    "MaxPool <kernel_shape = [2, 2], strides = [3, 3], pads = [1, 1, 1, 1], ceil_mode = 1>",
    "AveragePool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1], ceil_mode = 1>",
    "AveragePool <kernel_shape = [3, 2], strides = [2, 2], pads = [1, 0, 1, 0], ceil_mode = 1, count_include_pad = 1>",
]


def test_ceil_mode_of_symbolic_sizes() -> None:
    body = "\n".join(f"y{i} = {node} (x)" for i, node in enumerate(_NODES))
    outputs = ", ".join(f"float[b, 2, k{i}, l{i}] y{i}" for i in range(len(_NODES)))
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 19]>
        g (float[b, 2, h, w] x) => ({outputs}) {{ {body} }}""")
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    for height, width in [(5, 6), (7, 9), (8, 4), (11, 10)]:
        x = np.random.default_rng(height).standard_normal((2, 2, height, width)).astype("float32")
        for node, actual, expected in zip(_NODES, main(x), session.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-5, atol=1e-6, err_msg=f"{node} {x.shape}")
