"""The example for any model: one device and two give the same results, and its exit code says so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh

APP = Path(__file__).resolve().parents[3] / "apps" / "onnx_two_devices" / "run.py"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Nameless nodes, one name that looks like a pattern, two outputs."""
    weight = np.random.default_rng(0).standard_normal((3, 3)).astype("float32")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Relu", ["a"], ["b"], name="relu[1]"),
        helper.make_node("Exp", ["b"], ["c"]),
        helper.make_node("Add", ["c", "a"], ["d"]),
    ]
    graph = helper.make_graph(
        nodes,
        "four",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("b", "d")],
        [numpy_helper.from_array(weight, "w")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    proto.ir_version = 9
    onnx.save(proto, str(tmp_path / "model.onnx"))
    return tmp_path / "model.onnx"


@pytest.fixture(scope="module")
def main() -> Callable[[Sequence[str]], int]:
    spec = importlib.util.spec_from_file_location("onnx_two_devices", APP)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize(
    "options",
    [
        ["--place", "Exp=vdevice:1"],
        *(pytest.param(each, marks=pytest.mark.slow) for each in ([], ["--fraction", "0.25"])),
    ],
)
def test_two_devices_give_what_one_gives(main, model: Path, options: list[str], capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main([str(model), *options, "--repeat", "1"]) == 0
    shown = capsys.readouterr().out
    assert "b [2, 3]: same" in shown and "d [2, 3]: same" in shown
    assert "llvm:0" in shown and "llvm:1" in shown


def test_errors_are_one_line(tmp_path: Path):
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"\xff" * 64)
    done = subprocess.run([sys.executable, APP, junk], capture_output=True, text=True)
    assert done.returncode == 1 and "is not an ONNX model" in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_a_pattern_that_matches_nothing_is_an_error(main, model: Path):
    with pytest.raises(rh.HeteroError, match="pattern 'none'"):
        main([str(model), "--place", "none=llvm"])


def test_wrong_usage(main, model: Path, tmp_path: Path):
    for arguments in ([tmp_path / "absent.onnx"], [model, "--vdevice", "llvm"]):
        with pytest.raises(SystemExit) as exit_:
            main([*map(str, arguments)])
        assert exit_.value.code == 2
