"""Submitted calls: their results, the limit of calls in flight, and the interface of futures."""

import asyncio
import concurrent.futures
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.artifact.metadata import DispatchSpec
from relax_hetero.artifact.schedule import Schedule, Step
from relax_hetero.vm.queue.queues import LARGE_BYTES, LARGE_OPERATIONS, functions_to_queue
from seeds import fresh_rng
from vm.queue_models import Gate, Pipeline, expected, kernels

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def exe():
    return rh.compile(Pipeline)


@pytest.fixture
def vm(exe):
    return rh.vm.VirtualMachine(exe)


def numbers(count=17):
    return fresh_rng().standard_normal(count, dtype="float32")


def test_a_fence_gives_what_a_call_gives(vm):
    x = numbers()
    fence = vm.submit("main", x)
    assert not fence.cancelled() and fence.exception(timeout=30) is None and fence.done()
    np.testing.assert_array_equal(fence.result().numpy(), vm["main"](x).numpy())
    assert str(fence.result().device) == "cpu:1"
    np.testing.assert_array_equal(vm["main"].submit(x=x).result().numpy(), expected(x))


def test_waiting_ends_after_the_timeout(vm):
    gate = Gate()
    with kernels(gate):
        fence = vm.submit("main", numbers())
        with pytest.raises(concurrent.futures.TimeoutError):
            fence.result(timeout=0.02)
        assert not vm.synchronize(0.02) and fence.running()
        gate.open()
        assert fence.exception(30) is None and vm.synchronize()


def test_callbacks_are_all_called_even_if_they_raise(vm, caplog):
    gate, fences, again, all_told = Gate(), [], [], threading.Event()
    x = numbers()

    def refuse(fence):
        raise ArithmeticError("a callback that raises")

    def exit_thread(fence):
        raise SystemExit(3)

    with kernels(gate):
        fence = vm.submit("main", x)
        submit_again = lambda _: again.append(vm.submit("main", x))  # noqa: E731
        for callback in (refuse, exit_thread, submit_again, fences.append, lambda _: all_told.set()):
            fence.add_done_callback(callback)
        gate.open()
        assert all_told.wait(30)
    fence.add_done_callback(fences.append)  # at once
    assert fences == [fence, fence]
    np.testing.assert_array_equal(again[0].result(30).numpy(), expected(x))
    assert "a callback that raises" in caplog.text


def test_a_machine_dropped_by_a_callback(exe):
    machines = [rh.vm.VirtualMachine(exe)]
    fence = machines[0].submit("main", numbers())
    dropped = threading.Event()
    fence.add_done_callback(lambda _: (machines.clear(), dropped.set()))
    fence.result(30)
    assert dropped.wait(30) and not machines


def test_a_machine_dropped_while_calls_are_under_way(exe):
    gate, x, threads = Gate(), numbers(), set(threading.enumerate())
    with kernels(gate):
        machine = rh.vm.VirtualMachine(exe)
        fences = [machine.submit("main", x) for _ in range(4)]
        gate.wait()
        del machine
        gate.open()
        for fence in fences:
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))
    limit = time.monotonic() + 30
    while set(threading.enumerate()) - threads:
        assert time.monotonic() < limit, threading.enumerate()
        time.sleep(0.005)


def test_cancelled_before_and_after_the_start(exe):
    vm, gate, x = rh.vm.VirtualMachine(exe, max_in_flight=3), Gate(), numbers()
    fences = []
    with kernels(gate):
        first, second, third = (vm.submit("main", x) for _ in range(3))
        gate.wait()
        assert not first.cancel()
        second.add_done_callback(fences.append)
        assert second.cancel() and second.cancel() and second.cancelled() and fences == [second]
        fourth = vm.submit("main", x)  # has the room of the cancelled one
        done, left = concurrent.futures.wait([second, third], timeout=0)
        assert done == {second} and left == {third}
        gate.open()
        for fence in (first, third, fourth):
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))
        assert not first.cancel() and vm.synchronize(30)
    with pytest.raises(concurrent.futures.CancelledError):
        second.result()
    assert gate.most == 1


