"""Models exported for AArch64, loaded and called by an emulated Python, against the same models on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import relax_hetero as rh
from arm.environment import PYTHON, unsupported_reason
from seeds import fresh_rng

pytestmark = [
    pytest.mark.slow,  # TVM takes ten seconds to start under emulation
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
]

# Products with weights of 4 bits, attention, a convolution, and 8-bit layers.
MODEL = """
<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
layers (float[2, 9, 64] x, uint8[8, 64] bytes, float[1, 32, 6, 7] image)
    => (float[2, 9, 64] mixed, uint8[8, 32] quantized, float[1, 48, 6, 7] maps)
<float xs = {0.02}, uint8 xz = {128}, float ys = {0.05}, uint8 yz = {0}, float scale = {0.125}>
{
    packed = com.microsoft.MatMulNBits <K = 64, N = 64, bits = 4, block_size = 32> (x, blocks, scales)
    keys = Transpose <perm = [0, 2, 1]> (packed)
    products = MatMul(x, keys)
    scores = Mul(products, scale)
    weights = Softmax <axis = -1> (scores)
    mixed = MatMul(weights, packed)
    xd = DequantizeLinear(bytes, xs, xz)
    wd = DequantizeLinear <axis = 1> (w, ws, wz)
    p = MatMul(xd, wd)
    quantized = QuantizeLinear(p, ys, yz)
    maps = Conv <pads = [1, 1, 1, 1]> (image, windows)
}
"""


def model(rng: np.random.Generator) -> onnx.ModelProto:
    weights = {
        "blocks": rng.integers(0, 256, (64, 2, 16), dtype="uint8"),
        "scales": rng.uniform(0.01, 0.03, 128).astype("float32"),
        "w": rng.integers(-127, 128, (64, 32), dtype="int8"),
        "ws": rng.uniform(0.001, 0.01, 32).astype("float32"),
        "wz": np.zeros(32, "int8"),
        "windows": rng.standard_normal((48, 32, 3, 3)).astype("float32"),
    }
    parsed = onnx.parser.parse_model(MODEL)
    parsed.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return parsed


@pytest.mark.parametrize(
    ("mcpu", "emulated"),
    [
        ("cortex-a72", "cortex-a72"),
        ("neoverse-n1", "neoverse-n1"),
        ("a64fx", "a64fx"),
        # SVE2 code, with registers of 128, 256 and 512 bits.
        *(("neoverse-v2", f"max,sve-max-vq={segments}") for segments in (1, 2, 4)),
    ],
)
def test_results(mcpu: str, emulated: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = fresh_rng()
    parsed = model(rng)
    inputs = [
        rng.standard_normal((2, 9, 64)).astype("float32"),
        rng.integers(0, 256, (8, 64), dtype="uint8"),
        rng.standard_normal((1, 32, 6, 7)).astype("float32"),
    ]
    expected = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(parsed, ["llvm"])))["main"](*inputs)
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2}
    monkeypatch.setenv("CXX", "aarch64-linux-gnu-g++")
    rh.compile(rh.from_onnx(parsed, [target])).export_library(str(tmp_path / "model.so"))
    np.savez(tmp_path / "inputs.npz", *inputs)
    command = [str(PYTHON), str(Path(__file__).with_name("run_model.py"))]
    files = [str(tmp_path / name) for name in ("model.so", "inputs.npz", "outputs.npz")]
    environment = {**os.environ, "QEMU_CPU": emulated, "TVM_USE_RUNTIME_LIB": "1", "TVM_NUM_THREADS": "2"}
    subprocess.run([*command, *files], env=environment, check=True)
    outputs = np.load(tmp_path / "outputs.npz")
    for name, want in zip(outputs.files, expected, strict=True):
        if want.numpy().dtype == "uint8":
            assert np.abs(outputs[name].astype(int) - want.numpy()).max() <= 1  # halves are rounded either way
        else:
            np.testing.assert_allclose(outputs[name], want.numpy(), rtol=1e-4, atol=1e-4)
