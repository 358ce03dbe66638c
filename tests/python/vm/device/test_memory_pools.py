"""Pinned tensors: their memory comes back, within bounds."""

import ctypes
import gc
import mmap
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

from relax_hetero.vm.device import cuda_copies, memory_pools
from relax_hetero.vm.device.builtins import running_on, to_device
from relax_hetero.vm.device.cuda_library import CudaLibrary
from relax_hetero.vm.device.memory_pools import BlockPool, PinnedPool, release_pinned
from relax_hetero.vm.device.tensors import alias
from seeds import fresh_rng
from vm.fake_cuda import FakeCuda

CPU = tvm.cpu(0)


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def library(cuda):
    return CudaLibrary(cuda.library, cuda.library)


def test_memory_comes_back_when_the_last_tensor_over_it_is_gone(cuda, library):
    pool = PinnedPool(library, 0, 1 << 20)
    first = pool.tensor((3, 700), "float32", tvm.cpu(2))
    address, other = first.data_ptr(), alias(first, CPU)
    assert str(first.device) == "cpu:2" and tuple(first.shape) == (3, 700) and str(first.dtype) == "float32"
    assert library.is_pinned(address) and library.is_pinned(address + 3 * 700 * 4 - 1)
    second = pool.tensor((3, 700), "float32", CPU)
    assert second.data_ptr() != address
    del first
    assert pool.tensor((3, 700), "float32", CPU).data_ptr() not in (address, second.data_ptr())
    del other
    assert pool.tensor((2100,), "int32", CPU).data_ptr() == address
    assert len(cuda.pinned) == 3


def test_similar_sizes_share_memory(library):
    pool = PinnedPool(library, 0, 1 << 30)
    addresses = {pool.tensor((n,), "uint8", CPU).data_ptr() for n in range(70_000, 81_920, 1000)}
    assert len(addresses) == 1 and pool.nbytes == 81_920


def test_beyond_the_limit_nothing_is_pinned(cuda, library):
    pool = PinnedPool(library, 0, 3 * 4096)
    first, second = (pool.tensor((4096,), "uint8", CPU) for _ in range(2))
    large = pool.tensor((8192,), "uint8", CPU)
    assert not library.is_pinned(large.data_ptr()) and pool.nbytes == 8192
    large.copyfrom(np.arange(8192, dtype="uint8"))
    np.testing.assert_array_equal(large.numpy(), np.arange(8192, dtype="uint8"))
    del first
    large = pool.tensor((8192,), "uint8", CPU)  # kept memory is freed
    assert library.is_pinned(large.data_ptr()) and pool.nbytes == 3 * 4096 and len(cuda.pinned) == 2
    assert library.is_pinned(second.data_ptr())


def test_no_elements_need_no_memory(cuda, library):
    assert tuple(PinnedPool(library, 0, 1 << 20).tensor((0, 4), "float32", CPU).shape) == (0, 4)
    assert not cuda.pinned


def test_tensors_outlive_the_pool(cuda, library):
    pool = PinnedPool(library, 0, 1 << 20)
    tensor, other = pool.tensor((10,), "float32", CPU), pool.tensor((10,), "float32", CPU)
    del other
    assert len(cuda.pinned) == 2
    tensor.copyfrom(np.arange(10, dtype="float32"))
    del pool
    gc.collect()
    np.testing.assert_array_equal(tensor.numpy(), np.arange(10))
    del tensor
    gc.collect()
    assert not cuda.pinned


def test_tensors_are_made_without_touching_their_memory():
    """A GPU's memory is not the CPU's: reading it there ends the process."""
    libc = ctypes.CDLL(None)
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_size_t, [ctypes.c_size_t] * 6
    address = libc.mmap(0, 1 << 16, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, ctypes.c_size_t(-1).value, 0)
    pool = BlockPool(lambda nbytes: SimpleNamespace(address=address, nbytes=nbytes), 1 << 20)
    tensor = pool.tensor((3, 700), "float32", tvm.cuda(0))
    assert tensor.data_ptr() == address and str(tensor.device) == "cuda:0" and tensor.is_contiguous()
    del tensor
    assert pool.tensor((2100,), "float32", tvm.cuda(0)).data_ptr() == address


def test_many_threads(cuda, library):
    pool = PinnedPool(library, 0, 1 << 22)
    failures = []

    def work(value):
        for size in range(1, 200):
            tensor = pool.tensor((size * 37,), "uint8", CPU)
            view = np.from_dlpack(tensor)
            view[:] = value
            if not (view == value).all():
                failures.append(size)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and pool.nbytes <= 1 << 22


def test_values_from_a_gpu_arrive_in_pinned_memory(cuda, library, monkeypatch):
    monkeypatch.setattr(memory_pools, "cuda_library", lambda: library)
    monkeypatch.setattr(cuda_copies, "cuda_library", lambda: library)
    monkeypatch.setattr(memory_pools, "_pools", {})
    monkeypatch.setattr(memory_pools, "TRANSFER_BYTES", 3 * memory_pools.PINNED_BYTES)
    for rows, pinned in ((1, False), (2, True), (8, False)):  # too small, fits, beyond the limit
        array = fresh_rng().random((rows, memory_pools.PINNED_BYTES // 8), "float32")
        there, target = alias(tvm.runtime.tensor(array), tvm.cuda(0)), tvm.runtime.tensor(np.zeros_like(array))
        with running_on((tvm.cpu(0), tvm.cuda(0)), ("global", "global")):
            for given in (None, target):
                here = to_device(there, 0, 0, given)
                np.testing.assert_array_equal(here.numpy(), array)
                assert library.is_pinned(here.data_ptr()) == pinned
                assert (here.data_ptr() == target.data_ptr()) == (given is target and not pinned)
    assert cuda.copies == [("to the host", 4 * n * memory_pools.PINNED_BYTES // 8) for n in (1, 1, 2, 2, 8, 8)]
    array = fresh_rng().random(memory_pools.PINNED_BYTES // 4, "float32")
    target = PinnedPool(library, 0, 1 << 20).tensor(array.shape, "float32", tvm.cpu(0))
    with running_on((tvm.cpu(0), tvm.cuda(0)), ("global", "global")):  # room that is pinned already
        here = to_device(alias(tvm.runtime.tensor(array), tvm.cuda(0)), 0, 0, target)
    np.testing.assert_array_equal(here.numpy(), array)
    assert here.data_ptr() == target.data_ptr()


def test_unused_memory_can_be_released(cuda, library, monkeypatch):
    monkeypatch.setattr(memory_pools, "cuda_library", lambda: library)
    monkeypatch.setattr(memory_pools, "_pools", {})
    second, used = (memory_pools.send_buffer(nbytes * memory_pools.PINNED_BYTES, CPU, 0) for nbytes in (1, 2))
    assert len(cuda.pinned) == 2
    del second
    release_pinned()
    assert list(cuda.pinned) == [used.data_ptr()] and memory_pools._pools[0].nbytes == 2 * memory_pools.PINNED_BYTES
