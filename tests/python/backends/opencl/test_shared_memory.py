"""Transfers between a CPU and an OpenCL device in its memory: no copy in either direction."""

import numpy as np
import pytest
from tvm import runtime
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.target.backend import backend_of
from relax_hetero.vm.device import builtins, memory_pools

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0 or not opencl.opencl_memory().host_reads(0),
    reason="no OpenCL device in the host's memory",
)


@I.ir_module
class ThereAndBack:
    """`first` and `second` could share storage if the transfer of `first` copied it."""

    I.module_global_infos({"vdevice": [I.vdevice("llvm"), I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor((256, 256), "float32", "llvm:0")):
        with R.dataflow():
            first = R.cumsum(x, axis=1)
            first_there = R.to_vdevice(first, "opencl:0")
            second = R.cumsum(x, axis=0)
            third = R.multiply(second, second)
            third_there = R.to_vdevice(third, "opencl:0")
            result = R.to_vdevice(R.nn.softmax(R.add(R.sin(first_there), R.cos(third_there))), "llvm:0")
            R.output(result)
        return result


def expected(x):
    x = x.astype("float64")
    sums = np.exp(np.sin(np.cumsum(x, 1)) + np.cos(np.cumsum(x, 0) ** 2))
    return sums / sums.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def machine():
    return rh.vm.VirtualMachine(rh.compile(ThereAndBack))


@pytest.fixture
def copies(monkeypatch):
    memory, made = opencl.opencl_memory(), []
    copy = memory.copy
    monkeypatch.setattr(memory, "copy", lambda *arguments: made.append(arguments) or copy(*arguments))
    return made


@pytest.mark.parametrize("submits", [False, True])
def test_values_cross_in_place(machine, copies, monkeypatch, submits):
    lent, memory = [], opencl.opencl_memory()
    lend = memory.lend
    monkeypatch.setattr(memory, "lend", lambda *arguments: lent.append(arguments[1]) or lend(*arguments))
    generator, results = np.random.default_rng(0), []
    for _ in range(4):
        x = np.round(generator.standard_normal((256, 256)), 1).astype("float32")
        result = machine.submit("main", x).result() if submits else machine["main"](x)
        results.append((result, expected(x)))
    for result, values in results:  # later calls have not written to the memory of earlier results
        np.testing.assert_allclose(result.numpy(), values, rtol=2e-3, atol=1e-5)
    assert copies == [] and len(lent) == 2 * len(results)


SIZE = memory_pools.PINNED_BYTES


def test_the_device_works_on_the_address_that_the_host_has_written(monkeypatch):
    """And the host waits before it writes memory that the device may still read."""
    memory, device = opencl.opencl_memory(), runtime.device("opencl", 0)
    waits = []
    with builtins.running_on([runtime.device("cpu", 0), device], ["global", "global"]):
        storage = builtins.pinned_storage([SIZE], 0)
        address = storage.data_ptr()
        np.from_dlpack(storage)[:] = 7
        is_next_lent = memory.is_lent(0, address + SIZE)  # by an earlier test
        there = builtins.to_device(storage, 1)
        assert str(there.device) == "opencl:0" and there.data_ptr() == address
        np.from_dlpack(storage)[5] = 9
        assert (there.numpy()[:7] == [7, 7, 7, 7, 7, 9, 7]).all()
        del storage
        assert memory.is_lent(0, address + SIZE - 1) and memory.is_lent(0, address + SIZE) == is_next_lent
        del there
        assert not memory.is_lent(0, address)
        finish = memory.opened(0).synchronize
        monkeypatch.setattr(memory.opened(0), "synchronize", lambda: waits.append(1) or finish())
        small = builtins.pinned_storage([SIZE - 1], 0)  # as of values of unknown size
        assert not waits and not memory.is_lent(0, small.data_ptr())
        again = builtins.pinned_storage([SIZE], 0)
        assert again.data_ptr() == address and waits == [1]
        forced = builtins.to_device(again, 1, 1)
        plain = builtins.to_device(runtime.tensor(np.zeros(SIZE, "uint8")), 1)
        assert address not in (forced.data_ptr(), plain.data_ptr())
