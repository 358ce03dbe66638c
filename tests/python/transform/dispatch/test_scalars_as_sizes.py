"""A fused function that reads a symbolic size as a number and has others in its shape."""

import numpy as np
from onnx import parser

import relax_hetero as rh


def test_a_mask_over_past_and_new_positions():
    """The mask that decoders with a cache compute: numbers of rows times a size of another input, plus positions."""
    model = parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[b, past] x, float[seq] y, int64[b, total] mask) => (int64[b, n] z) {
            zero = Constant<value_int = 0>() one = Constant<value_int = 1>()
            first = Constant<value_ints = [0]>() second = Constant<value_ints = [1]>()
            sx = Shape(x) sy = Shape(y) sm = Shape(mask)
            b = Gather<axis = 0>(sx, zero) past = Gather<axis = 0>(sx, one) seq = Gather<axis = 0>(sy, zero)
            total = Gather<axis = 0>(sm, one)
            length = Add(past, seq)
            positions = Range(zero, length, one)
            row = Unsqueeze(positions, first)
            rows = Range(zero, b, one)
            column = Unsqueeze(rows, second)
            starts = Mul(column, total)
            z = Add(row, starts)
        }""")
    machine = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))
    actual = machine["main"](np.zeros((2, 3), "float32"), np.zeros(2, "float32"), np.zeros((2, 5), "int64"))
    np.testing.assert_array_equal(actual.numpy(), np.arange(5) + 5 * np.arange(2)[:, None])
