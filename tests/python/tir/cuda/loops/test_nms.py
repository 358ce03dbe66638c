"""Non-maximum suppression of ONNX on a GPU, by the interpreter, against the CPU's kernel."""

import numpy as np
import pytest
from onnx import TensorProto, helper

import relax_hetero as rh
from gpu_interpreter.models import InterpretedModel
from seeds import fresh_rng

GPU = {"kind": "cuda", "arch": "sm_90a"}


def model(batches, classes, boxes, limit, is_center, least, names=None):
    b, c, n = names or (batches, classes, boxes)
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
        for name, shape in (("boxes", (b, n, 4)), ("scores", (b, c, n)))
    ]
    constants = [
        helper.make_tensor("limit", TensorProto.INT64, [1], [limit]),
        helper.make_tensor("overlap", TensorProto.FLOAT, [1], [0.4]),
        helper.make_tensor("least", TensorProto.FLOAT, [1], [least]),
    ]
    operands = ["boxes", "scores", "limit", "overlap", "least"]
    node = helper.make_node("NonMaxSuppression", operands, ["places"], center_point_box=int(is_center))
    result = helper.make_tensor_value_info("places", TensorProto.INT64, ("n", 3))
    graph = helper.make_graph([node], "nms", inputs, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


@pytest.mark.parametrize(
    "batches, classes, boxes, limit, is_center, least, names",
    [
        pytest.param(1, 2, 300, 20, False, 0.2, None, marks=pytest.mark.slow),
        pytest.param(2, 1, 40, 8, True, -1.0, None, marks=pytest.mark.slow),
        (2, 2, 30, 6, False, 0.2, ("b", "c", "n")),
        pytest.param(1, 1, 5, 3, False, 2.0, None, marks=pytest.mark.slow),
        pytest.param(0, 2, 5, 3, False, 2.0, ("b", "c", "n"), marks=pytest.mark.slow),
        pytest.param(2, 0, 5, 3, False, 2.0, ("b", "c", "n"), marks=pytest.mark.slow),
    ],
)
def test_the_same_boxes_as_on_a_cpu(batches, classes, boxes, limit, is_center, least, names):
    rng = fresh_rng()
    corners = rng.random((batches, boxes, 4), "float32") * 4
    scores = np.round(rng.random((batches, classes, boxes), "float32"), 1)  # many are equal
    onnx_model = model(batches, classes, boxes, limit, is_center, least, names)
    expected = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(onnx_model)))["main"](corners, scores).numpy()
    interpreted = InterpretedModel(rh.from_onnx(onnx_model, vdevices=[GPU]))
    np.testing.assert_array_equal(np.asarray(interpreted(corners, scores)), expected)
    launched = [name for name in interpreted.launched if name.startswith("non_max")]
    # Memory between launches of a symbolic size stays inside of one function.
    assert launched == (["non_max_suppression"] if names else ["non_max_suppression_1", "non_max_suppression_2"])
