"""Profiles: every kernel and transfer once, own times that add up, and a machine that is as before."""

import dataclasses
import json
import threading

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.vm.profile import Recorder

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
    assert lines[0].split() == ["kernel", "device", "ops", "calls", "us", "share"]
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
    recorder = Recorder([])
    for symbol, before in [("outer", True), ("inner", True), ("inner", False), ("outer", False)]:
        recorder.instrument(None, symbol, before, None)
    profile = recorder.profile("main", rh.vm.Metadata((), -1, {}))
    assert {row.symbol for row in profile.rows} == {"outer", "inner", "(machine)"}
    assert sum(row.microseconds for row in profile.rows) == pytest.approx(profile.microseconds)
