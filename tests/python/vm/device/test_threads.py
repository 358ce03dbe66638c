"""Several threads, several machines, machines that come and go."""

import gc
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import tvm

import relax_hetero as rh

W = np.ones(4, "float32")


def run_and_check(vm, value):
    x = np.full((value % 5 + 1, 4), value / 100, "float32")
    for _ in range(20):
        z, y = vm["main"](x, W)
        np.testing.assert_allclose(z.numpy(), np.exp(x) + 1, rtol=1e-6)
        np.testing.assert_allclose(y.numpy(), np.exp(x), rtol=1e-6)


def test_one_machine_from_many_threads(chain):
    vm = rh.vm.VirtualMachine(chain)
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda value: run_and_check(vm, value), range(24)))


def test_good_and_bad_calls_from_many_threads(chain):
    vm = rh.vm.VirtualMachine(chain)

    def call(value):
        if value % 2:
            with pytest.raises(rh.BindingError):
                vm["main"](np.zeros((1, 3), "float32"), W)
        else:
            run_and_check(vm, value)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(call, range(16)))


def test_machines_with_other_devices_side_by_side(chain):
    machines = [rh.vm.VirtualMachine(chain, [tvm.cpu(i), tvm.cpu(i + 1)]) for i in range(4)]

    def call(vm):
        run_and_check(vm, 7)
        return [str(t.device) for t in vm["main"](np.zeros((1, 4), "float32"), W)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, machines))
    assert results == [[f"cpu:{i + 1}", f"cpu:{i}"] for i in range(4)]


@contextmanager
def kernel(function):
    """`function` in place of the kernel of the `failing` model."""
    name = "relax_hetero.test.refuse_negative"
    before = tvm.get_global_func(name)
    tvm.register_global_func(name, function, override=True)
    try:
        yield
    finally:
        tvm.register_global_func(name, before, override=True)


def test_two_machines_run_at_the_same_time(failing):
    # Each call waits inside its kernel until the other machine is in its own.
    meeting = threading.Barrier(2, timeout=30)

    def meet(x):
        meeting.wait()
        return x

    with kernel(meet), ThreadPoolExecutor(2) as pool:
        machines = [rh.vm.VirtualMachine(failing) for _ in range(2)]
        results = list(pool.map(lambda vm: vm["main"](np.ones(2, "float32")).numpy(), machines))
    np.testing.assert_array_equal(results, np.ones((2, 2)))


def test_a_kernel_may_call_its_own_machine(failing):
    inner = []

    def recurse(x):
        if x.numpy()[0] > 0:
            inner.append(vm["main"](np.array([-1, -2], "float32")).numpy())
        return x

    with kernel(recurse):
        vm = rh.vm.VirtualMachine(failing)
        np.testing.assert_array_equal(vm["main"](np.array([5, 6], "float32")).numpy(), [5, 6])
    np.testing.assert_array_equal(inner, [[-1, -2]])


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_a_thousand_machines_leave_nothing_behind(lifted):
    x = np.ones(1024, "float32")

    def use():
        vm = rh.vm.VirtualMachine(lifted)
        vm["main"](x)
        return weakref.ref(vm)

    for _ in range(100):
        use()
    gc.collect()
    before = resident_bytes()
    gc.disable()  # no cycles: each machine ends with its last reference
    try:
        assert not any([use()() for _ in range(1000)])
    finally:
        gc.enable()
    assert resident_bytes() - before < 8 << 20


def test_memory_is_bounded_over_many_shapes(chain):
    # Each call needs buffers of sizes that no call before it had; TVM's pool would keep them all (600 MB here).
    vm = rh.vm.VirtualMachine(chain)
    vm["main"](np.zeros((256 * 400, 4), "float32"), W)
    before = resident_bytes()
    for k in range(400):
        vm["main"](np.zeros((256 * k, 4), "float32"), W)
    assert resident_bytes() - before < 200 << 20


def test_a_function_outlives_the_name_of_its_machine(chain):
    run = rh.vm.VirtualMachine(chain)["twice"]
    gc.collect()
    np.testing.assert_array_equal(run(W).numpy(), W * 2)


def test_results_outlive_machine_and_file(lifted, tmp_path):
    lifted.export_library(tmp_path / "model.so")
    y, d = rh.vm.VirtualMachine(rh.load(tmp_path / "model.so"))["main"](np.ones(1024, "float32"))
    os.unlink(tmp_path / "model.so")
    gc.collect()
    np.testing.assert_array_equal(d.numpy() + 1, y.numpy())
