"""Floats of 8 bits on CPUs against ml_dtypes, with all codes; types without arithmetic are refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tvm import relax

import relax_hetero as rh
from marks import slow_but_for

TYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
COMPUTED = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": np.divide,
    "maximum": np.maximum,
    "equal": np.equal,
    "less": np.less,
}
BITS = np.tile([True, False], 8)


def module(emit, dtype, count=2, shape=(16, 16)):
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{index}", relax.TensorType(shape, dtype)) for index in range(count)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.Tuple([builder.emit(each) for each in emit(*params)]))
        builder.emit_func_output(result)
    return builder.get()


def results(mod, *arrays):
    with np.errstate(all="ignore"):
        return [found.numpy() for found in rh.vm.VirtualMachine(rh.compile(mod))["main"](*arrays)]


def codes(dtype):
    """All codes, and all of them in an order in which each meets another."""
    array = np.arange(256, dtype="uint8").view(getattr(ml_dtypes, dtype)).reshape(16, 16)
    return array, np.roll(array, 37).T.copy()


def same(actual, expected):
    """Equal, signs of zeros aside; any NaN is like another."""
    np.testing.assert_array_equal(actual.astype("float32"), expected.astype("float32"))
    assert actual.dtype == expected.dtype


@pytest.mark.parametrize("dtype", slow_but_for(TYPES, ["float8_e4m3fn"]))
def test_arithmetic_is_that_of_float32_rounded(dtype):
    def emit(a, b):
        ops = [getattr(relax.op, name)(a, b) for name in COMPUTED]
        return [*ops, relax.op.negative(a), relax.op.nn.relu(a)]

    a, b = codes(dtype)
    *actual, negative, relu = results(module(emit, dtype), a, b)
    with np.errstate(all="ignore"):
        for result, compute in zip(actual, COMPUTED.values(), strict=True):
            same(result, compute(a, b))
        same(negative, -a)
        same(relu, np.where(a < 0, np.zeros_like(a), a))


@pytest.mark.parametrize("dtype", slow_but_for([*TYPES, "float8_e8m0fnu"], ["float8_e5m2"]))
def test_moves_keep_each_code_and_casts_its_number(dtype):
    def emit(a, b):
        halves = relax.op.split(a, 2, axis=1)
        index = relax.const(np.array([3, 1]))
        moved = [relax.op.permute_dims(a), relax.op.concat([a, b], axis=1), relax.op.where(relax.const(BITS), a, b)]
        moved += [relax.op.take(a, index, axis=0), relax.op.strided_slice(a, [0], [1], [9]), relax.op.tile(a, (2, 1))]
        return [*moved, relax.TupleGetItem(halves, 1), relax.op.astype(a, "float32"), relax.op.astype(a, "float16")]

    a, b = codes(dtype)
    *actual, single, half = results(module(emit, dtype), a, b)
    x, y = a.view("uint8"), b.view("uint8")
    expected = [x.T, np.concatenate([x, y], 1), np.where(BITS, x, y), x[[3, 1]], x[1:9], np.tile(x, (2, 1)), x[:, 8:]]
    for result, moved in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(result.view("uint8"), moved)
    with np.errstate(all="ignore"):
        same(single, a.astype("float32"))
        same(half, a.astype("float32").astype("float16"))


@pytest.mark.parametrize("dtype", slow_but_for(TYPES, ["float8_e5m2"]))
def test_casts_round(dtype):
    numbers = np.random.default_rng(0).normal(0, 100, (16, 16)).astype("float32")
    numbers[0, :6] = np.inf, -np.inf, np.nan, 1e30, 1e-30, 0
    actual = results(module(lambda x: [relax.op.astype(x, dtype)], "float32", 1), numbers)[0]
    with np.errstate(all="ignore"):
        same(actual, numbers.astype(getattr(ml_dtypes, dtype)))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("add", "int4"),
        ("equal", "uint4"),
        ("permute_dims", "int2"),
        ("add", "float4_e2m1fn"),
        ("cumsum", "float8_e5m2"),
        ("multiply", "float8_e8m0fnu"),
        ("subtract", "bool"),
        ("sum", "bool"),
    ],
)
def test_other_arithmetic_is_refused_by_name(name, dtype):
    count = 2 if name in ("add", "equal", "multiply", "subtract") else 1
    mod = module(lambda *x: [getattr(relax.op, name)(*x)], dtype, count)
    with pytest.raises(
        rh.BuildError, match=f"relax.{name} of variable .* in function 'main' .* elements of type {dtype}"
    ):
        rh.compile(mod)
