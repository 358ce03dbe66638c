"""ScheduleCPU of reductions, pools, norms and products: the same numbers as TVM's loops, on every vector width."""

from __future__ import annotations

from typing import Any

import pytest
from tvm.relax import op

from seeds import fresh_rng
from tir.kernel_runs import VECTOR_NAMES
from transform.scheduled_ops import Build, N, Operands, check, f32, i32, i64, one_width_each, pool

pytestmark = pytest.mark.sampled(7)

CHANNELS_LAST = {"data_layout": "NHWC", "kernel_layout": "HWOI"}


def conv2d(**attributes: Any) -> Build:
    return lambda x, w: op.nn.conv2d(x, w, **attributes)


# name -> (what is computed, operands)
CASES: dict[str, tuple[Build, Operands]] = {
    "sum of rows": (lambda x: op.sum(x, -1), [f32(9, 1000)]),
    "sum of short rows": (lambda x: op.sum(x, -1), [f32(9, 11)]),
    "sum of tiny rows": (lambda x: op.sum(x, -1), [f32(40, 3)]),
    "sum of columns": (lambda x: op.sum(x, 0), [f32(29, 100)]),
    "sum of all": (lambda x: op.sum(x), [f32(9, 5, 37)]),
    "mean, channels last": (lambda x: op.mean(x, [1, 2], keepdims=True), [f32(2, 7, 7, 83)]),
    "mean, channels first": (lambda x: op.mean(x, [2, 3], keepdims=True), [f32(2, 83, 7, 7)]),
    "max of the middle": (lambda x: op.max(x, 1), [f32(5, 19, 33)]),
    "min of rows": (lambda x: op.min(x, -1), [f32(5, 133)]),
    "product": (lambda x: op.prod(x, -1), [f32(5, 33)]),
    "mean of integers": (lambda x: op.sum(x, 0), [i64(9, 37)]),
    "variance": (lambda x: op.variance(x, -1), [f32(9, 133)]),
    "argmax of rows": (lambda x: op.argmax(x, -1), [f32(5, 133)]),
    "argmin of columns": (lambda x: op.argmin(x, 0), [f32(21, 35)]),
    "square and sum": (lambda x: op.sqrt(op.sum(op.multiply(x, x), -1, keepdims=True)), [f32(9, 100)]),
    "normalized by length": (
        lambda x: op.divide(x, op.sqrt(op.sum(op.multiply(x, x), -1, keepdims=True))),
        [f32(9, 100)],
    ),
    "max pool": (pool("max", "NHWC", 3, 2, 1), [f32(1, 17, 15, 37)]),
    "max pool, ceil": (pool("max", "NHWC", 3, 2, 0, ceil_mode=True), [f32(1, 16, 15, 70)]),
    "max pool, channels first": (pool("max", "NCHW", 3, 2, 1), [f32(1, 3, 37, 41)]),
    "max pool, small": (pool("max", "NCHW", 2, 2, 0), [f32(2, 3, 5, 7)]),
    "average pool": (pool("avg", "NHWC", 3, 1, 1), [f32(1, 9, 8, 20)]),
    "average pool, padding counts": (pool("avg", "NCHW", 3, 1, 1, count_include_pad=True), [f32(1, 3, 9, 40)]),
    "large window": (pool("avg", "NHWC", 7, 1, 0), [f32(1, 7, 7, 33)]),
    "adaptive pool": (lambda x: op.nn.adaptive_avg_pool2d(x, (5, 3), layout="NHWC"), [f32(1, 10, 9, 20)]),
    "softmax of columns": (lambda x: op.nn.softmax(x, 1), [f32(2, 9, 37)]),
    "log softmax": (lambda x: op.nn.log_softmax(x, -1), [f32(9, 37)]),
    "layer norm": (lambda x, g, b: op.nn.layer_norm(x, g, b, [-1]), [f32(9, 37), f32(37), f32(37)]),
    "group norm": (
        lambda x, g, b: op.nn.group_norm(x, g, b, 4, 1, [2, 3]),
        [f32(2, 12, 5, 9), f32(12), f32(12)],
    ),
    "matmul": (lambda x, y: op.matmul(x, y), [f32(13, 35), f32(35, 41)]),
    "matmul, transposed": (lambda x, y: op.matmul(x, op.permute_dims(y)), [f32(13, 35), f32(41, 35)]),
    "convolution": (conv2d(padding=(1, 1)), [f32(1, 5, 11, 21), f32(7, 5, 3, 3)]),
    "strided convolution": (
        conv2d(strides=(2, 2)),
        [f32(1, 5, 11, 41), f32(7, 5, 3, 3)],
    ),
    "depthwise": (
        lambda x, w: op.nn.conv2d(x, w, padding=(1, 1), groups=20, data_layout="NHWC", kernel_layout="HWOI"),
        [f32(1, 9, 8, 20), f32(3, 3, 20, 1)],
    ),
    "transposed convolution": (
        lambda x, w: op.nn.conv2d_transpose(x, w, strides=(2, 2)),
        [f32(1, 3, 6, 7), f32(3, 4, 3, 3)],
    ),
    "integer convolution": (conv2d(), [i32(1, 3, 6, 20), i32(4, 3, 3, 3)]),
    "sum, symbolic": (lambda x: op.sum(x, -1), [f32(5, N)]),
    "mean of columns, symbolic": (lambda x: op.mean(x, 0), [f32(N, 20)]),
    "pool, symbolic": (pool("max", "NHWC", 3, 2, 1), [f32(N, 9, 9, 20)]),
}


@pytest.mark.parametrize(("name", "width"), one_width_each(CASES))
def test_numbers(name: str, width: str) -> None:
    check(*CASES[name], [width], fresh_rng())


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_on_every_width(name: str) -> None:
    check(*CASES[name], VECTOR_NAMES, fresh_rng())
