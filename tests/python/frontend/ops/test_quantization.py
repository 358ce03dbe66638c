"""Quantization: rounding and saturation, scales per axis and per block, integer products; casts."""

import numpy as np
import pytest
from onnx import TensorProto, helper

from frontend.ops.checking import check, integers, node_model, refused, run, uniform


@pytest.mark.parametrize("dtype", ["uint8", "int8"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_quantize_and_dequantize_per_axis(dtype, axis):
    data = uniform(3, 4, 5, low=-40, high=40)
    scale, point = (
        uniform(data.shape[axis], low=0.05, high=0.4),
        integers(data.shape[axis], low=0, high=20, dtype=dtype),
    )
    check("QuantizeLinear", data, scale, point, axis=axis)
    check("DequantizeLinear", integers(3, 4, 5, low=0, high=120, dtype=dtype), scale, point, axis=axis)


def test_halves_are_rounded_to_even_and_values_held_in_range():
    data = np.array([0.5, 1.5, 2.5, -0.5, 300, -300], "float32")
    check("QuantizeLinear", data, np.array(1, "float32"), np.array(3, "uint8"), constant=[1, 2])


def test_blocks():
    data, scale = uniform(3, 8, low=-40, high=40), uniform(3, 4, low=0.2, high=0.4)
    point = integers(3, 4, low=0, high=9, dtype="int8")
    check("QuantizeLinear", data, scale, point, opset=21, axis=1, block_size=2, reference="onnx")
    codes = integers(3, 8, dtype="int8")
    check("DequantizeLinear", codes, scale, point, opset=21, axis=1, block_size=2, reference="onnx")


@pytest.mark.parametrize("low", [-3, 1, 0])
def test_dynamic_quantization(low):
    check("DynamicQuantizeLinear", uniform(3, 5, low=low, high=low + 4), outputs=3, atol=1)


def test_dynamic_quantization_of_zeros():
    check("DynamicQuantizeLinear", np.zeros((2, 3), "float32"), outputs=3)


def test_matmul_integer_with_zero_points_per_row_and_column():
    a, b = integers(3, 4, low=0, high=200, dtype="uint8"), integers(4, 5, low=0, high=100, dtype="int8")
    check("MatMulInteger", a, b, np.array(7, "uint8"), integers(5, low=0, high=9, dtype="int8"))
    points = np.array([1, 2, 3], "uint8")
    result = (a.astype("int32") - points[:, None]) @ b.astype("int32")
    (got,) = run(*node_model("MatMulInteger", [a, b, points], 18))
    np.testing.assert_array_equal(got, result)


@pytest.mark.parametrize("per_channel", [False, True])
def test_qlinear_conv(per_channel):
    scale = uniform(3, low=0.01, high=0.03) if per_channel else np.array(0.02, "float32")
    operands = [
        integers(1, 2, 6, 5, low=0, high=200, dtype="uint8"), np.array(0.05, "float32"), np.array(9, "uint8"),
        integers(3, 2, 3, 2, low=-50, high=50, dtype="int8"), scale, np.zeros(scale.shape, "int8"),
        np.array(0.4, "float32"), np.array(30, "uint8"), integers(3, low=-90, high=90, dtype="int32"),
    ]  # fmt: skip
    check("QLinearConv", *operands, constant=[1, 2, 3, 4, 5, 6, 7, 8], pads=[1, 0, 1, 1], strides=[2, 1], atol=1)


def test_qlinear_matmul():
    scale, point = np.array(0.05, "float32"), np.array(9, "uint8")
    a, b = (integers(*shape, low=0, high=200, dtype="uint8") for shape in ((3, 4), (4, 5)))
    operands = [a, scale, point, b, scale, point, np.array(1.1, "float32"), np.array(30, "uint8")]
    check("QLinearMatMul", *operands, atol=1)


def test_conv_integer():
    data, weight = (integers(*s, low=0, high=200, dtype="uint8") for s in ((1, 2, 6, 5), (3, 2, 3, 2)))
    check("ConvInteger", data, weight, np.array(4, "uint8"), pads=[1, 0, 1, 1])


@pytest.mark.parametrize("target", ["float16", "float64", "int8", "uint8", "int64", "bool"])
def test_cast(target):
    to = helper.np_dtype_to_tensor_dtype(np.dtype(target))
    check("Cast", uniform(3, 5, low=0, high=100), to=to)
    check("Cast", integers(3, 5, low=0, high=3, dtype="int32"), to=to)


def test_casts_that_would_round_twice_are_refused():
    refused("Cast", uniform(3, dtype="float64"), opset=19, to=TensorProto.FLOAT8E4M3FN, match="rounded twice")


def test_parameters_that_do_not_fit_are_refused():
    codes, scales = integers(2, 3, dtype="uint8"), uniform(3, low=0.1, high=1)
    two = np.zeros(2, "uint8")  # no zero point, but for its shape
    refused("DequantizeLinear", codes, scales, two, constant=[1, 2], match=r"shape \[2\], expected one number or \[3\]")
    refused("QuantizeLinear", uniform(2, 3), scales, two, constant=[1, 2], match=r"zero point of shape \[2\]")
    refused("QuantizeLinear", uniform(2, 3), np.array(0, "float32"), constant=[1], match="scale of 0")
    one, image, weight = (
        np.array(0.5, "float32"),
        integers(1, 2, 4, 4, dtype="uint8"),
        integers(3, 2, 1, 1, dtype="int8"),
    )
    zero = np.array(0, "uint8")
    inputs = (image, one, two, weight, one, np.array(0, "int8"), one, zero)
    refused("QLinearConv", *inputs, constant=[1, 2, 3, 4, 5, 6, 7], match=r"zero point of shape \[2\]")
    inputs = (image, one, zero, weight, one, np.zeros(2, "int8"), one, zero)
    refused("QLinearConv", *inputs, constant=[1, 2, 3, 4, 5, 6, 7], match=r"zero point of shape \[2\]")
