"""SinkDequantize: bytes move instead of floats, quantizing undoes dequantizing, every user dequantizes for itself."""

import numpy as np
import pytest
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import check_pass, ir_module
from relax_hetero.encoding.expression import Expression
from relax_hetero.transform import RealizeVDevice, SinkDequantize
from relax_hetero.transform.quantize.sink_dequantize import is_inverse
from seeds import fresh_rng


@ir_module()
def Before(q: R.Tensor((1, 4, 6, 6), "uint8"), w: R.Tensor((4, 4, 1, 1), "float32")):
    with R.dataflow():
        wide = R.astype(q, "int32")
        shifted = R.subtract(wide, R.const(3, "int32"))
        floats = R.astype(shifted, "float32")
        x = R.multiply(floats, R.const(0.5, "float32"))
        m = R.nn.max_pool2d(x, [2, 2], [2, 2])
        divided = R.divide(m, R.const(0.5, "float32"))
        rounded = R.round(divided)
        moved = R.add(rounded, R.const(3.0, "float32"))
        clipped = R.clip(moved, 0, 255)
        p = R.astype(clipped, "uint8")
        flat = R.reshape(p, (1, 36))
        y = R.nn.conv2d(x, w)
        z = R.add(x, y)
        R.output(flat, z)
    return flat, z


@ir_module()
def Expected(q: R.Tensor((1, 4, 6, 6), "uint8"), w: R.Tensor((4, 4, 1, 1), "float32")):
    with R.dataflow():
        wide = R.astype(q, "int32")
        shifted = R.subtract(wide, R.const(3, "int32"))
        floats = R.astype(shifted, "float32")
        x = R.multiply(floats, R.const(0.5, "float32"))
        m = R.nn.max_pool2d(q, [2, 2], [2, 2])
        flat = R.reshape(m, (1, 36))
        y = R.nn.conv2d(x, w)
        wide_1 = R.astype(q, "int32")
        shifted_1 = R.subtract(wide_1, R.const(3, "int32"))
        floats_1 = R.astype(shifted_1, "float32")
        x_1 = R.multiply(floats_1, R.const(0.5, "float32"))
        z = R.add(x_1, y)
        R.output(flat, z)
    return flat, z


def test_the_passs_own_example():
    check_pass(SinkDequantize(), Before, Expected)


def test_joined_bytes_of_one_scale_stay_bytes():
    @ir_module()
    def Concat(a: R.Tensor((2, 3), "int8"), b: R.Tensor((2, 5), "int8")):
        with R.dataflow():
            af = R.astype(a, "float32")
            x = R.multiply(af, R.const(0.5, "float32"))
            bf = R.astype(b, "float32")
            y = R.multiply(bf, R.const(0.5, "float32"))
            both = R.concat((x, y), axis=1)
            turned = R.permute_dims(both, [1, 0])
            z = R.exp(turned)
            R.output(z)
        return z

    @ir_module()
    def Joined(a: R.Tensor((2, 3), "int8"), b: R.Tensor((2, 5), "int8")):
        with R.dataflow():
            both = R.concat((a, b), axis=1)
            turned = R.permute_dims(both, [1, 0])
            tf = R.astype(turned, "float32")
            x = R.multiply(tf, R.const(0.5, "float32"))
            z = R.exp(x)
            R.output(z)
        return z

    assert_structural_equal(SinkDequantize()(Concat), Joined)


def test_joined_bytes_of_two_scales_become_floats():
    @ir_module()
    def Concat(a: R.Tensor((2, 3), "int8"), b: R.Tensor((2, 5), "int8")):
        with R.dataflow():
            af = R.astype(a, "float32")
            x = R.multiply(af, R.const(0.5, "float32"))
            bf = R.astype(b, "float32")
            y = R.multiply(bf, R.const(0.25, "float32"))
            both = R.concat((x, y), axis=1)
            R.output(both)
        return both

    assert SinkDequantize()(Concat).same_as(Concat)


