"""Kernels have sizes that fit the device: facts of devices that are not at hand, in targets."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tvm import relax, tirx
from tvm.target import Target

import relax_hetero as rh
from modules import built_module
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.frontend.auto import measure_devices
from relax_hetero.target.backend import backend_of
from relax_hetero.target.gpu_target import OTHER_BLOCK_THREADS, DeviceFacts, device_facts_of, gpu_target_of
from relax_hetero.target.native_target import with_hardware

pyopencl = pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0, reason=f"no OpenCL: {backend_of('opencl').why_absent()}"
)

DEVICES = {
    "mali": (16 << 10, DeviceFacts(10, in_host_memory=True, has_local_memory=False, cache_line=64)),
    "intel": (48 << 10, DeviceFacts(96, in_host_memory=True, subgroups=(8, 16, 32), has_command_buffers=True)),
    "amd": (48 << 10, DeviceFacts(60, subgroups=(64,), has_byte_dots=True)),
}


def target_of(name):
    local_bytes, facts = DEVICES[name]
    return Target({"kind": "opencl", "max_shared_memory_per_block": local_bytes, "model": str(facts)})


@pytest.mark.parametrize("name", DEVICES)
def test_facts_are_in_the_text_of_the_target(name):
    facts = device_facts_of(target_of(name))
    assert facts == DEVICES[name][1]
    gpu = gpu_target_of(target_of(name))
    assert (gpu.shared_bytes, gpu.multiprocessors) == (DEVICES[name][0], facts.units)
    assert gpu.stages_tiles == (name != "mali")
    backend = backend_of("opencl")
    expected = "cl_khr_command_buffer" if facts.has_command_buffers else "recorded launches"
    assert backend.submission(target_of(name)) == expected
    assert backend.may_share_memory(target_of(name)) == facts.in_host_memory


def test_targets_of_earlier_versions_and_without_facts():
    model = {"kind": "opencl", "max_shared_memory_per_block": 49152, "model": "132 units"}
    assert device_facts_of(Target(model)) == DeviceFacts(132)
    assert device_facts_of(Target({**model, "model": "2 CPU units in host memory"})) == DeviceFacts(2, True, True)
    assert device_facts_of(Target("opencl")) == device_facts_of(Target({**model, "model": "unknown"})) == DeviceFacts()


def test_facts_of_this_machines_device():
    memory, facts = opencl.opencl_memory(), device_facts_of(backend_of("opencl").native_target(0))
    device = memory.opened(0)._device
    assert facts == memory.facts(0)
    assert facts.units == device.max_compute_units and facts.cache_line == device.global_mem_cacheline_size
    assert facts.has_command_buffers == (memory.opened(0).commands is not None)


def test_targets_of_the_guide_are_not_those_of_the_present_device():
    guide = (Path(__file__).resolve().parents[4] / "docs" / "guides" / "opencl.md").read_text()
    targets = [json.loads(text) for text in re.findall(r'`({"kind": "opencl".*?})`', guide)]
    assert [target["max_shared_memory_per_block"] for target in targets] == [16384, 49152]
    for target in targets:
        vdevice = with_hardware(rh.VDevice(target))
        assert {name: vdevice.target.attrs[name] for name in target if name != "kind"} | {"kind": "opencl"} == target


def attention(builder, q, w):
    heads = builder.emit(relax.op.reshape(q, (1, 40, 1, 64)))
    return builder.emit(relax.op.nn.attention(heads, heads, heads))


WORK = {
    "product": ([(70, 64), (64, 96)], lambda builder, x, w: builder.emit(relax.op.matmul(x, w))),
    "gemv": ([(3, 64), (64, 33)], lambda builder, x, w: builder.emit(relax.op.matmul(x, w))),
    "convolution": ([(1, 8, 9, 11), (16, 8, 3, 3)],
                    lambda builder, x, w: builder.emit(relax.op.nn.conv2d(x, w, padding=1))),
    "attention": ([(40, 64), (1,)], attention),
    "rows": ([(5, 3000), (3000,)], lambda builder, x, w: builder.emit(relax.op.nn.softmax(x + w))),
}  # fmt: skip


@pytest.fixture(scope="module")
def plain_results():
    """Arguments and results on a CPU."""
    generator, results = np.random.default_rng(0), {}
    for name, (shapes, build) in WORK.items():
        arrays = [generator.standard_normal(shape).astype("float32") for shape in shapes]
        results[name] = arrays, rh.vm.VirtualMachine(rh.compile(built_module(build, *shapes)))["main"](*arrays).numpy()
    return results


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["mali", *(pytest.param(name, marks=pytest.mark.slow) for name in ("intel", "amd"))])
def test_kernels_fit_local_memory_and_groups(plain_results, name):
    """And compute right numbers, on the device at hand."""
    local_bytes, _ = DEVICES[name]
    for work, (shapes, build) in WORK.items():
        mod = rh.transform.UpdateVDevice([rh.VDevice(target_of(name))])(built_module(build, *shapes))
        executable = rh.compile(mod)
        kernels = executable.metadata.device_code[0].text.split("__kernel void")
        for kernel in kernels:
            arrays = re.findall(r"__local (\w+?)(\d*) \w+\[(\d+)\]", kernel)
            sizes = {"float": 4, "int": 4, "uint": 4, "char": 1, "uchar": 1, "half": 2, "long": 8, "double": 8}
            assert sum(sizes[kind] * int(lanes or 1) * int(count) for kind, lanes, count in arrays) <= local_bytes
        groups = re.findall(r"reqd_work_group_size\((\d+), (\d+), (\d+)\)", "".join(kernels))
        assert groups and max(np.prod(np.array(groups, int), axis=1)) <= OTHER_BLOCK_THREADS
        if work in ("product", "convolution"):
            stages = gpu_target_of(target_of(name)).stages_tiles or work == "convolution"
            assert ("__local" in "".join(kernels)) == stages, "tiles"
        arguments, expected = plain_results[work]
        result = rh.vm.VirtualMachine(executable)["main"](*arguments).numpy()
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("batch, k, n", [((), 36, 24), ((3,), 37, 21)])
def test_products_of_operands_in_place(batch, k, n, transposed):
    """Without local memory: rests in every dimension, none to many rows, vectors and single elements."""
    builder, rows = relax.BlockBuilder(), tirx.Var("rows", "int64")
    shapes = (*batch, rows, k), (n, k) if transposed else (k, n), (n,)
    x, w, bias = (relax.Var(name, relax.TensorType(each, "float32")) for name, each in zip("xwb", shapes, strict=True))
    with builder.function("main", [x, w, bias]):
        with builder.dataflow():
            right = builder.emit(relax.op.permute_dims(w)) if transposed else w
            result = builder.emit_output(relax.op.nn.relu(builder.emit(relax.op.matmul(x, right)) + bias))
        builder.emit_func_output(result)
    mod = rh.transform.UpdateVDevice([rh.VDevice(target_of("mali"))])(builder.get())
    machine, generator = rh.vm.VirtualMachine(rh.compile(mod)), np.random.default_rng(0)
    for count in (5, 0, 70):
        shapes = (*batch, count, k), (n, k) if transposed else (k, n), (n,)
        arrays = [generator.standard_normal(each).astype("float32") for each in shapes]
        wide = [array.astype("float64") for array in arrays]
        expected = np.maximum(wide[0] @ (wide[1].T if transposed else wide[1]) + wide[2], 0)
        np.testing.assert_allclose(machine["main"](*arrays).numpy(), expected, rtol=1e-4, atol=1e-5)


def test_a_device_with_small_groups_is_left_out():
    class Device:
        svm_capabilities, max_work_group_size = 1, 128

    assert opencl._unsupported_reason(pyopencl, Device()) == "has groups of 128 work-items, expected 256"


def test_measured_figures_are_kept_by_device_and_driver(monkeypatch):
    def key():
        return measure_devices._cache_key("device", [rh.VDevice("opencl")])

    backend_of("opencl").load()
    before = key()
    assert key() == before
    monkeypatch.setattr(opencl.OpenClMemory, "driver_version", lambda self, index: "another")
    assert key() != before
    monkeypatch.undo()
    monkeypatch.setattr(opencl.OpenClMemory, "name", lambda self, index: "another")
    assert key() != before
