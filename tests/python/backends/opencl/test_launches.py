"""Command buffers on OpenCL devices: recordings, and the driver's command buffers where it has them."""

import gc

import numpy as np
import pytest
from tvm import runtime
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.backends.opencl import devices as opencl
from relax_hetero.backends.opencl import driver, launches
from relax_hetero.target.backend import backend_of

pytest.importorskip("pyopencl")
pytestmark = pytest.mark.skipif(
    backend_of("opencl").count() == 0, reason=f"no OpenCL: {backend_of('opencl').why_absent()}"
)


@I.ir_module
class Chain:
    I.module_global_infos({"vdevice": [I.vdevice("opencl")]})

    @R.function
    def main(x: R.Tensor(("n", 40), "float32"), w: R.Tensor((40, 24), "float32")):
        with R.dataflow():
            product = R.matmul(x, w)
            probabilities = R.nn.softmax(product)
            best = R.argmax(product, axis=1)
            R.output(probabilities, best)
        return probabilities, best


@pytest.fixture(scope="module")
def executable():
    return rh.compile(Chain)


def expected(x, w):
    product = x.astype("float64") @ w
    powers = np.exp(product - product.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True), product.argmax(1)


class Counts:
    """Numbers of launches, of the driver's command buffers and of their submissions."""

    def __init__(self, monkeypatch):
        self.launched = self.recorded = self.submitted = self.released = 0
        for kind, name, count in (
            (launches._Kernel, "enqueue", "launched"),
            (launches.CommandBuffer, "__init__", "recorded"),
            (launches.CommandBuffer, "submit", "submitted"),
            (launches.CommandBuffer, "release", "released"),
        ):
            monkeypatch.setattr(kind, name, self._counting(getattr(kind, name), count))

    def _counting(self, method, count):
        def call(*args):
            setattr(self, count, getattr(self, count) + 1)
            return method(*args)

        return call


@pytest.mark.parametrize("by_driver", [True, False])
def test_a_recording_reads_and_writes_memory_as_it_is_at_each_call(executable, monkeypatch, by_driver):
    device = opencl.opencl_memory().opened(0)
    if not by_driver:
        monkeypatch.setattr(device, "commands", None)
    elif device.commands is None:
        pytest.skip(f"{device.name} lacks {driver.EXTENSION}")
    generator, machine = np.random.default_rng(0), rh.vm.VirtualMachine(executable)
    counts, on_device = Counts(monkeypatch), runtime.device("opencl", 0)
    (sequence,) = executable.metadata.device_code[0].sequences
    assert len(sequence.launches) == 3
    x, w = (runtime.tensor(np.zeros(shape, "float32"), on_device) for shape in ((7, 40), (40, 24)))
    for _ in range(16):
        arrays = [generator.standard_normal(tensor.shape).astype("float32") for tensor in (x, w)]
        for tensor, array in zip((x, w), arrays, strict=True):
            tensor.copyfrom(array)
        results = machine["main"](x, w)
        probabilities, best = expected(*arrays)
        np.testing.assert_allclose(results[0].numpy(), probabilities, rtol=1e-5, atol=1e-6)
        assert (results[1].numpy() == best).all()
        for tensor in results:  # their memory is used again
            tensor.copyfrom(np.full(tensor.shape, -7, tensor.dtype))
        del results, tensor
    assert counts.launched + 3 * counts.submitted == 3 * 16
    assert (counts.submitted >= 8) if by_driver else (counts.recorded == 0), vars(counts)


def test_old_recordings_give_way(executable, monkeypatch):
    """Sizes that alternate beyond the limit, kept results, and memory that goes back to the driver."""
    library, addresses = driver.driver(), []

    class Library:
        def __getattr__(self, name):
            return getattr(library, name)

        def clSetKernelArgSVMPointer(self, kernel, position, address):  # noqa: N802 (the driver's name)
            addresses.append(address)
            return library.clSetKernelArgSVMPointer(kernel, position, address)

    monkeypatch.setattr(launches, "driver", Library)
    generator, machine, counts = np.random.default_rng(1), rh.vm.VirtualMachine(executable), Counts(monkeypatch)
    device, kept = opencl.opencl_memory().opened(0), []
    w = generator.standard_normal((40, 24)).astype("float32")
    for call, rows in enumerate(generator.integers(0, 9, 60)):
        x = generator.standard_normal((rows, 40)).astype("float32")
        kept = [*kept[-2:], (machine["main"](x, w), expected(x, w))]
        if call % 20 == 19:
            device._release()
        for results, values in kept:
            np.testing.assert_allclose(results[0].numpy(), values[0], rtol=1e-5, atol=1e-6)
            assert (results[1].numpy() == values[1]).all()
    assert counts.recorded - counts.released <= launches._MAX_RECORDINGS
    assert addresses and all(addresses), "empty tensors have an address, too"


