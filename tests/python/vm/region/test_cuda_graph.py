"""CUDA graphs without CUDA: the code that submits, compiled for the CPU; Python plays the driver and the device."""

import ctypes
import gc
import logging
import threading
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm import tirx

import relax_hetero as rh
from relax_hetero.artifact import graph_layout
from relax_hetero.artifact.commands import GRAPH as RUNS_AS_GRAPH
from relax_hetero.artifact.commands import Dispatch, RegionSpec, SlotSpec
from relax_hetero.artifact.graph_layout import REPORT_INTERVAL, RING_ROWS, Layout
from relax_hetero.artifact.memory_plan import MemoryPlan
from relax_hetero.artifact.metadata import ConstantSpec, DeviceSpec, Metadata
from relax_hetero.tir.commands.command_list import Tensor
from relax_hetero.tir.commands.graph_functions import submit_function
from relax_hetero.vm.device.builtins import running_on
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_streams import wait_checks
from relax_hetero.vm.device.graph_launches import GraphLaunch
from relax_hetero.vm.device.peer_memory import await_launches, devices_of_call, peer_call, run_over_peers
from relax_hetero.vm.region import cuda_graph
from relax_hetero.vm.region.cuda_graph import CudaGraph, timing_kernels
from vm.fake_cuda import LOST, NOT_READY, FakeCuda, FakeLibrary

EXTENT = 4
LAYOUT = Layout(2)
CAPTURE, TIMED = 77, 1234


class Device(FakeCuda):
    """Plays driver and device: a graph adds `constant` to the first tensor bound, and writes the second."""

    def __init__(self):
        super().__init__()
        self.driver, self.waiting = FakeLibrary(self), []
        self.launches = self.recordings = self.filled = self.done = self.destroyed = 0
        self.is_lazy = False

    def record(self, plan):
        """Stand-in for the compiled function that launches all kernels."""
        words = words_at(plan.value, LAYOUT.constants + 2)
        self.constant = floats_at(words[LAYOUT.constants])
        if words[graph_layout.RING]:
            self.recordings += 1
            current = {cuda_graph.tvm_ffi.get_raw_stream(tvm.cpu(index)) for index in range(2)}
            assert current & {*self.captures, CAPTURE}
            self.ring, self.consumed = int(words[graph_layout.RING]), int(words[graph_layout.CONSUMED_ADDRESS])
        else:
            self.filled += 1
            self._add(words[graph_layout.BINDINGS :][:2])

    def proceed(self):
        """Begin and end one of the pending launches."""
        self.waiting.pop(0)
        words_at(self.consumed, 1)[0] = (
            self.done // REPORT_INTERVAL * REPORT_INTERVAL
        )  # rows of those before it are free
        self._add(words_at(self.ring + 16 * (self.done % RING_ROWS), 2))
        self.done += 1

    def cuGraphLaunch(self, graph, stream):
        assert graph in (*self.executables, TIMED) and not stream
        self.launches += 1
        self.waiting.append(None)
        if not self.is_lazy:
            self.proceed()

    def cuStreamQuery(self, stream):
        if not self.waiting:
            return 0
        self.proceed()
        return NOT_READY

    def cuGraphExecDestroy(self, graph):
        super().cuGraphExecDestroy(graph)
        self.destroyed += 1

    def _add(self, addresses):
        x, y = map(floats_at, addresses)
        y[:] = x + self.constant


def words_at(address, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(int(address)))


def floats_at(address):
    return np.ctypeslib.as_array((ctypes.c_float * EXTENT).from_address(int(address)))


@pytest.fixture(scope="module")
def submit():
    tensors = [Tensor(name, [tirx.const(EXTENT, "int64")], "float32") for name in ("x", "y")]
    function = submit_function("main_commands", tensors[:1], tensors[1:], rh.native("llvm"))
    return tvm.tirx.build(tvm.IRModule({"main_commands": function}), rh.native("llvm"))["main_commands"]


def tensor(values=0.0, device=tvm.cpu(0)):  # noqa: B008
    return tvm.runtime.tensor(np.full(EXTENT, values, "float32"), device)


