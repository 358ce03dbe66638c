"""Number of threads of kernels: alone, alongside other callers, and set by the environment."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.target.cpu_cores import num_cores
from relax_hetero.vm.device import threads
from relax_hetero.vm.device.threads import CALLS_BEFORE_WIDENING, threads_for

X = np.ones(2, "float32")
pool_width = tvm.get_global_func("runtime.NumThreads")


def cpu(**attrs):
    return rh.vm.DeviceSpec(json.dumps({"kind": "llvm", **attrs}))


def test_width_is_that_of_the_compiled_code(monkeypatch):
    for name in ("TVM_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert threads_for([]) == threads_for([cpu()]) == num_cores()
    assert threads_for([cpu(**{"num-cores": 1})]) == 1
    assert threads_for([cpu(**{"num-cores": 1}), cpu(**{"num-cores": 10**6})]) == num_cores()
    assert threads_for([rh.vm.DeviceSpec('{"kind":"cuda","num-cores":1}')]) == num_cores()


def test_the_environment_overrules(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TVM_NUM_THREADS", raising=False)
    assert threads_for([cpu(**{"num-cores": 2})]) == 3
    monkeypatch.setenv("TVM_NUM_THREADS", "5")
    assert threads_for([cpu(**{"num-cores": 2})]) == 5
    monkeypatch.setenv("TVM_NUM_THREADS", "many")
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert threads_for([cpu()]) == num_cores()


@pytest.fixture
def seen(failing, monkeypatch):
    """Calls of a kernel that records its thread's pool width; an entry of `held` keeps a call in its kernel."""
    monkeypatch.setenv("TVM_NUM_THREADS", "4")
    name = "relax_hetero.test.refuse_negative"
    before = tvm.get_global_func(name)
    events, widths = {}, []

    def look(x):
        widths.append(pool_width())
        event = events.get(threading.get_ident())
        if event is not None:
            event[0].set()
            event[1].wait(30)
        return x

    tvm.register_global_func(name, look, override=True)
    try:
        yield rh.vm.VirtualMachine(failing), events, widths
    finally:
        tvm.register_global_func(name, before, override=True)


def test_callers_at_the_same_time_share_the_threads(failing, seen):
    vm, events, widths = seen
    inside, go_on = threading.Event(), threading.Event()

    def stay():
        events[threading.get_ident()] = (inside, go_on)
        rh.vm.VirtualMachine(failing)["main"](X)

    def visit():
        vm["main"](X)
        with ThreadPoolExecutor(1) as other:
            first = other.submit(stay)
            assert inside.wait(30)
            vm["main"](X)
            go_on.set()
            first.result()
        for _ in range(CALLS_BEFORE_WIDENING + 1):
            vm["main"](X)

    with ThreadPoolExecutor(1) as pool:  # a thread without a pool from other tests
        pool.submit(visit).result()
    single, visitor, guest, *later = widths
    assert (single, visitor, guest) == (4, 4, 2)
    assert later[:CALLS_BEFORE_WIDENING] == [2] * CALLS_BEFORE_WIDENING  # no change for every moment without company
    assert later[CALLS_BEFORE_WIDENING:] == [4]
    assert not threads._calling


def test_machines_of_different_width_on_one_thread(failing, seen, monkeypatch):
    vm, _, widths = seen
    monkeypatch.setenv("TVM_NUM_THREADS", "3")
    other = rh.vm.VirtualMachine(failing)

    def visit():
        for machine in (vm, other, vm, other):
            machine["main"](X)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(visit).result()
    assert widths == [4, 3, 4, 3]


def test_failing_calls_and_nested_calls_are_counted_once(failing):
    vm = rh.vm.VirtualMachine(failing)
    for _ in range(3):
        with pytest.raises(rh.HeteroError, match="negative"):
            vm["main"](-X)
    assert not threads._calling


SCRIPT = """
import os, sys, threading
import numpy as np
from tvm.script import ir as I, relax as R
import tvm, relax_hetero as rh
from relax_hetero.vm.device import workers

@I.ir_module
class Product:
    I.module_global_infos({"vdevice": [I.vdevice({"kind": "llvm", "mcpu": "MCPU", "num-cores": CORES})]})

    @R.function
    def main(x: R.Tensor((70, 130), "float32"), w: R.Tensor((130, 257), "float32")):
        with R.dataflow():
            y = R.nn.relu(R.matmul(x, w))
            R.output(y)
        return y

before = os.sched_getaffinity(0)
vm = rh.vm.VirtualMachine(rh.compile(Product))
x, w = (np.random.default_rng(i).random(shape, "float32") - 0.5 for i, shape in enumerate([(70, 130), (130, 257)]))
for _ in range(3):
    found = vm["main"](x, w).numpy()
np.testing.assert_allclose(found, np.maximum(x.astype("float64") @ w, 0), atol=1e-5)
print(workers.width() or tvm.get_global_func("runtime.NumThreads")(), os.sched_getaffinity(0) == before)
"""


@pytest.mark.parametrize(
    ("cores", "environment", "expected"),
    [
        (2, {"TVM_NUM_THREADS": "1"}, 1),
        pytest.param(3, {"TVM_NUM_THREADS": "2"}, 2, marks=pytest.mark.slow),
        pytest.param(1, {"TVM_NUM_THREADS": "2"}, 2, marks=pytest.mark.slow),
        pytest.param(2, {}, min(2, num_cores()), marks=pytest.mark.slow),
    ],
)
def test_any_number_of_threads_computes_the_same(tmp_path, cores, environment, expected):
    script = tmp_path / "product.py"
    script.write_text(SCRIPT.replace("CORES", str(cores)).replace("MCPU", rh.native("llvm").attrs["mcpu"]))
    outside = {k: v for k, v in os.environ.items() if k not in ("TVM_NUM_THREADS", "TVM_BIND_THREADS")}
    env = {**outside, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.pop("OMP_NUM_THREADS", None)
    done = subprocess.run([sys.executable, script], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [str(expected), "True"], done.stderr
