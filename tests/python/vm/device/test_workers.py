"""Worker threads: distribution of tasks, late workers, errors, nested loops, threads and forks."""

import ctypes
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.artifact import worker_threads as names
from relax_hetero.target.cpu_cores import cpus_of_cores
from relax_hetero.vm.device import workers

TASK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, TASK, ctypes.c_void_p, ctypes.c_int)
X, W = (np.random.default_rng(i).random(shape, "float32") - 0.5 for i, shape in enumerate([(70, 130), (130, 257)]))
CPU = {**{k: v for k, v in rh.native("llvm").export().items() if k in ("kind", "mcpu", "mattr")}, "num-cores": 2}


@ir_module("llvm")
def Product(x: R.Tensor((70, 130), "float32"), w: R.Tensor((130, 257), "float32")):
    with R.dataflow():
        y = R.matmul(x, w)
        R.output(y)
    return y


def product():
    return rh.transform.UpdateVDevice(rh.VDevice(CPU), 0)(Product)


@pytest.fixture(scope="module")
def vm():
    machine = rh.vm.VirtualMachine(rh.compile(product()))
    if machine._threads.use_tvm_pool:
        pytest.skip("no worker threads for this operating system and processor, or TVM_BIND_THREADS is set")
    return machine


@pytest.fixture
def launch(vm):
    """Runs a task on so many threads, in a new thread each time; returns the status and what it saw."""
    function = LAUNCH(workers._functions[names.LAUNCH]())

    def run(used, body=lambda task: 0, room=None, times=1):
        tasks, status = [], []

        def task(number, env, data):
            count = ctypes.cast(env + 8, ctypes.POINTER(ctypes.c_int))[0]
            tasks.append((number, count, threading.get_native_id()))
            return body(number)

        def call():
            workers.configure(room or used, used)
            callback = TASK(task)
            status.extend(function(callback, None, 0) for _ in range(times))

        caller = threading.Thread(target=call)
        caller.start()
        caller.join(60)
        assert not caller.is_alive()
        return status, tasks

    return run


def test_every_task_runs_once_at_any_width(launch):
    for used in (1, 2, 3, 9, 40):
        status, tasks = launch(used, times=20)
        assert status == [0] * 20
        assert sorted(task for task, _, _ in tasks) == sorted(list(range(used)) * 20)
        assert {count for _, count, _ in tasks} == {used}


def test_the_caller_takes_tasks_that_nobody_began(launch):
    began = threading.Event()

    def body(task):
        if task:  # the first worker to come holds on until the caller has done the rest
            time.sleep(0.05 if not began.is_set() else 0)
            began.set()
        return 0

    status, tasks = launch(16, body, times=3)
    assert status == [0] * 3
    assert sorted(task for task, _, _ in tasks) == sorted(list(range(16)) * 3)


def test_a_late_worker_is_waited_for_asleep(vm):
    function = LAUNCH(workers._functions[names.LAUNCH]())
    together = threading.Barrier(2)
    callers = []

    def task(number, env, data):
        together.wait(30)  # both tasks run at once: the worker has begun its own
        if threading.current_thread() is not caller:
            time.sleep(0.5)
        return 0

    def call():
        workers.configure(2, 2)
        before = time.thread_time()  # of this thread alone: other threads of the process may be at work
        status = function(TASK(task), None, 0)
        callers.append((status, time.thread_time() - before))

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    ((status, seconds),) = callers
    assert status == 0
    assert seconds < 0.25  # spinning would have taken all of it


def test_code_that_is_loaded_later_sets_how_long_running_workers_spin(vm, monkeypatch):
    """Every library has the workers' code, but only the first one's runs."""
    spins = []
    monkeypatch.setitem(workers._functions, names.SPIN, spins.append)
    later = rh.compile(product()).runnable_module()
    assert workers.use_workers(later) and not spins
    assert workers.use_workers(later, has_accelerators=True) and spins == [workers.SPIN_NANOSECONDS_WITH_ACCELERATORS]


