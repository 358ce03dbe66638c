"""Models for AArch64 servers, compiled on any machine: instructions of their kernels, and machines that run them."""

import re

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper

import relax_hetero as rh
from relax_hetero.errors import BindingError
from relax_hetero.vm.device.cpu_features import linux_features

MODEL = """
<ir_version: 9, opset_import: ["" : 17]>
layers (uint8[8, 64] x, float[1, 32, 6, 7] image) => (uint8[8, 32] y, float[1, 48, 6, 7] maps)
<float xs = {0.02}, uint8 xz = {128}, float ys = {0.05}, uint8 yz = {0}>
{
    xd = DequantizeLinear(x, xs, xz)
    wd = DequantizeLinear <axis = 1> (w, ws, wz)
    p = MatMul(xd, wd)
    y = QuantizeLinear(p, ys, yz)
    maps = Conv <pads = [1, 1, 1, 1]> (image, windows)
}
"""


@pytest.mark.parametrize(
    ("mcpu", "expected"),
    [
        ("neoverse-v2", {"usmmla", "bfmmla"}),  # Graviton 4, Grace
        pytest.param("neoverse-v1", {"usmmla", "bfmmla"}, marks=pytest.mark.slow),  # Graviton 3
        pytest.param("neoverse-n1", {"sdot"}, marks=pytest.mark.slow),  # Graviton 2, Ampere Altra
    ],
)
def test_products_and_convolutions_use_the_instructions_of_the_cpu(mcpu, expected):
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.integers(-127, 128, (64, 32), dtype="int8"),
        "ws": rng.uniform(0.001, 0.01, 32).astype("float32"),
        "wz": np.zeros(32, "int8"),
        "windows": rng.standard_normal((48, 32, 3, 3)).astype("float32"),
    }
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": mcpu, "num-cores": 2}
    executable = rh.compile(rh.transform.ToMixedPrecision("bfloat16")(rh.from_onnx(model, [target])))
    texts = [part.inspect_source("asm") for part in executable.module.imports if part.kind == "llvm"]
    instructions = set(re.findall(r"\s(\w+mmla|[su]dot|bfdot)\s", "".join(texts)))
    assert instructions == expected
    if "asimd" not in linux_features():
        with pytest.raises(BindingError, match="which this one lacks"):
            rh.vm.VirtualMachine(executable)
