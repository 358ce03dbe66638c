"""Profiles: every kernel and transfer once, own times that add up, and a machine that is as before."""

import dataclasses
import json
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact.commands import Dispatch, RegionSpec
from relax_hetero.artifact.metadata import DeviceSpec, DispatchSpec, Metadata
from relax_hetero.vm import profile as subject
from relax_hetero.vm.device.peer_memory import peer_call
from relax_hetero.vm.device.tensors import alias
from relax_hetero.vm.profile import BufferClock, MeshRecorder, ProfileRecorder
from relax_hetero.vm.region.profile_regions import RegionCalls
from vm.fake_cuda import FakeCuda, FakeLibrary

X, W = np.zeros((64, 4), "float32"), np.ones(4, "float32")


@pytest.fixture
def vm(chain):
    dispatches = {
        name: dataclasses.replace(spec, ops=(name.upper(),)) for name, spec in chain.metadata.dispatches.items()
    }
    metadata = dataclasses.replace(chain.metadata, dispatches=dispatches)
    return rh.vm.VirtualMachine(rh.vm.Executable(chain.module, metadata, []))


def test_rows_name_kernels_devices_and_ops(vm):
    profile = vm.profile("main", X, W)
    rows = {row.symbol: row for row in profile.rows}
    (exp,) = [row for name, row in rows.items() if "exp" in name]
    (add,) = [row for name, row in rows.items() if "add" in name]
    assert (exp.device, add.device, rows["to_device"].device) == ("llvm:0", "llvm:1", "llvm:1")
    assert exp.ops == (exp.symbol.upper(),)
    assert exp.precision == add.precision == "f32"
    assert all(row.calls == 1 for row in profile.rows)
    assert "vm.builtin" not in str(profile)


def test_times_add_up(vm):
    profile = vm.profile("main", x=X, w=W)
    assert sum(row.microseconds for row in profile.rows) == pytest.approx(profile.microseconds)
    assert sum(row.share for row in profile.rows) == pytest.approx(1)
    assert list(profile.rows) == sorted(profile.rows, key=lambda row: -row.microseconds)


def test_text_and_json(vm):
    profile = vm.profile("main", X, W)
    lines = str(profile).splitlines()
    assert lines[0].split() == ["kernel", "device", "precision", "ops", "calls", "us", "share"]
    assert lines[-1].startswith("total")
    assert len(lines) == len(profile.rows) + 2
    data = json.loads(profile.to_json())
    assert data["function"] == "main"
    assert [row["symbol"] for row in data["rows"]] == [row.symbol for row in profile.rows]


def test_the_machine_is_as_before(vm, failing):
    for _ in range(2):
        vm.profile("main", X, W)
        np.testing.assert_array_equal(vm["main"](X, W)[0].numpy(), np.full((64, 4), 2))
    with pytest.raises(rh.BindingError):
        vm.profile("main", X)
    machine = rh.vm.VirtualMachine(failing)
    with pytest.raises(rh.HeteroError, match="negative"):
        machine.profile("main", -np.ones(2, "float32"))
    machine["main"](np.ones(2, "float32"))


def test_other_threads_do_not_disturb_a_profile(vm):
    stop = threading.Event()

    def call():
        while not stop.is_set():
            vm["main"](X, W)

    other = threading.Thread(target=call)
    other.start()
    try:
        for _ in range(10):
            assert all(row.calls == 1 for row in vm.profile("main", X, W).rows)
    finally:
        stop.set()
        other.join()


def test_a_call_is_charged_without_the_calls_inside_it():
    recorder = ProfileRecorder(rh.vm.Metadata((), -1, {}), [])
    for symbol, before in [("outer", True), ("inner", True), ("inner", False), ("outer", False)]:
        recorder.instrument(None, symbol, before, None)
    profile = recorder.profile("main")
    assert {row.symbol for row in profile.rows} == {"outer", "inner", "(allocation, shapes, bytecode)"}
    assert sum(row.microseconds for row in profile.rows) == pytest.approx(profile.microseconds)


@tvm.register_global_func("relax_hetero.test.refuse", override=True)
def refuse(value):
    if value < 0:
        raise ArithmeticError("refused")


