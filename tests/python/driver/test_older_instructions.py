"""Models for x86 CPUs without AVX-512: instructions of their code, and numbers of integers, 4 bits and floats."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import onnx.parser
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

import relax_hetero as rh
from relax_hetero.target.native_target import INSTRUCTION_LEVELS
from tir.kernel_runs import runs_here

NEWER = {
    "sse4": r"^\s+v[a-z]\w*\s|[yz]mm\d",
    "avx2": r"zmm\d|%k[0-7]|[xy]mm(1[6-9]|[23]\d)|vpdp",
    "avx-vnni": r"zmm\d|%k[0-7]|[xy]mm(1[6-9]|[23]\d)",
}
"""Assembly of instructions that a CPU of each level lacks: VEX and its registers; EVEX, masks, dot products."""
USED = {"sse4": "pmaddwd .*pmaddubsw", "avx2": "vpmaddwd .*vpmaddubsw", "avx-vnni": "vpdpbusd"}
"""Instructions of products of bytes, and of weights of 4 bits."""

INTEGERS = """
<ir_version: 9, opset_import: ["" : 17]>
layers (uint8[7, 70] x, uint8[1, 37, 9, 7] image, int8[1, 6, 8, 8] channels)
    => (int32[7, 33] y, int32[1, 45, 5, 4] maps, int32[1, 6, 6, 6] depthwise)
<uint8 xz = {131}, uint8 iz = {7}>
{
    y = MatMulInteger(x, w, xz)
    maps = ConvInteger <strides = [2, 2], pads = [1, 1, 1, 1]> (image, windows, iz)
    depthwise = ConvInteger <group = 6> (channels, filters)
}
"""
FLOATS = """
<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]>
layers (float[5, 96] a, float[2, 9, 20] q, float[2, 20, 11] k, float[2, 11, 6] v, float[1, 6, 9, 9] image)
    => (float[5, 45] four_bits, float[2, 9, 6] attended, float[1, 19, 9, 9] maps)
{
    four_bits = com.microsoft.MatMulNBits <K = 96, N = 45, bits = 4, block_size = 32> (a, quants, scales)
    scores = MatMul(q, k)
    shares = Softmax(scores)
    mixed = MatMul(shares, v)
    exps = Exp(mixed)
    roots = Erf(exps)
    attended = Tanh(roots)
    convolved = Conv <pads = [1, 1, 1, 1]> (image, windows)
    maps = Sigmoid(convolved)
}
"""
LEVELS = [name for name in NEWER if runs_here({"avx-vnni": "avxvnni"}.get(name, name))]


def parsed(text: str, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model


def code_of(executable: rh.vm.Executable) -> str:
    return "".join(part.inspect_source("asm") for part in executable.module.imports if part.kind == "llvm")


def check_instructions(code: str, level: str) -> None:
    assert len(re.findall(r"xmm\d", code)) > 100  # there are vectors
    assert not (newer := re.findall(f".*(?:{NEWER[level]}).*", code, re.MULTILINE)), newer[:5]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.sampled(2)
def test_integers_are_exact(level):
    """Extremes of bytes, whose sums of pairs do not fit int16; ragged sizes; strides and zero points."""
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.choice([-128, -127, 127, 3], (70, 33)).astype("int8"),
        "windows": rng.integers(-128, 128, (45, 37, 3, 3)).astype("int8"),
        "filters": rng.integers(-128, 128, (6, 1, 3, 3)).astype("int8"),
    }
    model = parsed(INTEGERS, weights)
    inputs = {
        "x": rng.choice([0, 1, 254, 255], (7, 70)).astype("uint8"),
        "image": rng.integers(0, 256, (1, 37, 9, 7)).astype("uint8"),
        "channels": rng.integers(-128, 128, (1, 6, 8, 8)).astype("int8"),
    }
    executable = rh.compile(rh.from_onnx(model, [rh.native("llvm", isa=level)]))
    check_instructions(code := code_of(executable), level)
    assert USED[level].partition(" ")[0] in code
    expected = ReferenceEvaluator(model).run(None, inputs)
    for got, want in zip(rh.vm.VirtualMachine(executable)["main"](**inputs), expected, strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


def floats() -> tuple[onnx.ModelProto, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`FLOATS`, its weights and inputs."""
    rng = np.random.default_rng(1)
    weights = {
        "quants": rng.integers(0, 256, (45, 3, 16), dtype=np.uint8),
        "scales": rng.uniform(0.01, 0.02, 45 * 3).astype("float32"),
        "windows": rng.standard_normal((19, 6, 3, 3)).astype("float32") / 8,
    }
    model = parsed(FLOATS, weights)
    sizes = {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in model.graph.input}
    return model, weights, {name: rng.standard_normal(size).astype("float32") for name, size in sizes.items()}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.sampled(2)