def test_wait_and_as_completed(vm):
    xs = [numbers() for _ in range(20)]
    fences = [vm.submit("main", x) for x in xs]
    done = set(concurrent.futures.as_completed(fences, timeout=30))
    assert done == set(fences) and concurrent.futures.wait(fences, 30).not_done == set()
    for x, fence in zip(xs, fences, strict=True):
        np.testing.assert_array_equal(fence.result().numpy(), expected(x))


def test_waiting_for_all_of_several_that_end_later(vm):
    gate = Gate()
    with kernels(gate):
        fences = [vm.submit("main", numbers()) for _ in range(4)]
        threading.Timer(0.05, gate.open).start()
        done, left = concurrent.futures.wait(fences, timeout=30)
    assert done == set(fences) and not left


def test_many_are_awaited_at_once(exe):
    vm = rh.vm.VirtualMachine(exe, max_in_flight=100)

    async def one(x):
        return (await vm.submit("main", x)).numpy()

    async def all_of(xs):
        return await asyncio.gather(*map(one, xs))

    xs = [numbers() for _ in range(100)]
    for x, y in zip(xs, asyncio.run(all_of(xs)), strict=True):
        np.testing.assert_array_equal(y, expected(x))


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_calls_than_asked_for_are_under_way(exe, limit):
    vm, gate, x = rh.vm.VirtualMachine(exe, max_in_flight=limit), Gate(), numbers()
    fences = []
    with kernels(gate):
        more = threading.Thread(target=lambda: fences.extend(vm.submit("main", x) for _ in range(limit + 2)))
        more.start()
        gate.wait()
        time.sleep(0.05)
        assert len(fences) <= limit and more.is_alive()
        gate.open()
        more.join(30)
        assert len(fences) == limit + 2
        for fence in fences:
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))


def test_calls_in_flight_are_at_different_stages(exe):
    vm, first, second, x = rh.vm.VirtualMachine(exe, max_in_flight=2), Gate(), Gate(), numbers()
    first.open()
    with kernels(first, second):
        one = vm.submit("main", x)
        second.wait()
        two = vm.submit("main", x)
        first.wait()
        first.wait()  # the second call passes the first stage while the first call is in the second one
        second.open()
        np.testing.assert_array_equal(one.result(30).numpy(), two.result(30).numpy())


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2", None])
def test_malformed_limits(exe, limit):
    with pytest.raises(rh.BindingError, match=r"max_in_flight is .*, expected a positive integer"):
        rh.vm.VirtualMachine(exe, max_in_flight=limit)


def test_arguments_are_checked_when_submitted(vm):
    with pytest.raises(rh.BindingError, match="argument 'x' of 'main' has dtype int64"):
        vm.submit("main", np.zeros(3, "int64"))
    with pytest.raises(rh.BindingError, match="no function|nowhere"):
        vm.submit("nowhere", numbers())
    with pytest.raises(rh.BindingError):
        vm["main"].submit(numbers(5), out=np.empty(5, "int32"))
    for _ in range(6):  # what was refused takes no room
        with pytest.raises(rh.BindingError):
            vm.submit("main")
    assert vm.synchronize(30)


def test_buffers_are_filled(vm):
    x, out = numbers(), np.empty(17, "float32")
    assert vm["main"].submit(x, out=out).result(30) is out
    np.testing.assert_array_equal(out, expected(x))
    gate, other = Gate(), np.empty(17, "float32")
    with kernels(gate):
        fence = vm.submit("main", x)
        threading.Timer(0.02, gate.open).start()
        assert vm["main"](x, out=other) is other  # through the queues
        np.testing.assert_array_equal(other, fence.result(30).numpy())


def test_results_share_nothing_with_arguments(vm):
    x = tvm.runtime.tensor(numbers())
    for result in (vm.submit("same", x).result(30), vm["same"](x)):
        assert result.data_ptr() != x.data_ptr()
        np.testing.assert_array_equal(result.numpy(), x.numpy())


def test_arrays_that_nobody_else_keeps(exe):
    vm, gate = rh.vm.VirtualMachine(exe, max_in_flight=50), Gate()
    with kernels(gate):
        fences = [vm.submit("main", np.full(4096, k, "float32")) for k in range(50)]
        gate.open()
        for k, fence in enumerate(fences):
            np.testing.assert_array_equal(fence.result(30).numpy(), np.full(4096, 4 * k, "float32"))


