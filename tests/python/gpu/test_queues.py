"""On a machine with NVIDIA GPUs: calls through queues against plain calls, bit for bit; streams of others; failures."""

import gc
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import relax_hetero as rh
from gpu.allocations import allocations
from relax_hetero.target.vdevice import with_vdevices
from seeds import fresh_rng

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CUDA = {"kind": "cuda", "arch": "sm_90"}
CPU = rh.native("llvm")
SECONDS, WIDTH = 60, 96


def stages(kinds, places, rows=None, results=None):
    """`main(x)`: a product by a constant and a tanh on each of `places` (indices of `kinds`); the last are returned."""
    devices = [rh.VDevice(kind, index) for kind, index in kinds]
    n = tvm.tirx.Var("n", "int64") if rows is None else rows
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((n, WIDTH), "float32", devices[places[0]]))
    with builder.function("main", [x]):
        with builder.dataflow():
            value, values = x, []
            for index, place in enumerate(places):
                if index and place != places[index - 1]:
                    value = builder.emit(relax.op.to_vdevice(value, devices[place]))
                weight = np.random.default_rng(index).standard_normal((WIDTH, WIDTH)).astype("float32") / 10
                value = builder.emit(relax.op.tanh(builder.emit(relax.op.matmul(value, relax.const(weight)))))
                values.append(value)
            outputs = [builder.emit_output(value) for value in values[-(results or 1) :]]
        builder.emit_func_output(outputs[0] if results is None else relax.Tuple(outputs))
    return rh.compile(with_vdevices(builder.get(), devices))


def random(rows):
    return fresh_rng().standard_normal((rows, WIDTH)).astype("float32")


def arrays(result):
    return [part.numpy() for part in (result if isinstance(result, tuple) else (result,))]


def check(vm, count=30, rows=(1, 7, 2000)):
    """Compare many calls at once with plain calls, which run before and after them without overlap."""
    inputs = [random(rows[number % len(rows)]) for number in range(count)]
    expected = [arrays(vm["main"](x)) for x in inputs]
    for _ in range(3):
        fences = [vm.submit("main", x) for x in inputs]
        for fence, want in zip(fences, expected, strict=True):
            for actual, value in zip(arrays(fence.result(SECONDS)), want, strict=True):
                np.testing.assert_array_equal(actual, value)
    assert vm.synchronize(SECONDS)
    np.testing.assert_array_equal(arrays(vm["main"](inputs[0]))[0], expected[0][0])


@pytest.fixture(scope="module")
def pipeline():
    """From one CPU device to the GPU to another CPU device."""
    return stages([(CPU, 0), (CUDA, 0), (CPU, 1)], (0, 1, 1, 2))


def test_cpu_gpu_cpu(pipeline):
    vm = rh.vm.VirtualMachine(pipeline, max_in_flight=6)
    assert pipeline.metadata.schedules
    check(vm)


def test_command_buffers_through_queues():
    """Regions run as graphs, more calls of them at once than a graph has rows."""
    vm = rh.vm.VirtualMachine(stages([(CPU, 0), (CUDA, 0)], (0, 1, 1, 1, 0, 1, 1), rows=50), max_in_flight=40)
    assert vm.graphs
    check(vm, count=60, rows=(50,))


def test_one_gpu_alone():
    vm = rh.vm.VirtualMachine(stages([(CUDA, 0)], (0, 0, 0)), max_in_flight=8)
    check(vm)


@two_gpus
def test_all_devices_and_results_on_each():
    kinds = [(CPU, 0), (CUDA, 0), (CUDA, 1), (CPU, 1)]
    exe = stages(kinds, (1, 0, 2, 2, 1, 3, 2, 1), results=7)
    check(rh.vm.VirtualMachine(exe, max_in_flight=6))
    check(rh.vm.VirtualMachine(exe, {"cuda:1": tvm.cuda(0), "cuda:0": tvm.cuda(1)}, max_in_flight=2))
    check(rh.vm.VirtualMachine(exe, {"cuda:1": tvm.cuda(0)}, max_in_flight=3))  # both on one GPU


def test_many_threads_and_machines(pipeline):
    machines = [rh.vm.VirtualMachine(pipeline, max_in_flight=3) for _ in range(3)]
    inputs = [random(rows) for rows in (2, 500)]
    expected = [arrays(machines[0]["main"](x))[0] for x in inputs]

    def work(number):
        vm = machines[number % 3]
        for trip in range(20):
            result = vm.submit("main", inputs[trip % 2]).result(SECONDS) if trip % 5 else vm["main"](inputs[trip % 2])
            np.testing.assert_array_equal(arrays(result)[0], expected[trip % 2])

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(work, range(12)))


