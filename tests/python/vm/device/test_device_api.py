"""TVM's device API over memory that is managed in Python, with a device type that TVM has no support for."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest
import tvm_ffi
from tvm import runtime

from relax_hetero.target.backend import DeviceMemory
from relax_hetero.vm.device import device_api
from relax_hetero.vm.device.device_api import install, installed

EXT_DEV = 12


class SmallMemory(DeviceMemory):
    """Two devices with a kilobyte of host memory each."""

    def __init__(self):
        self.blocks = {}
        self.copies = []

    def count(self):
        return 2

    def memory_bytes(self, index):
        return 1024

    def allocate(self, index, nbytes, alignment):
        if nbytes > 1024:
            raise MemoryError(f"{nbytes} of 1024 bytes")
        block = ctypes.create_string_buffer(nbytes + alignment)
        address = -(-ctypes.addressof(block) // alignment) * alignment
        self.blocks[address] = index, block
        return address

    def free(self, index, address):
        assert self.blocks.pop(address)[0] == index

    def copy(self, source, target, nbytes):
        self.copies.append((source.device, target.device, nbytes))
        ctypes.memmove(target.address, source.address, nbytes)

    def synchronize(self, index):
        self.copies.append(index)


@pytest.fixture
def memory():
    memory = SmallMemory()
    install(EXT_DEV, "ext_dev", memory)
    yield memory
    installed(EXT_DEV).memory = SmallMemory()


def test_tensors_of_tvm_live_in_the_memory(memory):
    data = np.arange(12, dtype="float32").reshape(3, 4)
    device = runtime.device("ext_dev", 1)
    tensor = runtime.tensor(data, device)
    assert [index for index, _ in memory.blocks.values()] == [1] and tensor.data_ptr() in memory.blocks
    assert (tensor.numpy() == data).all()
    assert memory.copies[0] == (None, 1, 48) and (1, None, 48) in memory.copies
    other = runtime.empty((3, 4), "float32", runtime.device("ext_dev", 0))
    tensor.copyto(other)
    assert (other.numpy() == data).all() and (1, 0, 48) in memory.copies
    device.sync()
    assert memory.copies[-1] == 1
    del tensor, other
    assert not memory.blocks


def test_devices_exist_up_to_their_number(memory):
    assert [runtime.device("ext_dev", index).exist for index in range(3)] == [True, True, False]
    assert runtime.device("ext_dev", 0).total_global_memory == 1024


def test_an_error_inside_of_tvm_is_raised_by_the_next_launch(memory):
    launch = installed(EXT_DEV).launching(lambda *args: memory.copies.append(args), 1)
    runtime.empty((1025,), "uint8", runtime.device("ext_dev", 0))  # TVM sees the address 0
    with pytest.raises(MemoryError, match="1025 of 1024 bytes"):
        launch(1, 2)
    launch(1, 2)  # once
    assert memory.copies == [(0, (1,), (2,))]


def test_a_launch_is_for_the_device_that_the_thread_has_chosen(memory):
    calls = []
    launch = installed(EXT_DEV).launching(lambda *args: calls.append(args), 2)
    tvm_ffi.get_global_func("__tvm_set_device")(EXT_DEV, 1)
    launch(1, 2, 3)
    assert calls == [(1, (1, 2), (3,))]


def test_another_class_of_tvm_is_refused(monkeypatch):
    monkeypatch.setitem(device_api._ANCHORS, 11, device_api._ANCHORS[10])
    with pytest.raises(device_api.HeteroError, match="another class DeviceAPI than that of version 0.27"):
        device_api.DeviceApi(SmallMemory())


def test_tensors_may_outlive_the_interpreter():
    code = f"""
import sys
sys.path[:0] = {sys.path!r}
from vm.device.test_device_api import *
install(EXT_DEV, "ext_dev", SmallMemory())
kept = runtime.empty((8,), "float32", runtime.device("ext_dev", 0))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
