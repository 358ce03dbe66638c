"""Ops that move elements: slices, splits, padding, blocks, broadcasting, shapes that are computed."""

import numpy as np
import onnx
import pytest

import relax_hetero as rh
from frontend.ops.checking import check, integers, node_model, run, uniform

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("constant", [[1, 2, 3, 4], []])
@pytest.mark.parametrize(
    ("start", "end", "step"),
    [(1, 4, 1), (-3, INT_MAX, 1), (5, INT_MIN, -2), (9, -9, -1), (0, 9, 3), (3, 1, 1), (-9, 2, 1), (-9, INT_MIN, -1)],
)
def test_slice(start, end, step, constant):
    numbers = [np.array([value, other]) for value, other in ((start, 0), (end, 1), (1, 0), (step, 1))]
    check("Slice", uniform(2, 6, 3), *numbers, constant=constant)


@pytest.mark.parametrize(("start", "end", "step"), [(1, INT_MAX, 1), (-2, INT_MAX, 1), (0, -1, 2), (-1, INT_MIN, -1)])
def test_slice_of_a_symbolic_axis(start, end, step):
    numbers = [np.array([value]) for value in (start, end, 1, step)]
    check("Slice", uniform(3, 7), *numbers, constant=[1, 2, 3, 4], symbolic=[0])


def test_slice_by_attributes():
    check("Slice", uniform(4, 5), opset=9, starts=[1, -3], ends=[3, INT_MAX], axes=[0, 1])


def test_split_by_sizes_of_which_one_is_empty():
    check("Split", uniform(7, 2), np.array([3, 0, 4]), outputs=3, constant=[1], axis=0)


def test_split_evenly_with_a_smaller_last_part():
    check("Split", uniform(2, 7), outputs=3, axis=-1, num_outputs=3)


def test_split_into_computed_parts():
    check("Split", uniform(4), np.array([1, 3]), outputs=2)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pad(mode):
    pads = [0, 2, 1, 1, 0, 3] if mode != "constant" else [-1, 2, 1, 1, 0, -2]
    check("Pad", uniform(3, 4, 5), np.array(pads), opset=19, constant=[1], mode=mode)


def test_pad_with_a_number_in_one_dimension():
    check("Pad", uniform(3, 4), np.array([1, 0, 0, 2]), np.array([7], "float32"), constant=[1, 2])


def test_pad_with_a_computed_value_on_some_axes():
    operands = [uniform(3, 4), np.array([1, 2]), np.array(7, "float32"), np.array([-1])]
    check("Pad", *operands, constant=[1, 3])


def test_pad_of_a_symbolic_size():
    check("Pad", uniform(3, 4), np.array([1, 0, 0, 2]), constant=[1], symbolic=[0], mode="reflect")


@pytest.mark.parametrize("upper", [0, 1])
@pytest.mark.parametrize("constant", [[], [1]])
def test_trilu(upper, constant):
    check("Trilu", integers(2, 4, 5), np.array(-1), opset=14, upper=upper, constant=constant)


@pytest.mark.parametrize("mode", ["DCR", "CRD"])
def test_depth_to_space(mode):
    check("DepthToSpace", uniform(2, 12, 2, 3), blocksize=2, mode=mode)


def test_space_to_depth():
    check("SpaceToDepth", uniform(2, 3, 4, 6), blocksize=2)


def test_col2im():
    columns = uniform(1, 2 * 6, 12)
    options = {"strides": [1, 2], "pads": [0, 1, 1, 1], "opset": 18}
    check("Col2Im", columns, np.array([4, 6]), np.array([2, 3]), constant=[1, 2], **options)


def test_center_crop_pad():
    check("CenterCropPad", uniform(7, 4, 3), np.array([4, 9]), constant=[1], axes=[0, 1], reference="onnx")


def test_max_unpool():
    indices = np.array([[[[0, 3], [9, 14]]]])
    check("MaxUnpool", uniform(1, 1, 2, 2), indices, opset=22, kernel_shape=[2, 2], strides=[2, 2], reference="onnx")


