"""Random small graphs over one to three devices: calls in flight give the bits of plain calls."""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import relax_hetero as rh
from driver.random_graphs import modules
from relax_hetero.transform.partition import device_partition
from relax_hetero.vm.queue.call import QueuedCall
from relax_hetero.vm.queue.device_queue import DeviceQueue
from relax_hetero.vm.queue.plan import QueuePlan

DEVICES = [rh.VDevice({"kind": "llvm", "mcpu": "x86-64-v2", "num-cores": 1}, index) for index in range(3)]
GRAPHS = st.integers(1, 3).flatmap(lambda count: modules(DEVICES[:count]))


@given(GRAPHS, st.integers(0, 1 << 30), st.booleans(), st.booleans())
@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_same_bits(graph, seed, buffers, join_small):
    mod, shapes = graph
    with mock.patch.object(
        device_partition, "SMALL_PART_BYTES", device_partition.SMALL_PART_BYTES if join_small else -1
    ):
        vm = rh.vm.VirtualMachine(rh.compile(mod, command_buffers=buffers))
    calls = random_calls(shapes, seed)
    expected = [vm["main"](*args) for args in calls]
    check([vm.submit("main", *args) for args in calls], expected)


@given(GRAPHS, st.integers(0, 1 << 30))
@settings(max_examples=18, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_same_bits_whatever_comes_late(graph, seed):
    """Threads sleep around every shared operation and switch often; three of them submit."""
    mod, shapes = graph
    with mock.patch.object(device_partition, "SMALL_PART_BYTES", -1):  # as many steps as there can be
        vm = rh.vm.VirtualMachine(rh.compile(mod), max_in_flight=5)
    calls = random_calls(shapes, seed, count=9)
    expected = [vm["main"](*args) for args in calls]
    late = random.Random(seed)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with (
            mock.patch.object(QueuePlan, "execute", delayed(QueuePlan.execute, late)),
            mock.patch.object(QueuedCall, "_mark_ended", delayed(QueuedCall._mark_ended, late)),
            mock.patch.object(QueuedCall, "_settle", delayed(QueuedCall._settle, late)),
            mock.patch.object(DeviceQueue, "push", delayed(DeviceQueue.push, late)),
            ThreadPoolExecutor(3) as pool,
        ):
            fences = list(pool.map(lambda args: vm.submit("main", *args), calls))
            check(fences, expected)
            assert vm.synchronize(60)
    finally:
        sys.setswitchinterval(interval)


def delayed(function, late):
    def wrapper(*args, **kwargs):
        time.sleep(late.choice((0, 0, 1e-4, 1e-3)))
        result = function(*args, **kwargs)
        time.sleep(late.choice((0, 0, 1e-4, 1e-3)))
        return result

    return wrapper


def random_calls(shapes, seed, count=6):
    rng = np.random.default_rng(seed)
    return [[rng.standard_normal(shape).astype("float32") for shape in shapes] for _ in range(count)]


def check(fences, wanted):
    for fence, want in zip(fences, wanted, strict=True):
        for got, expected in zip(fence.result(60), want, strict=True):
            np.testing.assert_array_equal(got.numpy(), expected.numpy())