def graph_of(submit, device, commands=(), index=0):
    slots = tuple(SlotSpec(name, 0, 4 * EXTENT, 64, access) for name, access in (("x", "read"), ("y", "write")))
    region = RegionSpec("main_commands", "main", 0, slots, (), (0,), 0, commands)
    constant = tensor(10.0)
    graph = CudaGraph(region, tvm.cpu(index), [constant.data_ptr()], submit, device.record, device.driver)
    graph.keeps = constant
    return graph


def call(graph, value):
    x, y = (tensor(each, graph.state.device) for each in (value, np.nan))
    graph.submit_function(x, graph.state, y)
    return x, y


def test_first_submission_records_and_later_ones_launch(submit):
    device = Device()
    graph = graph_of(submit, device)
    for iteration in range(3 * RING_ROWS):
        _, y = call(graph, iteration)
        np.testing.assert_array_equal(y.numpy(), np.full(EXTENT, iteration + 10.0))
    assert (device.filled, device.recordings, device.launches) == (1, 1, 3 * RING_ROWS - 1)


class Timed:
    """Stand-in for a graph with events after two kernels, the first of which fetches the bindings."""

    handle, microseconds = TIMED, lambda _: [1.0, 5.0]

    def __init__(self, library, gpu, launch):
        launch(SimpleNamespace(handle=CAPTURE))


def test_profiled_calls_of_a_mesh_launch_graphs_with_events(submit, monkeypatch):
    monkeypatch.setattr(cuda_graph, "TimedGraph", Timed)
    device, command, outputs = Device(), Dispatch("sum", (), variable="y"), []
    graph = graph_of(submit, device, commands=(command,))

    def function():
        devices_of_call()
        outputs.append(call(graph, 1.0))
        await_launches()
        assert device.launches == peer_call.is_repeated

    def run():
        device.launches = 0
        with running_on((tvm.cpu(0), tvm.cpu(1)), ("global",) * 2):
            run_over_peers(function, (), [])
        np.testing.assert_array_equal(outputs[-1][1].numpy(), np.full(EXTENT, 11.0))

    with timing_kernels([graph]):
        assert graph.times() == []
        run()
        assert graph.times() == [(command, 5.0)] and (device.recordings, device.filled) == (1, 0)
    run()  # as before the profile
    assert graph.times() == [] and (device.recordings, len(outputs)) == (2, 4)


class Waiting(Device):
    """A device whose launches return only when `returns` does, as if its kernels waited for those of another one."""

    def __init__(self, returns):
        super().__init__()
        self.returns = returns

    def cuGraphLaunch(self, graph, stream):
        self.returns()
        super().cuGraphLaunch(graph, stream)


def run_by_nccl(graphs, values, outputs=None):
    """Submit graphs as a call of a mesh whose GPUs sum by NCCL; returns the results; `outputs` keeps the tensors."""
    outputs = [] if outputs is None else outputs

    def function():
        devices_of_call()
        peer_call.is_by_nccl = True
        outputs[:] = [call(graph, value) for graph, value in zip(graphs, values, strict=True)]
        await_launches()
        assert not peer_call.launches

    with running_on((tvm.cpu(0), tvm.cpu(1)), ("global",) * 2):
        run_over_peers(function, (), [])
    return [y.numpy()[0] for _, y in outputs]


def test_launches_of_gpus_that_wait_for_each_other(submit):
    """No launch returns before the other GPU's graph is launched; one thread for both would wait forever."""
    both = threading.Barrier(2, timeout=20)
    devices = [Waiting(both.wait) for _ in range(2)]
    graphs = [graph_of(submit, device, index=index) for index, device in enumerate(devices)]
    for number in range(2 * RING_ROWS):
        assert run_by_nccl(graphs, (number, -number)) == [number + 10, 10 - number]
    assert [device.launches for device in devices] == [2 * RING_ROWS] * 2
    assert [int(graph._words[graph_layout.SUBMITTED]) for graph in graphs] == [2 * RING_ROWS] * 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [rh.HeteroError("the exchange has not ended"), KeyboardInterrupt("Ctrl-C")])
