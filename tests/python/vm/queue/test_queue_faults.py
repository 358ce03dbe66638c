"""Faults in a queue: errors arrive at the right fences, and the queue goes on."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import relax_hetero as rh
from seeds import fresh_rng
from vm.queue_models import Gate, Pipeline, expected, kernels

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Pipeline)


@pytest.fixture
def vm(exe):
    return rh.vm.VirtualMachine(exe)


def numbers(count=9):
    return fresh_rng().random(count, dtype="float32")


def refuse_negative(source, target):
    if (source.numpy() < 0).any():
        raise ArithmeticError("negative input")
    source.copyto(target)


@pytest.mark.parametrize("stage", ["first", "second"])
def test_a_kernel_that_raises(vm, stage):
    good, bad = numbers(), -1 - numbers()
    with kernels(**{stage: refuse_negative}):
        fences = [vm.submit("main", bad if k % 3 == 1 else good) for k in range(12)]
        for k, fence in enumerate(fences):
            if k % 3 == 1:
                with pytest.raises(rh.HeteroError, match=rf"'main', step .*test\.{stage}\b.*negative") as raised:
                    fence.result(30)
                assert isinstance(raised.value.__cause__, Exception)
            else:
                np.testing.assert_array_equal(fence.result(30).numpy(), expected(good))


@pytest.mark.parametrize("raised", [KeyboardInterrupt, SystemExit, MemoryError, GeneratorExit])
def test_exceptions_of_every_kind(vm, raised):
    def refuse(source, target):
        raise raised("by hand")

    with kernels(second=refuse):
        with pytest.raises(rh.HeteroError, match="by hand"):
            vm.submit("main", numbers()).result(30)
    x = numbers()
    np.testing.assert_array_equal(vm.submit("main", x).result(30).numpy(), expected(x))


def test_errors_reach_the_fences_that_depend_on_them(exe, vm):
    other, x = rh.vm.VirtualMachine(exe), numbers()
    with kernels(second=refuse_negative):
        failed = vm.submit("main", -1 - x)
        dependent = other.submit("one", failed)
        second = vm.submit("same", x=dependent)
        assert vm.synchronize(30) and other.synchronize(30)
    message = r"argument 'x' of 'one' is the result of a call that failed: .*negative input"
    with pytest.raises(rh.HeteroError, match=message):
        dependent.result(30)
    with pytest.raises(rh.HeteroError, match=rf"argument 'x' of 'same' is the result of a call that failed: {message}"):
        second.result(30)


def test_results_that_are_arguments(exe, vm):
    other, x, gate = rh.vm.VirtualMachine(exe), numbers(), Gate()
    with kernels(gate):
        first = vm.submit("main", x)
        second = other.submit("one", x=first)
        third = vm.submit("one", second)
        gate.wait()
        assert not second.running() and not third.done()
        gate.open()
        np.testing.assert_array_equal(third.result(30).numpy(), (expected(x) ** 2) ** 2)
    np.testing.assert_array_equal(second.result().numpy(), expected(x) ** 2)


def test_results_of_calls_that_were_cancelled(vm):
    gate = Gate()
    with kernels(gate):
        vm.submit("main", numbers())
        gate.wait()
        second = vm.submit("main", numbers())
        third = vm.submit("one", second)
        fourth = vm.submit("one", third)
        assert third.cancel() and second.cancel()
        with pytest.raises(rh.HeteroError, match="argument 'x' of 'one' is the result of a call that was cancelled"):
            fourth.result(30)
        gate.open()
        assert vm.synchronize(30)


def test_results_that_do_not_fit(vm):
    fence = vm.submit("main", vm.submit("one", numbers()), numbers())
    with pytest.raises(rh.BindingError, match="'main'"):
        fence.result(30)


def test_a_long_line_of_dependent_calls_fails_in_the_end(exe):
    vm, x = rh.vm.VirtualMachine(exe, max_in_flight=2000), numbers()
    with kernels(second=refuse_negative):
        gate = Gate()
        with kernels(gate, refuse_negative):
            fence = vm.submit("main", -1 - x)
            for _ in range(1500):
                fence = vm.submit("same", fence)
            gate.open()
            assert "negative input" in str(fence.exception(60))


def test_nobody_waits_in_a_queues_own_thread(vm):
    outcomes, gate, x = [], Gate(), numbers()
    later = []

    def wait(fence):
        for action in (later[0].result, later[0].exception, vm.synchronize, lambda: vm.profile("main", x)):
            try:
                action()
            except rh.HeteroError as error:
                outcomes.append(str(error))
        outcomes.append(vm["one"](x))  # this does not wait for the queue

    with kernels(second=gate):
        fence = vm.submit("main", x)
        fence.add_done_callback(wait)
        later.append(vm.submit("main", x))
        gate.open()
        assert vm.synchronize(30)
    while len(outcomes) < 5:
        time.sleep(0.001)
    assert all("in a thread that runs queues" in text for text in outcomes[:-1])
    np.testing.assert_array_equal(outcomes[-1].numpy(), x * x)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
@pytest.mark.parametrize("wait", ["result", "room", "synchronize"])
def test_callers_are_interrupted_and_calls_go_on(exe, wait):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore Ctrl-C
    vm, x, gate = rh.vm.VirtualMachine(exe, max_in_flight=2), numbers(), Gate()
    with kernels(gate):
        fences = [vm.submit("main", x) for _ in range(2)]
        gate.wait()
        ways = {"result": fences[1].result, "room": lambda: vm.submit("main", x), "synchronize": vm.synchronize}
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ways[wait]()
        timer.join()
        signal.signal(signal.SIGINT, before)
        gate.open()
        for fence in (*fences, vm.submit("main", x)):
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))
    assert vm.synchronize(30)


def test_a_queue_that_gets_no_thread(exe, monkeypatch):
    vm, x = rh.vm.VirtualMachine(exe), numbers()
    start = threading.Thread.start

    def refuse(thread):
        if thread.name.startswith("queue of"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(rh.HeteroError, match=r"queue of llvm:0 has no thread \(can't start new thread\)"):
        vm.submit("main", x).result(30)
    monkeypatch.undo()
    np.testing.assert_array_equal(vm.submit("main", x).result(30).numpy(), expected(x))
