"""MelWeightMatrix: triangular filters over frequencies, evenly spaced on the mel scale."""

from __future__ import annotations

import math
from typing import Any

from tvm import relax, te, tirx

from ..elementwise import cast
from ..node import Node, Position, const, onnx_dtype
from ..required_sizes import as_expr
from ..run_time.numbers import dims_of_vector
from ..table import converts

_MEL = 2595 / math.log(10)  # factor of mel = 2595 log10(1 + hertz / 700)


def _double(number: Any) -> tirx.Expr:
    return tirx.const(number, "float64")


@converts("MelWeightMatrix")
def mel_weight_matrix(node: Node) -> relax.Expr:
    """Weights [frequencies, filters], also for dynamic parameters."""
    scalars = [node.emit(relax.op.reshape(node.tensor(index), (1,))) for index in range(5)]
    constants = [None if array is None else const(array.reshape(1)) for array in map(node.constant, range(3))]
    filters, length, rate = (
        dims_of_vector(node, value if constant is None else constant, name)[0]
        for value, constant, name in zip(scalars, constants, ("mel_filters", "dft_length", "sample_rate"), strict=False)
    )
    node.require(as_expr(filters) >= 0, f"has {filters} bins, expected at least 0")
    node.require(as_expr(length) >= 0, f"has a dft_length of {length}, expected at least 0")
    node.require(as_expr(rate) >= 1, f"has a sample_rate of {rate}, expected at least 1")
    numbers = [cast(node, value, "float64") for value in scalars]

    def bin_of(i: Position, *arguments: te.Tensor) -> tirx.Expr:
        count, size, hertz, low, high = arguments
        first, last = (_double(_MEL) * tirx.log(_double(1) + edge(0) / _double(700)) for edge in (low, high))
        step = (last - first) / (count(0) + _double(2))
        mel = first + tirx.Cast("float64", i[0]) * step
        frequency = _double(700) * (tirx.exp(mel / _double(_MEL)) - _double(1))
        row = tirx.floor((size(0) + _double(1)) * frequency / hertz(0))
        return tirx.Cast("int64", tirx.max(tirx.min(row, _double(2.0**40)), _double(-(2.0**40))))

    bins = node.kernel("mel_bins", bin_of, *numbers, shape=[as_expr(filters) + 2])
    dtype = onnx_dtype(node.attribute("output_datatype", 1))

    def weight(i: Position, edges: te.Tensor) -> tirx.Expr:
        row = i[0]
        left, middle, right = (edges(i[1] + offset) for offset in range(3))

        def part(above: tirx.Expr, below: tirx.Expr) -> tirx.Expr:
            return tirx.Cast("float64", above) / tirx.Cast("float64", tirx.max(below, as_expr(1)))

        rising = tirx.all(left < middle, row >= left, row <= middle)
        falling = tirx.all(middle < right, row >= middle, row < right)
        is_peak = tirx.all(left >= middle, row == middle)
        up = tirx.Select(rising, part(row - left, middle - left), tirx.Select(is_peak, _double(1), _double(0)))
        return tirx.Select(falling, part(right - row, right - middle), up).astype(dtype)

    frequencies = tirx.floordiv(as_expr(length), 2) + 1
    return node.kernel("mel_weights", weight, bins, shape=[frequencies, as_expr(filters)])