def test_a_launch_that_does_not_return_ends_by_an_error_of_the_waiting_thread(submit, monkeypatch, error):
    """The launch takes place later, and the next one follows it."""
    returns, kept = threading.Event(), []
    device = Waiting(lambda: returns.wait(20))
    graph = graph_of(submit, device)

    def check(seconds):
        if seconds > 0.05 and not returns.is_set():
            raise error

    monkeypatch.setitem(wait_checks, 0, check)
    with pytest.raises(type(error), match=str(error)):
        run_by_nccl([graph], [1.0], kept)
    assert not peer_call.launches and graph._words[graph_layout.SUBMITTED] == 0
    returns.set()
    assert run_by_nccl([graph], [3.0]) == [13.0]
    assert kept[0][1].numpy()[0] == 11.0 and graph._words[graph_layout.SUBMITTED] == device.launches == 2


def test_an_error_of_a_thread_of_a_gpu_is_one_of_the_call(submit, monkeypatch):
    device = Device()
    graph = graph_of(submit, device)
    device.failing["cuGraphLaunch"] = LOST
    with pytest.raises(CudaError, match="cuGraphLaunch failed: CUDA_ERROR_LAUNCH_FAILED"):
        run_by_nccl([graph], [1.0])
    device.failing.clear()
    assert run_by_nccl([graph], [3.0]) == [13.0]
    monkeypatch.setattr(graph, "_words", None)  # an error of another kind does not end the thread
    with pytest.raises(TypeError, match="NoneType"):
        GraphLaunch(0, partial(graph._submit, 0, None, None)).wait()
    monkeypatch.undo()
    assert run_by_nccl([graph], [4.0]) == [14.0]


def test_submissions_in_flight_keep_their_bindings(submit):
    device = Device()
    graph = graph_of(submit, device)
    call(graph, 0.0)
    device.is_lazy = True
    calls = [call(graph, turn) for turn in range(3 * RING_ROWS)]  # the device begins with one when a row is needed
    assert RING_ROWS - REPORT_INTERVAL <= len(device.waiting) < RING_ROWS and device.launches == 3 * RING_ROWS
    while device.waiting:
        device.proceed()
    for iteration, (_, y) in enumerate(calls):
        np.testing.assert_array_equal(y.numpy(), np.full(EXTENT, iteration + 10.0))


def test_waiting_ends_where_the_device_has_failed(submit):
    device = Device()
    graph = graph_of(submit, device)
    call(graph, 0.0)
    device.is_lazy = True
    for iteration in range(RING_ROWS):
        call(graph, iteration)
    device.failing["cuStreamQuery"] = LOST
    with pytest.raises(CudaError, match="CUDA_ERROR_LAUNCH_FAILED"):
        call(graph, 1.0)


def test_a_launch_that_fails_raises_and_takes_no_row(submit):
    device = Device()
    graph = graph_of(submit, device)
    call(graph, 0.0)
    device.failing["cuGraphLaunch"] = LOST
    for _ in range(2 * RING_ROWS):
        with pytest.raises(CudaError, match="'main_commands'.*CUDA_ERROR_LAUNCH_FAILED"):
            call(graph, 1.0)
    device.failing.clear()
    for iteration in range(3):
        _, y = call(graph, iteration)
        np.testing.assert_array_equal(y.numpy(), np.full(EXTENT, iteration + 10.0))


def test_graphs_that_cannot_be_recorded_are_launched_each_time(submit, caplog):
    device = Device()
    device.failing["cuStreamEndCapture"] = LOST
    graph = graph_of(submit, device)
    with caplog.at_level(logging.WARNING, "relax_hetero"):
        for iteration in range(3):
            _, y = call(graph, iteration)
            np.testing.assert_array_equal(y.numpy(), np.full(EXTENT, iteration + 10.0))
    assert (device.filled, device.recordings, device.launches) == (3, 1, 0)
    (record,) = caplog.records
    assert "'main_commands'" in record.message and "cuStreamEndCapture failed" in record.message