@ir_module("llvm")
class Buffered:
    """Three kernels of one command buffer, with symbolic extents, numbers and a constant; then one of another."""

    @T.prim_func
    def grow(a: T.handle, k: T.int64, s: T.float32, b: T.handle):
        T.func_attr({"op_pattern": 8})
        n, m = T.int64(), T.int64()
        A = T.match_buffer(a, (n,), "float32")
        B = T.match_buffer(b, (m,), "float32")
        T.evaluate(T.call_packed("relax_hetero.test.refuse", A[0]))
        for i in range(m):
            B[i] = A[T.min(i, n - 1)] * s + T.cast(k, "float32")

    @R.function(private=True)
    def inner(x: R.Tensor(("m",), "float32", "llvm:0")):
        m = T.int64()
        cls = Buffered
        with R.dataflow():
            a = R.call_tir(cls.grow, (x, m, T.float32(1)), out_ty=R.Tensor((m,), "float32", "llvm:0"))
            b = R.call_tir(cls.grow, (a, m, T.float32(1)), out_ty=R.Tensor((m,), "float32", "llvm:0"))
            R.output(b)
        return b

    @R.function
    def main(x: R.Tensor(("n",), "float32", "llvm:0"), shape: R.Shape(["k"])):
        n, k = T.int64(), T.int64()
        cls = Buffered
        a = R.call_tir(cls.grow, (x, k, T.float32(2)), out_ty=R.Tensor((n + 2,), "float32", "llvm:0"))
        b = R.call_tir(cls.grow, (a, k + 1, T.float32(0.5)), out_ty=R.Tensor((n * 2,), "float32", "llvm:0"))
        c = R.add(b, R.const(np.arange(1, 2, dtype="float32")))
        d = cls.inner(c)
        return d


@pytest.fixture(scope="module")
def buffered():
    return rh.compile(Buffered)


def profiled_call(vm, *args):
    """A result that was made under a profile, and the profile."""
    regions = RegionCalls(vm.executable, vm._constants.values)
    recorder = ProfileRecorder(vm.executable.metadata, vm.devices, regions)
    vm._module["set_instrument"](recorder.instrument)
    try:
        result = vm["main"](*args).numpy()
    finally:
        vm._module["set_instrument"](None)
    return result, recorder.profile("main")


def expected(x, k):
    a = np.pad(x, (0, 2), mode="edge") * 2 + k
    b = a[np.minimum(np.arange(2 * len(x)), len(x) + 1)] / 2 + k + 1
    return b + 1 + 2 * len(b)


def test_kernels_of_command_buffers_are_measured_each(buffered):
    vm = rh.vm.VirtualMachine(buffered)
    assert [len(region.commands) for region in buffered.metadata.regions] == [2, 3]
    for n, k in ((3, 5), (1, 0), (7, 2)):
        x = np.random.default_rng(n).random(n, "float32")
        result, profile = profiled_call(vm, x, [k])
        np.testing.assert_array_equal(result, vm["main"](x, [k]).numpy())
        np.testing.assert_allclose(result, expected(x, k), rtol=1e-6)
        calls = {row.symbol: (row.device, row.calls) for row in profile.rows if row.symbol in ("grow", "add")}
        assert calls == {"grow": ("llvm:0", 4), "add": ("llvm:0", 1)}
        assert sum(row.share for row in profile.rows) == pytest.approx(1)


def test_a_kernel_of_a_command_buffer_that_fails_under_a_profile(buffered):
    vm = rh.vm.VirtualMachine(buffered)
    with pytest.raises(rh.HeteroError, match="refused"):
        vm.profile("main", -np.ones(3, "float32"), [1])
    assert {row.symbol for row in vm.profile("main", np.ones(3, "float32"), [1]).rows} >= {"grow", "add"}


def test_command_buffers_that_run_as_a_whole_are_one_row_each(buffered):
    metadata = dataclasses.replace(buffered.metadata, kernels={})
    vm = rh.vm.VirtualMachine(rh.vm.Executable(buffered.module, metadata, buffered.constants))
    rows = {row.symbol: row for row in vm.profile("main", np.ones(3, "float32"), [1]).rows}
    assert {name: (rows[name].calls, rows[name].ops) for name in ("inner_commands", "main_commands")} == {
        "inner_commands": (1, ("grow", "grow")),
        "main_commands": (1, ("grow", "grow", "add")),
    }
    assert "grow" not in rows


# One kernel on two equal devices: by itself on both, and in a command buffer on the second.
@ir_module("llvm", "llvm:1")
def Shared(x: R.Tensor((4,), "float32", "llvm:0"), p: R.Tensor((), "bool", "llvm:0")):
    a = R.nn.relu(x)
    b = R.nn.relu(R.to_vdevice(a, "llvm:1"))
    if p:
        c = R.nn.relu(b)
    else:
        c = R.sort(R.nn.relu(b))
    return c


