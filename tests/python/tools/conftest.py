"""Small models and a way to call the command line in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from relax_hetero.tools.cli import cli

# Two CPU devices with different targets.
TWO = ["--vdevice", "llvm", "--vdevice", json.dumps({"kind": "llvm"})]


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Call the command line with arguments of any type."""
    # bench sets these for its process, which here is that of the other tests too.
    for name in ("TVM_NUM_THREADS", "TVM_BIND_THREADS"):
        monkeypatch.setenv(name, os.environ.get(name, "0" if "BIND" in name else "2"))

    def call(*arguments: object) -> Result:
        return CliRunner().invoke(cli, [str(argument) for argument in arguments])

    return call


def two_layers(batch: int | str = 2) -> onnx.ModelProto:
    """``y = relu(x @ a) @ b`` with named nodes; the output's name is one that Python reserves."""
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal(shape).astype("float32") for shape in ((3, 4), (4, 5)))
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"], name="/lower/MatMul"),
            helper.make_node("Relu", ["h"], ["r"], name="/lower/Relu"),
            helper.make_node("MatMul", ["r", "b"], ["class"], name="/upper/MatMul"),
        ],
        "two_layers",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3])],
        [helper.make_tensor_value_info("class", TensorProto.FLOAT, [batch, 5])],
        [numpy_helper.from_array(a, "a"), numpy_helper.from_array(b, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 9
    return model


def save(model: onnx.ModelProto, path: Path) -> Path:
    onnx.save(model, str(path))
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file with `two_layers` for a batch of 2."""
    return save(two_layers(), tmp_path / "model.onnx")


@pytest.fixture
def symbolic_model(tmp_path: Path) -> Path:
    """The same with a symbolic batch."""
    return save(two_layers("batch"), tmp_path / "symbolic.onnx")


def parsed(result: Result) -> Any:
    """JSON that a command printed on stdout, which holds nothing else."""
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)
