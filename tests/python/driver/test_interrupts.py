"""Ctrl-C while a model is compiled is KeyboardInterrupt, soon, and leaves nothing half-written."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnx
import pytest
import tvm
from onnx import TensorProto, helper, numpy_helper

import relax_hetero as rh
from relax_hetero.vm.device.interruptible import run_in_threads
from seeds import fresh_rng

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals are sent to processes")
SOON = 5.0  # seconds; half of one where nothing else runs


@pytest.fixture(autouse=True)
def heard():
    """Ctrl-C is heard, here and in child processes: a shell has background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Three convolutions of different shapes: kernels that take LLVM a while."""
    weights, nodes, last = [], [], "x"
    for i in range(3):
        shape = (8 + i, 3 if i == 0 else 7 + i, 3, 3)
        weights.append(numpy_helper.from_array(np.ones(shape, "float32"), f"w{i}"))
        nodes.append(helper.make_node("Conv", [last, f"w{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Softmax" if i % 2 else "Sigmoid", [f"c{i}"], [f"y{i}"]))
        last = f"y{i}"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 20, 20])
    y = helper.make_tensor_value_info(last, TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(onnx.shape_inference.infer_shapes(proto), path)
    return path


INTERRUPTED = """
import os, signal, sys, threading, time
import relax_hetero as rh

path, cache, *shares = sys.argv[1:]
compiled = lambda: rh.compile(rh.from_onnx(path), cache=True)
compiled_without = lambda: rh.compile(rh.from_onnx(path), cache=False)
compiled_without()  # imports
start = time.perf_counter()
compiled_without()
total = time.perf_counter() - start
for share in map(float, shares):
    def interrupt():
        time.sleep(total * share)
        global sent
        sent = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        compiled()
        thread.join()
        time.sleep(1)
    except BaseException as error:
        print(type(error).__name__, time.perf_counter() - sent, flush=True)
    thread.join()
rh.compile(rh.from_onnx(path), cache=True)
print("compiled", *os.listdir(cache))
"""


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_compiling_ends_with_keyboard_interrupt(model, tmp_path, times):
    rng = fresh_rng()
    shares = [str(rng.uniform(0.02, 0.9)) for _ in range(times)]
    cache = tmp_path / "cache"
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    done = run([script, model, cache, *shares], RELAX_HETERO_CACHE=str(cache))
    *interrupts, last = done.stdout.splitlines()
    assert [line.split()[0] for line in interrupts] == ["KeyboardInterrupt"] * times, done.stdout + done.stderr
    assert all(float(line.split()[1]) < SOON for line in interrupts), done.stdout
    word, *files = last.split()
    assert word == "compiled"
    assert not [name for name in files if name.startswith(".") and name.endswith(".so")]


@pytest.mark.parametrize("times", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_the_command_line_exits_with_130_and_writes_nothing(model, tmp_path, times):
    rng = fresh_rng()
    command = [sys.executable, "-m", "relax_hetero", "compile", str(model), "-o", str(tmp_path / "model.so")]
    env = {**environment(), "RELAX_HETERO_CACHE": "off"}
    start = time.perf_counter()
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    total = time.perf_counter() - start
    (tmp_path / "model.so").unlink()
    for _ in range(times):
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            time.sleep(total * rng.uniform(0.4, 0.8))  # after Python has begun
            process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=60)
        # Python that has not quite begun, or is about to end, leaves SIGINT to the system; shells show 130 for both.
        assert process.returncode in (0, 130, -signal.SIGINT), output
        assert "Traceback" not in output
        if process.returncode == 130:
            assert output.splitlines()[-1] == "interrupted"
            assert os.listdir(tmp_path) == []
        elif os.listdir(tmp_path):
            assert os.listdir(tmp_path) == ["model.so"]
            rh.load(tmp_path / "model.so", verify=True)
            (tmp_path / "model.so").unlink()


def test_an_interrupt_in_a_callback_of_tvm_is_one_outside():
    @tvm.transform.module_pass(opt_level=0)
    def interrupted(mod, context):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tvm.transform.Sequential([interrupted])(tvm.IRModule())


def test_waiting_for_threads_ends_at_an_interrupt():
    gate, begun = threading.Event(), []

    def task():
        begun.append(1)
        gate.wait(30)

    def interrupt():
        while not begun:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as other:
        try:
            other.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                run_in_threads([task] * 5, 2, "test")
        finally:
            gate.set()
    assert len(begun) <= 2  # the others are never begun


def test_threads_give_results_in_order_and_the_first_error():
    def fail(number):
        raise ValueError(number)

    ended = []
    assert run_in_threads([lambda i=i: i for i in range(9)], 3, "test", ended.append) == list(range(9))
    assert sorted(ended) == list(range(9))
    assert run_in_threads([], 3, "test") == []
    with pytest.raises(ValueError, match="1"):
        run_in_threads([int, lambda: fail(1), lambda: fail(2)], 2, "test")


def environment():
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run(command, **settings):
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, env={**environment(), **settings}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done