@pytest.mark.skipif(len(cpus_of_cores()) < 2, reason="one core: nowhere to go")
@pytest.mark.parametrize("core", [0, -1])
def test_a_worker_on_its_callers_cpu_is_sent_away(vm, core):
    """Also again after something else moves it back: ``taskset``, or a control group that changes."""
    function = LAUNCH(workers._functions[names.LAUNCH]())
    allowed = os.sched_getaffinity(0)
    shared = cpus_of_cores()[core]
    callers, masks = set(), []

    def task(number, env, data):
        together.wait(30)  # the worker has begun, here or there
        if number == 0:  # the caller comes to the CPU where the worker did its task
            os.sched_setaffinity(0, shared[:1])
            os.sched_setaffinity(0, allowed)
        elif not masks:
            os.sched_setaffinity(0, shared[:1])
            masks.append(set(shared[:1]))
        else:
            masks.append(os.sched_getaffinity(0))
            if shared[0] not in masks[-1]:
                left.append(masks[-1])
                if len(left) < 3:
                    os.sched_setaffinity(0, shared[:1])
        return 0

    def call():
        workers.configure(2, 2)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            function(callback, None, 0)
            callers.add(frozenset(os.sched_getaffinity(0)))
            if len(left) == 3:
                return

    left = []
    together, callback = threading.Barrier(2), TASK(task)
    caller = threading.Thread(target=call)
    caller.start()
    caller.join(60)
    assert not caller.is_alive()
    assert callers == {frozenset(allowed)}
    assert left == [allowed - set(shared)] * 3


def test_loops_within_loops_run_in_one_thread(launch):
    function = LAUNCH(workers._functions[names.LAUNCH]())
    inner = []

    def nested(number, env, data):
        inner.append((number, ctypes.cast(env + 8, ctypes.POINTER(ctypes.c_int))[0]))
        return 0

    callback = TASK(nested)
    status, _ = launch(3, lambda task: function(callback, None, 0))
    assert status == [0] and inner == [(0, 1)] * 3


def test_a_machine_keeps_its_numbers_at_any_width(vm, monkeypatch):
    for width in (1, 2, 3, 7, 2):
        monkeypatch.setenv("TVM_NUM_THREADS", str(width))
        actual = rh.vm.VirtualMachine(vm.executable)["main"](X, W).numpy()
        np.testing.assert_allclose(actual, X @ W, atol=1e-4)


def test_threads_end_with_their_caller(vm):
    def threads():
        return len(os.listdir("/proc/self/task"))

    def call():
        np.testing.assert_allclose(vm["main"](X, W).numpy(), X @ W, atol=1e-4)

    before = threads()
    for _ in range(5):
        caller = threading.Thread(target=call)
        caller.start()
        caller.join()
    until = time.monotonic() + 10
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threads() <= before


