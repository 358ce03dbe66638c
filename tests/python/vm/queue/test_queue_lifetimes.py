"""Machines that come and go, interpreters that end, processes that fork: nothing is left, and nobody hangs."""

import gc
import math
import os
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

import relax_hetero as rh
from marks import slow_but_for
from seeds import fresh_rng
from vm.queue_models import Pipeline, expected

pytestmark = pytest.mark.timeout(120)

HEAD = """
import atexit, gc, os, sys, threading, time
import numpy as np
import tvm
from vm.queue_models import Gate, Pipeline, expected, kernels
import relax_hetero as rh

x = np.arange(5, dtype="float32")
vm = rh.vm.VirtualMachine(rh.load("model.so"))
"""

SLEEP = """
def sleep(source, target):
    time.sleep(0.2)
    source.copyto(target)
tvm.register_global_func("relax_hetero.test.first", sleep, override=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("queues")
    rh.compile(Pipeline).export_library(path / "model.so")
    return path


def run(script, folder, status=0):
    """A script's output, or its error, after it has ended by itself with that status."""
    path = folder / "script.py"  # functions of a module are read again from its file
    path.write_text(HEAD + script)
    paths = [os.path.dirname(os.path.dirname(__file__)), *filter(None, sys.path)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, str(path)], env=env, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, (done.returncode, done.stdout, done.stderr)
    return done.stderr if status else done.stdout


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def queue_threads():
    return {thread for thread in threading.enumerate() if thread.name.startswith(("queue of", "ends of"))}


def use_machines(exe, count):
    """Make machines, submit two calls to each and drop it; returns weak references to machines and fences."""
    x = fresh_rng().random(1000, dtype="float32")
    of_others, references = queue_threads(), []

    def wait_until_there_are(most):
        limit = time.monotonic() + 30
        while len(queue_threads() - of_others) > most:
            assert time.monotonic() < limit, queue_threads() - of_others
            time.sleep(0.001)

    for _ in range(count):
        vm = rh.vm.VirtualMachine(exe)
        fences = [vm.submit("main", x) for _ in range(2)]
        references += map(weakref.ref, [vm, *fences])
        del vm
        for fence in fences:
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))
        wait_until_there_are(20)
    wait_until_there_are(0)
    return references


@pytest.fixture
def no_collections():
    """No cycles are broken: each machine ends with its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def count_objects():
    """The number of objects of the garbage collector, which stops following thousands of tuples when it first runs."""
    count = math.inf
    while (remaining := len(gc.get_objects())) < count:
        count = remaining
        gc.collect()
    return count


def test_machines_leave_nothing_behind(no_collections):
    exe = rh.compile(Pipeline)
    use_machines(exe, 10)
    before = count_objects()
    references = use_machines(exe, 30)
    assert not any(reference() for reference in references)
    del references
    # A leak of one object per machine, or per call, would be 30 of them.
    assert count_objects() - before < 20


@pytest.mark.timing
def test_a_thousand_machines_take_no_memory(no_collections):
    exe = rh.compile(Pipeline)
    use_machines(exe, 150)
    before = resident_bytes()
    use_machines(exe, 1000)
    assert resident_bytes() - before < 24 << 20


ENDS = {
    "queued and running": "fences = [vm.submit('main', x) for _ in range(4)]",
    "nobody keeps anything": "rh.vm.VirtualMachine(vm.executable).submit('main', x); del vm",
    "sys.exit": "fence = vm.submit('main', x); sys.exit(0)",
    "a callback": "vm.submit('main', x).add_done_callback(lambda fence: print(fence)); del vm",
    "a daemon waits": """
fence = vm.submit('main', x)
threading.Thread(target=fence.result, daemon=True).start()
threading.Thread(target=lambda: [vm.submit('main', x) for _ in range(1000)], daemon=True).start()
time.sleep(0.05)
""",
    "daemons call": """
def call(vm):
    while True:
        vm["main"](x)
for _ in range(2):
    threading.Thread(target=call, args=(rh.vm.VirtualMachine(vm.executable),), daemon=True).start()
time.sleep(0.2)
""",
    "a thread waits": "threading.Thread(target=lambda: print(vm.submit('main', x).result().numpy().sum())).start()",
    "submitted at exit": """
