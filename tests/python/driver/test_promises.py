"""The promises of docs/explanation/promises.md: what has the same bits, and what does not."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import tvm
from onnx import numpy_helper

import relax_hetero as rh
from relax_hetero.target.cpu_cores import cpus_of_cores

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "explanation" / "promises.md"
CPU = {k: v for k, v in rh.native("llvm").export().items() if k in ("kind", "mcpu", "mattr")}

# A convolution, products with and without weights, rows, reductions of everything, functions with odd remainders, and
# random numbers without a seed.
NETWORK = """
<ir_version: 9, opset_import: ["" : 20]>
g (float[n, 4, 11, 11] image, float[n, 301] row) => (
    float[n, 8] pooled, float[n, 33] p, float[n, 7, 43] attended, float[n, 301] e, float s, float[8] channels,
    float[9, 5] noise
) {
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (image, k)
    a = Relu (c)
    pooled = ReduceMean <keepdims = 0> (a, hw)
    channels = ReduceSum <keepdims = 0> (a, nhw)
    h = MatMul (row, w1)
    t = Tanh (h)
    l = LayerNormalization (t, g1, b1)
    logits = MatMul (l, w2)
    p = Softmax (logits)
    q = Reshape (row, shape)
    qt = Transpose <perm = [0, 2, 1]> (q)
    scores = MatMul (q, qt)
    weights = Softmax (scores)
    attended = MatMul (weights, q)
    sine = Sin (row)
    power = Exp (sine)
    e = Erf (power)
    s = ReduceSum <keepdims = 0> (row)
    noise = RandomNormal <shape = [9, 5]> ()
}"""
OF_ROWS = slice(4)
"""The outputs with a row of the batch in each row."""


def network():
    model, rng = onnx.parser.parse_model(NETWORK), np.random.default_rng(0)
    shapes = {"k": (8, 4, 3, 3), "w1": (301, 150), "g1": 150, "b1": 150, "w2": (150, 33)}
    tensors = {name: (rng.standard_normal(shape) / 8).astype("float32") for name, shape in shapes.items()}
    tensors |= {"hw": np.array([2, 3]), "nhw": np.array([0, 2, 3]), "shape": np.array([-1, 7, 43])}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    return model


def compiled(cores=1, batch=None, **options):
    shapes = None if batch is None else {"n": batch}
    return rh.compile(rh.from_onnx(network(), [{**CPU, "num-cores": cores}], shapes=shapes), **options)


def arguments(batch):
    rng = np.random.default_rng(1)
    image, row = rng.standard_normal((40, 4, 11, 11)), rng.standard_normal((40, 301))
    return image.astype("float32")[:batch], row.astype("float32")[:batch]


def arrays(results):
    return [result.numpy() for result in results]


def assert_equal_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        np.testing.assert_array_equal(*(np.frombuffer(array.tobytes(), "uint8") for array in (one, other)))


@pytest.fixture(scope="module")
def executable():
    return compiled(cores=4)


@pytest.fixture(scope="module")
def expected(executable):
    return arrays(rh.vm.VirtualMachine(executable, threads=1)["main"](*arguments(37)))


def test_calls_and_machines(executable, expected):
    args = arguments(37)
    machine = rh.vm.VirtualMachine(executable)
    fences = [machine.submit("main", *args) for _ in range(3)]
    into = [np.empty_like(each) for each in expected]
    machine["main"](*args, out=tuple(into))
    other = rh.vm.VirtualMachine(executable, devices=[tvm.cpu(3)])
    for found in (*(arrays(fence.result(60)) for fence in fences), into, arrays(other["main"](*args))):
        assert_equal_bits(found, expected)


def test_numbers_of_threads(executable, expected):
    options = [{"threads": 2}, {"threads": 3, "spin": False}, {"threads": 4}, {"cores": [cpus_of_cores()[0][0]]}]
    for option in options:
        assert_equal_bits(arrays(rh.vm.VirtualMachine(executable, **option)["main"](*arguments(37))), expected)


def test_compilations_for_other_numbers_of_cores(expected):
    """Also a second compilation, and one without command buffers."""
    for cores, buffers in ((1, False), (3, True)):
        found = rh.vm.VirtualMachine(compiled(cores, command_buffers=buffers, cache=False))["main"](*arguments(37))
        assert_equal_bits(arrays(found), expected)


RUN = """
import sys, numpy as np, relax_hetero as rh
machine = rh.vm.VirtualMachine(rh.load(sys.argv[1]))
with np.load(sys.argv[2]) as values:
    results = machine["main"](*(values[name] for name in values.files))
