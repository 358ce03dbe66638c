"""The model benchmark: its models run, contestants are checked and timed, the report draws the right conclusions."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

BENCH = Path(__file__).parents[3] / "apps" / "bench"


@pytest.fixture(autouse=True)
def _bench_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A convolution, a clip and a Gemm, with a named batch."""
    from model_zoo.graph import Graph

    graph = Graph("small")
    x = graph.node("Relu", graph.conv(graph.input("image", (1, 3, 8, 9)), 20, 3, stride=2, norm=True))
    path = tmp_path / "small.onnx"
    onnx.save(graph.model(graph.classifier(x, classes=7)), path)
    return path


def run(*arguments: str) -> str:
    command = [sys.executable, str(BENCH / "models.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout


def result(model: str = "net", threads: int = 1, **milliseconds: float) -> dict[str, Any]:
    rows = {key: {"median_ms": value, "fastest_ms": value} for key, value in milliseconds.items()}
    return {"model": model, "threads": threads, "rows": rows}


@pytest.mark.slow
def test_contestants_are_compiled_checked_and_timed(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    file, folder = tmp_path / "results.json", tmp_path / "kept"
    options = ("--peers", "ours,onnxruntime,openvino", "--rounds", "1", "--seconds", "0.02", "--threads", "2")
    text = run(str(small), *options, "--json", str(file), "--executables", str(folder), "--memory", "--dispatches", "3")
    results = json.loads(file.read_text())["results"]
    assert [(row["model"], row["threads"]) for row in results] == [("small", 2)]
    for row in results:
        ours = row["rows"]["ours"]
        assert ours["median_ms"] > 0 and ours["error"] <= 1 and ours["compile_seconds"] > 0
        assert ours["memory"]["running"] >= ours["memory"]["loading"] >= 0
        dispatches = ours["profile"]["dispatches"]
        assert sum(one["share"] for one in dispatches) == pytest.approx(1)
        (conv,) = [one for one in dispatches if "conv2d" in one["name"]]
        assert conv["operations"] == 2 * 20 * 4 * 5 * 27 and conv["bytes"] > 0
        assert row["rows"]["onnxruntime"]["median_ms"] > 0
    assert "geometric mean" in text and "relax-hetero" in text
    # A compiled model is used again.
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.so")}
    assert len(before) == 1
    run(str(small), "--peers", "ours", "--rounds", "0", "--threads", "2", "--isolate", "--executables", str(folder))
    assert {path.name: path.stat().st_mtime_ns for path in folder.glob("*.so")} == before


def test_named_dimensions_get_sizes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    weight = numpy_helper.from_array(np.ones((4, 5), "float32"), "w")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 5])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "named", [x], [y], [weight])
    path = tmp_path / "named.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    from model_zoo import random_inputs

    assert random_inputs(path, {"batch": 3}, 0)["x"].shape == (3, 4)
    assert random_inputs(path, {}, 0)["x"].shape == (1, 4)


@pytest.mark.slow
def test_one_file_serves_all_sizes(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from model_zoo.graph import Graph

    graph = Graph("any")
    x = graph.input("x", ("batch", 20))
    path, file, folder = tmp_path / "any.onnx", tmp_path / "results.json", tmp_path / "kept"
    onnx.save(graph.model(graph.node("Relu", graph.linear(x, 20, 30))), path)
    options = ("--peers", "ours,symbolic", "--rounds", "1", "--seconds", "0.01", "--threads", "1")
    text = run(str(path), *options, "--dims", "batch=1:5", "--json", str(file), "--executables", str(folder))
    results = json.loads(file.read_text())["results"]
    assert [row["model"] for row in results] == ["any batch=1", "any batch=5"]
    assert all(row["rows"][key]["median_ms"] > 0 for row in results for key in ("ours", "symbolic"))
    assert len(list(folder.glob("*-symbolic.so"))) == 1 and len(list(folder.glob("*-ours.so"))) == 2
    assert "any size over static" in text and "any size / static" in text


def test_precisions_are_those_of_names_or_the_option(small: Path) -> None:
    from model_bench.cases import FLOAT32_ALLOWED, LOW_ALLOWED, cases_of

    plain, low = cases_of([str(small), f"{small}:bf16"], "float32", {})
    assert (plain.label, plain.precision, plain.allowed()) == ("small", "float32", FLOAT32_ALLOWED)
    assert (low.label, low.precision, low.allowed()) == ("small:bf16", "bfloat16", LOW_ALLOWED)
    (chosen,) = cases_of([str(small)], "float16", {})
    assert chosen.label == "small:f16"


def test_bfloat16_is_computed_where_it_is_asked_for(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("openvino")
    file = tmp_path / "results.json"
    options = ("--peers", "ours,onnxruntime,openvino", "--rounds", "1", "--seconds", "0.01", "--threads", "1")
    text = run(f"{small}:bf16", *options, "--json", str(file))
    (result,) = json.loads(file.read_text())["results"]
    assert result["rows"]["ours"]["products"] == {"bfloat16 * bfloat16": 2} and result["rows"]["ours"]["error"] <= 1
    assert result["rows"]["onnxruntime"] == {"unsupported": "no bfloat16 of a float32 model"}
    assert "relax-hetero, small:bf16: products 2 in bfloat16 * bfloat16" in text


def test_masks_end_in_zeros_and_types_are_zero_or_one(tmp_path: Path) -> None:
    names = ("attention_mask", "token_type_ids", "input_ids")
    values = [helper.make_tensor_value_info(name, TensorProto.INT64, [1, 64]) for name in names]
    outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, [1, 64])]
    graph = helper.make_graph([helper.make_node("Sum", list(names), ["y"])], "ids", values, outputs)
    path = tmp_path / "ids.onnx"
    onnx.save(helper.make_model(graph), path)
    from model_zoo import random_inputs

    inputs = random_inputs(path, {}, 0)
    assert inputs["attention_mask"][0].tolist() == [1] * 56 + [0] * 8
    assert set(inputs["token_type_ids"][0].tolist()) == {0, 1}
    assert inputs["input_ids"].max() > 1 and inputs["input_ids"].max() < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_net"], "'no_such_net' is no file *.onnx and none of resnet50"),
        (["gone.onnx"], "no file gone.onnx"),
        (["squeezenet", "--peers", "mkl"], "'mkl' is none of ours, onnxruntime"),
        (["squeezenet", "--threads", "two"], "expected numbers of threads"),
        (["squeezenet", "--dims", "batch"], "expected sizes of dimensions"),
    ],
)
def test_wrong_options_are_refused_by_name(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from click.testing import CliRunner

    # Loaded by its path: a package of tests is called `models` too.
    spec = importlib.util.spec_from_file_location("bench_models", BENCH / "models.py")
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    done = CliRunner().invoke(models.main, arguments)
    assert done.exit_code == 2 and message in done.output


def test_made_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    import model_zoo

    monkeypatch.setenv("RELAX_HETERO_CACHE", str(tmp_path))
    path = model_zoo.model_path("shufflenet_v2")
    assert path == tmp_path / "models" / "shufflenet_v2.onnx"
    modified = path.stat().st_mtime_ns
    assert model_zoo.model_path("shufflenet_v2").stat().st_mtime_ns == modified


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "mobilenet_v3", "shufflenet_v2", "convnext_tiny"])
def test_results_of_made_models_can_be_compared(name: str) -> None:
    ort = pytest.importorskip("onnxruntime")
    import model_zoo

    model = model_zoo.MAKERS[name]()
    weights = {weight.name for weight in model.graph.initializer}
    (image,) = [value for value in model.graph.input if value.name not in weights]
    shape = [extent.dim_value for extent in image.type.tensor_type.shape.dim]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {image.name: np.random.default_rng(1).standard_normal(shape, "float32")})
    assert np.isfinite(result).all()
    # Many different numbers: not a softmax with all its weight on one element.
    assert (np.abs(result) > 1e-5 * np.abs(result).max()).mean() > 0.05