@pytest.mark.parametrize("shape, dtype", [((EXTENT + 1,), "float32"), ((EXTENT,), "float64"), ((1, EXTENT), "float32")])
def test_bad_bindings_are_refused_before_anything_runs(submit, shape, dtype):
    device = Device()
    graph = graph_of(submit, device)
    for place in (0, 2):
        args = [tensor(), graph.state, tensor()]
        args[place] = tvm.runtime.empty(shape, dtype)
        with pytest.raises((TypeError, ValueError), match="main_commands"):
            submit(*args)
    assert (device.filled, device.launches) == (0, 0)


def test_memory_is_given_back(submit):
    device = Device()
    graph = graph_of(submit, device)
    call(graph, 0.0)
    assert len(device.pinned) == 1
    address = graph.state.data_ptr()
    del graph
    gc.collect()
    assert not device.pinned and device.destroyed == 1 and address not in cuda_graph._graphs


def test_graphs_of_a_device_share_their_arena(submit, monkeypatch):
    """One of the machine's four regions on two devices has symbolic extents."""
    device = Device()
    plans = {}

    def record_of(name):
        def record(plan, *_):
            plans[name] = words_at(plan.value, LAYOUT.constants + 1)[-1]

        return record

    def region(name, where, arena):
        slots = tuple(SlotSpec(slot, where, 4 * EXTENT, 64, access) for slot, access in (("x", "read"), ("y", "write")))
        return RegionSpec(name, "main", where, slots, (), (), arena, (), runs=RUNS_AS_GRAPH)

    regions = [region("a", 0, 100), region("b", 0, 300), region("c", 1, 200), region("d", 0, "64*n")]
    specs = [ConstantSpec(r.name, (LAYOUT.state_words,), "int64", r.device, (), r.name) for r in regions]
    devices = (DeviceSpec("cuda"), DeviceSpec("cuda", 1))
    metadata = Metadata(devices, -1, {}, tuple(specs), regions=tuple(regions))
    module = SimpleNamespace(get_function=lambda name, _: record_of(name[0]) if name.endswith("_record") else submit)
    monkeypatch.setattr(cuda_graph, "cuda_library", lambda: device.driver)
    _, graphs = cuda_graph.make_graphs(metadata, [tvm.cpu(0), tvm.cpu(1)], [tensor()] * 4, module)
    sizes = [int(graph._arena.shape[0]) for graph in graphs]
    assert sizes == [300, 300, 200, 1]
    for graph in graphs[:2]:
        call(graph, 0.0)
    assert plans["a"] == plans["b"] == graphs[0]._arena.data_ptr()
    states = MemoryPlan(replace(metadata, regions=())).weights(0)
    assert MemoryPlan(metadata).weights(0) == states + 300


class SymbolicDevice(Device):
    """Graphs add a constant to so many numbers as they were recorded for."""

    LAYOUT = Layout(2, 1)

    def __init__(self):
        super().__init__()
        self.extents, self.arenas = {}, []

    def record(self, plan, extent):
        words = words_at(plan.value, self.LAYOUT.constants + 1)
        self.arenas.append(int(words[-1]))
        if words[graph_layout.RING]:
            self.recordings += 1
            self.ring, self.last = int(words[graph_layout.RING]), extent
        else:
            self.filled += 1
            self._add(words[graph_layout.BINDINGS :][:2], extent)

    def cuGraphInstantiateWithFlags(self, result, graph, flags):
        super().cuGraphInstantiateWithFlags(result, graph, flags)
        self.extents[result._obj.value] = self.last

    def cuGraphLaunch(self, graph, stream):
        self._add(words_at(self.ring + 16 * (self.launches % RING_ROWS), 2), self.extents[graph])
        self.launches += 1
        self.cuStreamQuery(stream)

    def cuStreamQuery(self, stream):
        words_at(self.ring - 8 * self.LAYOUT.ring + 8 * graph_layout.CONSUMED, 1)[0] = self.launches

    def cuGraphExecDestroy(self, graph):
        super().cuGraphExecDestroy(graph)
        del self.extents[graph]

    def _add(self, addresses, extent):
        x, y = ((ctypes.c_float * extent).from_address(int(address)) for address in addresses)
        y[:] = [value + 10 for value in x]


