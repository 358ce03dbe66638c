"""SetEncoding on convolutions of 8-bit integers, as ONNX's front end writes them: found, exact, nothing left over."""

from itertools import product

import numpy as np
import pytest
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from frontend.ops.checking import node_model
from modules import calls_of, ir_module, ops_of
from relax_hetero.op.encoded import CONV
from relax_hetero.transform import SetEncoding, VerifyEncodings
from relax_hetero.transform.ir.rewriting import op_name, walk_bindings
from seeds import fresh_rng

pytestmark = pytest.mark.sampled(6)

U8S8 = (
    "<uint8 * int8 -> int32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); b=1, c=4, x0={0}, x1={0}, n=2, k=4,"
    " w0=3, w1=3, y0=5, y1=5; strides=1x1, padding={1}, dilation=1x1, groups=1>"
)


def encoded(mod):
    after = SetEncoding()(mod)
    VerifyEncodings()(after)
    assert SetEncoding()(after).same_as(after)
    return after, ops_of(after["main"])


def random_bytes(random, dtype, *shape):
    return random.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape).astype(dtype)


def convolved(data, weight, strides, pads, groups):
    """The exact convolution of int64 tensors, padded with zeros."""
    (top, left, bottom, right), (n, _, *window) = pads, weight.shape
    padded = np.pad(data, ((0, 0), (0, 0), (top, bottom), (left, right)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, window, (2, 3))[:, :, :: strides[0], :: strides[1]]
    parts = zip(np.split(windows, groups, 1), np.split(weight, groups), strict=True)
    return np.concatenate([np.einsum("bcyxhw,nchw->bnyx", x, w) for x, w in parts], 1).reshape(
        data.shape[0], n, *windows.shape[2:4]
    )


def test_symmetric_data_are_padded_by_the_kernel():
    image, result = "conv2d[0]" + U8S8.format(5, "1x1x1x1"), "conv2d[2]" + U8S8.format(5, "1x1x1x1")
    weight = "conv2d[1]" + U8S8.format(5, "1x1x1x1")

    @ir_module()
    def Before(
        x: R.Tensor((1, 4, 5, 5), "uint8"), w: R.Tensor((2, 4, 3, 3), "int8"), s: R.Tensor((2, 1, 1, 1), "float32")
    ):
        with R.dataflow():
            a = R.multiply(R.astype(x, "float32"), R.const(0.5, "float32"))
            b = R.multiply(R.astype(w, "float32"), s)
            y = R.nn.conv2d(a, b, padding=1)
            R.output(y)
        return y

    @ir_module()
    def Expected(
        x: R.Tensor((1, 4, 5, 5), "uint8"), w: R.Tensor((2, 4, 3, 3), "int8"), s: R.Tensor((2, 1, 1, 1), "float32")
    ):
        with R.dataflow():
            data = R.hetero.set_encoding(x, image)
            rhs = R.hetero.set_encoding(w, weight)
            out = R.hetero.conv(data, rhs, encoding=result)
            total = R.hetero.unset_encoding(out, result)
            y_float = R.astype(total, "float32")
            along = R.reshape(s, (2,))
            scale = R.reshape(along, (2, 1, 1))
            both = R.multiply(R.const(0.5, "float32"), scale)
            y = R.multiply(y_float, both)
            R.output(y)
        return y

    assert_structural_equal(SetEncoding()(Before), Expected)


def test_data_with_a_zero_point_are_padded_with_it():
    image, result = "conv2d[0]" + U8S8.format(7, "0x0x0x0"), "conv2d[2]" + U8S8.format(7, "0x0x0x0")
    weight = "conv2d[1]" + U8S8.format(7, "0x0x0x0")

    @ir_module()
    def Before(x: R.Tensor((1, 4, 5, 5), "uint8"), w: R.Tensor((2, 4, 3, 3), "int8")):
        with R.dataflow():
            a = R.subtract(R.astype(x, "int32"), R.const(7, "int32"))
            b = R.astype(w, "int32")
            y = R.nn.conv2d(a, b, padding=1, out_dtype="int32")
            R.output(y)
        return y

    @ir_module()
    def Expected(x: R.Tensor((1, 4, 5, 5), "uint8"), w: R.Tensor((2, 4, 3, 3), "int8")):
        with R.dataflow():
            b = R.astype(w, "int32")
            padded = R.nn.pad(x, [0, 0, 0, 0, 1, 1, 1, 1], pad_value=7)
            data = R.hetero.set_encoding(padded, image)
            rhs = R.hetero.set_encoding(w, weight)
            out = R.hetero.conv(data, rhs, encoding=result)
            total = R.hetero.unset_encoding(out, result)
            wide = R.astype(w, "int32")
            columns = R.sum(wide, axis=[1, 2, 3])
            along = R.reshape(columns, (2, 1, 1))
            correction = R.multiply(along, R.const(7, "int32"))
            y = R.subtract(total, correction)
            R.output(y)
        return y

    after = SetEncoding()(Before)
    assert ops_of(after["main"]) == [op_name(b.value) for b in walk_bindings(Expected["main"]) if b.var.name != "b"]


SHAPES = (
    ((2, 5, 9, 7), (6, 5, 3, 2), 1),
    ((1, 6, 8, 9), (9, 2, 3, 3), 3),
    ((1, 7, 6, 6), (7, 1, 3, 3), 7),
    ((1, 4, 7, 5), (3, 4, 1, 1), 1),
)


@pytest.mark.parametrize("data_type, weight_type", list(product(("uint8", "int8"), repeat=2)))
@pytest.mark.parametrize("is_constant", [False, True])
def test_conv_integer_is_exact(data_type, weight_type, is_constant):
    """Also where zero points are known only at run time, and at the ends of their ranges."""
    random = fresh_rng()
    for number, (data_shape, weight_shape, groups) in enumerate(SHAPES):
        data, weight = random_bytes(random, data_type, *data_shape), random_bytes(random, weight_type, *weight_shape)
        limits = [np.iinfo(dtype) for dtype in (data_type, weight_type)]
        ends = [(i.min, i.max)[(number + side) % 2] for side, i in enumerate(limits)]
        points = [np.array(end, dtype) for end, dtype in zip(ends, (data_type, weight_type), strict=True)]
        pads, strides = [1, 0, 1, 1], [1 + number % 2, 1]
        constants = [1, 2, 3] if is_constant else []
        model, feeds = node_model(
            "ConvInteger", [data, weight, *points], 18, constant=constants, pads=pads, strides=strides, group=groups
        )
        wide = [x.astype("int64") - int(p) for x, p in zip((data, weight), points, strict=True)]
        mod = rh.from_onnx(model)
        if is_constant or weight_type == "int8":
            assert CONV in encoded(mod)[1]
        got = rh.vm.VirtualMachine(rh.compile(mod))["main"](*feeds.values()).numpy()
        np.testing.assert_array_equal(got, convolved(*wide, strides, pads, groups).astype("int32"))


def float_convolution(x, w, scales):
    """A convolution of dequantized operands; scales of the data have the shape given."""
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            scale = relax.const(np.ones(scales, "float32"))
            a = builder.emit(relax.op.multiply(relax.op.astype(x, "float32"), scale))
            y = builder.emit_output(relax.op.nn.conv2d(a, builder.emit(relax.op.astype(w, "float32"))))
        builder.emit_func_output(y)
    return builder.get()


@pytest.mark.parametrize(
    "data, weight, scales",
    [
        (((1, 4, 5, 5), "uint8"), ((2, 4, 3, 3), "int8"), (1, 4, 1, 1)),  # a scale per input channel
        (((1, 4, 5, 5), "uint8"), ((2, 4, 3, 3), "uint8"), (1,)),  # weights that are not known, and unsigned
        (((1, 4096, 3, 3), "uint8"), ((2, 4096, 3, 3), "int8"), (1,)),  # sums that int32 may not hold
    ],
)
def test_convolutions_that_stay_float(data, weight, scales):
    x, w = (relax.Var(name, relax.TensorType(*given)) for name, given in (("x", data), ("w", weight)))
    after, ops = encoded(float_convolution(x, w, scales))
    assert ops.count(CONV) == 1
    (conv,) = calls_of(CONV, after["main"])
    assert str(conv.attrs.encoding).startswith("conv2d[2]<float32 * float32 -> float32;")


@pytest.mark.parametrize("target", ["c", {"kind": "llvm", "mcpu": "x86-64"}])
def test_devices_without_a_kernel_compute_the_same(target):
    random = fresh_rng()
    data, weight = random_bytes(random, "uint8", 1, 3, 6, 5), random_bytes(random, "int8", 4, 3, 3, 3)
    model, feeds = node_model("ConvInteger", [data, weight, np.array(9, "uint8")], 18, constant=[1, 2], pads=[1] * 4)
    exe = rh.compile(rh.from_onnx(model, vdevices=[target]))
    got = rh.vm.VirtualMachine(exe)["main"](*feeds.values()).numpy()
    wide = data.astype("int64") - 9, weight.astype("int64")
    np.testing.assert_array_equal(got, convolved(*wide, [1, 1], [1] * 4, 1))