def test_errors_of_tasks_reach_the_caller(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run_script(script)
    assert done.stdout.split() == ["failed", "failed", "4.0"], done.stderr


def run_script(script, **environment):
    env = {**os.environ, "TVM_NUM_THREADS": "2", **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)


FAILING = """
import numpy as np, tvm, relax_hetero as rh
from tvm.script import ir as I, relax as R, tirx as T

@tvm.register_global_func("test.fail_if_negative")
def fail(value):
    if value < 0:
        raise ValueError("it is negative")

@I.ir_module
class Model:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "MCPU", "num-cores": 2})]})

    @T.prim_func(s_tir=True)
    def checked(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
        for i in T.parallel(4):
            T.call_packed("test.fail_if_negative", x[i])
            y[i] = x[i]

    @R.function
    def main(x: R.Tensor((4,), "float32")):
        cls = Model
        y = R.call_tir(cls.checked, (x,), out_ty=R.Tensor((4,), "float32"))
        return y

vm = rh.vm.VirtualMachine(rh.compile(Model))
for bad in (0, 3):
    x = np.ones(4, "float32")
    x[bad] = -1
    try:
        vm["main"](x)
    except rh.HeteroError as error:
        print("failed" if "it is negative" in str(error) else error)
print(vm["main"](np.ones(4, "float32")).numpy().sum())
""".replace("MCPU", str(rh.native("llvm").attrs["mcpu"]))


def test_a_forked_process_makes_new_threads(vm):
    np.testing.assert_allclose(vm["main"](X, W).numpy(), X @ W, atol=1e-4)
    child = os.fork()
    if child == 0:
        try:
            good = np.allclose(vm["main"](X, W).numpy(), X @ W, atol=1e-4)
            os._exit(0 if good and workers.width() > 0 else 1)
        finally:
            os._exit(2)
    until = time.monotonic() + 60
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0 and ended[0] == child
    np.testing.assert_allclose(vm["main"](X, W).numpy(), X @ W, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "before"),
    [
        pytest.param({"TVM_BIND_THREADS": "1"}, "", marks=pytest.mark.slow),
        ({}, "workers._start = lambda module: False"),
    ],
)
def test_a_library_runs_without_workers_too(vm, tmp_path, environment, before):
    vm.executable.export_library(tmp_path / "product.so")
    np.savez(tmp_path / "arrays.npz", x=X, w=W)
    script = tmp_path / "stock.py"
    script.write_text(STOCK.replace("FOLDER", repr(str(tmp_path))).replace("BEFORE", before))
    done = run_script(script, **environment)
    assert done.stdout.split() == ["True", "True"], done.stderr


STOCK = """
import numpy as np, relax_hetero as rh
from relax_hetero.vm.device import workers
BEFORE
arrays = np.load(FOLDER + "/arrays.npz")
vm = rh.vm.VirtualMachine(rh.load(FOLDER + "/product.so"))
found = vm["main"](arrays["x"], arrays["w"]).numpy()
print(vm._threads.use_tvm_pool, np.abs(found - arrays["x"] @ arrays["w"]).max() < 1e-4)
"""


UNLIKE_CORES_PROGRAM = """
import ctypes
from unittest import mock
import numpy as np
from relax_hetero.target import cpu_cores, native_target
from relax_hetero.vm.device import workers
with mock.patch.object(cpu_cores, "_kind_of", str), mock.patch.object(cpu_cores, "cpus_of_cores", lambda: [[0], [1]]):
    import relax_hetero as rh
    from vm.device.test_workers import CPU, LAUNCH, TASK, Product, W, X, names
    assert cpu_cores.UNLIKE_CORES in native_target.native_llvm().keys
    assert cpu_cores.UNLIKE_CORES in native_target.completed_llvm(native_target.default_target("llvm")).keys
    cpu = rh.VDevice({**CPU, "keys": ["cpu", cpu_cores.UNLIKE_CORES]})
    machine = rh.vm.VirtualMachine(rh.compile(rh.transform.UpdateVDevice(cpu, 0)(Product), cache=False))
    for _ in range(20):
        np.testing.assert_allclose(machine["main"](X, W).numpy(), X @ W, rtol=1e-4, atol=1e-5)
    seen = []
    @TASK
    def task(number, environment, data):
        seen.append((number, ctypes.cast(environment + 8, ctypes.POINTER(ctypes.c_int))[0]))
        return 0
    workers.configure(2, 2)
    assert machine._threads.use_tvm_pool or LAUNCH(workers._functions[names.LAUNCH]())(task, None, 0) == 0
    assert machine._threads.use_tvm_pool or sorted(seen) == [(number, 8) for number in range(8)]
"""


def test_threads_on_unlike_cores_share_tasks(tmp_path):
    """In a process that believes so: several tasks for each thread, each once, whoever takes it."""
    script = tmp_path / "unlike_cores.py"
    script.write_text(UNLIKE_CORES_PROGRAM)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
