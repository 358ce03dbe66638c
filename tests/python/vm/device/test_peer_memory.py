"""Calls over GPUs that wait for each other: repeated if graphs were made, nested, and by one thread at a time."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.artifact.peer_layout import LONG_OPERANDS, SLOTS, data_offset
from relax_hetero.vm.device import peer_memory
from relax_hetero.vm.device.builtins import current_machine
from relax_hetero.vm.device.cuda_streams import wait_checks
from relax_hetero.vm.device.graph_launches import GraphLaunch
from relax_hetero.vm.device.peer_memory import peer_call, run_over_peers
from vm.fake_cuda import FakeCuda, FakeLibrary


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Calls are those of a machine; Python collects garbage after them."""
    monkeypatch.setattr(current_machine, "devices_and_scopes", ([], []))
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def launching(*misses):
    """Compiled code that asks for memory of a mesh; its n-th run makes a graph if the n-th miss is true."""
    runs = []

    def function(value):
        peer_memory.devices_of_call()
        assert not gc.isenabled()
        if misses[len(runs)]:
            peer_call.is_incomplete, peer_call.missing = True, "'main_commands' on cuda:1"
        runs.append(value)
        return value + len(runs)

    return function, runs


def _try_lock():
    with_lock = peer_memory._launching.acquire(blocking=False)
    if with_lock:
        peer_memory._launching.release()
    return with_lock


def is_locked():
    """Return whether another thread cannot launch."""
    acquired = []
    thread = threading.Thread(target=lambda: acquired.append(_try_lock()))
    thread.start()
    thread.join()
    return not acquired[0]


def test_a_call_that_made_graphs_is_repeated():
    function, runs = launching(True, False, False)
    assert run_over_peers(function, [3], []) == 5 and runs == [3, 3]
    assert run_over_peers(function, [4], []) == 7 and len(runs) == 3
    assert not (peer_call.uses_peers or peer_call.is_incomplete or peer_call.has_lock)


class Devices(tuple):
    """Devices of a machine."""


def test_memory_is_cleared_after_calls_that_ended_halfway(monkeypatch):
    """Before a call is repeated, and before the first kernel of the call after an error; not of other machines."""
    machine, other, events = Devices(), Devices(), []
    for devices in (machine, other):
        memory = SimpleNamespace(clear=lambda devices=devices: events.append(devices is machine))
        monkeypatch.setitem(peer_memory._memories, (id(devices), 1024, (0, 1)), memory)
    monkeypatch.setattr(current_machine, "devices_and_scopes", (machine, ()))
    misses = [True, False, False, False]

    def function(value):
        peer_memory.devices_of_call()
        events.append(value)
        peer_call.is_incomplete = misses.pop(0)
        return 1 // value

    assert run_over_peers(function, [1], machine) == 1
    with pytest.raises(ZeroDivisionError):
        run_over_peers(function, [0], machine)
    assert run_over_peers(function, [2], machine) == 0
    assert events == [1, True, 1, 0, True, 2] and id(machine) not in peer_memory._unfinished


@pytest.mark.sampled(1)
@pytest.mark.parametrize("hangs", [False, True])
def test_a_call_after_a_failure_of_nccl_does_not_wait(hangs, monkeypatch):
    """The GPUs' kernels may never end: the next call raises the failure instead of clearing memory."""
    cuda = FakeCuda()
    library, machine = FakeLibrary(cuda), (tvm.cuda(0), tvm.cpu())
    library.use(0)
    cuda.streams[0] += [lambda: None] * hangs
    monkeypatch.setattr(peer_memory, "cuda_library", lambda: library)
    monkeypatch.setattr(peer_memory, "_unfinished", {id(machine)})

    def check(seconds):
        raise rh.HeteroError(f"cuda:0 is lost, found after {seconds} s")

    monkeypatch.setitem(wait_checks, 0, check)
    monkeypatch.setattr(current_machine, "devices_and_scopes", (machine, ("global",) * 2))
    for _ in range(2):
        with pytest.raises(rh.HeteroError, match="cuda:0 is lost, found after 0" + r"\." * hangs):
            run_over_peers(peer_memory.devices_of_call, [], machine)
    assert not is_locked()


def test_memory_is_cleared_after_launches_that_an_interrupted_call_has_left(monkeypatch):
    begins, machine, events, library = threading.Event(), (tvm.cuda(0),), [], FakeLibrary(FakeCuda())
    monkeypatch.setattr(peer_memory, "cuda_library", lambda: library)
    memory = SimpleNamespace(clear=lambda: events.append("cleared"))
    monkeypatch.setitem(peer_memory._memories, (id(machine), 1024, (0,)), memory)
    GraphLaunch(0, lambda: events.append(begins.wait(20)))
    threading.Timer(0.02, begins.set).start()
    peer_memory._clear_memory(machine)
    assert events == [True, "cleared"]


def test_all_but_long_operands_is_cleared(monkeypatch):
    for name in ("different_gpus", "enable_peer_access"):
        monkeypatch.setattr(peer_memory, name, lambda devices: None)
    monkeypatch.setattr(peer_memory, "has_peer_access", lambda *indices: True)
    devices, slot_bytes = [tvm.cpu(0), tvm.cpu(1)], LONG_OPERANDS + 48
    for tensor in (memory := peer_memory._PeerMemory(devices, slot_bytes)).memory:
        tensor.copyfrom(np.full(tensor.shape, 255, "uint8"))
    memory.clear()
    begin = data_offset(0, 2, slot_bytes)
    for tensor in memory.memory:
        slots = tensor.numpy()[begin:].reshape(SLOTS * 2, slot_bytes)
        assert not tensor.numpy()[:begin].any() and not slots[:, :LONG_OPERANDS].any()
        assert (slots[:, LONG_OPERANDS:] == 255).all()


def test_graphs_that_are_missing_after_all_are_named():
    with pytest.raises(rh.HeteroError, match=r"command buffer 'main_commands' on cuda:1 made its graph in a repeated"):
        run_over_peers(launching(True, True)[0], [0], [])
    assert not peer_call.uses_peers and not is_locked()


def test_nested_calls_leave_the_outer_one_as_it_was():
    inner, _ = launching(False)
    outer, _ = launching(False)

    def function(value):
        result = outer(value)
        assert run_over_peers(inner, [value], []) == value + 1
        assert peer_call.uses_peers and peer_call.has_lock and is_locked()
        return result

    assert run_over_peers(function, [1], []) == 2 and not is_locked()