@pytest.mark.parametrize("constant", [[], [1]])
@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 4), (3, 1)])
def test_expand_broadcasts_both_ways(shape, constant):
    check("Expand", uniform(3, 1), np.array(shape), constant=constant)


def test_expand_of_an_axis_that_turns_out_to_be_one():
    check("Expand", uniform(2, 1), np.array([2, 3]), constant=[1], symbolic=[0])
    check("Expand", uniform(2, 3), np.array([2, 3]), constant=[1], symbolic=[0])


@pytest.mark.parametrize("shape", [(4, -1), (0, 2, 3), (-1,), (2, 0, -1)])
def test_reshape_to_a_computed_shape(shape):
    check("Reshape", uniform(2, 6), np.array(shape))


def test_constant_of_a_computed_shape():
    from onnx import numpy_helper

    check("ConstantOfShape", np.array([2, 3]), value=numpy_helper.from_array(np.array([7], "int32")))


@pytest.mark.parametrize("options", [{}, {"start": 1}, {"start": -2, "end": -1}, {"end": 9}, {"start": 2, "end": 1}])
def test_shape(options):
    check("Shape", uniform(2, 3, 4), opset=19, **options)
    check("Shape", uniform(2, 3, 4), opset=19, symbolic=[0], **options)


@pytest.mark.parametrize("mode", ["constant", "edge", "reflect", "wrap"])
def test_pads_that_are_computed(mode):
    check("Pad", uniform(3, 5), np.array([1, -2, 0, 2]), mode=mode, opset=19, symbolic=[0])


def test_pads_that_cut_off_too_much_are_refused_by_the_call():
    model, feeds = node_model("Pad", [uniform(3), np.array([-2, -2])], 19)
    with pytest.raises(rh.HeteroError, match="Pad node 'the_node': its pads, .*pad_0 = -2, pad_1 = -2"):
        run(model, feeds)


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [((2, 9, 3), "int64"), ((9, 2, -3), "int32"), ((0, 1, 0.3), "float32"), ((1, 0, 1), "float64")],
)
def test_range_of_computed_numbers(numbers, dtype):
    check("Range", *(np.array(number, dtype) for number in numbers))


@pytest.mark.parametrize(("delta", "message"), [(0.0, "its delta is 0"), (np.nan, "its start, limit and delta leave")])
def test_a_range_without_a_length_is_refused_by_the_call(delta, message):
    model, feeds = node_model("Range", [np.array(number, "float32") for number in (0, 1, delta)], 18)
    with pytest.raises(rh.HeteroError, match=f"Range node 'the_node': {message}"):
        run(model, feeds)


def test_a_symbolic_axis_that_turns_out_to_be_1_is_dropped():
    check("Squeeze", uniform(1, 3), np.array([0]), constant=[1], symbolic=[0])


def test_a_constant_target_that_fixes_a_symbolic_size_is_noted(caplog):
    model, _ = node_model("Reshape", [uniform(1, 4), np.array([2, 2])], 18, constant=[1], symbolic=[0])
    rh.from_onnx(model)
    assert "Reshape node 'the_node' writes its target [2, 2] as a constant" in caplog.text
    assert "unless x0_0 * x0_1 is 4" in caplog.text


@pytest.mark.parametrize(
    ("shape", "axis"), [((0, 3, 4), 1), pytest.param((2, 3, 4), -1, marks=pytest.mark.slow), ((), 0)]
)
def test_flattened(shape, axis):
    check("Flatten", uniform(*shape), axis=axis)


@pytest.mark.parametrize(
    ("op", "options", "message"),
    [
        ("Flatten", {"axis": 4}, "axis 4 is out of range for rank 3"),
        ("Transpose", {"perm": [1, 0]}, r"its perm \[1, 0\] is not an order of 3 axes"),
    ],
)
def test_axes_that_are_not_there_are_refused(op, options, message):
    node = onnx.helper.make_node(op, ["x"], ["y"], name="the_node", **options)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 3, 4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [x], [y]), ir_version=8)
    with pytest.raises(rh.HeteroError, match=f"{op} node 'the_node': {message}"):
        rh.from_onnx(model)