@pytest.mark.parametrize("command_buffers", [False, True])
def test_a_kernel_of_two_devices_has_a_row_for_each(command_buffers):
    executable = rh.compile(Shared, command_buffers=command_buffers)
    assert sorted(executable.metadata.dispatches["relu"].devices) == [0, 1]
    vm = rh.vm.VirtualMachine(executable)
    for condition in (True, False):
        profile = vm.profile("main", X[:, 0][:4], np.array(condition))
        calls = {row.device: row.calls for row in profile.rows if row.symbol == "relu"}
        assert calls == {"llvm:0": 1, "llvm:1": 2}


def test_kernels_of_both_devices_of_a_mesh_are_measured():
    w = np.ones((4, 4), "float32")

    @ir_module({"kind": "llvm", "num-cores": 1}, {"kind": "llvm", "num-cores": 1})
    def mesh(x: R.Tensor((2, 4), "float32", "llvm[0:2]")):
        with R.dataflow():
            y = R.hetero.shard(R.matmul(R.hetero.shard(x, "S[0]"), R.const(w)), "S[0]")
            R.output(y)
        return y

    vm, x = rh.vm.VirtualMachine(rh.compile(mesh)), np.arange(8, dtype="float32").reshape(2, 4)
    np.testing.assert_array_equal(vm["main"](x).numpy(), x @ w)
    products = [row for row in vm.profile("main", x).rows if "matmul" in row.ops]
    assert {row.device: row.calls for row in products} == {"llvm:0": 1, "llvm:1": 1}


GPUS = [tvm.cuda(0), tvm.cuda(1), tvm.cpu()]
MESH = Metadata(
    (DeviceSpec('{"kind": "cuda"}'), DeviceSpec('{"kind": "cuda"}', 1)),
    -1,
    {},
    dispatches={"sum": DispatchSpec(0, ("sum",), other_devices=(1,)), "alone": DispatchSpec(1, ("exp",))},
    regions=tuple(
        RegionSpec(f"graph_{gpu}", "main", gpu, (), (), (), 0, (Dispatch("sum", (), variable="y"),)) for gpu in (0, 1)
    ),
)


def calls_of_a_mesh(instrument):
    """Two graphs, a kernel of GPU 1, a copy from GPU 0, and a function of the host, which calls another one."""
    tensor = alias(tvm.runtime.empty((1,), "float32", tvm.cpu()), tvm.cuda(0))
    for symbol, *args in (("graph_0",), ("graph_1",), ("alone",), ("relax_hetero.to_device", tensor, 1), ("outer",)):
        instrument(None, symbol, True, None, *args)
        if symbol == "outer":
            instrument(None, "inner", True, None)
            instrument(None, "inner", False, None)
        instrument(None, symbol, False, None, *args)


def test_a_mesh_of_gpus_is_measured_by_events(monkeypatch):
    """In the call after the one that makes graphs; nothing waits before the end."""
    cuda = FakeCuda()
    graphs = [SimpleNamespace(region=r, times=lambda r=r: [(r.commands[0], 250.0 + r.device)]) for r in MESH.regions]
    recorder = MeshRecorder(MESH, GPUS, graphs, FakeLibrary(cuda))
    for is_repeated in (False, True):
        monkeypatch.setattr(peer_call, "is_repeated", is_repeated)
        calls_of_a_mesh(recorder.instrument)
    assert len(cuda.streams[0]) == 8  # events that no one has waited for
    profile = recorder.profile("main")
    times = {(row.symbol, row.device): row.microseconds for row in profile.rows if row.device != "host"}
    assert times == pytest.approx(
        {("sum", "cuda:0"): 250, ("sum", "cuda:1"): 251, ("alone", "cuda:1"): 1500, ("to_device", "cuda:1"): 1500}
    )
    assert [(each.region, each.kernel, each.variable) for each in profile.commands] == [
        (f"graph_{gpu}", "sum", "y") for gpu in (0, 1)
    ]
    on_host = {row.symbol: row.calls for row in profile.rows if row.device == "host"}
    assert on_host == {"outer": 1, "inner": 1, subject.VM_OVERHEAD: 1}


def test_a_clock_of_a_mesh_waits_at_its_end(monkeypatch):
    cuda = FakeCuda()
    library = FakeLibrary(cuda)
    monkeypatch.setattr(subject, "cuda_library", lambda: library)
    monkeypatch.setattr(peer_call, "uses_peers", True)
    clock = BufferClock(MESH, GPUS)
    calls_of_a_mesh(clock.instrument)
    assert clock.seconds == 0 and cuda.streams[0]
    clock.stop()
    assert clock.seconds == pytest.approx(1.5e-3) and not cuda.streams[0]
