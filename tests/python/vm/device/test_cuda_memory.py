"""Pinned memory of callers: `rh.vm.pinned_array`, and tensors that say they lie in such memory."""

import gc

import numpy as np
import pytest
import tvm
import tvm_ffi

import relax_hetero as rh
from relax_hetero.vm.device import cuda_memory
from relax_hetero.vm.device.cuda_library import CUDA_HOST, CudaLibrary
from relax_hetero.vm.device.tensors import alias, copy_into, copy_to
from seeds import fresh_rng
from vm.command_kernels import Kernels, floats
from vm.fake_cuda import FakeCuda

PINNED = tvm_ffi.Device(CUDA_HOST, 0)


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    library = CudaLibrary(fake.library, fake.library)
    monkeypatch.setattr(cuda_memory, "cuda_library", lambda: library)
    return fake


def test_an_array_is_pinned_as_long_as_there_is_one_over_its_memory(cuda):
    array = rh.vm.pinned_array((3, 500), "float32")
    assert array.shape == (3, 500) and array.dtype == np.float32 and array.flags.writeable and array.flags.c_contiguous
    (address,) = cuda.pinned
    assert array.ctypes.data == address
    array[...] = 2
    part = array[1:, ::7]
    tensor = tvm_ffi.from_dlpack(array)
    del array
    gc.collect()
    assert (part == 2).all() and len(cuda.pinned) == 1
    del part
    gc.collect()
    assert (tensor.numpy() == 2).all() and len(cuda.pinned) == 1
    del tensor
    gc.collect()
    assert not cuda.pinned


@pytest.mark.parametrize(
    "shape, dtype, nbytes",
    [
        (5, "int8", 5),
        ((), "float64", 8),
        ((2, 3), "bfloat16", 12),
        ((4,), np.dtype("int16"), 8),
        ((0, 3), "float32", 0),
    ],
)
def test_shapes_and_element_types(cuda, shape, dtype, nbytes):
    array = rh.vm.pinned_array(shape, dtype)
    assert array.shape == np.empty(shape).shape and array.nbytes == nbytes and str(array.dtype) == str(dtype)
    assert len(cuda.pinned) == bool(nbytes)


def test_without_cuda_it_says_so(monkeypatch):
    monkeypatch.setattr(cuda_memory, "cuda_library", lambda: None)
    with pytest.raises(rh.BindingError, match="pinned_array needs a CUDA driver and a GPU, found none"):
        rh.vm.pinned_array(4)


def pinned(array):
    """A tensor that names its device as DLPack names pinned memory."""
    return alias(tvm.runtime.tensor(array), PINNED)


class Foreign:
    """An object of another library, in pinned memory."""

    def __init__(self, array):
        self.tensor = pinned(array)

    def __dlpack__(self, stream=None, **_):
        return self.tensor.__dlpack__()

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("kind", [pinned, Foreign])
def test_a_cpu_reads_pinned_memory_in_place(chain, weighted, kind):
    vm = rh.vm.VirtualMachine(chain)
    x = fresh_rng().random((256, 4), "float32")
    argument, w = kind(x), np.ones(4, "float32")
    for _ in range(2):  # the second call is a known one
        z, y = vm["main"](argument, w)
        assert [str(z.device), str(y.device)] == ["cpu:1", "cpu:0"]
        np.testing.assert_allclose(z.numpy(), np.exp(x) + 1, rtol=1e-6)
    np.testing.assert_array_equal(vm.submit("main", argument, w).result()[0].numpy(), z.numpy())
    vm = rh.vm.VirtualMachine(weighted)
    x = x.reshape(-1)
    vm.set_params({"w": kind(x), "b": kind(np.ones(1, "float32"))})
    out = kind(np.zeros(1024, "float32"))
    assert vm["main"](kind(x), out=out) is out
    filled = out.tensor if kind is Foreign else out
    np.testing.assert_allclose(alias(filled, tvm.cpu(0)).numpy(), x * x + 1, rtol=1e-6)


def test_copies_between_it_and_other_host_memory():
    x = fresh_rng().random(100, "float32")
    source, target = pinned(x), pinned(np.zeros_like(x))
    here = copy_to(source, tvm.cpu(1))
    assert str(here.device) == "cpu:1"
    copy_into(here, target)
    np.testing.assert_array_equal(alias(target, tvm.cpu(0)).numpy(), x)


def test_command_buffers_take_it():
    vm = rh.vm.VirtualMachine(rh.compile(Kernels))
    cb = rh.vm.CommandBuffer(vm, slots=3)
    cb.begin()
    cb.dispatch("add", 1, [cb.slot(0), cb.slot(1), cb.slot(2)])
    cb.end()
    x, y, out = floats(16, 0), floats(16, 1), np.zeros(16, "float32")
    argument = pinned(out)
    cb.submit([pinned(x), Foreign(y), argument])
    np.testing.assert_array_equal(alias(argument, tvm.cpu(0)).numpy(), x + y)