def test_numbers_that_are_equal_with_another_sign_differ():
    memory, calls = opencl.opencl_memory(), []

    class Recording:
        def __init__(self, _, arguments):
            calls.append(arguments)

        def submit(self):
            pass

    code = launches.DeviceCode("opencl", "key", "", (launches.KernelLaunch("kernel", ("float32",), ()),))
    launcher = launches.SequenceLauncher(memory, code, launches.LaunchSequence("main", (), ((0, 0),)))
    launcher._record = lambda device, arguments, kernels: Recording(device, arguments)
    for value in (0.0, -0.0, 0.0, 1.0):
        launcher(0, (value,))
    assert list(map(str, calls)) == ["(0.0,)", "(-0.0,)", "(1.0,)"]


@pytest.mark.parametrize("name, why", [("_CAPABILITIES", "submitted twice"), ("EXTENSION", "absent")])
def test_devices_without_fitting_command_buffers(monkeypatch, name, why):
    """Recorded launches serve them."""
    monkeypatch.setattr(driver, name, 0 if name == "_CAPABILITIES" else "cl_khr_none")
    assert driver.command_buffers_of(opencl.opencl_memory().opened(0)._device) is None, why


def test_an_error_of_the_driver_names_the_device_and_the_call():
    with pytest.raises(rh.HeteroError, match=r"opencl:0 \(x\): clFinalizeCommandBufferKHR: INVALID_VALUE"):
        driver.check(-30, "opencl:0 (x)", "clFinalizeCommandBufferKHR")


def test_command_buffers_that_the_driver_refuses_are_launched_one_by_one(executable, monkeypatch, caplog):
    device = opencl.opencl_memory().opened(0)
    if device.commands is None:
        pytest.skip(f"{device.name} lacks {driver.EXTENSION}")
    monkeypatch.setattr(device, "commands", device.commands._replace(finalize=lambda handle: -36))
    machine, generator = rh.vm.VirtualMachine(executable), np.random.default_rng(2)
    x, w = generator.standard_normal((3, 40)).astype("float32"), generator.standard_normal((40, 24)).astype("float32")
    for _ in range(4):
        np.testing.assert_allclose(machine["main"](x, w)[0].numpy(), expected(x, w)[0], rtol=1e-5, atol=1e-6)
    (warning,) = [record.getMessage() for record in caplog.records if "clFinalizeCommandBufferKHR" in record.message]
    assert "INVALID_COMMAND_QUEUE; kernels are launched one by one" in warning and device.commands is None


def test_calls_after_a_failed_one_are_right(executable, monkeypatch):
    """The failed call left arguments of other calls in some kernels, or some launches in the queue."""
    machine, generator, device = rh.vm.VirtualMachine(executable), np.random.default_rng(3), opencl.opencl_memory()
    w = generator.standard_normal((40, 24)).astype("float32")

    def check(rows):
        x = generator.standard_normal((rows, 40)).astype("float32")
        np.testing.assert_allclose(machine["main"](x, w)[0].numpy(), expected(x, w)[0], rtol=1e-5, atol=1e-6)

    for failing, rows in (("set", 11), ("enqueue", 21)):
        for more in range(launches._MAX_RECORDINGS):  # whose kernels the failed call takes
            check(rows + more)
        launched, method, calls = device.opened(0).launched, getattr(launches._Kernel, failing), []

        def fail_second(*arguments, method=method, calls=calls):
            calls.append(arguments)
            if len(calls) == 2:
                raise rh.HeteroError("no resources")
            return method(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(launches._Kernel, failing, fail_second)
            with pytest.raises(rh.HeteroError, match="no resources"):
                machine["main"](np.zeros((rows + 9, 40), "float32"), w)
        gc.collect()  # the error has references to its call's memory, which the next calls use again
        assert device.opened(0).launched == launched + (failing == "enqueue")
        for _ in range(2):
            check(rows + 9)
