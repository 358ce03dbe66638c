"""Models of more than 2 GB, which protobuf cannot write as a whole: weights in several files, or in memory."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import relax_hetero as rh
from relax_hetero.errors import FrontendError

ROWS, COLS = 190_000, 1024
NBYTES = ROWS * COLS * 4
WEIGHTS = {"a": ("one.bin", 4096), "b": ("one.bin", 4096 + NBYTES), "c": ("two.bin", 0)}
"""Weight -> its file and offset there."""
MARKS = {"a": (ROWS - 1, 1), "b": (7, 10), "c": (ROWS - 1, 100)}
"""Weight -> its only row that is not zero, and the numbers in it."""


def save(folder: Path) -> Path:
    weights = []
    for name, (file, offset) in WEIGHTS.items():
        tensor = TensorProto(name=name, data_type=1, dims=[ROWS, COLS], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", file), ("offset", offset), ("length", NBYTES)):
            tensor.external_data.add(key=key, value=str(value))
        weights.append(tensor)
        row, number = MARKS[name]
        with open(folder / file, "ab") as data:
            data.truncate(offset + NBYTES)  # all holes, which read as zeros
        with open(folder / file, "r+b") as data:
            data.seek(offset + row * COLS * 4)
            data.write(np.full(COLS, number, "float32").tobytes())
    nodes = [helper.make_node("Gather", [name, "rows"], [f"of_{name}"]) for name in WEIGHTS]
    nodes.append(helper.make_node("Sum", [f"of_{name}" for name in WEIGHTS], ["y"]))
    rows = helper.make_tensor_value_info("rows", TensorProto.INT64, ["n"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", COLS])
    graph = helper.make_graph(nodes, "g", [rows], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), folder / "m.onnx")
    return folder / "m.onnx"


def own_bytes() -> int:
    """Bytes of memory of this process that belong to no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.slow
@pytest.mark.parametrize("in_memory", [False, True], ids=["files", "memory"])
def test_weights_of_more_than_2_gb(in_memory, tmp_path):
    path = save(tmp_path)
    model = onnx.load(path) if in_memory else path
    before = own_bytes()
    assert rh.onnx_report(path)
    mod = rh.from_onnx(model)
    vm = rh.vm.VirtualMachine(rh.compile(mod, cache=False))
    actual = vm["main"](rows=np.array([ROWS - 1, 7, 0])).numpy()
    np.testing.assert_array_equal(actual, np.repeat([[101], [10], [0]], COLS, 1).astype("float32"))
    copies = 1 if in_memory else 0  # files are mapped, and stay where they are
    assert own_bytes() - before < (copies + 0.5) * len(WEIGHTS) * NBYTES


def test_a_file_that_protobuf_cannot_read_is_refused_by_name(tmp_path):
    path = tmp_path / "huge.onnx"
    with open(path, "wb") as file:
        file.truncate(2**31 + 1)
    with pytest.raises(FrontendError, match=r"huge\.onnx.*external data"):
        rh.from_onnx(path)
