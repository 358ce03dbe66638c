"""Benchmarks of GPUs, run on a CPU: numbers are compared, failures are reported, skeletons are models."""

import pathlib

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import relax_hetero as rh

BENCH = pathlib.Path(__file__).resolve().parents[3] / "apps" / "bench"


@pytest.fixture(autouse=True)
def bench_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))


def test_programs_of_products_give_numpys_numbers():
    from gpu_bench.contest import NOTHING, OURS, contest
    from gpu_bench.workloads import KINDS, Products
    from gpu_products import wanted
    from peers.shape import Shape

    works = [Products(Shape.parse("9x64x24"), kind, gelu, 2) for kind, gelu in (("f16", True), ("s8", False))]
    rows = contest(works, "llvm", lambda clock, work: NOTHING, wanted, 1, 1, lambda row: None)
    assert [row["kind"] for row in rows] == ["f16", "s8"]
    for row in rows:
        assert row["error"] <= max(KINDS[row["kind"]].allowed, 5e-3 * (row["kind"] == "f16")), row
        assert row["us"][OURS] > 0


def test_weights_of_a_program_differ():
    from gpu_bench.workloads import Products
    from peers.shape import Shape

    first, second = Products(Shape.parse("2x8x16"), "f16", count=2).weights()
    assert first.shape == second.shape == (8, 16) and not np.array_equal(first, second)


def test_errors_are_of_the_largest_number():
    from gpu_bench.programs import error_of

    assert error_of(np.float32([1, 2]), np.float32([1, 4])) == 0.5
    assert error_of(np.float32([1]), np.float32([1, 4])) == float("inf")
    assert error_of(np.float32([np.nan, 4]), np.float32([1, 4])) == float("inf")


def test_a_skeleton_keeps_the_graph_and_the_statistics(tmp_path):
    from model_zoo.graph import Graph
    from model_zoo.skeleton import SUFFIX, expanded, write_skeleton

    graph = Graph("small")
    x = graph.input("x", (4, 256))
    model = graph.model(graph.linear(x, 256, 128))
    file = tmp_path / f"small{SUFFIX}"
    write_skeleton(model, file)
    assert file.stat().st_size < 2000
    full = expanded(file)
    assert [node.SerializeToString() for node in full.graph.node] == [n.SerializeToString() for n in model.graph.node]
    for ours, theirs in zip(full.graph.initializer, model.graph.initializer, strict=True):
        a, b = numpy_helper.to_array(ours), numpy_helper.to_array(theirs)
        assert a.shape == b.shape and a.dtype == b.dtype and not np.array_equal(a, b)
        assert abs(a.std() / b.std() - 1) < 0.2
    onnx.checker.check_model(full)


def test_a_process_compares_a_model_and_cuts_it(tmp_path):
    from gpu_bench.model_process import Job, Work
    from model_zoo.graph import Graph

    graph = Graph("small")
    x = graph.input("x", (3, 64))
    onnx.save(graph.model(graph.linear(graph.gelu(graph.linear(x, 64, 32)), 32, 8)), tmp_path / "small.onnx")
    work = Work(Job("small", str(tmp_path / "small.onnx"), gpu="llvm", cuts=2))
    assert work.reference()["seconds"] >= 0
    assert work.gpu()["error"] < 1e-5
    cut = work.cut()
    assert cut["error"] < 1e-5 and min(cut["ops"]) > 0
    work.wanted[0] = work.wanted[0] + 1
    assert work._error(work._run(work.machine)) > 0.01


def test_newer_networks_are_right_on_the_cpu():
    from model_zoo import random_arrays
    from model_zoo.newer import llama_step

    onnxruntime = pytest.importorskip("onnxruntime")
    model = llama_step()
    inputs = random_arrays(model.graph, {}, 0)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    actual = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model), cache=False))["main"](**inputs)
    for ours, theirs in zip(actual, session.run(None, inputs), strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-3, atol=1e-4)


def test_models_for_a_batch():
    """Shapes that reshape, weights that are concatenated, and outputs follow; images keep their results."""
    import onnxruntime
    from model_zoo import random_arrays
    from model_zoo.batches import with_batch
    from model_zoo.graph import Graph

    graph = Graph("patches")
    patches = graph.conv(graph.input("image", (1, 3, 8, 8)), 8, 4, stride=4, pad=0)
    tokens = graph.node("Transpose", graph.node("Reshape", patches, graph.shape(1, 8, 4)), perm=[0, 2, 1])
    tokens = graph.node("Concat", graph.weight(1, 1, 8, deviation=1.0), tokens, axis=1)
    model = graph.model(graph.linear(graph.layer_norm(tokens, 8), 8, 5))

    def results(one, inputs):
        session = onnxruntime.InferenceSession(one.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, inputs)[0]

    images = random_arrays(with_batch(model, 3).graph, {}, 0)
    batched = results(with_batch(model, 3), images)
    assert batched.shape == (3, 5, 5)
    for number in range(3):
        single = results(model, {"image": images["image"][number : number + 1]})
        np.testing.assert_allclose(batched[number], single[0], rtol=1e-5, atol=1e-6)
