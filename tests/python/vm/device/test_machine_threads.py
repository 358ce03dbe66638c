"""Threads, cores and waiting of one machine: `VirtualMachine(threads=, cores=, spin=)`."""

import ctypes
import os
import threading
import time

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact import worker_threads as names
from relax_hetero.errors import BindingError
from relax_hetero.target.cpu_cores import cpus_of_cores
from relax_hetero.vm.device import threads, workers
from relax_hetero.vm.queue.queues import shares_of

pytestmark = pytest.mark.sampled(1)  # the variants are cheap
CPUS = [core[0] for core in cpus_of_cores()]
CPU = {**{k: v for k, v in rh.native("llvm").export().items() if k in ("kind", "mcpu", "mattr")}, "num-cores": 4}
TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, TASK, ctypes.c_void_p, ctypes.c_int)
X, W = (np.random.default_rng(i).random(shape, "float32") - 0.5 for i, shape in enumerate([(64, 96), (96, 250)]))


@ir_module("llvm")
def Watched(
    x: R.Tensor((64, 96), "float32"),
    w: R.Tensor((96, 250), "float32"),
    watch: R.Callable([R.Tensor((64, 250), "float32")], R.Tensor((64, 250), "float32")),
):
    y = R.matmul(x, w)
    z = watch(y)
    return R.nn.relu(z)


@pytest.fixture(scope="module")
def executable():
    return rh.compile(rh.transform.UpdateVDevice(rh.VDevice(CPU), 0)(Watched))


def call(machine, barrier=None):
    """The result of a call; the number of threads of its loops, the CPUs that it may use, and its thread."""
    seen = []

    def watch(y):
        if barrier is not None:
            barrier.wait(60)
        seen.append((workers.width(), sorted(os.sched_getaffinity(0)), threading.get_native_id()))
        return y

    result = machine["main"](X, W, watch).numpy()
    np.testing.assert_allclose(result, np.maximum(X @ W, 0), rtol=1e-4, atol=1e-5)
    return result, *seen[0]


def needs_workers(machine):
    if machine._threads.use_tvm_pool:
        pytest.skip("no worker threads for this operating system and processor, or TVM_BIND_THREADS is set")


def test_each_machine_has_its_number_of_threads(executable):
    machines = {count: rh.vm.VirtualMachine(executable, threads=count) for count in (1, 2, 4)}
    needs_workers(machines[2])
    other = threads.Pool(False)  # another thread is inside of a call
    results = []
    for is_busy in (False, True):
        threads._calling.update([other] if is_busy else [])
        try:
            for count in (4, 1, 2, 4):
                result, width, _, thread = call(machines[count])
                assert (width, thread) == (count, threading.get_native_id())
                results.append(result)
        finally:
            threads._calling.discard(other)
    assert all((result == results[0]).all() for result in results)


@pytest.mark.skipif(len(CPUS) < 2, reason="one core: no disjoint ones")
def test_machines_on_disjoint_cores_run_at_once(executable):
    machines = [rh.vm.VirtualMachine(executable, cores=[cpu]) for cpu in CPUS[:2]]
    both, before = threading.Barrier(2), os.sched_getaffinity(0)
    found = [None, None]

    def work(index):
        found[index] = call(machines[index], both)  # each waits inside of its call until the other is there

    callers = [threading.Thread(target=work, args=[index]) for index in (0, 1)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(120)
    assert [cpus for _, _, cpus, _ in found] == [[cpu] for cpu in CPUS[:2]]
    assert [width for _, width, _, _ in found] == [1, 1] and found[0][3] != found[1][3]
    assert (found[0][0] == found[1][0]).all() and os.sched_getaffinity(0) == before
    assert machines[0].submit("main", X, W, lambda y: y).result(60).shape == (64, 250)


def test_all_cores_by_default_and_fewer_threads_on_request(executable):
    machine = rh.vm.VirtualMachine(executable, cores=CPUS)
    needs_workers(machine)
    _, width, cpus, thread = call(machine)
    assert (width, cpus) == (min(4, len(CPUS)), sorted(CPUS)) and thread != threading.get_native_id()
    assert call(rh.vm.VirtualMachine(executable, cores=CPUS, threads=1))[1] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 0}, "threads is 0, expected 1 to 4; its code was compiled for that many"),
        ({"threads": 5}, "threads is 5, expected 1 to 4"),
        ({"threads": 2.0}, "threads is 2.0, expected 1 to 4"),
        ({"threads": True}, "threads is True"),
        ({"threads": 2, "cores": CPUS[:1]}, "threads is 2, expected 1 to 1; one on each of its cores"),
        ({"cores": []}, r"cores is \[\], expected different CPUs of those that this process may use"),
        ({"cores": CPUS[:1] * 2}, "cores is .*, expected different CPUs"),
        ({"cores": [4096]}, r"cores is \[4096\], expected"),
        ({"cores": ["0"]}, r"cores is \['0'\], expected"),
        ({"cores": [[0]]}, r"cores is \[\[0\]\], expected"),
        ({"cores": "0"}, "cores is '0', expected"),
        ({"cores": 0}, "cores is 0, expected"),
        ({"spin": "sleep"}, "spin is 'sleep', expected True or False"),
    ],
)
def test_wrong_values_are_refused(executable, options, message):
    with pytest.raises(BindingError, match=f"VirtualMachine: {message}"):
        rh.vm.VirtualMachine(executable, **options)


def test_cores_contradict_other_bindings(monkeypatch):
    plain, node = (
        rh.vm.DeviceSpec(str(tvm.target.Target({"kind": "llvm", **more}))) for more in ({}, {"model": "numa:0"})
    )
    with pytest.raises(BindingError, match="bound to NUMA nodes"):
        threads.choose_threads([plain, node], None, CPUS, True)
    monkeypatch.setenv("TVM_BIND_THREADS", "1")
    with pytest.raises(BindingError, match="TVM_BIND_THREADS=1 binds"):
        threads.choose_threads([plain], None, CPUS, True)
    assert threads.choose_threads([plain], 7, None, False).width == 7  # code for any number of cores


def test_devices_share_the_cores():
    assert shares_of([3, 1, 4, 5, 9], "ab") == {"a": [3, 1], "b": [4, 5, 9]}
    assert shares_of([3], "ab") == {"a": [3], "b": [3]}


def test_threads_of_a_machine_that_does_not_spin_sleep(executable):
    machine = rh.vm.VirtualMachine(executable, threads=2, spin=False)
    needs_workers(machine)
    launch, together, used = LAUNCH(workers._functions[names.LAUNCH]()), threading.Barrier(2), []

    def task(number, env, data):
        together.wait(30)  # both tasks run at once: the worker has begun its own
        if threading.current_thread() is not caller:
            time.sleep(0.5)
        return 0

    def work():
        call(machine)  # configures the threads of this one
        before = time.thread_time()  # CPU time of this thread alone
        assert launch(TASK(task), None, 0) == 0
        used.append(time.thread_time() - before)

    workers._functions[names.SPIN](60_000_000_000)  # a minute for all other machines
    try:
        caller = threading.Thread(target=work)
        caller.start()
        caller.join(60)
    finally:
        workers._functions[names.SPIN](workers.SPIN_NANOSECONDS)
    assert used and used[0] < 0.25  # spinning would have taken half a second