@pytest.fixture(scope="module")
def submit_symbolic():
    n = tirx.Var("n", "int64")
    tensors = [Tensor(name, [n], "float32") for name in ("x", "y")]
    function = submit_function("main_commands", tensors[:1], tensors[1:], rh.native("llvm"), [n])
    return tvm.tirx.build(tvm.IRModule({"main_commands": function}), rh.native("llvm"))["main_commands"]


def symbolic_graph_of(submit, device, arena="64*n"):
    slots = tuple(SlotSpec(name, 0, "4*n", 64, access) for name, access in (("x", "read"), ("y", "write")))
    region = RegionSpec("main_commands", "main", 0, slots, ("n",), (), arena, ())
    return CudaGraph(region, tvm.cpu(0), [], submit, device.record, device.driver)


def call_symbolic(graph, extent):
    x = np.arange(extent, dtype="float32")
    y = tvm.runtime.tensor(np.full(extent, np.nan, "float32"))
    graph.submit_function(tvm.runtime.tensor(x), graph.state, y)
    np.testing.assert_array_equal(y.numpy(), x + 10)


def test_extents_that_come_again_have_a_graph_each(submit_symbolic):
    device = SymbolicDevice()
    graph = symbolic_graph_of(submit_symbolic, device)
    for _ in range(4):
        for extent in (9, 3, 5):
            call_symbolic(graph, extent)
    assert (device.filled, device.recordings, device.launches) == (6, 3, 6)
    assert sorted(device.extents.values()) == [3, 5, 9] and not device.destroyed


def test_extents_that_grow_call_by_call_leave_no_graphs(submit_symbolic):
    device = SymbolicDevice()
    graph = symbolic_graph_of(submit_symbolic, device)
    for extent in range(1, 100):
        call_symbolic(graph, extent)
    assert (device.filled, device.recordings) == (99, 0) and len(set(device.arenas)) < 30


def test_graphs_go_where_the_arena_must_grow(submit_symbolic):
    device = SymbolicDevice()
    graph = symbolic_graph_of(submit_symbolic, device)
    for extent in (4, 4, 4, 400, 4, 4, 4):
        call_symbolic(graph, extent)
    assert (device.recordings, device.destroyed, device.launches) == (2, 1, 2)


def test_gpus_of_a_mesh_have_graphs_for_the_same_extents(submit_symbolic, monkeypatch):
    """Though their arenas grow at different ones, and one of them finds its rows in use."""
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 3)
    devices = [SymbolicDevice(), SymbolicDevice()]
    arenas = ("64*n", "64*n + 4096")
    graphs = [symbolic_graph_of(submit_symbolic, *each) for each in zip(devices, arenas, strict=True)]

    def function(extent):
        devices_of_call()
        for graph in graphs:
            x, y = (tvm.runtime.tensor(np.zeros(extent, "float32")) for _ in range(2))
            graph.submit_function(x, graph.state, y)
        assert devices[0].launches == devices[1].launches

    def run(extent):
        with running_on((tvm.cpu(0), tvm.cpu(1)), ("global",) * 2):
            run_over_peers(function, (extent,), [])

    for extent in (100, 120, 126, 120):
        run(extent)
    assert [len(set(device.arenas)) for device in devices] == [3, 2]
    assert [device.recordings for device in devices] == [3, 3]
    graphs[0]._words[graph_layout.CONSUMED] -= RING_ROWS
    run(100)  # the first GPU's submission comes to the machine
    run(90)  # in place of the first graph of both
    for extent in (100, 120, 126):
        run(extent)
        assert [device.recordings for device in devices].count(devices[0].recordings) == 2


def test_more_graphs_than_are_searched_and_kept(submit_symbolic, monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_GRAPHS", 12)
    device = SymbolicDevice()
    graph = symbolic_graph_of(submit_symbolic, device)
    extents = [200, *range(1, 12)]
    for extent in extents * 3:
        call_symbolic(graph, extent)
    assert (device.recordings, device.launches, device.destroyed) == (12, 12, 0)
    for extent in (77, 77, 77, 200):
        call_symbolic(graph, extent)
    assert device.destroyed == 1 and 77 in device.extents.values() and 200 not in device.extents.values()
    del graph
    gc.collect()
    assert not device.extents and not device.pinned