def test_floats_and_four_bits(level):
    model, weights, inputs = floats()
    executable = rh.compile(rh.from_onnx(model, [rh.native("llvm", isa=level)]))
    check_instructions(code := code_of(executable), level)
    assert USED[level].rpartition("*")[2] in code
    four_bits, attended, maps = rh.vm.VirtualMachine(executable)["main"](**inputs)
    quants, scales = weights["quants"], weights["scales"]
    codes = np.stack([quants & 15, quants >> 4], -1).reshape(45, 3, 32).astype("float64") - 8
    numbers = (codes * scales.reshape(45, 3, 1)).reshape(45, 96)
    error = np.abs(four_bits.numpy() - inputs["a"] @ numbers.T)
    assert (error <= 1.5e-2 * (np.abs(inputs["a"]) @ np.abs(numbers).T)).all()  # activations of a byte
    del model.graph.node[0], model.graph.output[0]
    for got, want in zip((attended, maps), ReferenceEvaluator(model).run(None, inputs), strict=True):
        np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=2e-6)


@pytest.mark.slow(reason="imports numpy and TVM under emulation: half a minute")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64: apt install qemu-user")
@pytest.mark.parametrize(("level", "cpu"), [("sse4", "Nehalem"), ("avx2", "Haswell")])
def test_an_emulated_older_cpu_computes_the_same_bits(level, cpu, tmp_path):
    """Newer instructions would end the process, those of checks and of TVM's libraries included."""
    model, _, inputs = floats()
    executable = rh.compile(rh.from_onnx(model, [rh.native("llvm", isa=level)]))
    executable.export_library(tmp_path / "model.so")
    np.savez(tmp_path / "inputs.npz", **inputs)
    program = """
import numpy as np
import relax_hetero as rh
machine = rh.vm.VirtualMachine(rh.load("model.so"))
np.savez("outputs.npz", *(output.numpy() for output in machine["main"](**np.load("inputs.npz"))))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENBLAS_")}
    environment |= {"TVM_USE_RUNTIME_LIB": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = ["qemu-x86_64", "-cpu", cpu, sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    outputs = np.load(tmp_path / "outputs.npz")
    for name, want in zip(outputs.files, rh.vm.VirtualMachine(executable)["main"](**inputs), strict=True):
        assert outputs[name].tobytes() == want.numpy().tobytes()


def test_levels_of_instructions():
    for level in INSTRUCTION_LEVELS:
        if runs_here({"avx-vnni": "avxvnni"}.get(level, level)):
            target = rh.native("llvm", isa=level)
            assert target.attrs["num-cores"] == rh.native("llvm").attrs["num-cores"]
            assert str(target.attrs["mcpu"]).startswith("x86-64-v")
    for kind, isa in (("llvm", "avx3"), ("cuda", "avx2")):
        with pytest.raises(
            rh.HeteroError, match=f"'{kind}' with isa='{isa}'.*expected 'llvm' on x86_64 and one of sse4"
        ):
            rh.native(kind, isa=isa)