np.savez(sys.argv[3], *(result.numpy() for result in results))
"""


def test_processes(executable, expected, tmp_path):
    executable.export_library(tmp_path / "model.so")
    np.savez(tmp_path / "in.npz", *arguments(37))
    env = {**os.environ, "TVM_NUM_THREADS": "3", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    paths = [tmp_path / name for name in ("model.so", "in.npz", "out.npz")]
    subprocess.run([sys.executable, "-c", RUN, *paths], env=env, check=True, timeout=120)
    with np.load(paths[-1]) as results:
        assert_equal_bits([results[name] for name in results.files], expected)


def test_rows_of_a_batch_of_known_size():
    large = arrays(rh.vm.VirtualMachine(compiled(batch=37))["main"](*arguments(37)))
    for batch in (1, 9):
        found = arrays(rh.vm.VirtualMachine(compiled(batch=batch))["main"](*arguments(batch)))
        assert_equal_bits(found[OF_ROWS], [each[:batch] for each in large[OF_ROWS]])


def test_rows_of_a_batch_of_unknown_size(executable, expected):
    """Only products with weights differ: their tiles have several sums where rows are few."""
    machine = rh.vm.VirtualMachine(executable)
    for batch in (1, 2, 9, 36):
        pooled, p, *others = arrays(machine["main"](*arguments(batch)))[OF_ROWS]
        assert_equal_bits([pooled, *others], [expected[index][:batch] for index in (0, 2, 3)])
        np.testing.assert_allclose(p, expected[1][:batch], rtol=1e-5)


INTEGERS = """
<ir_version: 8, opset_import: ["" : 17]>
g (uint8[5, 70] x) => (int32[5, 19] y, int64[5] sums) {
    y = MatMulInteger (x, w)
    wide = Cast <to = 7> (y)
    sums = ReduceSum <keepdims = 0> (wide, one)
}"""


def test_integers_on_other_cpus():
    model, rng = onnx.parser.parse_model(INTEGERS), np.random.default_rng(0)
    x, w = rng.integers(0, 256, (5, 70)).astype("uint8"), rng.integers(-128, 128, (70, 19)).astype("int8")
    model.graph.initializer.extend([numpy_helper.from_array(w, "w"), numpy_helper.from_array(np.array([1]), "one")])
    exact = x.astype("int32") @ w.astype("int32")
    for target in ({"kind": "llvm", "mcpu": "x86-64-v2"}, {"kind": "llvm", "mcpu": "x86-64-v3"}, CPU):
        if target is not CPU and not str(rh.native("llvm").attrs["mtriple"]).startswith("x86_64"):
            continue
        y, sums = arrays(rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, [target])))["main"](x))
        assert_equal_bits([y, sums], [exact, exact.astype("int64").sum(1)])


FUNCTIONS = "Exp Log Tanh Erf Asin Acos Atan Sinh Cosh Asinh Acosh Atanh Sqrt Sigmoid Softplus Gelu".split()


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_float32_functions_are_not_those_of_the_c_library(tmp_path):
    """Sines of numbers beyond 2^20 are; other symbols of mathematics are exact (fmod)."""
    outputs = ", ".join(f"float[n, 7] {name.lower()}" for name in FUNCTIONS)
    nodes = " ".join(f"{name.lower()} = {name} (x)" for name in FUNCTIONS)
    head = '<ir_version: 9, opset_import: ["" : 20]>'
    text = f"{head} g (float[n, 7] x) => ({outputs}, float[n, 7] pw) {{ {nodes} pw = Pow (x, x) }}"
    rh.compile(rh.from_onnx(onnx.parser.parse_model(text))).export_library(tmp_path / "functions.so")
    listed = subprocess.run(["nm", "-D", tmp_path / "functions.so"], capture_output=True, text=True, check=True).stdout
    symbols = {line.split()[-1].partition("@")[0] for line in listed.splitlines()}
    names = {"exp", "log", "tanh", "erf", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh", "pow"}
    assert symbols and not symbols & {variant for name in names for variant in (name, f"{name}f", f"{name}2f")}


def test_the_page_names_tests_that_exist():
    named = re.findall(r"`(tests/python/[\w/]+\.py)::(\w+)`", PAGE.read_text())
    functions = {}
    for path, name in named:
        if path not in functions:
            tree = ast.parse((ROOT / path).read_text())
            functions[path] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert name in functions[path], f"{path} has no {name}"
    own = {name for path, name in named if Path(path).name == Path(__file__).name}
    tests = {name for name in globals() if name.startswith("test_")} - {"test_the_page_names_tests_that_exist"}
    assert own == tests
