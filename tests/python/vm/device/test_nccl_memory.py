"""Sums by NCCL without GPUs: what they ask of NCCL and of CUDA, who has communicators, and errors."""

from __future__ import annotations

import ctypes
import itertools

import pytest
import tvm

import relax_hetero as rh
from relax_hetero.vm.device import nccl_memory, peer_memory
from relax_hetero.vm.device.builtins import running_on
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_streams import Stream
from relax_hetero.vm.device.nccl import Nccl
from relax_hetero.vm.device.nccl_memory import NcclMemory, add_child_graph, captured
from relax_hetero.vm.device.peer_memory import peer_call

GPUS = [tvm.runtime.device("cpu", index) for index in range(2)]  # memory of GPUs is memory of the host


class FakeLibrary:
    """CUDA's driver with a note of each call; handles are numbers, and graphs end in the order of captures."""

    def __init__(self):
        self.notes, self._handles = [], itertools.count(100)
        self.parent, self.failing = 7, ""

    def use(self, gpu):
        pass

    def create(self, name, *args):
        return next(self._handles)

    def call(self, name, *args):
        self.notes.append(name)
        if name == self.failing:
            raise self.error(name, 1)
        if name == "cuStreamGetCaptureInfo_v2":
            args[3]._obj.value = self.parent
        elif name == "cuGraphAddChildGraphNode":
            args[0]._obj.value = 55
            self.notes.append(("child", args[1].value, args[4]))

    def status(self, name, *args):
        self.notes.append(name)
        if name == "cuStreamEndCapture":
            args[1]._obj.value = next(self._handles)
        return 0

    def error(self, name, status):
        return CudaError(f"{name} failed: {status}")


class FakeCommunicator:
    def __init__(self, gpu, notes):
        self.gpu, self._notes = gpu, notes

    def allReduce(self, source, target, count, dtype, op, stream):
        assert source == target and (dtype, op) == (7, 0)
        ctypes.memset(source, 0, 4 * count)  # it is memory of so many numbers
        self._notes.append(("sum", self.gpu, count))


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(nccl_memory, "_communicators", type(nccl_memory._communicators)(list))
    return FakeLibrary()


def fake_nccl(notes):
    def communicators(gpus):
        notes.append(("communicators", *gpus))
        return [FakeCommunicator(gpu, notes) for gpu in gpus]

    start, end = lambda: notes.append("start"), lambda: notes.append("end")
    return Nccl(None, None, communicators, start, end, byte=1, float32=7, sum=0)


def test_sums_of_all_gpus_are_captured_together(library):
    notes = library.notes
    memory = NcclMemory(GPUS, (8, 1024), fake_nccl(notes), library)
    sums = [note for note in notes if isinstance(note, tuple)]
    pairs = [("sum", gpu, count) for count in (8, 8, 1024, 1024) for gpu in (0, 1)]  # once at once, once captured
    assert sums == [("communicators", 0, 1), *pairs]
    captures = [note for note in notes if note in ("start", "end") or "Capture" in str(note)]
    assert captures[2:8] == [*["cuStreamBeginCapture_v2"] * 2, "start", "end", *["cuStreamEndCapture"] * 2]
    assert {index: list(tensor.numpy()) for index, tensor in memory.addresses.items()} == dict.fromkeys(
        (0, 1), [buffer.data_ptr() for buffer in memory._buffers]
    )
    notes.clear()
    memory.add(8, 1)
    memory.add(1024, 0)
    children = [note for note in notes if isinstance(note, tuple)]
    assert children == [("child", 7, memory._graphs[8][1]), ("child", 7, memory._graphs[1024][0])]
    assert notes[-1] == "cuStreamUpdateCaptureDependencies"


def test_a_machine_leaves_its_communicators_to_the_next_one(library):
    memories = [NcclMemory(GPUS, (8,), fake_nccl(library.notes), library) for _ in range(2)]
    assert library.notes.count(("communicators", 0, 1)) == 2  # each has its own
    memories[0].free()
    third = NcclMemory(GPUS, (8,), fake_nccl(library.notes), library)
    assert library.notes.count(("communicators", 0, 1)) == 2
    assert third._communicators is memories[0]._communicators
    assert library.notes.count("cuGraphDestroy") == 2


def test_captures_end_if_a_launch_fails(library):
    streams = [Stream(library, gpu) for gpu in (0, 1)]

    def launch():
        raise CudaError("no")

    with pytest.raises(CudaError, match="no"):
        captured(library, streams, launch)
    assert library.notes.count("cuStreamEndCapture") == 2


def test_a_launch_without_a_graph_is_an_error(library):
    library.parent = 0
    with pytest.raises(rh.HeteroError, match="outside of a CUDA graph"):
        add_child_graph(library, Stream(library, 0), 3)


def test_one_gpu_twice_is_no_mesh(library):
    with pytest.raises(rh.HeteroError, match="expected different GPUs"):
        NcclMemory([GPUS[0]] * 2, (8,), fake_nccl(library.notes), library)


def test_memory_is_made_once_for_each_machine_and_function(library, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(library.notes))
    monkeypatch.setattr(nccl_memory, "cuda_library", lambda: library)
    devices = (*GPUS, tvm.cpu())
    try:
        with running_on(devices, ("global",) * 3):
            first, again = (nccl_memory.nccl_memory(1, 2, 0, 1, 8) for _ in range(2))
            other = nccl_memory.nccl_memory(1, 2, 0, 1, 8, 16)
            assert first.same_as(again) and not other.same_as(first)
            nccl_memory.nccl_all_reduce(16, 1, 0, 1)  # of the function that asked last
            with pytest.raises(KeyError):
                nccl_memory.nccl_all_reduce(4, 1, 0, 1)
        assert peer_call.uses_peers
    finally:
        peer_memory._launching.release()
        peer_call.uses_peers = peer_call.has_lock = False
        nccl_memory.free_nccl_memory(id(devices))
    assert library.notes.count("cuGraphDestroy") == 6
    assert not [key for key in nccl_memory._memories if key[0] == id(devices)]


def test_without_nccl_the_first_call_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(
        nccl_memory, "load_nccl", lambda: "the package cupy-cuda13x cannot be imported (no): pip install x"
    )
    monkeypatch.setattr(nccl_memory, "cuda_library", FakeLibrary)
    try:
        with (
            running_on((*GPUS, tvm.cpu()), ("global",) * 3),
            pytest.raises(rh.HeteroError, match="need NCCL.*pip install"),
        ):
            nccl_memory.nccl_memory(1, 2, 0, 1, 8)
    finally:
        peer_memory._launching.release()
        peer_call.uses_peers = peer_call.has_lock = False
