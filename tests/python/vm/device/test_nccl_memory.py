"""Sums by NCCL without GPUs: what they ask of NCCL and of CUDA, who has communicators, and errors."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import defaultdict
from dataclasses import replace

import pytest
import tvm

import relax_hetero as rh
from relax_hetero.vm.device import nccl_memory, peer_memory
from relax_hetero.vm.device.builtins import running_on
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_graphs import KERNEL
from relax_hetero.vm.device.cuda_streams import Stream, check_wait, wait_checks
from relax_hetero.vm.device.nccl import Nccl
from relax_hetero.vm.device.nccl_memory import Communicators, NcclMemory, add_child_graph
from relax_hetero.vm.device.peer_memory import peer_call
from vm.fake_cuda import EVENT_RECORD, INVALID, LOST, WAIT_EVENT, FakeCuda, FakeLibrary

GPUS = [tvm.runtime.device("cpu", index) for index in range(2)]  # memory of GPUs is memory of the host


class FakeCommunicator:
    def __init__(self, gpu, notes, cuda):
        self.gpu, self._notes, self._cuda = gpu, notes, cuda
        self.error, self.aborted = None, threading.Event()

    def check_async_error(self):
        if self.error is not None:
            raise self.error

    def abort(self):
        self._notes.append(("abort", self.gpu))
        self.aborted.set()

    def allReduce(self, source, target, count, dtype, op, stream):
        assert source == target and (dtype, op) == (7, 0)
        ctypes.memset(source, 0, 4 * count)  # it is memory of so many numbers
        self._notes.append(("sum", self.gpu, count, len(self._cuda.captures)))
        if graph := self._cuda.captures.get(stream):
            last = []
            for kind in (WAIT_EVENT, KERNEL, EVENT_RECORD):
                last = [self._cuda.add_node(graph, kind, last)]

    def send(self, address, nbytes, dtype, peer, stream):
        assert dtype == 1
        self._notes.append(("send", self.gpu, peer, address, nbytes))

    def recv(self, address, nbytes, dtype, peer, stream):
        assert dtype == 1
        self._notes.append(("recv", self.gpu, peer, address, nbytes))


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(nccl_memory, "_unused", defaultdict(list))
    monkeypatch.setattr(nccl_memory, "_communicators", {})
    yield FakeCuda()
    wait_checks.clear()


@pytest.fixture
def library(cuda):
    return FakeLibrary(cuda)


@pytest.fixture
def notes():
    return []


def fake_nccl(notes, cuda):
    """NCCL with a note of each sum, and of the number of streams that capture."""

    def communicators(gpus):
        notes.append(("communicators", *gpus))
        return [FakeCommunicator(gpu, notes, cuda) for gpu in gpus]

    abort = FakeCommunicator.abort
    return Nccl(None, None, communicators, abort, lambda: None, lambda: None, byte=1, float32=7, sum=0)


def memory_of(collectives, notes, cuda, library):
    nccl = fake_nccl(notes, cuda)
    communicators = nccl.communicators([0, 1])
    notes.clear()
    return NcclMemory(GPUS, collectives, Communicators((0, 1), communicators, nccl, library))


def capturing(library, gpu):
    """Let the current stream of a GPU capture."""
    stream = Stream.current(library, GPUS[gpu])
    library.call("cuStreamBeginCapture_v2", stream.handle, 2)
    return stream


def test_sums_of_all_gpus_are_captured_together(cuda, library, notes):
    memory = memory_of(((8,), (1024,)), notes, cuda, library)
    sums = [("sum", gpu, count, captures) for count in (8, 1024) for captures in (0, 2, 0) for gpu in (0, 1)]
    assert notes == sums  # at once, which connects GPUs, by both captures, and after what NCCL copies for these
    assert [[*kinds.values()] for kinds in cuda.nodes.values()] == [[KERNEL]] * 4 and not any(cuda.edges.values())
    assert {index: list(tensor.numpy()) for index, tensor in memory.addresses.items()} == dict.fromkeys(
        (0, 1), [buffer.data_ptr() for buffer in memory._buffers]
    )
    stream = capturing(library, 1)
    memory.add(0, 1)
    memory.add(1, 1)
    parent = cuda.captures[stream.handle]
    assert cuda.children == [(parent, memory._graphs[0][1]), (parent, memory._graphs[1][1])]


def test_tensors_cross_by_places_in_the_buffers(cuda, library, notes):
    exchange = (0, 1, 100, 1, 0, 300, 0, 1, 8)
    memory = memory_of((exchange,), notes, cuda, library)
    first, second = (buffer.data_ptr() for buffer in memory._buffers)
    assert [buffer.shape[0] for buffer in memory._buffers] == [256 + 512 + 8] * 2
    pairs = [(0, 1, 0, 100), (1, 0, 256, 300), (0, 1, 768, 8)]
    bases = {0: first, 1: second}
    expected = [
        note
        for source, target, offset, nbytes in pairs
        for note in (
            ("send", source, target, bases[source] + offset, nbytes),
            ("recv", target, source, bases[target] + offset, nbytes),
        )
    ]
    assert notes == expected * 3


def test_a_driver_without_graphs_copies_all_the_same(cuda):
    del cuda.library.cuGraphAddChildGraphNode
    library = FakeLibrary(cuda)
    with pytest.raises(CudaError, match="cuGraphAddChildGraphNode failed: 801; expected a driver of CUDA 12.3"):
        add_child_graph(library, capturing(library, 0), 3)
    library.call("cuStreamSynchronize", 0)


def test_a_failed_capture_is_an_error(cuda, library, notes):
    cuda.failing["cuStreamEndCapture"] = INVALID
    with pytest.raises(CudaError, match="cuStreamEndCapture failed: CUDA_ERROR_INVALID_VALUE"):
        memory_of(((8,),), notes, cuda, library)


def test_a_launch_without_a_graph_is_an_error(library):
    with pytest.raises(rh.HeteroError, match="outside of a CUDA graph"):
        add_child_graph(library, Stream(library, 0), 3)


@pytest.fixture
def machine(monkeypatch, library):
    """The devices of a machine whose function runs."""
    monkeypatch.setattr(nccl_memory, "cuda_library", lambda: library)
    devices = (*GPUS, tvm.cpu())
    with running_on(devices, ("global",) * 3):
        yield devices
    gc.enable()
    peer_memory._launching.release()
    vars(peer_call).clear()


def test_memory_is_made_once_for_each_machine_and_function(cuda, library, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    first, again = (nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8) for _ in range(2))
    other = nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8, 1, 16)
    assert first.same_as(again) and not other.same_as(first)
    capturing(library, 1)
    nccl_memory.nccl_collective(1, 1, 0, 1)  # of the function that asked last
    with pytest.raises(KeyError):
        nccl_memory.nccl_collective(0, 1, 0, 2)  # of a mesh that it does not have
    assert peer_call.uses_peers and len(cuda.graphs) == 6
    assert notes.count(("communicators", 0, 1)) == 1
    nccl_memory.free_nccl_memory(id(machine))
    assert not cuda.graphs


def test_a_machine_leaves_its_communicators_to_the_next_one(cuda, library, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    machines = [machine, (*GPUS, tvm.cpu()), (*GPUS, tvm.cpu())]
    for devices in machines[:2]:
        with running_on(devices, ("global",) * 3):
            nccl_memory.nccl_memory(0, 2, 0, 1, 1, 8)
    assert notes.count(("communicators", 0, 1)) == 2  # each has its own
    nccl_memory.free_nccl_memory(id(machines[0]))
    with running_on(machines[2], ("global",) * 3):
        nccl_memory.nccl_memory(0, 2, 0, 1, 1, 8)
    assert notes.count(("communicators", 0, 1)) == 2
    for devices in machines[1:]:
        nccl_memory.free_nccl_memory(id(devices))


def test_errors_of_nccl_leave_their_communicators(cuda, notes, machine, monkeypatch):
    nccl = fake_nccl(notes, cuda)

    def fail():
        raise RuntimeError("NCCL_ERROR_SYSTEM_ERROR")

    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: replace(nccl, end=fail))
    with pytest.raises(rh.HeteroError, match=r"NCCL failed between .*: NCCL_ERROR_SYSTEM_ERROR; NCCL_DEBUG"):
        nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: nccl)
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    assert notes.count(("communicators", 0, 1)) == 2  # those that failed are not used again
    nccl_memory.free_nccl_memory(id(machine))


def test_one_gpu_twice_is_no_mesh(cuda, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    with (
        running_on((GPUS[0], GPUS[0]), ("global",) * 2),
        pytest.raises(rh.HeteroError, match="expected different GPUs"),
    ):
        nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)


@pytest.mark.usefixtures("machine")
def test_without_nccl_the_first_call_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: "the package cupy-cuda13x cannot be imported: pip install x")
    with pytest.raises(rh.HeteroError, match=r"need NCCL.*pip install"):
        nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)


def hanging(library, gpu):
    """An event of a GPU that is never reached, unless someone waits without a check, and its stream."""
    stream = Stream(library, gpu)
    return stream.record(), stream


def fail_by_time(group, cuda):
    group._limit = 0.01
    return r"not ended after 0\.01 s \(collective_timeout=\)"


def fail_by_nccl(group, cuda):
    group.each[1].error = RuntimeError("NCCL_ERROR_REMOTE_ERROR")
    return "NCCL_ERROR_REMOTE_ERROR"


def fail_by_a_lost_gpu(group, cuda):
    cuda.failing["cuStreamQuery"] = LOST
    return "cuStreamQuery failed: CUDA_ERROR_LAUNCH_FAILED"


def fail_by_an_event_of_a_lost_gpu(group, cuda):
    cuda.failing["cuEventQuery"] = LOST
    return fail_by_a_lost_gpu(group, cuda)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fail", [fail_by_time, fail_by_nccl, fail_by_a_lost_gpu, fail_by_an_event_of_a_lost_gpu])
def test_waits_for_a_lost_gpu_end(cuda, library, notes, machine, monkeypatch, fail):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    (group,) = nccl_memory._communicators.values()
    (event, _), (_, other) = streams = hanging(library, 0), hanging(library, 1)
    message = f"NCCL's exchange between cuda:0, cuda:1 failed: .*{fail(group, cuda)}.*a new VirtualMachine"
    library.use(0)
    with pytest.raises(rh.HeteroError, match=message):
        event.synchronize()
    assert cuda.current.context == library.context(0)  # launches on default streams go there
    assert all(communicator.aborted.wait(10) for communicator in group.each)
    cuda.failing.clear()
    with pytest.raises(rh.HeteroError, match=message):  # what the others wait for may have ended with undefined data
        check_wait(1, 0)
    with pytest.raises(rh.HeteroError, match=message):
        nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    with pytest.raises(rh.HeteroError, match=message):
        other.synchronize()
    nccl_memory.free_nccl_memory(id(machine))
    assert not cuda.graphs and not wait_checks
    streams[1][1].synchronize()
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    assert notes.count(("communicators", 0, 1)) == 2 and notes.count(("abort", 0)) == 1
    nccl_memory.free_nccl_memory(id(machine))


def test_checks_release_pythons_lock(library):
    """Another thread, whose launch the driver may wait for, may need it."""
    stream = Stream(library, 0)
    del library._quick["cuStreamQuery"]
    assert stream.has_ended()


def test_a_wait_that_ends_in_time_is_no_failure(cuda, library, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    stream = Stream(library, 0)
    event = stream.record()
    ends = threading.Timer(0.05, library.call, ("cuEventSynchronize", event.handle))
    ends.start()
    event.synchronize()
    ends.join()
    stream.synchronize()
    nccl_memory.free_nccl_memory(id(machine))
    assert not wait_checks and ("abort", 0) not in notes


def test_a_machine_limits_its_waits(cuda, library, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    nccl_memory.limit_waits(id(machine), 0.02)
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)
    with pytest.raises(rh.HeteroError, match=r"after 0\.02 s"):
        hanging(library, 1)[1].synchronize()
    nccl_memory.free_nccl_memory(id(machine))
    assert id(machine) not in nccl_memory._limits


def test_a_machine_is_freed_while_its_gpus_wait(cuda, library, notes, machine, monkeypatch):
    """The limit ends that wait, too, and the graphs are destroyed, so that the aborts end."""
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    nccl_memory.limit_waits(id(machine), 0.02)
    for count in (8, 16):
        nccl_memory.nccl_memory(1, 2, 0, 1, 1, count)
    (group,) = nccl_memory._communicators.values()
    library.use(0)
    cuda._push(0, lambda: None)
    nccl_memory.free_nccl_memory(id(machine))
    assert all(communicator.aborted.wait(10) for communicator in group.each)
    assert not cuda.graphs and not wait_checks and not any(nccl_memory._unused.values())


def test_a_function_that_finds_no_memory_leaves_the_others_their_checks(cuda, notes, machine, monkeypatch):
    monkeypatch.setattr(nccl_memory, "load_nccl", lambda: fake_nccl(notes, cuda))
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 8)

    def fail(*_):
        raise CudaError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(nccl_memory, "empty", fail)
        with pytest.raises(CudaError, match="out of memory"):
            nccl_memory.nccl_memory(1, 2, 0, 1, 1, 16)
    assert sorted(wait_checks) == [0, 1]
    nccl_memory.nccl_memory(1, 2, 0, 1, 1, 16)
    assert notes.count(("communicators", 0, 1)) == 1
    nccl_memory.free_nccl_memory(id(machine))