vm.submit("main", x).result()
atexit.register(lambda: print(vm.submit("main", x).exception(20)))
""",
}


@pytest.mark.parametrize("way", slow_but_for(ENDS, ["queued and running", "daemons call", "submitted at exit"]))
def test_interpreters_end(way, folder):
    out = run(SLEEP + ENDS[way], folder)
    if way == "a thread waits":
        assert "40.0" in out


def test_an_interpreter_that_ends_by_an_exception(folder):
    out = run(SLEEP + "vm.submit('main', x), vm.submit('main', x)\nraise ArithmeticError('the end')", folder, status=1)
    assert out.strip().endswith("ArithmeticError: the end")


def test_a_kernel_that_never_ends_does_not_keep_the_interpreter(folder):
    script = """
tvm.register_global_func("relax_hetero.test.first", lambda source, target: threading.Event().wait(), override=True)
from relax_hetero.vm.queue import queues
queues.CLOSE_SECONDS = 0.5
fences = [vm.submit("main", x) for _ in range(3)]
print("all done" if vm.synchronize(0.1) else "still at work")
"""
    # `run` waits for a minute: an interpreter that the kernel keeps would not end at all.
    assert run(script, folder) == "still at work\n"


FORKED = """
def child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            print(work())
        except BaseException as error:
            print(f"{type(error).__name__}: {error}")
        sys.stdout.flush()
        os._exit(0)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return
        time.sleep(0.01)
    os.kill(pid, 9)
    print("HANGS")

def total(result):
    return float(result.numpy().sum())

exe = vm.executable
"""


def test_a_machine_that_took_calls_refuses_everything_after_a_fork(folder):
    script = """
gate = Gate()
with kernels(gate):
    fence = vm.submit("main", x)
    gate.wait()
    for work in (
        lambda: vm.submit("main", x),
        lambda: vm["main"](x),
        lambda: vm.profile("main", x),
        lambda: vm.set_input("main", x),
        vm.synchronize,
        fence.result,
    ):
        child(work)
    gate.open()
    print(total(fence.result()))
child(lambda: total(rh.vm.VirtualMachine(exe).submit("main", x).result(10)))
child(lambda: total(rh.vm.VirtualMachine(exe)["main"](x)))
print(total(vm["main"](x)))
"""
    *refused, after, submitted, called, plain = run(FORKED + script, folder).splitlines()
    assert len(refused) == 6 and all(line.startswith("HeteroError: this machine was in use when") for line in refused)
    assert after == submitted == called == plain == "40.0"


@pytest.mark.parametrize("threads", ["workers", "stock"])
def test_plain_calls_after_a_fork(folder, monkeypatch, threads):
    """A fork leaves TVM's helper threads behind; kernels shared by several threads would wait for them for ever."""
    monkeypatch.setenv("TVM_NUM_THREADS", "2")  # a pool of one thread has no helpers to leave behind
    if threads == "stock":
        monkeypatch.setenv("TVM_BIND_THREADS", "1")
    script = """
from tvm.script import ir as I, relax as R

@I.ir_module
class Product:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "num-cores": 2}, 0)]})

    @R.function
    def main(x: R.Tensor((256, 256), "float32", "llvm:0")):
        with R.dataflow():
            y: R.Tensor((256, 256), "float32", "llvm:0") = R.matmul(x, x)
            R.output(y)
        return y

exe, x = rh.compile(Product), np.eye(256, dtype="float32")
unused = rh.vm.VirtualMachine(exe)
vm = rh.vm.VirtualMachine(exe)
child(lambda: total(unused["main"](x)))
vm["main"](x)
child(lambda: total(unused["main"](x)))
child(lambda: total(vm["main"](x)))
child(lambda: total(rh.vm.VirtualMachine(exe)["main"](x)))
child(lambda: len(vm.profile("main", x).rows) > 0)
"""
    *totals, profile = run(FORKED + script, folder).splitlines()
    assert totals == ["256.0"] * 4
    assert profile.startswith(
        "HeteroError: this thread's worker threads do not exist" if threads == "stock" else "True"
    )
