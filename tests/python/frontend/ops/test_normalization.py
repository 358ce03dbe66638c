"""Softmax and normalizations: statistics as outputs, every axis, half precision."""

import numpy as np
import pytest

from frontend.ops.checking import check, node_model, run, uniform


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize(("opset", "axis"), [(13, -2), (13, 0), (12, 1), (11, 0)])
def test_softmax_family(op, opset, axis):
    check(op, uniform(3, 4, 5), opset=opset, axis=axis)


def test_softmax_in_half_precision():
    check("Softmax", uniform(4, 300, dtype="float16"), reference="onnx", rtol=5e-3)


def test_hardmax_marks_the_first_of_equals():
    check("Hardmax", np.array([[1, 3, 3, 2], [0, 0, 0, 0]], "float32"), axis=1)


@pytest.mark.parametrize("axis", [0, 1, -1, -2])
def test_layer_normalization_puts_out_mean_and_deviation(axis):
    data = uniform(3, 4, 5)
    shape = data.shape[axis:] if axis else data.shape
    operands = [data, uniform(*shape), uniform(*shape, low=-1)]
    check("LayerNormalization", *operands, outputs=3, axis=axis, epsilon=1e-4)
    check("LayerNormalization", *operands[:2], constant=[1], axis=axis)


def test_layer_normalization_in_half_precision():
    operands = [uniform(3, 8, dtype="float16"), uniform(8, dtype="float16")]
    check("LayerNormalization", *operands, reference="onnx", rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rms_normalization(axis):
    data = uniform(3, 4, 5)
    check("RMSNormalization", data, uniform(*data.shape[axis:]), opset=23, reference="onnx", axis=axis)


@pytest.mark.parametrize("opset", [18, 21])
def test_group_normalization(opset):
    size = 2 if opset == 18 else 6
    check("GroupNormalization", uniform(2, 6, 3, 5), uniform(size), uniform(size, low=0), opset=opset, num_groups=2)


def test_instance_normalization():
    check("InstanceNormalization", uniform(2, 3, 5, 4), uniform(3), uniform(3, low=0), opset=17)


def test_batch_normalization_in_training():
    operands = [uniform(4, 3, 5), *(uniform(3, low=low, high=2) for low in (-1, 0, -2, 0.1))]
    check("BatchNormalization", *operands, opset=15, outputs=3, training_mode=1, momentum=0.8, reference="onnx")


def test_batch_normalization():
    operands = [uniform(4, 3, 5), *(uniform(3, low=low, high=2) for low in (-1, 0, -2, 0.1))]
    check("BatchNormalization", *operands, opset=15, constant=[1, 2, 3, 4])


def test_batch_normalization_of_halves_gives_halves():
    operands = [uniform(4, 3, 5), *(uniform(3, low=low, high=2) for low in (-1, 0, -2, 0.1))]
    check("BatchNormalization", *(operand.astype("float16") for operand in operands), opset=15, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_lrn_with_even_and_odd_windows(size):
    data = uniform(2, 7, 3, 4)
    (got,) = run(*node_model("LRN", [data], 18, size=size, alpha=0.5, beta=0.6, bias=1.5))
    before, after = (size - 1) // 2, size // 2
    squares = [(data[:, max(c - before, 0) : c + after + 1] ** 2).sum(axis=1, keepdims=True) for c in range(7)]
    want = data / (1.5 + 0.5 / size * np.concatenate(squares, axis=1)) ** 0.6
    np.testing.assert_allclose(got, want, rtol=1e-4)


@pytest.mark.parametrize("p", [1, 2])
def test_lp_normalization(p):
    check("LpNormalization", uniform(3, 4, 5), opset=22, axis=1, p=p)
    (zeros,) = run(*node_model("LpNormalization", [np.zeros((2, 3), "float32")], 22, axis=1, p=p))
    assert not zeros.any()


def test_mean_variance_normalization():
    check("MeanVarianceNormalization", uniform(2, 3, 4, 5) + np.float32(50), axes=[0, 2], rtol=5e-3)
