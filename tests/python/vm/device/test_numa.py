"""Devices that are the CPUs of a NUMA node: affinity of their threads, their memory, and refusals."""

import json
import os
import threading

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.target import cpu_cores
from relax_hetero.target.cpu_cores import cpus_of_nodes, listed_cpus
from relax_hetero.vm.device import numa
from relax_hetero.vm.queue import queues

X = np.random.default_rng(0).random((64, 256), "float32")
NODE = min(cpus_of_nodes())


@ir_module("llvm")
def Model(x: R.Tensor((64, 256), "float32"), w: R.Tensor((256, 256), "float32")):
    with R.dataflow():
        y = R.nn.relu(R.matmul(x, w))
        R.output(y)
    return y


@pytest.fixture(scope="module")
def weight():
    return np.random.default_rng(1).random((256, 256), "float32") - 0.5


@pytest.fixture(scope="module")
def executable(weight):
    mod = rh.transform.UpdateVDevice(rh.VDevice(rh.native("llvm", numa=NODE)), 0)(Model)
    return rh.compile(mod, params={"w": weight})


def test_calls_run_on_the_node_and_leave_the_caller_where_it_is(executable, weight, monkeypatch):
    calls, settle_in = [], numa.prefer_node
    monkeypatch.setattr(
        "relax_hetero.vm.queue.device_queue.prefer_node",
        lambda node: calls.append((node, os.sched_getaffinity(0), threading.get_ident(), settle_in(node))),
    )
    before = os.sched_getaffinity(0)
    actual = rh.vm.VirtualMachine(executable)["main"](X).numpy()
    np.testing.assert_allclose(actual, np.maximum(X @ weight, 0), atol=1e-4)
    ((node, cpus, thread, _),) = calls
    assert node == NODE and cpus == set(sum(cpus_of_nodes()[NODE], []))
    assert thread != threading.get_ident()
    assert os.sched_getaffinity(0) == before


def test_a_file_keeps_its_node(executable, weight, tmp_path):
    executable.export_library(tmp_path / "model.so")
    loaded = rh.load(tmp_path / "model.so")
    assert loaded.devices[0].numa_node == NODE
    actual = rh.vm.VirtualMachine(loaded)["main"](X).numpy()
    np.testing.assert_allclose(actual, np.maximum(X @ weight, 0), atol=1e-4)


def test_memory_of_a_node():
    array = np.ones(1 << 20, "float32")
    address = array.ctypes.data
    if numa.node_of(address) is None:
        pytest.skip("the system does not tell where memory is")
    numa.move_to_node([(address, address + array.nbytes)], NODE)
    middle = address + array.nbytes // 2
    assert numa.node_of(middle) == NODE and array.sum() == 1 << 20
    numa.move_to_node([(address + 8, address + 16)], NODE)  # no whole page: nothing to do


def test_other_devices_are_not_kept_to_a_nodes_cpus(monkeypatch):
    cores = [[0, 4], [1, 5], [2, 6], [3, 7]]
    monkeypatch.setattr(queues, "cpus_of_cores", lambda: cores)
    monkeypatch.setattr(queues, "num_cores", lambda: 4)
    monkeypatch.setattr(queues, "cpus_of_nodes", lambda: {0: cores[:2], 1: cores[2:]})
    first, second = (1, 0), (1, 1)
    threads = {first: 2, second: 2}
    assert queues.cpus_of_queues(threads, {}) == {first: [0, 4, 1, 5], second: [2, 6, 3, 7]}
    assert queues.cpus_of_queues(threads, {second: 0}) == {second: [0, 4, 1, 5]}
    assert queues.cpus_of_queues(threads, {first: 1, second: 0}) == {first: [2, 6, 3, 7], second: [0, 4, 1, 5]}


def spec(**target):
    return rh.vm.DeviceSpec(json.dumps({"kind": "llvm", **target}))


def test_nodes_that_are_not_here_are_refused():
    numa.check_node("llvm:0", spec())
    numa.check_node("llvm:0", spec(model=f"numa:{NODE}"))
    with pytest.raises(rh.BindingError, match=f"llvm:1 was compiled for NUMA node 999, found CPUs of node {NODE}"):
        numa.check_node("llvm:1", spec(model="numa:999"))
    assert spec(model="numa:").numa_node is spec(model="unknown").numa_node is None


def test_a_device_is_of_one_node():
    names, cpus = ["llvm:0", "llvm:1"], [tvm.cpu(0), tvm.cpu(1)]
    numa.check_one_node(names, [spec(model="numa:0"), spec(model="numa:1")], cpus)
    numa.check_one_node(names, [spec(model="numa:0"), spec(model="numa:0")], cpus[:1] * 2)
    with pytest.raises(rh.BindingError, match=r"llvm:0 \(NUMA node 0\) and llvm:1 \(any node\); expected a device for"):
        numa.check_one_node(names, [spec(model="numa:0"), spec()], cpus[:1] * 2)


@pytest.mark.parametrize(("kind", "node"), [("llvm", 999), ("llvm", -1), ("llvm", "0"), ("llvm", True), ("cuda", 0)])
def test_targets_of_missing_nodes(kind, node):
    with pytest.raises(rh.VDeviceError, match=f"numa=.*expected 'llvm' and a node .*: {NODE}"):
        rh.native(kind, numa=node)


def test_targets_of_nodes():
    target = rh.native("llvm", numa=NODE)
    assert spec(**{k: v for k, v in target.export().items() if k == "model"}).numa_node == NODE
    assert 1 <= target.attrs["num-cores"] <= len(cpus_of_nodes()[NODE])


def test_nodes_have_the_cores_that_the_process_may_use(monkeypatch, tmp_path):
    for node, text in {"node1": "4-7\n", "node0": "0-3\n", "node2": "8\n", "node10": "nonsense\n"}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text)
    monkeypatch.setattr(cpu_cores, "_NODES", tmp_path)
    monkeypatch.setattr(cpu_cores, "cpus_of_cores", lambda: [[5, 7], [2], [3]])
    assert cpus_of_nodes.__wrapped__() == {0: [[2], [3]], 1: [[5, 7]]}
    monkeypatch.setattr(cpu_cores, "_NODES", tmp_path / "absent")
    assert cpus_of_nodes.__wrapped__() == {0: [[5, 7], [2], [3]]}


def test_sets_of_cpus_are_read():
    assert listed_cpus("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert listed_cpus("\n") == []
    with pytest.raises(ValueError):
        listed_cpus("all")
