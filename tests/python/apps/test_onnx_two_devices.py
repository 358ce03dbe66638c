"""The example for any model: one device and two give the same results, and its exit code says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

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


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(APP), *map(str, arguments), "--repeat", "1"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "120"})


@pytest.mark.parametrize(
    "options",
    [
        ["--place", "Exp=vdevice:1"],
        *(pytest.param(each, marks=pytest.mark.slow) for each in ([], ["--fraction", "0.25"])),
    ],
)
def test_two_devices_give_what_one_gives(model: Path, options: list[str]):
    done = run(model, *options)
    assert done.returncode == 0, done.stderr
    assert "b [2, 3]: same" in done.stdout and "d [2, 3]: same" in done.stdout
    assert "llvm:0" in done.stdout and "llvm:1" in done.stdout


def test_errors_are_one_line(model: Path, tmp_path: Path):
    junk = tmp_path / "junk.onnx"
    junk.write_bytes(b"\xff" * 64)
    for arguments, message in (((junk,), "is not an ONNX model"), ((model, "--place", "none=llvm"), "pattern 'none'")):
        done = run(*arguments)
        assert done.returncode == 1 and message in done.stderr
        assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_wrong_usage(model: Path, tmp_path: Path):
    assert run(tmp_path / "absent.onnx").returncode == 2
    assert run(model, "--vdevice", "llvm").returncode == 2
