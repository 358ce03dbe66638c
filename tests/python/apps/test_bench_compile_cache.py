"""The benchmark of the compile cache, on a small model."""

import json
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

BENCH = Path(__file__).parents[3] / "apps" / "bench"


@pytest.mark.slow
def test_a_model_is_compiled_kept_and_found(tmp_path: Path) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [x], [y])
    file = tmp_path / "relu.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(file))
    command = [sys.executable, str(BENCH / "compile_cache.py"), str(file), "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    times = json.loads(done.stdout)[str(file)]
    assert set(times) == {"import", "without", "miss", "hit"} and min(times.values()) > 0