def test_wrong_and_right_results_are_distinguished() -> None:
    from model_bench.model_worker import error_of

    expected = {"0": np.linspace(-3, 5, 40).reshape(8, 5).astype("float32")}
    assert error_of([expected["0"] * np.float32(1.0005)], expected) <= 1
    wrong = expected["0"].copy()
    wrong[2, 3] += 0.1
    assert error_of([wrong], expected) > 1
    wrong[2, 3] = np.nan
    assert error_of([wrong], expected) == float("inf")
    assert error_of([expected["0"][:7]], expected) == float("inf")
    assert error_of([], expected) == float("inf")


def test_ratios_are_to_the_fastest_peer_and_stock_tvm_is_none() -> None:
    from model_bench.report import best_peer, ratio, summary

    one = result(ours=10.0, onnxruntime=12.0, openvino=11.0, tvm=2.0)
    assert best_peer(one) == ("openvino", 11.0)
    assert ratio(one) == pytest.approx(1.1) and ratio(one, "onnxruntime") == pytest.approx(1.2)
    two = result("other", ours=10.0, onnxruntime=10.0)
    (line,) = summary([one, two])
    assert "1.049 of the best peer (2)" in line and "1.100 of OpenVINO (1)" in line


def test_failures_are_remarks_and_leave_a_hole() -> None:
    from model_bench.report import markdown, remarks

    broken = result(ours=10.0)
    broken["rows"]["iree"] = {"failure": "not done after 300 s"}
    broken["rows"]["torch"] = {"unsupported": "no translation of Foo"}
    assert remarks([broken]) == ["IREE, net, 1 threads: not done after 300 s", "torch: no translation of Foo"]
    assert "| net | 10.00 (10.00) |  |  |  |  |" in markdown([broken])


def test_the_bound_of_a_dispatch() -> None:
    from model_bench.dispatches import Dispatch, Roof, dispatch_cells

    roof = Roof(operations=100e9, bytes=10e9)
    arithmetic = Dispatch("a", ("conv2d",), 1, 100.0, 9_000_000, 10_000, 0.5, "bf16")
    memory = Dispatch("b", ("relu",), 2, 100.0, 0, 900_000, 0.3)
    caches = Dispatch("c", ("relu",), 2, 100.0, 0, 2_000_000, 0.2)
    neither = Dispatch("d", ("matmul",), 2, 100.0, 1_000_000, 10_000, 0.2)
    bounds = [dispatch_cells(one, roof)[-1] for one in (arithmetic, memory, caches, neither)]
    assert bounds == ["arithmetic", "memory", "caches", "neither"]
    assert dispatch_cells(arithmetic, roof)[4:6] == ["90", "90%"]
    assert dispatch_cells(arithmetic, roof)[-2] == "bf16"


def test_a_chart_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from model_bench.chart import draw

    file = tmp_path / "chart.png"
    draw([result("a", 1, ours=1.0, onnxruntime=2.5), result("b", 1, onnxruntime=2.0), result("a", 2, ours=1.0)], file)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_the_bandwidth_loop_reads_what_it_says() -> None:
    from peers.bandwidth import read_bandwidth

    loop = read_bandwidth(1)
    loop()
    lines = [line for line in loop.assembly.splitlines() if "vaddps" in line and "(" in line]
    assert loop.operations >= 1 << 28 and (lines or "vaddps" not in loop.assembly)
