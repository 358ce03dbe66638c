"""Models on OpenCL devices, whole and cut: on the GPU's driver where there is one, else on a CPU's."""

import math
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes  # noqa: F401 (bfloat16)
import numpy as np
import pytest
import tvm
from tvm import relax, runtime, tirx
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from backends.test_npu import npu  # noqa: F401 (a fixture)
from models.running import assert_both_devices_hold_ops, assert_same, cut, expected_outputs, outputs_of
from models.zoo import inputs_of, minilm, node_names, random_model
from modules import built_module
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.backends.opencl import text
from relax_hetero.errors import BindingError, BuildError, MemoryLimitError
from relax_hetero.target.backend import backend_of

sys.path.append(str(Path(__file__).resolve().parents[4] / "apps" / "bench"))

from model_zoo import MAKERS  # noqa: E402 (found in the benchmark)

pyopencl = pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0, reason=f"no OpenCL: {opencl.opencl_memory().why_absent}"
)


@I.ir_module
class Cut:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor(("n", 32), "float32", "llvm:0"), w: R.Tensor((32, 48), "float32", "opencl:0")):
        with R.dataflow():
            doubled = R.add(x, x)
            moved = R.hint_on_device(doubled, tvm.opencl(0))
            product = R.matmul(moved, w)
            positive = R.nn.relu(product)
            result = R.to_vdevice(positive, "llvm:0")
            R.output(result, product)
        return result, product