def test_bytes_go_to_another_device():
    @ir_module("llvm", "llvm:1")
    def Floats(q: R.Tensor((2, 3), "int8", "llvm:0")):
        with R.dataflow():
            qf = R.astype(q, "float32")
            x = R.multiply(qf, R.const(0.5, "float32"))
            there = R.to_vdevice(x, "llvm:1")
            y = R.exp(there)
            R.output(y)
        return y

    @ir_module("llvm", "llvm:1")
    def Bytes(q: R.Tensor((2, 3), "int8", "llvm:0")):
        with R.dataflow():
            there = R.to_vdevice(q, "llvm:1")
            qf: R.Tensor((2, 3), "float32", "llvm:1") = R.astype(there, "float32")
            x: R.Tensor((2, 3), "float32", "llvm:1") = R.multiply(qf, R.const(0.5, "float32"))
            y = R.exp(x)
            R.output(y)
        return y

    realized = RealizeVDevice()(Floats)
    assert_structural_equal(SinkDequantize()(realized), RealizeVDevice()(Bytes))


@pytest.mark.parametrize("squared, scale", [(False, -0.5), (True, 0.5)])
def test_the_greatest_byte_need_not_be_the_greatest_number(squared, scale):
    @ir_module()
    def Pool(q: R.Tensor((1, 1, 4, 4), "int8")):
        with R.dataflow():
            qf = R.astype(q, "float32")
            x = R.multiply(qf, qf if squared else R.const(scale, "float32"))
            m = R.nn.max_pool2d(x, [2, 2])
            y = R.exp(m)
            R.output(y)
        return y

    assert SinkDequantize()(Pool).same_as(Pool)


def test_scales_per_channel_and_results_stay():
    @ir_module()
    def PerChannel(q: R.Tensor((2, 3), "int8"), s: R.Tensor((3,), "float32")):
        with R.dataflow():
            qf = R.astype(q, "float32")
            x = R.multiply(qf, s)
            y = R.permute_dims(x, [1, 0])
            one = R.multiply(qf, R.const(2.0, "float32"))
            R.output(y, one)
        return y, one

    assert SinkDequantize()(PerChannel).same_as(PerChannel)


@pytest.mark.parametrize(
    "quantize, is_same",
    [
        ("cast(clip(add(round(divide(x0, 0.25)), 3.0), 0.0, 255.0), 'uint8')", True),
        ("cast(clip(add(round(divide(x0, 0.25)), 4.0), 0.0, 255.0), 'uint8')", False),
        ("cast(clip(add(round(divide(x0, 0.5)), 3.0), 0.0, 255.0), 'uint8')", False),
        ("cast(clip(add(round(divide(x0, 0.25)), 3.0), 0.0, 99.0), 'uint8')", False),
        ("cast(clip(round(divide(x0, 0.25)), 0.0, 255.0), 'uint8')", False),
    ],
)
def test_expressions_that_undo_dequantization(quantize, is_same):
    dequantize = Expression.parse("multiply(cast(subtract(cast(x0, 'int32'), 3), 'float32'), 0.25)")
    assert is_inverse(Expression.parse(quantize), dequantize, "uint8") == is_same
    without = Expression.parse("multiply(cast(x0, 'float32'), 0.25)")
    assert is_inverse(Expression.parse("cast(clip(round(divide(x0, 0.25)), -128.0, 127.0), 'int8')"), without, "int8")


@pytest.mark.parametrize(
    "dequantize",
    [
        "multiply(multiply(cast(x0, 'float32'), 2.0), 0.25)",
        "multiply(subtract(cast(x0, 'float32'), 3.0), 0.25)",
        "multiply(cast(subtract(subtract(cast(x0, 'int32'), 3), 3), 'float32'), 0.25)",
        "multiply(cast(x0, 'float32'), cast(x0, 'float32'))",
    ],
)
@pytest.mark.parametrize("moved", ["round(divide(x0, 0.25))", "add(round(divide(x0, 0.25)), 3.0)"])
def test_numbers_that_went_through_more_are_other_bytes(dequantize, moved):
    quantize = Expression.parse(f"cast(clip({moved}, 0.0, 255.0), 'uint8')")
    assert not is_inverse(quantize, Expression.parse(dequantize), "uint8")


def test_every_byte_comes_back():
    """Assumption of `is_inverse`: (q - z) * s / s rounds to q - z in single precision, whatever the scale."""
    random = fresh_rng()
    codes = np.arange(-255, 256, dtype="float32")
    for scale in np.exp(random.uniform(-20, 20, 2000)).astype("float32"):
        np.testing.assert_array_equal(np.round(codes * scale / scale), codes)
