"""Copies between the host and an OpenCL device, which overlap with launches: their order."""

import threading

import numpy as np
import pytest
from tvm import runtime
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.target.backend import backend_of
from relax_hetero.vm.device.tensors import copy_into, empty

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0, reason=f"no OpenCL: {backend_of('opencl').why_absent()}"
)

SIZE = 1 << 14


@I.ir_module
class Steps:
    """Two kernels, so that the first result is memory that is freed while the device works."""

    I.module_global_infos({"vdevice": [I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor((16384,), "float32"), y: R.Tensor((16384,), "float32")):
        with R.dataflow():
            sums = R.cumsum(x)
            result = R.add(R.multiply(sums, R.const(0.5, "float32")), y)
            R.output(result)
        return result


@I.ir_module
class Pipeline:
    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor((64, 256), "float32", "llvm:0")):
        with R.dataflow():
            first = R.cumsum(x, axis=1)
            second = R.nn.softmax(R.to_vdevice(first, "opencl:0"))
            third = R.cumsum(R.to_vdevice(second, "llvm:0"), axis=0)
            result = R.to_vdevice(R.sin(R.to_vdevice(third, "opencl:0")), "llvm:0")
            R.output(result)
        return result


@pytest.fixture(scope="module")
def step():
    machine, device = rh.vm.VirtualMachine(rh.compile(Steps)), runtime.device("opencl", 0)
    machine["main"](*(runtime.tensor(np.zeros(SIZE, "float32"), device) for _ in range(2)))
    return machine["main"]


@pytest.mark.parametrize("seed", range(3))
def test_random_chains_of_copies_and_launches(step, seed):
    """Tensors are made, overwritten, computed, read and dropped at random, while earlier launches run."""
    generator, device = np.random.default_rng(seed), runtime.device("opencl", 0)
    tensors = []  # tensors on the device, and their values

    def array():
        return generator.integers(-3, 4, SIZE).astype("float32")

    for _ in range(120):
        choice = generator.integers(6) if len(tensors) > 2 else 0
        index = generator.integers(len(tensors)) if tensors else 0
        if choice == 0:
            values = array()
            tensors.append((runtime.tensor(values, device), values))
        elif choice == 1:
            values = array()
            tensors[index][0].copyfrom(values)
            tensors[index] = tensors[index][0], values
        elif choice in (2, 3):
            (x, x_values), (y, y_values) = tensors[index], tensors[generator.integers(len(tensors))]
            result = step(x, y)
            values = np.cumsum(x_values, dtype="float64") * 0.5 + y_values
            if generator.integers(2):
                tensors[generator.integers(len(tensors))] = result, values.astype("float32")
        elif choice == 4:
            np.testing.assert_allclose(tensors[index][0].numpy(), tensors[index][1], rtol=1e-5, atol=1e-2)
        else:
            del tensors[index]
    for tensor, values in tensors:
        np.testing.assert_allclose(tensor.numpy(), values, rtol=1e-5, atol=1e-2)


def events_of(monkeypatch):
    """Numbers of events that copies wait for."""
    device, waits = opencl.opencl_memory().opened(0), []
    copy = device._copy

    def counting(target, source, nbytes, events):
        waits.append(sum(event is not None for event in events))
        return copy(target, source, nbytes, events)

    monkeypatch.setattr(device, "_copy", counting)
    return device, waits


def on_device(array):
    """A copy of an array as a virtual machine makes it."""
    tensor = empty(array.shape, str(array.dtype), runtime.device("opencl", 0))
    copy_into(runtime.tensor(array), tensor, wait=False)
    return tensor


def test_a_copy_waits_for_launches_that_may_use_its_memory_only(step, monkeypatch):
    device, waits = events_of(monkeypatch)
    device._release()
    x, y = (on_device(np.full(SIZE, value, "float32")) for value in (1, 2))
    results = [step(x, y)]
    waits.clear()
    unused = on_device(np.ones(5 * SIZE, "float32"))  # of new memory
    assert waits == [0]
    copy_into(runtime.tensor(np.full(SIZE, 5, "float32")), x, wait=False)  # a launch reads it
    assert waits == [0, 1]
    results.append(step(x, y))
    del x, unused
    again = on_device(np.full(SIZE, 7, "float32"))  # of memory that launches used
    on_device(np.ones(5 * SIZE, "float32"))  # of memory that they did not
    assert waits[2:] == [1, 0]
    runtime.device("opencl", 0).sync()
    copy_into(runtime.tensor(np.full(SIZE, 8, "float32")), again)
    assert waits[4:] == [0]  # all launches have ended
    for result, scale in zip(results, (1, 5), strict=True):
        np.testing.assert_allclose(result.numpy(), np.arange(1, SIZE + 1) * scale * 0.5 + 2, rtol=1e-5)


def test_transfers_of_a_discrete_device_have_threads_of_their_own(monkeypatch):
    """As on a device with memory of its own."""
    monkeypatch.setattr(opencl.opencl_memory(), "host_reads", lambda index: False)
    machine, threads = rh.vm.VirtualMachine(rh.compile(Pipeline)), set()
    device = opencl.opencl_memory().opened(0)
    for name in ("send", "receive", "touch"):
        method = getattr(device, name)

        def noting(*arguments, name=name, method=method):
            threads.add((name, threading.current_thread().name))
            return method(*arguments)

        monkeypatch.setattr(device, name, noting)
    generator = np.random.default_rng(0)
    arrays = [generator.standard_normal((64, 256)).astype("float32") for _ in range(12)]
    fences = [machine.submit("main", x) for x in arrays]
    for x, fence in zip(arrays, fences, strict=True):
        first = np.exp(np.cumsum(x.astype("float64"), 1))
        expected = np.sin(np.cumsum(first / first.sum(1, keepdims=True), 0))
        np.testing.assert_allclose(fence.result().numpy(), expected, rtol=1e-4, atol=1e-5)
    names = {kind: {thread for name, thread in threads if name == kind} for kind in ("send", "receive", "touch")}
    assert names["touch"] == {"queue of opencl:0"}
    assert names["receive"] == {"copies from cpu:0 to opencl:0"} and names["send"] == {"copies from opencl:0 to cpu:0"}