@I.ir_module
class OtherKind:
    I.module_global_infos({"vdevice": [I.vdevice("ext_dev"), I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor((40, 32), "float32", "ext_dev:0"), w: R.Tensor((32, 48), "float32", "opencl:0")):
        with R.dataflow():
            doubled = R.add(x, x)
            moved = R.to_vdevice(doubled, "opencl:0")
            product = R.matmul(moved, w)
            result = R.nn.relu(R.to_vdevice(product, "ext_dev:0"))
            R.output(result)
        return result


@I.ir_module
class Rows:
    I.module_global_infos({"vdevice": [I.vdevice("opencl")]})

    @R.function
    def main(
        x: R.Tensor(("n", 300), "float32"), scale: R.Tensor((300,), "float32"), shift: R.Tensor((300,), "float32")
    ):
        with R.dataflow():
            normalized = R.nn.layer_norm(x, scale, shift, axes=[-1])
            probabilities = R.nn.softmax(normalized)
            sums = R.sum(probabilities * x, axis=[1])
            best = R.argmax(x, axis=1)
            R.output(probabilities, sums, best)
        return probabilities, sums, best


@I.ir_module
class Sorts:
    I.module_global_infos({"vdevice": [I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor((7, 300), "float32")):
        with R.dataflow():
            best = R.topk(x, k=9, axis=1, ret_type="both", largest=True)
            sums = R.cumsum(x, axis=1)
            angles = R.acos(R.tanh(x))
            R.output(best, sums, angles)
        return best, sums, angles


def random(*shape):
    return np.random.default_rng(len(shape)).standard_normal(shape).astype("float32")


def test_a_module_cut_over_cpu_and_opencl(tmp_path):
    executable = rh.compile(Cut)
    executable.export_library(tmp_path / "model.so")
    w = random(32, 48)
    for each in (executable, rh.load(tmp_path / "model.so")):
        machine = rh.vm.VirtualMachine(each)
        for rows in (1, 70, 33):
            x = random(rows, 32)
            expected = 2 * x.astype("float64") @ w
            for result, product in (machine["main"](x, w), machine.submit("main", x, w).result()):
                assert (str(result.device), str(product.device)) == ("cpu:0", "opencl:0")
                np.testing.assert_allclose(product.numpy(), expected, rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(result.numpy(), np.maximum(expected, 0), rtol=1e-5, atol=1e-5)


def test_rows_and_reductions():
    machine = rh.vm.VirtualMachine(rh.compile(Rows))
    scale, shift = random(300), np.linspace(-1, 1, 300, dtype="float32")
    for rows in (5, 0, 64):
        x = random(rows, 300)
        centered = x.astype("float64") - x.mean(1, keepdims=True)
        normalized = centered / np.sqrt((centered**2).mean(1, keepdims=True) + 1e-5) * scale + shift
        powers = np.exp(normalized - normalized.max(1, keepdims=True))
        probabilities = powers / powers.sum(1, keepdims=True)
        outputs = [output.numpy() for output in machine["main"](x, scale, shift)]
        np.testing.assert_allclose(outputs[0], probabilities, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(outputs[1], (probabilities * x).sum(1), rtol=1e-4, atol=1e-5)
        assert (outputs[2] == x.argmax(1)).all()


def test_sorts_scans_and_functions():
    x = random(7, 300)
    (values, indices), sums, angles = rh.vm.VirtualMachine(rh.compile(Sorts))["main"](x)
    order = np.argsort(-x, axis=1, kind="stable")[:, :9]
    assert (indices.numpy() == order).all() and (values.numpy() == np.take_along_axis(x, order, 1)).all()
    np.testing.assert_allclose(sums.numpy(), np.cumsum(x.astype("float64"), 1), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(angles.numpy(), np.arccos(np.tanh(x.astype("float64"))), rtol=1e-3, atol=1e-3)


TILES = {"kind": "opencl", "max_shared_memory_per_block": 32 << 10}
"""Target of GPUs; products of CPUs are plain loops."""


def with_tiles(build, *shapes):
    """A machine and random arguments of the function of Relax variables `build`, for `TILES`."""
    executable = rh.compile(rh.transform.UpdateVDevice([rh.VDevice(TILES)])(built_module(build, *shapes)))
    shapes = tuple([1 if isinstance(extent, tirx.Var) else extent for extent in shape] for shape in shapes)
    return rh.vm.VirtualMachine(executable), [random(*shape) for shape in shapes]


@pytest.mark.parametrize("m, n, k", [(65, 33, 47), (3, 33, 100), pytest.param(128, 96, 64, marks=pytest.mark.slow)])
def test_products_by_tiles(m, n, k):
    def product(builder, x, w, bias):
        return builder.emit(relax.op.nn.gelu(builder.emit(relax.op.matmul(x, w)) + bias))

    machine, (x, w, bias) = with_tiles(product, (m, k), (k, n), (n,))
    (dispatch,) = machine.executable.metadata.dispatches.values()
    assert dispatch.precision == "f32" and len(dispatch.ops) == 3  # the epilogue is part of the product's kernel
    text = machine.executable.metadata.device_code[0].text
    assert "__local" in text and ("shuffle_xor_float(EXCHANGED" in text) == (m == 3)
    total = x.astype("float64") @ w + bias
    expected = total * (1 + np.vectorize(math.erf)(total / math.sqrt(2))) / 2
    np.testing.assert_allclose(machine["main"](x, w, bias).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_values_of_bfloat16_within_a_kernel():
    """Products are rounded to bfloat16 before the addition; TVM computes with float32 in their place."""
    builder = relax.BlockBuilder()
    shapes = (2, 4, 8), (2, 8, 6), (4, 6)
    params = [relax.Var(f"x{i}", relax.TensorType(shape, "bfloat16")) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(relax.op.add(builder.emit(relax.op.matmul(*params[:2])), params[2]))
        builder.emit_func_output(result)
    machine = rh.vm.VirtualMachine(rh.compile(rh.transform.UpdateVDevice([rh.VDevice("opencl")])(builder.get())))
    x, w, bias = (random(*shape).astype("bfloat16") for shape in shapes)
    rounded = (x.astype("float32") @ w.astype("float32")).astype("bfloat16").astype("float32")
    expected = (rounded + bias.astype("float32")).astype("bfloat16").astype("float32")
    np.testing.assert_allclose(machine["main"](x, w, bias).numpy().astype("float32"), expected, rtol=2**-7, atol=2**-7)


def test_shuffles_through_local_memory(monkeypatch):
    """As on devices whose compilers have no sub-groups of a required size."""
    monkeypatch.setattr(
        text, "_SHUFFLES", text._SHUFFLES.replace("#elif defined(cl_intel", "#elif 0 && defined(cl_intel")
    )
    machine, (x, w) = with_tiles(lambda builder, x, w: builder.emit(relax.op.matmul(x, w)), (2, 100), (100, 33))
    np.testing.assert_allclose(machine["main"](x, w).numpy(), x.astype("float64") @ w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("operation", "shapes"), [(relax.op.nn.softmax, [(3, 30000)]),
                                                   (relax.op.matmul, [(1, 4096), (4096, 64)])])  # fmt: skip
def test_groups_have_at_most_256_work_items(operation, shapes):
    machine, arguments = with_tiles(lambda builder, *params: builder.emit(operation(*params)), *shapes)
    sizes = re.findall(r"reqd_work_group_size\((\d+), 1, 1\)", machine.executable.metadata.device_code[0].text)
    assert sizes and max(map(int, sizes)) <= 256
    first = arguments[0].astype("float64")
    powers = np.exp(first - first.max(-1, keepdims=True))
    expected = powers / powers.sum(-1, keepdims=True) if len(shapes) == 1 else first @ arguments[1]
    np.testing.assert_allclose(machine["main"](*arguments).numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("causal", [None, pytest.param("BottomRight", marks=pytest.mark.slow)])
def test_attention(causal):
    def attention(builder, query, key, value):
        return builder.emit(relax.op.nn.attention(query, key, value, causal_mask=causal))

    rows = 5 if causal else tirx.Var("rows", "int64")
    machine, (_, key, value) = with_tiles(attention, (2, rows, 3, 40), (2, 37, 3, 40), (2, 37, 3, 40))
    query = random(2, 5, 3, 40)
    assert machine.executable.metadata.device_code[0].text.count("__kernel void") == 2  # one, declared and defined
    scores = np.einsum("bmhd,bnhd->bhmn", query.astype("float64"), key) / math.sqrt(40)
    if causal:
        scores = np.where(np.arange(37) <= np.arange(5)[:, None] + 32, scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("bhmn,bnhd->bmhd", powers / powers.sum(-1, keepdims=True), value)
    np.testing.assert_allclose(machine["main"](query, key, value).numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("before, after", [
    ("__global float* restrict p) {\n  x = vload4(0, p + (i * 4));", "x = *((__global float4*)(p + (i * 4)));"),
    ("__global half* q) {\n  vstore2(vload2(0, r + 0), 0, q + f(i, 2));",
     "*((__global half2*)(q + f(i, 2))) = vload2(0, r + 0);"),
    ("  __local int s[64];\n  vstore4(a + vload4(0, s + 4), 0, s + (b[i] * 4));",
     "*((__local int4*)(s + (b[i] * 4))) = a + *((__local int4*)(s + 4));"),
])  # fmt: skip
def test_vectors_of_arrays_are_aligned(before, after):
    """Private arrays have no alignment of their own."""
    result = text._with_aligned_vectors(before)
    assert result.endswith(after)
    assert ("aligned(16)" in result) == ("__local" in before)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 8])
def test_convolutions_by_tiles(groups):
    def convolution(builder, x, w):
        return builder.emit(relax.op.nn.relu(builder.emit(relax.op.nn.conv2d(x, w, padding=1, groups=groups))))

    machine, arguments = with_tiles(convolution, (2, 8, 9, 11), (16, 8 // groups, 3, 3))
    padded = np.pad(arguments[0].astype("float64"), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3)).reshape(2, groups, -1, 9, 11, 3, 3)
    weights = arguments[1].reshape(groups, -1, *arguments[1].shape[1:])
    expected = np.maximum(np.einsum("bgcyxij,gncij->bgnyx", windows, weights), 0).reshape(2, 16, 9, 11)
    np.testing.assert_allclose(machine["main"](*arguments).numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_device_with_too_little_local_memory_is_refused():
    large = rh.VDevice({**TILES, "max_shared_memory_per_block": 1 << 30})
    executable = rh.compile(rh.transform.UpdateVDevice([large])(Rows))
    with pytest.raises(BindingError, match=r"bytes of local memory, expected 1,073,741,824: compile for the target"):
        rh.vm.VirtualMachine(executable)


def test_arguments_on_the_device_are_not_copied():
    machine, w = rh.vm.VirtualMachine(rh.compile(Cut)), random(32, 48)
    on_device = runtime.tensor(w, runtime.device("opencl", 0))
    out = machine["main"](random(3, 32), on_device)[1]
    np.testing.assert_allclose(out.numpy(), 2 * random(3, 32) @ w, rtol=1e-5, atol=1e-5)
    assert (on_device.numpy() == w).all()


@pytest.mark.parametrize("is_shared", [True, False])
def test_results_in_the_hosts_memory_are_not_copied(monkeypatch, is_shared):
    memory, copies, copy = opencl.opencl_memory(), [], opencl.OpenClMemory.copy
    if is_shared and not memory.host_reads(0):
        pytest.skip("the device has memory of its own")
    machine, w = rh.vm.VirtualMachine(rh.compile(Cut)), runtime.tensor(random(32, 48), runtime.device("opencl", 0))
    if not is_shared:
        monkeypatch.setattr(memory, "host_reads", lambda index: False)
    monkeypatch.setattr(memory, "copy", lambda *a: copies.append(a) or copy(memory, *a))
    sizes = (1024, 5, 1030)  # only the second one is of less than 128 KB
    results = [machine["main"](random(rows, 32), w)[0].numpy() for rows in sizes]
    assert len(copies) == (1 if is_shared else 2 * len(results))
    for rows, result in zip(sizes, results, strict=True):
        np.testing.assert_allclose(result, np.maximum(2 * random(rows, 32) @ random(32, 48), 0), rtol=1e-5, atol=1e-5)


NETWORKS = {
    **{name: lambda name=name: random_model(name) for name in ("squeezenet", "inception_v1")},
    "minilm": lambda: minilm(2, 16),
    **{name: MAKERS[name] for name in ("resnet50", "mobilenet_v2", "bert", "distilbert", "gpt2", "vit_small")},
}


@pytest.mark.slow  # whole networks
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name, is_cut):
    model = NETWORKS[name]()
    names = node_names(model)
    inputs = {key: array % 1000 if array.dtype.kind == "i" else array for key, array in inputs_of(model).items()}
    placement = cut(names, [len(names) // 3, len(names) // 2, len(names) * 4 // 5]) if is_cut else None
    executable = rh.compile(rh.from_onnx(model, ["llvm", "opencl"] if is_cut else ["opencl"], placement))
    if is_cut:
        assert_both_devices_hold_ops(executable)
    assert_same(outputs_of(executable, inputs), expected_outputs(model, inputs))


@pytest.mark.slow  # compiles a language model
@pytest.mark.parametrize("placement", [None, {"blk.*.attn*": "llvm", "*": "opencl"}, {"blk.[12].*": "opencl"}])
@pytest.mark.parametrize("name, kind", [("gemma3", "Q8_0"), ("qwen3moe", "Q4_K")])
def test_language_models(tmp_path, placement, name, kind):
    from llm.gguf_files import MODELS, write_gguf
    from llm.reference_model import ReferenceModel
    from llm.run_gguf import run

    path = write_gguf(tmp_path / "model.gguf", MODELS[name], {"*attn*": "F32", "*": kind})
    tokens = np.random.default_rng(1).integers(0, 320, 40)
    devices = ["opencl"] if placement is None else ["llvm", "opencl"]
    logits = run(path, tokens, 13, devices, placement, activations="float32")
    expected = ReferenceModel(path).logits(tokens)
    # Products of quantized weights on CPUs round their left operand to 16 bits.
    tolerance = 1e-4 if placement and "*" not in placement else 1e-5
    assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()


CASES = """test_cumsum_2d_axis_1 test_nonmaxsuppression_suppress_by_IOU test_scatter_elements_with_axis
    test_mod_mixed_sign_int16 test_simple_rnn_defaults test_where_example""".split()


@pytest.mark.slow  # ONNX computes the data of all its cases
@pytest.mark.parametrize("every", [0, 37])
def test_cases_of_onnx(every, monkeypatch):
    apps = os.path.join(os.path.dirname(__file__), *[".."] * 4, "apps", "onnx_backend")
    monkeypatch.syspath_prepend(apps)
    monkeypatch.setenv("CONFORMANCE_GPU", "opencl")
    from conformance.cases import case_names
    from conformance.outcome import PASSED, REFUSED, run_case

    outcomes = [run_case(name, "e") for name in (case_names()[::every] if every else CASES)]
    allowed = (PASSED, REFUSED) if every else (PASSED,)
    assert [(o.name, o.status, o.detail) for o in outcomes if o.status not in allowed] == []
    assert sum(outcome.status == PASSED for outcome in outcomes) > 0.6 * len(outcomes)


TWO_DEVICES = """
import sys
sys.path[:0] = {path!r}
from relax_hetero.backends.opencl import devices as opencl
find = opencl._usable_devices
opencl._usable_devices = lambda cl: (find(cl)[0][:1] * 2, "")  # with a context and a queue each
from backends.opencl.test_opencl import *
devices = ["opencl:0", "opencl:1"]
mod = rh.transform.UpdateVDevice([rh.VDevice("opencl", index) for index in range(2)])(Cut)
product = rh.vm.VirtualMachine(rh.compile(mod))["main"](random(7, 32), random(32, 48))[1]
assert str(product.device) == "opencl:1", product.device
np.testing.assert_allclose(product.numpy(), 2 * random(7, 32) @ random(32, 48), rtol=1e-5, atol=1e-5)
"""


@pytest.mark.slow
def test_two_opencl_devices():
    command = [sys.executable, "-c", TWO_DEVICES.format(path=sys.path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr


def test_copies_from_and_to_another_kind_of_device(npu):  # noqa: F811 (a fixture)
    """Through the host, in plain calls and between queues."""
    machine = rh.vm.VirtualMachine(rh.compile(OtherKind))
    x, w = np.round(random(40, 32)), np.round(random(32, 48))
    expected = np.maximum(2 * x @ w, 0)
    for result in (machine["main"](x, w), machine.submit("main", x, w).result()):
        assert str(result.device) == "ext_dev:0"
        np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-4)


def test_an_absent_device_is_named():
    machine = {"opencl:0": runtime.device("opencl", 7)}
    with pytest.raises(BindingError, match="opencl:0 is to run on opencl:7, which this machine does not have"):
        rh.vm.VirtualMachine(rh.compile(Cut), devices=machine)


def test_an_absent_package_or_driver_is_named(monkeypatch):
    monkeypatch.setattr(opencl, "opencl_memory", lambda: exec("raise ImportError"))
    assert "pip install 'relax-hetero[opencl]'" in backend_of("opencl").why_absent()
    assert not backend_of("opencl").load() and backend_of("opencl").count() == 0

    def fail():
        raise pyopencl.Error("PLATFORM_NOT_FOUND_KHR")

    monkeypatch.setattr(pyopencl, "get_platforms", fail)
    devices, reason = opencl._usable_devices(pyopencl)
    assert devices == [] and "no OpenCL platform (PLATFORM_NOT_FOUND_KHR); expected its vendor's driver" in reason


def test_a_driver_that_compiles_nothing_has_no_devices(monkeypatch):
    """As PoCL's for CPUs that are newer than it."""

    class Program:
        def __init__(self, *_):
            raise pyopencl.LogicError("clBuildProgram failed\n\nerror: unknown target CPU 'generic'\nDevice CPU failed")

    monkeypatch.setattr(pyopencl, "Program", Program)
    device = next(device for platform in pyopencl.get_platforms() for device in platform.get_devices())
    monkeypatch.setattr(pyopencl, "get_platforms", lambda: [device.platform])
    if device.type & pyopencl.device_type.CPU:
        devices, reason = opencl._usable_devices(pyopencl)
        assert (
            devices == [] and "cannot compile kernels (error: unknown target CPU 'generic'), expected a newer" in reason
        )


def test_kernels_that_a_device_cannot_compile_are_refused_before_anything_runs(monkeypatch):
    executable = rh.compile(Cut)
    (code,) = executable.metadata.device_code
    device = opencl.opencl_memory().opened(0)
    with pytest.raises(BuildError, match="cannot compile the model's kernels"):
        device.program("__kernel void k(")
    monkeypatch.setitem(opencl._EXTENSIONS, "cl_khr_none", "nothing")
    with pytest.raises(BuildError, match=r"opencl:0 \(.*\) lacks cl_khr_none \(nothing\), which the model's"):
        device.program(code.text + "// cl_khr_none")


def test_memory_that_does_not_suffice_is_an_error():
    with pytest.raises(MemoryLimitError, match=r"opencl:0 \(.*\) has no .* bytes left"):
        opencl.opencl_memory().allocate(0, 1 << 60, 64)
    machine = rh.vm.VirtualMachine(rh.compile(Cut))  # works as before
    assert machine["main"](random(1, 32), random(32, 48))[0].shape == (1, 48)


def test_freed_memory_is_used_again_or_returned():
    memory, device = opencl.opencl_memory(), opencl.opencl_memory().opened(0)
    first = memory.allocate(0, 48 << 20, 64)
    memory.free(0, first)
    assert memory.allocate(0, (48 << 20) - 5, 64) == first
    memory.free(0, first)
    for megabytes in (49, 50):
        memory.free(0, memory.allocate(0, megabytes << 20, 64))
    assert sum(block.end - block.begin for block in device._freed) == 50 << 20


def test_machines_of_several_threads():
    """Threads that free tensors do not wait for threads that allocate."""
    executable, w, errors = rh.compile(Cut), random(32, 48), []

    def work(seed):
        generator, machine = np.random.default_rng(seed), rh.vm.VirtualMachine(executable)
        for rows in generator.integers(1, 50, 20):
            x = generator.standard_normal((rows, 32)).astype("float32")
            errors.append(np.abs(machine["main"](x, w)[1].numpy() - 2 * x.astype("float64") @ w).max())

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(errors) == 120 and max(errors) < 1e-4
