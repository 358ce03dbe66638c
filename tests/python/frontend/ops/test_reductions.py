"""Reductions: axes of every form, infinities, nothing to reduce, half precision, last and first indices."""

import numpy as np
import pytest

from frontend.ops.checking import check, integers, refused, uniform

INF = np.float32(np.inf)


@pytest.mark.parametrize("op", ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceSumSquare"])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_axes_input(op, keepdims):
    check(op, uniform(3, 5, 7), np.array([-1, 0]), constant=[1], keepdims=keepdims)


@pytest.mark.parametrize("op", ["ReduceL1", "ReduceL2", "ReduceLogSumExp"])
def test_axes_attribute(op):
    check(op, uniform(2, 5, 3), opset=13, axes=[1], keepdims=0)


def test_log_sum_of_positive_numbers():
    check("ReduceLogSum", uniform(4, 3, low=0.1), np.array([1]), constant=[1])


def test_all_axes_without_axes():
    check("ReduceMean", uniform(3, 2, 5))


def test_no_axes_and_noop_is_the_input():
    check("ReduceMax", uniform(3, 2), opset=20, noop_with_empty_axes=1)


def test_maximum_of_minus_infinities_is_minus_infinity():
    data = np.array([[-INF, -INF], [-INF, 1]], "float32")
    (largest,) = check("ReduceMax", data, np.array([1]), constant=[1], keepdims=0)
    assert largest[0] == -INF


def test_log_sum_exp_of_large_numbers():
    check("ReduceLogSumExp", np.array([[1000, 1000.5], [-1000, -999]], "float32"), np.array([1]), constant=[1])


def test_log_sum_exp_of_infinities():
    data = np.array([[-INF, -INF], [INF, 0]], "float32")
    (result,) = check("ReduceLogSumExp", data, np.array([1]), constant=[1], reference="onnxruntime")
    assert result.tolist() == [[-INF], [INF]]


@pytest.mark.parametrize(
    ("op", "value"),
    [("ReduceSum", 0.0), ("ReduceProd", 1.0), ("ReduceMax", -INF), ("ReduceMin", INF), ("ReduceLogSumExp", -INF)],
)
def test_reducing_nothing(op, value):
    (result,) = check(op, np.zeros((2, 0, 3), "float32"), np.array([1]), constant=[1], opset=20, reference="onnx")
    assert np.all(result == value)


def test_half_precision_is_accumulated_in_single():
    check("ReduceSum", np.full((1, 4096), 0.5, "float16"), np.array([1]), constant=[1], opset=13, reference="onnx")


def test_integers():
    check("ReduceMean", integers(3, 4, dtype="int32"), np.array([1]), constant=[1])
    check("ReduceMax", integers(3, 4, dtype="int8"), np.array([0]), constant=[1])


def test_booleans():
    check("ReduceMax", uniform(3, 4) > 0, np.array([0]), constant=[1], opset=20)


def test_symbolic_sizes():
    check("ReduceSum", uniform(3, 5, 2), np.array([1]), constant=[1], symbolic=[0])


def test_a_number_of_axes_known_only_when_the_model_runs_is_refused():
    refused("ReduceSum", uniform(3, 2), np.array([1]), symbolic=[1], match="number of its axes is only known when")


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
@pytest.mark.parametrize("select_last_index", [0, 1])
def test_arg_with_ties(op, select_last_index):
    data = integers(4, 5, 3, low=0, high=3, dtype="float32")
    check(op, data, axis=-2, keepdims=0, select_last_index=select_last_index)


def test_arg_max_of_minus_infinities_is_an_index():
    (index,) = check("ArgMax", np.full((2, 3), -INF), axis=1, reference="onnx")
    assert index.tolist() == [[0], [0]]