def test_results_are_complete():
    """Results of a fence can be read on any stream at once."""
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(stages([(CPU, 0), (CUDA, 0)], (0, 1)), max_in_flight=4)
    x = random(4000)
    expected = torch.from_dlpack(vm["main"](x)).clone()
    other = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(20):
        fences = [vm.submit("main", x) for _ in range(4)]
        with torch.cuda.stream(other):
            assert all(bool((torch.from_dlpack(fence.result(SECONDS)) == expected).all()) for fence in fences)


def test_arguments_that_other_streams_are_making():
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(stages([(CUDA, 0), (CPU, 0)], (0, 1)), max_in_flight=4)
    base = torch.from_numpy(random(2000)).cuda()
    expected = arrays(vm["main"](base))[0]
    slow = torch.rand(4000, 4000, device="cuda")
    own = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (torch.cuda.default_stream(), own) * 5:
        with torch.cuda.stream(stream), tvm_ffi.use_raw_stream(tvm.cuda(0), stream.cuda_stream):
            noise = slow
            for _ in range(10):
                noise = noise @ slow / 2000
            x = base + 0 * noise[:2000, :WIDTH]
            fence = vm.submit("main", x)
        np.testing.assert_array_equal(arrays(fence.result(SECONDS))[0], expected)


def test_results_that_the_default_stream_still_reads():
    """The last reference goes while a kernel of PyTorch's has yet to read the memory."""
    torch = pytest.importorskip("torch")
    vm = rh.vm.VirtualMachine(stages([(CPU, 0), (CUDA, 0)], (0, 1)), max_in_flight=4)
    x, inputs = random(2000), [random(2000) for _ in range(8)]
    expected = torch.from_dlpack(vm["main"](x)).clone()
    slow = torch.rand(4000, 4000, device="cuda")
    for _ in range(5):
        result = torch.from_dlpack(vm.submit("main", x).result(SECONDS))
        noise = slow
        for _ in range(10):
            noise = noise @ slow / 2000
        copy = result + 0 * noise[:2000, :WIDTH]
        del result
        fences = [vm.submit("main", other) for other in inputs]
        assert bool((copy == expected).all())
        for fence in fences:
            fence.result(SECONDS)


def test_machines_leave_nothing_behind(pipeline):
    def use():
        vm = rh.vm.VirtualMachine(pipeline)
        fences = [vm.submit("main", random(3000)) for _ in range(4)]
        del vm
        for fence in fences:
            fence.result(SECONDS)

    def end(threads):
        """Wait for the threads of queues to end."""
        for _ in range(2000):
            if threading.active_count() <= threads:
                break
            threading.Event().wait(0.005)
        gc.collect()
        assert threading.active_count() <= threads

    threads = threading.active_count()
    use()  # pools keep what they have made once
    end(threads)
    with allocations() as counts:
        for _ in range(3):
            use()
            end(threads)
        pooled = +counts
        for _ in range(20):
            use()
            end(threads)
    # Calls that happen to meet may take one more block of a pool; what is left behind would grow with every use.
    assert all(count < 20 for count in (+counts - pooled).values()), +counts - pooled


WILD = """
import sys, numpy as np, tvm, relax_hetero as rh
from tvm import relax, te
from relax_hetero.target.vdevice import with_vdevices
builder = relax.BlockBuilder()
x = te.placeholder((64,), "float32", "x")
far = tvm.tirx.const(1 << 40, "int64")
wild = te.create_prim_func([x, te.compute((64,), lambda i: x[i.astype("int64") + far], "y")])
kernel = builder.add_func(wild.with_attr({"op_pattern": 8}), "wild")
devices = [rh.VDevice("llvm", 0), rh.VDevice({"kind": "cuda", "arch": "sm_90"}, 0)]
x = relax.Var("x", relax.TensorType((64,), "float32", devices[0]))
with builder.function("main", [x]):
    with builder.dataflow():
        there = builder.emit(relax.op.to_vdevice(x, devices[1]))
        made = builder.emit(relax.op.call_tir(kernel, [there], relax.TensorType((64,), "float32", devices[1])))
        result = builder.emit_output(relax.op.exp(builder.emit(relax.op.to_vdevice(made, devices[0]))))
    builder.emit_func_output(result)
vm = rh.vm.VirtualMachine(rh.compile(with_vdevices(builder.get(), devices)))
fences = [vm.submit("main", np.zeros(64, "float32")) for _ in range(8)]
for fence in fences:
    try:
        fence.result(30)
    except rh.HeteroError as error:
        print("told:", error)
assert vm.synchronize(30)
print("over")
"""


def test_an_illegal_address_reaches_every_fence(tmp_path):
    """In a process of its own, whose GPU cannot be used any more."""
    script = tmp_path / "wild.py"
    script.write_text(WILD)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=90)
    lines = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    assert len(lines) == 8 and all("'main'" in line for line in lines), done.stdout + done.stderr
    assert any("ILLEGAL_ADDRESS" in line or "illegal memory access" in line for line in lines), lines
    assert "over" in done.stdout.splitlines(), done.stdout + done.stderr
