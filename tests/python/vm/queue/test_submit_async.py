"""Submissions in event loops, which never block on a full queue, and arrays that change after they were submitted."""

import asyncio
import threading

import ml_dtypes
import numpy as np
import pytest
import tvm

import relax_hetero as rh
from vm.queue_models import Gate, Pipeline, expected, kernels

pytestmark = pytest.mark.timeout(60)
X = np.linspace(-2, 2, 8, dtype="float32")


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Pipeline)


def machine(exe, max_in_flight=2):
    return rh.vm.VirtualMachine(exe, max_in_flight=max_in_flight)


async def beside_ticks(gate, *works):
    """Open the gate after a hundred iterations of the loop while works run: this hangs if the loop blocks."""
    task = asyncio.gather(*works)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not task.done()
    gate.open()
    return await asyncio.wait_for(task, 30)


def test_awaited_submissions_never_hold_the_loop_up(exe):
    vm, gate = machine(exe), Gate()

    async def one(i):
        return await vm.submit("main", X * i)

    with kernels(gate):
        results = asyncio.run(beside_ticks(gate, *(one(i) for i in range(10))))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, expected(X * i))
    assert gate.most <= 2 and vm.synchronize(10)


def test_a_producer_is_held_back(exe):
    vm, gate, submitted = machine(exe), Gate(), []

    async def produce():
        for i in range(6):
            submitted.append(await vm.submit_async("main", X * i))
        return [await fence for fence in submitted]

    async def watch():
        task = asyncio.ensure_future(produce())
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(submitted) == 2
        gate.open()
        return await task

    with kernels(gate):
        for i, result in enumerate(asyncio.run(watch())):
            np.testing.assert_array_equal(result, expected(X * i))


def test_cancelled_while_they_wait(exe):
    vm, gate = machine(exe, 1), Gate()

    async def run():
        first = await vm.submit_async("main", X)
        waiting = asyncio.ensure_future(vm.submit_async("main", X))
        lined = vm.submit("main", X)
        task = asyncio.ensure_future(vm.submit_async("main", X * 3))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert lined.cancel() and lined.cancelled()
        gate.open()
        await first
        return await (await task)

    with kernels(gate):
        np.testing.assert_array_equal(asyncio.run(run()), expected(X * 3))
    assert vm.synchronize(10) and vm.submit("main", X).exception(10) is None


def test_errors_arrive(exe):
    vm, gate = machine(exe, 1), Gate()

    async def run():
        with pytest.raises(rh.BindingError, match="dtype float64"):
            await vm.submit_async("main", X.astype("float64"))
        with pytest.raises(rh.BindingError, match="no function 'nothing'"):
            await vm.submit_async("nothing", X)
        first = vm.submit("main", X)
        lined = vm.submit("main", X.astype("float64"))
        gate.open()
        with pytest.raises(rh.BindingError, match="dtype float64"):
            await lined
        return await first

    with kernels(gate):
        np.testing.assert_array_equal(asyncio.run(run()), expected(X))
    assert vm.synchronize(10) and vm.submit("main", X).exception(10) is None


def test_loops_in_several_threads(exe):
    vm, failures = machine(exe), []

    async def many(seed):
        async def one(i):
            fence = await vm["main"].submit_async(X * i) if (i + seed) % 2 else vm.submit("main", X * i)
            np.testing.assert_array_equal(await fence, expected(X * i))

        await asyncio.gather(*(one(i) for i in range(25)))

    def loop(seed):
        try:
            asyncio.run(many(seed))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=loop, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for i in range(25):
        np.testing.assert_array_equal(vm.submit("main", X * i).result(30), expected(X * i))
    for thread in threads:
        thread.join()
    assert not failures and vm.synchronize(10)


def test_a_loop_that_is_closed_while_calls_wait_for_room(exe):
    vm, gate = machine(exe, 1), Gate()

    async def run():
        await vm.submit_async("main", X)
        asyncio.ensure_future(vm.submit_async("main", X))
        await asyncio.sleep(0)

    with kernels(gate):
        asyncio.run(run())
        gate.open()
        assert vm.synchronize(10) and vm.submit("main", X).exception(10) is None


class Producer:
    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)


@pytest.mark.parametrize("wrap", [lambda x: x, Producer, lambda x: np.ascontiguousarray(x[::-1])[::-1]])
@pytest.mark.parametrize("awaits", [False, True])
def test_writes_after_a_submission_are_not_seen(exe, wrap, awaits):
    """Also if the call waits for another call's result, or for capacity."""
    vm, gate = machine(exe, 1 if awaits else 4), Gate()

    async def run():
        first = vm.submit("main", X)
        gate.wait()
        x = X.copy()
        argument = wrap(x)
        fences = [vm.submit("main", argument), vm.submit("main", x=argument), vm["main"].submit(argument)]
        getattr(argument, "array", argument)[:] = 100
        gate.open()
        return [await first, *[await fence for fence in fences]]

    vm["main"](X)  # the machine knows such a call
    with kernels(gate):
        for result in asyncio.run(run()):
            np.testing.assert_array_equal(result, expected(X))


def test_lent_when_asked_for(exe):
    vm, gate, x = machine(exe, 4), Gate(), X.copy()
    with kernels(gate):
        blocker = vm.submit("main", X)
        gate.wait()
        lent, copied = vm.submit("main", x, copy=False), vm.submit("main", x)
        x[:] = 100
        gate.open()
        assert np.asarray(lent.result(30))[0] == 400 and blocker.result(30) is not None
        np.testing.assert_array_equal(copied.result(30), expected(X))


def test_arguments_that_are_not_copied(exe, weighted):
    vm = machine(exe)
    result = vm.submit("main", X).result()
    seen = []
    with kernels(lambda source, target: (seen.append(source), source.copyto(target))):
        np.testing.assert_array_equal(vm.submit("main", vm.submit("main", X)).result(30), expected(expected(X)))
        np.testing.assert_array_equal(vm.submit("main", result).result(30), expected(expected(X)))
    other = rh.vm.VirtualMachine(weighted)
    fence = other.submit("main", X, X, np.ones(1, "f4"))
    np.testing.assert_array_equal(fence.result(30), X * X + 1)
    with pytest.raises(rh.BindingError, match="dtype bfloat16"):
        vm.submit("main", X.astype(ml_dtypes.bfloat16))
    assert isinstance(result, tvm.runtime.Tensor) and len(seen) == 3
