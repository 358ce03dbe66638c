"""ONNX models as graphs of PyTorch: one graph, the reference's numbers, nothing read from tensors."""

import pathlib

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

torch = pytest.importorskip("torch")

BENCH = pathlib.Path(__file__).resolve().parents[3] / "apps" / "bench"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def model_with_shapes():
    """Heads split by a computed shape, a mask with float32's least number, bounds, a gathered index."""
    constants = {
        "one": np.int64([1]), "zero": np.int64(0), "rest": np.int64([-1]), "four": np.int64([4]),
        "least": np.float32(np.finfo("float32").min), "low": np.float32(-0.5), "high": np.float32(0.5),
        "weight": np.random.default_rng(0).standard_normal((16, 16), "float32") / np.float32(4),
        "starts": np.int64([0]), "ends": np.int64([2**62]), "axes": np.int64([1]), "steps": np.int64([2]),
    }  # fmt: skip
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"], axis=0),
        helper.make_node("Unsqueeze", ["rows", "starts"], ["rows_1"]),
        helper.make_node("Concat", ["rows_1", "four", "rest"], ["heads"], axis=0),
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Cast", ["mask"], ["seen"], to=TensorProto.FLOAT),
        helper.make_node("Sub", ["seen", "seen"], ["none"]),
        helper.make_node("Mul", ["none", "least"], ["added"]),
        helper.make_node("Add", ["product", "added"], ["sum"]),
        helper.make_node("Clip", ["sum", "low", "high"], ["bounded"]),
        helper.make_node("Reshape", ["bounded", "heads"], ["parts"]),
        helper.make_node("Slice", ["parts", "starts", "ends", "axes", "steps"], ["some"]),
        helper.make_node("Gather", ["some", "zero"], ["y"], axis=1),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, (3, 16)),
        helper.make_tensor_value_info("mask", TensorProto.INT64, (3, 16)),
    ]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, (3, 4))]
    graph = helper.make_graph(
        nodes, "shapes", inputs, outputs, [numpy_helper.from_array(np.array(v), k) for k, v in constants.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model)
    return model


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
def test_a_model_is_one_graph(dtype, allowed):
    from model_peers.torch_graph import Runner, graph_of

    model, lower = model_with_shapes(), getattr(torch, dtype)
    arrays = {
        "x": np.random.default_rng(1).standard_normal((3, 16), "float32"),
        "mask": np.ones((3, 16), "int64"),
    }
    (expected,) = ReferenceEvaluator(model).run(None, arrays)
    operands = [torch.from_numpy(array) for array in arrays.values()]
    operands = [value.to(lower) if value.is_floating_point() else value for value in operands]
    graph = graph_of(Runner(model, lower).eval(), operands)
    assert not any("item" in str(node.target) or "_local_scalar" in str(node.target) for node in graph.graph.nodes)
    compiled = torch.compile(graph, backend="aot_eager", fullgraph=True, dynamic=False)
    for program in (graph, compiled):
        (actual,) = program(*operands)
        assert actual.dtype == lower and np.abs(actual.float().numpy() - expected).max() <= allowed


def test_a_shape_of_numbers_is_refused():
    from model_peers import Unsupported
    from model_peers.torch_graph import Runner

    graph = helper.make_graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        "computed",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, (4,)),
            helper.make_tensor_value_info("shape", TensorProto.INT64, (2,)),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ("a", "b"))],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(Unsupported, match="operand 1 of Reshape is computed"):
        Runner(model)(torch.zeros(4), torch.tensor([2, 2]))
