"""Axes, pads and sizes that are inputs of a node, on the second of two devices."""

import itertools

import numpy as np
import onnx.parser
import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.checking import node_model, uniform

DATA = uniform(2, 3, 4)


def function_of(op, *inputs, opset=18, **options):
    """A node of symbolic data on the second device, as a function of its inputs."""
    model, _ = node_model(op, inputs, opset, symbolic=[0], **options)
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement={op: "vdevice:1"})))
    return lambda *values: vm["main"](*values).numpy()


def assert_refused(function, *values, match):
    with pytest.raises(rh.HeteroError, match=match) as caught:
        function(*values)
    assert "the_node" in str(caught.value)


@pytest.mark.parametrize("keepdims", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_axes_of_a_reduction(keepdims):
    total = function_of("ReduceSum", DATA, np.array([0, 1]), keepdims=keepdims)
    for data in (DATA, np.zeros((0, 3, 4), "float32"), np.zeros((2, 3, 0), "float32")):
        for axes in itertools.permutations((-3, 1, -1), 2):
            want = data.sum(axes, keepdims=bool(keepdims))
            got = total(data, np.array(axes))
            assert got.shape == want.shape
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    assert_refused(total, DATA, np.array([0, 3]), match="an axis is out of range for rank 3")
    assert_refused(total, DATA, np.array([0, -(2**63)]), match="an axis is out of range for rank 3")
    assert_refused(total, DATA, np.array([1, -2]), match="names an axis twice")


def test_a_mean_of_nothing_along_an_axis_that_a_call_names():
    mean = function_of("ReduceMean", DATA, np.array([0], "int64"))
    np.testing.assert_allclose(mean(DATA, np.array([-1])), DATA.mean(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(mean(DATA[:0], np.array([0])), np.zeros((1, 3, 4)))  # as ONNX Runtime
    assert mean(DATA[:0], np.array([1])).shape == (0, 1, 4)


@pytest.mark.slow
def test_a_running_sum_along_an_axis_that_a_call_names():
    total = function_of("CumSum", DATA, np.array(0, "int32"), opset=14, reverse=1)
    for axis in range(-3, 3):
        want = np.flip(np.flip(DATA, axis).cumsum(axis), axis)
        np.testing.assert_allclose(total(DATA, np.array(axis, "int32")), want, rtol=1e-5, atol=1e-6)
    assert_refused(total, DATA, np.array(3, "int32"), match="out of range for rank 3")


@pytest.mark.slow
def test_axes_of_size_one_that_a_call_names():
    dropped = function_of("Squeeze", DATA[:1, :, :1], np.array([0, 2]))
    for axes in ([0, 2], [-1, 0], [2, -3]):
        assert dropped(DATA[:1, :, :1], np.array(axes)).shape == (3,)
    assert_refused(dropped, DATA[:1, :, :1], np.array([0, 1]), match="drops axis 1 of size")
    assert_refused(dropped, DATA[:1, :, :1], np.array([0, 0]), match="names an axis twice")
    added = function_of("Unsqueeze", DATA, np.array([0, 2]))
    for axes in ([0, 2], [-1, 0], [4, 3], [-2, 1]):
        want = np.expand_dims(DATA, tuple(axes))
        np.testing.assert_array_equal(added(DATA, np.array(axes)), want)
    assert_refused(added, DATA, np.array([0, 5]), match="out of range for rank 5")
    one = function_of("Unsqueeze", DATA, np.array(0))
    assert one(DATA, np.array(-2)).shape == (2, 3, 1, 4)


def test_a_new_axis_that_is_a_scalar():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 2] x) => (float[a, b, c] y, float[d, e, f] z) <int64 last = {-1}, int64[1] first = {0}> {
            y = Unsqueeze(x, last)
            z = Unsqueeze(x, first)
        }""")
    added, put_first = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"](DATA[0, :, :2])
    assert (added.shape, put_first.shape) == ((3, 2, 1), (1, 3, 2))


@pytest.mark.parametrize("axes, message", [("0, -5", "names an axis twice"), ("4, 5", "axis 5 is out of range for")])
def test_new_axes_that_cannot_be_are_refused(axes, message):
    model = onnx.parser.parse_model(f"""
        <ir_version: 8, opset_import: ["" : 17]>
        g (float[n, m, 2] x) => (float[a, b, c, d, e] y) <int64[2] axes = {{{axes}}}> {{
            [the_node] y = Unsqueeze(x, axes)
        }}""")
    with pytest.raises(rh.HeteroError, match=message):
        rh.from_onnx(model)


def test_pads_of_axes_that_a_call_names():
    padded = function_of("Pad", DATA, np.array([1, 0, 0, 1]), np.array(7, "float32"), np.array([0, 1]))
    filling = np.array(7, "float32")
    want = np.pad(DATA[:, 1:], ((0, 0), (0, 0), (1, 2)), constant_values=7)
    np.testing.assert_array_equal(padded(DATA, np.array([1, -1, 2, 0]), filling, np.array([-1, 1])), want)
    assert_refused(padded, DATA, np.array([1, -4, 0, 0]), filling, np.array([0, 1]), match="too little of axis 1")
    assert_refused(padded, DATA, np.array([1, 1, 0, 0]), filling, np.array([0, -3]), match="names an axis twice")


@pytest.mark.slow
def test_sizes_that_a_call_crops_and_pads_to():
    centered = function_of("CenterCropPad", DATA, np.array([1, 1, 1]))
    want = np.pad(DATA[:, 1:2], ((1, 2), (0, 0), (0, 1)))
    np.testing.assert_array_equal(centered(DATA, np.array([5, 1, 5])), want)
    assert centered(DATA, np.array([2, 0, 4])).shape == (2, 0, 4)
    assert_refused(centered, DATA, np.array([2, -1, 4]), match="has a size of")


@pytest.mark.slow
def test_images_of_columns_whose_sizes_a_call_names():
    columns = uniform(1, 5, 5)
    image = function_of("Col2Im", columns, np.array([5, 5]), np.array([1, 5]))
    np.testing.assert_allclose(image(columns, np.array([5, 5]), np.array([1, 5]))[0, 0], columns[0].T, rtol=1e-6)
    assert_refused(image, columns, np.array([5, 4]), np.array([1, 5]), match="smaller than blocks")
    assert_refused(image, columns, np.array([5, 5]), np.array([0, 5]), match="has a size of")
    assert_refused(image, columns, np.array([5, 5]), np.array([2, 5]), match="expected a multiple")


@pytest.mark.slow
def test_parts_of_a_sequence_whose_sizes_a_call_names():
    model = onnx.parser.parse_model("""
        <ir_version: 8, opset_import: ["" : 18]>
        parts (float[4, m] x, int64[2] sizes) => (float[p, m] y) {
            [the_node] all = SplitToSequence <axis = 0> (x, sizes)
            at = Constant <value_int = 1> ()
            y = SequenceAt(all, at)
        }""")
    second = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    data = uniform(4, 2)
    np.testing.assert_array_equal(second(data, np.array([1, 3])).numpy(), data[1:])
    assert_refused(second, data, np.array([1, 2]), match="splits an axis of 4")
