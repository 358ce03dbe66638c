"""NonMaxSuppression against onnxruntime."""

import numpy as np
import pytest

import relax_hetero as rh
from device_pairs import TWO_DEVICES
from frontend.ops.checking import check, expected, node_model, uniform
from seeds import fresh_rng


@pytest.mark.parametrize("constant", [[], [2, 3, 4]])
@pytest.mark.parametrize("center_point_box", [0, 1])
def test_non_max_suppression(constant, center_point_box):
    boxes, scores = uniform(2, 9, 4, low=0, high=1), uniform(2, 3, 9, low=0, high=1)
    limits = [np.array([4]), np.array([0.3], "float32"), np.array([0.2], "float32")]
    check("NonMaxSuppression", boxes, scores, *limits, constant=constant, center_point_box=center_point_box)


def test_non_max_suppression_without_threshold_keeps_negative_scores():
    boxes = np.array([[[0, 0, 1, 1], [0, 2, 1, 3]]], "float32")
    check("NonMaxSuppression", boxes, np.array([[[-1, -2]]], "float32"), np.array([2]), opset=11)


@pytest.mark.parametrize("on", ["vdevice:0", "vdevice:1"])
def test_as_many_boxes_as_a_call_has(on):
    """Images, classes and boxes are named; many scores are equal, and of these the first box comes first."""
    rng = fresh_rng()

    def operands(batches, classes, count):
        boxes = np.round(rng.random((batches, count, 4), "float32") * 4, 1)
        return [boxes, np.round(rng.random((batches, classes, count), "float32"), 1)]

    limits = [np.array([5]), np.array([0.4], "float32"), np.array([0.2], "float32")]
    model, _ = node_model(
        "NonMaxSuppression", [*operands(2, 3, 40), *limits], opset=17, constant=[2, 3, 4], symbolic=[0, 1]
    )
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=TWO_DEVICES, placement={"*": on})))["main"]
    for sizes in [(2, 3, 40), (1, 1, 700), (1, 2, 9), (3, 1, 1), (2, 2, 0), (0, 2, 3), (2, 0, 3)]:
        feeds = dict(zip(["x0", "x1"], operands(*sizes), strict=True))
        np.testing.assert_array_equal(main(*feeds.values()).numpy(), expected(model, feeds, "onnxruntime")[0])


def test_boxes_and_scores_of_other_numbers_are_refused():
    boxes, scores, max_boxes = uniform(1, 4, 4), uniform(1, 1, 4), np.array([2])
    model, _ = node_model("NonMaxSuppression", [boxes, scores, max_boxes], opset=17, constant=[2], symbolic=[0, 1])
    main = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model)))["main"]
    with pytest.raises(rh.HeteroError, match=r"the_node.*x1_2 = 5"):
        main(boxes, uniform(1, 1, 5))