def test_plain_calls_profiles_and_inputs_while_calls_are_under_way(vm):
    x, gate = numbers(), Gate()
    with kernels(gate):
        fences = [vm.submit("main", x) for _ in range(3)]
        vm.set_input("one", x)
        threading.Timer(0.05, gate.open).start()
        np.testing.assert_array_equal(vm["one"](x).numpy(), x * x)
        vm.invoke_stateful("one")
        assert "add" in str(vm.profile("main", x))
        np.testing.assert_array_equal(vm.get_output("one").numpy(), x * x)
        for fence in fences:
            np.testing.assert_array_equal(fence.result(30).numpy(), expected(x))


def test_parameters_given_while_calls_are_under_way(weighted):
    vm = rh.vm.VirtualMachine(weighted)
    x, w, b = numbers(5), numbers(5), numbers(1)
    for _ in range(20):
        vm.set_params({"w": w, "b": b})
        first = vm.submit("main", x)
        vm.set_params({"w": b * w, "b": b})
        second = vm.submit("main", x)
        np.testing.assert_allclose(first.result(30).numpy(), x * w + b, rtol=1e-6)
        np.testing.assert_allclose(second.result(30).numpy(), x * (b * w) + b, rtol=1e-6)


def test_sixty_four_threads(exe):
    vm = rh.vm.VirtualMachine(exe, max_in_flight=5)

    def calls(seed):
        rng = np.random.default_rng(seed)
        for k in range(5):
            x = rng.standard_normal(seed % 7 + 1, dtype="float32")
            result = vm.submit("main", x).result(30) if k % 2 else vm["main"](x)
            np.testing.assert_array_equal(result.numpy(), expected(x))

    with concurrent.futures.ThreadPoolExecutor(64) as pool:
        list(pool.map(calls, range(64)))
    assert vm.synchronize(30)


def test_a_queue_alone_uses_the_cores_that_a_call_uses(failing):
    counts, name = [], "relax_hetero.test.refuse_negative"

    def note_threads(x):
        counts.append(tvm.get_global_func("runtime.NumThreads")())
        return x

    before = tvm.get_global_func(name)
    tvm.register_global_func(name, note_threads, override=True)
    try:
        vm = rh.vm.VirtualMachine(failing)
        with concurrent.futures.ThreadPoolExecutor(1) as fresh:  # TVM's pool of this thread may be another test's
            fresh.submit(vm["main"], np.ones(2, "float32")).result(30)
        vm.submit("main", np.ones(2, "float32")).result(30)
    finally:
        tvm.register_global_func(name, before, override=True)
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize(
    "nbytes, operations, is_queued",
    [
        ((LARGE_BYTES, LARGE_BYTES), (0, 0), True),
        ((LARGE_BYTES, LARGE_BYTES - 1), (0, 0), False),
        ((LARGE_BYTES, 1), (0, LARGE_OPERATIONS), True),
        ((LARGE_BYTES, 0), (0, 0), True),  # sizes that only calls know
    ],
)
@pytest.mark.parametrize("kinds", [("cpu", "cuda"), ("cuda", "cuda")])
def test_plain_calls_are_queued_where_large_work_overlaps(nbytes, operations, is_queued, kinds):
    """Work of two GPUs overlaps without queues, as launches do not wait."""
    steps = tuple(Step(number, (number,), (2 + number,), f"step_{number}", calls=(f"k{number}",)) for number in (0, 1))
    work = zip(nbytes, operations, strict=True)
    metadata = SimpleNamespace(
        devices=[
            SimpleNamespace(
                numa_node=None, device_type=tvm.device(kind).dlpack_device_type(), vdevice_id=i, num_cores=1
            )
            for i, kind in enumerate(kinds)
        ],
        schedules=[Schedule("main", 2, 4, steps, (2, 3))],
        dispatches={f"k{number}": DispatchSpec(number, (), count, size) for number, (size, count) in enumerate(work)},
        regions=[],
    )
    assert functions_to_queue(metadata) == ({"main"} if is_queued and "cpu" in kinds else set())
