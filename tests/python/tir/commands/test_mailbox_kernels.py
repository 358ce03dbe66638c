"""Kernels that send and receive: the CPU's against each other, and the GPU's as code."""

import threading
import time

import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_hetero.artifact.mailboxes import DATA
from relax_hetero.tir.commands.mailbox_kernels import AWAIT_SLOWLY, Values, mailbox_kernel
from relax_hetero.vm.device import mailboxes

SHAPES = [((3, 7), "float32"), ((2, 1, 5), "int32"), ((1, 66), "float16"), ((130,), "uint32"), ((1,), "int64")]


def compiled(values, is_sender, has_token=False):
    kernel = mailbox_kernel(values, is_sender, False, has_token).with_attr("global_symbol", "main")
    target = tvm.target.Target("llvm")
    return tvm.compile(tvm.IRModule({"main": kernel.with_attr("target", target)}), target=target)["main"]


@pytest.mark.parametrize("first", range(3))
def test_values_arrive_with_their_bits(first):
    shapes = SHAPES[first:]
    values, rng = Values(shapes), np.random.default_rng(first)
    sent = [tvm.runtime.tensor(rng.integers(0, 100, shape).astype(dtype)) for shape, dtype in shapes]
    words = np.full(DATA + values.nbytes, 0xCD, "uint8")
    words[:4] = 0
    end = tvm_ffi.from_dlpack(words[:DATA])
    token = tvm.runtime.tensor(np.zeros(1, "int32"))
    compiled(values, True)(end, *sent, token)
    assert words[:4].view("int32")[0] == 1
    received = [tvm.runtime.tensor(np.full(shape, 77).astype(dtype)) for shape, dtype in shapes]
    compiled(values, False, has_token=True)(end, token, *received)
    assert words[:4].view("int32")[0] == 0
    for one, other in zip(sent, received, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_a_receiver_waits_for_the_flag(monkeypatch):
    """At first in compiled code; after many reads it calls the machine, which waits on."""
    values = Values([((64,), "float32")])
    memory = np.zeros(DATA + values.nbytes, "uint8")
    receive, result = compiled(values, False), tvm.runtime.tensor(np.zeros(64, "float32"))

    class Machine:
        def contains(self, address):
            return address == memory.ctypes.data

        def await_flag(self, address, wanted):
            thread.join()

    def send():
        time.sleep(0.05)
        memory[DATA : DATA + 256] = np.arange(64, dtype="float32").view("uint8")
        memory[:4] = [1, 0, 0, 0]

    machine, thread = Machine(), threading.Thread(target=send)
    monkeypatch.setattr(mailboxes, "_machines", [machine])
    thread.start()
    receive(tvm_ffi.from_dlpack(memory[:DATA]), result)
    thread.join()
    np.testing.assert_array_equal(result.numpy(), np.arange(64, dtype="float32"))


def test_kernels_of_a_gpu_order_their_accesses():
    """The flag is set after the values are written, and read before they are."""
    for is_sender in (True, False):
        text = mailbox_kernel(Values(SHAPES), is_sender, True, True).script()
        flag = text.index('"release", "sys"' if is_sender else "wait_until")
        copy = text.index("T.ptx.ld(")
        assert (copy < flag) == is_sender
        assert text.index('griddepcontrol("wait"') < min(copy, flag)
        assert "cta_sync" in text[min(copy, flag) : max(copy, flag)]


def test_the_slow_path_has_a_function():
    assert tvm_ffi.get_global_func(AWAIT_SLOWLY) is not None


def test_a_sender_waits_until_the_last_value_is_read():
    values = Values([((64,), "float32")])
    memory = np.zeros(DATA + values.nbytes, "uint8")
    memory[:4] = [1, 0, 0, 0]
    seen, token = [], tvm.runtime.tensor(np.zeros(1, "int32"))

    def read():
        time.sleep(0.02)
        seen.append(bytes(memory[DATA : DATA + 256]))
        memory[:4] = 0

    thread = threading.Thread(target=read)
    send = compiled(values, True)
    thread.start()
    send(tvm_ffi.from_dlpack(memory[:DATA]), tvm.runtime.tensor(np.ones(64, "float32")), token)
    thread.join()
    assert seen == [bytes(256)] and memory[:4].view("int32")[0] == 1
    np.testing.assert_array_equal(memory[DATA : DATA + 256].view("float32"), 1)
