"""apps/bench/memory_plan.py measures a small model."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

BENCH = Path(__file__).resolve().parents[3] / "apps" / "bench"


@pytest.fixture
def model(tmp_path):
    """Three products, each of them with a result of 4 MB."""
    weight = numpy_helper.from_array(np.eye(256, dtype="float32"), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("MatMul", ["a", "w"], ["b"]),
        helper.make_node("ReduceMax", ["b"], ["y"], keepdims=0),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4096, 256])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, "g", [x], [y], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


@pytest.fixture
def memory_plan(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import memory_plan

    return memory_plan


@pytest.mark.slow
def test_the_plan_of_a_small_model(memory_plan, model, tmp_path):
    row = memory_plan.alone("compile", model, tmp_path / "model.so", "{}")
    assert row["least"] == row["planned"] == 8 << 20


@pytest.mark.timing
def test_memory_of_a_small_model(memory_plan, model):
    row = memory_plan.measured(model, {})
    # All pages of the process are counted; an arena may be of any size.
    assert 0.9 * row["least"] < row["taken"] < 2 * row["least"]
    assert 0.9 * row["least"] < row["onnxruntime"] < 2 * row["least"]
    assert 0.9 * row["least"] < row["onnxruntime_arena"]
