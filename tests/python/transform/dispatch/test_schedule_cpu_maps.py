"""ScheduleCPU of ops that reduce nothing: the same numbers as TVM's loops, on every vector width."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.relax import op

import relax_hetero as rh
from relax_hetero.transform.dispatch.schedule_cpu import schedule_cpu
from seeds import fresh_rng
from tir.kernel_runs import VECTOR_NAMES, poisoned
from transform.scheduled_ops import (
    F32,
    I32,
    I64,
    Build,
    N,
    Operands,
    check,
    const,
    f32,
    formed,
    i64,
    not_scheduled,
    one_width_each,
    resize,
)

pytestmark = pytest.mark.sampled(7)


def shuffle(groups: int) -> Build:
    def build(x: relax.Var) -> relax.Expr:
        *outer, channels = [int(extent) for extent in x.ty.shape]
        split = op.reshape(x, (*outer, groups, channels // groups))
        return op.reshape(op.permute_dims(split, [*range(len(outer)), len(outer) + 1, len(outer)]), x.ty.shape)

    return build


# name -> (what is computed, operands)
CASES: dict[str, tuple[Build, Operands]] = {
    "one element": (lambda x: op.exp(x), [f32()]),
    "a row": (lambda x: op.nn.relu(x), [f32(37)]),
    "a chain": (lambda x, y: op.nn.relu(op.add(op.multiply(x, y), x)), [f32(3, 5, 19), f32(3, 5, 19)]),
    "values used twice": (lambda x: op.nn.silu(op.nn.silu(op.nn.silu(op.nn.silu(x)))), [f32(7, 33)]),
    "by channel, last": (
        lambda x, g, b: op.add(op.multiply(x, g), b),
        [f32(2, 7, 5, 21), f32(21), f32(21)],
    ),
    "by channel, first": (lambda x, g: op.nn.relu(op.multiply(x, g)), [f32(2, 21, 5, 7), f32(21, 1, 1)]),
    "outer sum": (lambda x, y: op.add(x, y), [f32(13, 1, 5), f32(1, 35, 1)]),
    "expensive and broadcast": (
        lambda x, v: op.multiply(x, op.rsqrt(op.add(op.abs(v), const(1.0)))),
        [f32(9, 40), f32(40)],
    ),
    "compare and select": (lambda x, y: op.where(op.greater(x, y), op.exp(x), y), [f32(11, 23), f32(11, 23)]),
    "bool": (lambda x, y: op.logical_and(op.less(x, y), op.isfinite(x)), [f32(11, 23), f32(23)]),
    "isnan": (lambda x: op.isnan(x), [f32(50)]),
    "integers": (
        lambda x, y: op.add(op.floor_divide(x, op.add(op.abs(y), const(1, I64))), y),
        [i64(9, 20), i64(9, 20)],
    ),
    "cast": (lambda x: op.astype(op.multiply(x, const(3.0)), I32), [f32(9, 20)]),
    "narrow": (lambda x: op.astype(op.clip(op.multiply(x, const(50.0)), -100, 100), "int8"), [f32(9, 77)]),
    "half": (lambda x: op.tanh(op.astype(x, "float16")), [f32(9, 20)]),
    "double": (lambda x: op.exp(op.astype(x, "float64")), [f32(9, 20)]),
    "functions": (lambda x: op.add(op.erf(x), op.add(op.sin(x), op.log(op.abs(x)))), [f32(5, 50)]),
    "inverse functions": (lambda x: op.add(op.atan(x), op.asinh(x)), [f32(5, 50)]),
    "round": (lambda x: op.add(op.round(x), op.floor(x)), [f32(77)]),
    "power": (lambda x, y: op.power(op.abs(x), y), [f32(33), f32(33)]),
    "concat, last": (
        lambda x, y, z: op.concat([x, y, z], 3),
        [f32(1, 6, 5, 17), f32(1, 6, 5, 3), f32(1, 6, 5, 40)],
    ),
    "concat, first": (lambda x, y: op.concat([x, y], 1), [f32(1, 3, 5, 7), f32(1, 4, 5, 7)]),
    "concat of a row": (lambda x, y: op.concat([x, y], 0), [f32(19), f32(33)]),
    "concat and relu": (lambda x, y: op.nn.relu(op.concat([op.exp(x), y], 1)), [f32(5, 17), f32(5, 20)]),
    "split": (lambda x: op.split(x, 3, 1), [f32(2, 12, 9)]),
    "slice": (lambda x: op.strided_slice(x, [1, 2], [2, 3], [20, 37], [1, 1]), [f32(3, 21, 40)]),
    "every second": (lambda x: op.strided_slice(x, [1], [1], [90], [2]), [f32(3, 91)]),
    "every third": (lambda x: op.strided_slice(x, [1], [0], [100], [3]), [f32(3, 100)]),
    "reversed": (lambda x: op.flip(x, 1), [f32(3, 53)]),
    "pad, channels last": (lambda x: op.nn.pad(x, [0, 0, 1, 2, 2, 1, 0, 0]), [f32(1, 9, 8, 20)]),
    "pad, channels first": (lambda x: op.nn.pad(x, [0, 0, 0, 0, 1, 2, 2, 1], pad_value=3.0), [f32(1, 2, 9, 33)]),
    "reflect": (lambda x: op.nn.pad(x, [0, 0, 3, 3], pad_mode="reflect"), [f32(4, 33)]),
    "reshape": (lambda x: op.nn.relu(op.reshape(x, (4, 21, 15))), [f32(3, 20, 21)]),
    "expand": (lambda x: op.broadcast_to(x, (4, 21, 15)), [f32(21, 1)]),
    "tile": (lambda x: op.tile(x, (2, 3)), [f32(5, 17)]),
    "repeat": (lambda x: op.repeat(x, 3, 1), [f32(5, 17)]),
    "tril": (lambda x: op.tril(x, 1), [f32(19, 23)]),
    "one hot": (
        lambda i: op.one_hot(i, relax.prim_value(tirx.FloatImm(F32, 1)), relax.prim_value(tirx.FloatImm(F32, 0)), 21),
        [i64(7)],
    ),
    "rows of a table": (lambda x, i: op.take(x, i, 0), [f32(50, 37), i64(2, 9)]),
    "columns of a table": (lambda x, i: op.take(x, i, 1), [f32(7, 50), i64(19)]),
    "gathered": (lambda x, i: op.gather_elements(x, i, 1), [f32(7, 50), i64(7, 9)]),
    "transpose": (lambda x: op.permute_dims(x, [1, 0]), [f32(37, 53)]),
    "transpose of integers": (lambda x: op.permute_dims(x, [1, 0]), [i64(33, 20)]),
    "transpose of bytes": (lambda x: op.permute_dims(op.astype(x, "int8"), [1, 0]), [f32(70, 90)]),
    "to channels last": (lambda x: op.permute_dims(x, [0, 2, 3, 1]), [f32(2, 19, 5, 9)]),
    "to channels first": (lambda x: op.permute_dims(x, [0, 3, 1, 2]), [f32(2, 5, 9, 35)]),
    "few channels": (lambda x: op.permute_dims(x, [0, 2, 3, 1]), [f32(1, 3, 14, 15)]),
    "heads": (lambda x: op.permute_dims(x, [0, 2, 1, 3]), [f32(1, 13, 4, 20)]),
    "shuffle": (
        lambda x: op.reshape(op.permute_dims(op.reshape(x, (1, 6, 5, 3, 8)), [0, 1, 2, 4, 3]), (1, 6, 5, 24)),
        [f32(1, 6, 5, 24)],
    ),
    "shuffle of a row": (shuffle(3), [f32(1, 6, 5, 72)]),
    "shuffle in pairs": (lambda x: op.nn.relu(shuffle(2)(x)), [f32(1, 4, 3, 90)]),
    "shuffle, large": (shuffle(4), [f32(3, 40, 40, 272)]),
    "shuffle, ragged": (shuffle(5), [f32(2, 4, 3, 35)]),
    "transpose and add": (
        lambda x, y: op.add(op.permute_dims(x, [2, 0, 1]), y),
        [f32(20, 33, 45), f32(45, 20, 33)],
    ),
    "resize nearest": (resize("NHWC", "nearest_neighbor", (11, 13)), [f32(1, 5, 6, 19)]),
    "resize to twice": (resize("NCHW", "nearest_neighbor", (10, 42)), [f32(1, 3, 5, 21)]),
    "resize linear": (resize("NHWC", "linear", (11, 13)), [f32(1, 5, 6, 19)]),
    "resize linear, channels first": (resize("NCHW", "linear", (11, 33)), [f32(1, 3, 5, 6)]),
    "rows, symbolic": (lambda x, y: op.nn.relu(op.add(x, y)), [f32(N, 33), f32(33)]),
    "columns, symbolic": (lambda x, y: op.multiply(op.exp(x), y), [f32(3, N), f32(3, 1)]),
    "transpose, symbolic": (lambda x: op.permute_dims(x, [1, 0]), [f32(N, 33)]),
    "to channels last, symbolic": (lambda x: op.permute_dims(x, [0, 2, 3, 1]), [f32(2, 19, N, 9)]),
    "bytes to channels first, symbolic": (
        lambda x: op.permute_dims(op.astype(x, "int8"), [0, 3, 1, 2]),
        [f32(2, N, 9, 35)],
    ),
    "concat, symbolic": (lambda x, y: op.concat([x, y], 0), [f32(N, 9), f32(4, 9)]),
}


@pytest.mark.parametrize(("name", "width"), one_width_each(CASES))
def test_numbers(name: str, width: str) -> None:
    check(*CASES[name], [width], fresh_rng())


def test_transposes_smaller_and_larger_than_a_tile() -> None:
    rows, columns = tirx.Var("rows", "int64"), tirx.Var("columns", "int64")
    scheduled = schedule_cpu(formed(lambda x: op.permute_dims(x, [1, 0]), [f32(rows, columns)], VECTOR_NAMES[0]))
    with not_scheduled():
        machine = rh.vm.VirtualMachine(rh.compile(scheduled))
    for shape in ((1, 1), (3, 40), (40, 3), (4, 4), (16, 17), (33, 70)):
        x = fresh_rng().standard_normal(shape).astype("float32")
        out = poisoned(shape[::-1], "float32")
        machine["main"](x, out=out)
        np.testing.assert_array_equal(out.numpy(), x.T)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_on_every_width(name: str) -> None:
    check(*CASES[name], VECTOR_NAMES, fresh_rng())
