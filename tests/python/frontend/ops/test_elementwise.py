"""Elementwise ops and activations whose stock conversion is wrong or narrow."""

import numpy as np
import pytest

from frontend.ops.checking import check, integers, node_model, refused, run, uniform

SPECIAL = np.array([np.inf, -np.inf, np.nan, 0.0, -3.5], "float32")


@pytest.mark.parametrize("positive", [0, 1])
@pytest.mark.parametrize("negative", [0, 1])
def test_is_inf(positive, negative):
    check("IsInf", SPECIAL, opset=20, detect_positive=positive, detect_negative=negative)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_mod_of_floats_takes_the_sign_of_the_divisor(dtype):
    a = np.array([5.5, -5.5, 5.5, -5.5, -1, 1, 0], dtype)
    b = np.array([2, 2, -2, -2, np.inf, -np.inf, 3], dtype)
    check("Mod", a, b, reference="onnx")


def test_mod_takes_the_sign_of_the_dividend():
    check("Mod", integers(4, 5, dtype="int32"), np.array([3, -3, 2, -4, 5], "int32"), fmod=1)
    check("Mod", uniform(4, 5), np.array([0.7, -0.3, 2, -4, 5], "float32"), fmod=1)


@pytest.mark.parametrize("direction", ["LEFT", "RIGHT"])
@pytest.mark.parametrize("dtype", ["uint8", "uint32", "uint64", "int32"])
def test_shift_by_the_width_or_more(direction, dtype):
    data = np.array([1, 200 if dtype[0] == "u" else -100, 77, 255 if dtype[0] == "u" else -1, 16], dtype)
    amount = np.array([1, 7, 64, 100, 33], dtype)
    check("BitShift", data, amount, opset=11, reference="onnx", direction=direction)


@pytest.mark.parametrize("base", ["float32", "float16", "int32", "int64"])
@pytest.mark.parametrize("exponent", ["float32", "int32", "int64"])
def test_power_of_mixed_types(base, exponent):
    a = np.array([[1, 2, 3], [4, 5, 6]], base)
    check("Pow", a, np.array([2, 0, 3], exponent), opset=15)


def test_square_is_a_product():
    check("Pow", uniform(3, 4), np.array(2, "float32"), constant=[1])


@pytest.mark.parametrize("target", ["int32", "float32", "uint8"])
def test_bit_cast(target):
    from onnx import helper

    data = uniform(3, 5) if target == "int32" else integers(3, 5, dtype="int32")
    data = data > 0 if target == "uint8" else data
    check("BitCast", data, opset=26, reference="onnx", to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))


def test_mish_softplus_and_softsign_keep_small_values():
    data = np.linspace(-30, 30, 601, dtype="float32")
    x = data.astype("float64")
    softplus = np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)
    for op, want in (("Softplus", softplus), ("Mish", x * np.tanh(softplus)), ("Softsign", x / (1 + np.abs(x)))):
        (got,) = run(*node_model(op, [data], 18))
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
@pytest.mark.parametrize("op", ["Elu", "Celu", "LeakyRelu", "ThresholdedRelu", "HardSigmoid", "Selu"])
def test_activations_in_every_float_type(op, dtype):
    reference = "onnxruntime" if dtype == "float32" else "onnx"
    options = {"gamma": 0.7, "alpha": 1.3} if op == "Selu" else {"alpha": 0.4}
    check(op, uniform(3, 5, low=-20, high=20, dtype=dtype), opset=22, reference=reference, rtol=5e-3, **options)


def test_large_input_does_not_overflow_the_branch_not_taken():
    check("Elu", np.array([1000, -1000, 0], "float32"))


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5), (3, 1, 5), (5,), (1,), ()])
def test_prelu_slope_broadcasts(shape):
    check("PRelu", uniform(3, 4, 5), uniform(*shape))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64", "uint8"])
def test_clip_with_bounds_as_inputs(dtype):
    data = integers(4, 5, low=0, high=50, dtype=dtype)
    check("Clip", data, np.array(7, dtype), np.array(30, dtype), opset=13)
    check("Clip", data, None, np.array(30, dtype), opset=13, constant=[2])


def test_clip_with_bounds_as_attributes():
    check("Clip", uniform(3, 4), opset=6, min=-0.5)


@pytest.mark.parametrize("op", ["Max", "Min", "Sum", "Mean"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_variadic_ops_broadcast(op, count):
    operands = [uniform(2, 3, 4), uniform(4, low=-1), uniform(3, 1, high=1)][:count]
    check(op, *operands)


def test_integer_division_is_towards_zero():
    check("Div", np.array([7, -7, 7, -7], "int32"), np.array([2, 2, -2, -2], "int32"))


def test_division_by_a_constant_zero_is_refused():
    refused("Div", integers(3), np.array([1, 0, 2]), constant=[1], match="constant 0")


@pytest.mark.parametrize("op", ["Acosh", "Asin", "Atan", "Cosh", "Tan", "Erf"])
def test_rare_functions_in_half_precision(op):
    low, high = (1, 3) if op == "Acosh" else (-0.9, 0.9)
    check(op, uniform(4, 5, low=low, high=high, dtype="float16"), opset=22, reference="onnx", rtol=5e-3)


def test_dropout_does_nothing_in_inference():
    check("Dropout", uniform(3, 4), outputs=2)
    check("Dropout", uniform(3, 4), np.array(0.75, "float32"), np.array(False), outputs=2, constant=[1, 2])


@pytest.mark.parametrize("training", [True, False])
def test_dropout_in_training_draws_what_the_reference_draws(training):
    ratio = np.array(0.4, "float32")
    check("Dropout", uniform(5, 4), ratio, np.array(training), outputs=2, reference="onnx", seed=7)


def test_dropout_in_training_without_a_seed_is_refused():
    refused("Dropout", uniform(3, 4), np.array(0.5, "float32"), np.array(True), match="at random")
