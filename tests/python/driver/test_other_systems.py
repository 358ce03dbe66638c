"""Models for macOS and Windows, linked on any machine: undefined symbols that those systems lack are errors."""

import sys

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import relax_hetero as rh

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
layers (float[N, 64] x, float[1, 3, 9, 11] image) => (float[N, 10] y, float[1, 4, 9, 11] maps)
{
    h = MatMul(x, w)
    e = Erf(h)
    y = Softmax <axis = -1> (e)
    maps = Conv <pads = [1, 1, 1, 1]> (image, windows)
}
"""
# Symbols that the systems' libraries lack: TVM's function that raises errors, and a symbol that MSVC's C library has.
STUB = "int TVMFFIErrorSetRaisedFromCStrParts(void) { return 0; }\nint _fltused = 0;\n"


@pytest.mark.slow(reason="the linker first builds the C libraries of the system: 10 to 40 s of processor time")
@pytest.mark.parametrize(
    ("triple", "system", "magic"),
    [
        ("arm64-apple-macosx", "aarch64-macos", b"\xcf\xfa\xed\xfe"),
        ("x86_64-pc-windows-msvc", "x86_64-windows-gnu", b"MZ"),
    ],
)
def test_a_model_is_exported_for_another_system(tmp_path, monkeypatch, triple, system, magic):
    pytest.importorskip("ziglang", reason="no linker of all systems: make test DEV=dev-all")
    rng = np.random.default_rng(0)
    weights = {"w": rng.standard_normal((64, 10)), "windows": rng.standard_normal((4, 3, 3, 3))}
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype("float32"), name) for name, array in weights.items()
    )
    executable = rh.compile(rh.from_onnx(model, [{"kind": "llvm", "mtriple": triple, "num-cores": 2}]), cache=False)
    (tmp_path / "stub.c").write_text(STUB)
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang cc -target {system} -g0 {tmp_path}/stub.c")
    executable.export_library(tmp_path / "model")
    assert (tmp_path / "model").read_bytes().startswith(magic)
