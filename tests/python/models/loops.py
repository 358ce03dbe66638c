"""A loop that collects rows until a condition holds, beside NonZero and a shape that is read."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser

LOOP_INPUTS = {"trips": np.array(1 << 40), "x": np.array([1, -0.0, 2], "float32"), "limit": np.array(100, "float32")}


def collecting_loop() -> onnx.ModelProto:
    """The model, for `LOOP_INPUTS`."""
    return onnx.parser.parse_model("""
    <ir_version: 8, opset_import: ["" : 18]>
    net (int64 trips, float[3] x, float limit) => (float[3] sum, float[N, 3] rows, int64[1, M] places, int64[2] s) {
        sum, rows = Loop (trips, , x) <
          body = trip (int64 i, bool c, float[3] a) => (bool again, float[3] b, float[3] r) {
            b = Add(a, x)
            r = Identity(b)
            total = ReduceSum <keepdims = 0> (b)
            again = Less(total, limit)
        }>
        places = NonZero(x)
        s = Shape(rows)
    }""")
