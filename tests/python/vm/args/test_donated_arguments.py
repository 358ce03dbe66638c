"""Donated arguments are overwritten, and no others ever are."""

from __future__ import annotations

import threading
import time
import weakref
from unittest import mock

import numpy as np
import pytest
import tvm
from tvm.script import relax as R

import relax_hetero as rh
from in_place import InPlace
from modules import ir_module
from relax_hetero.vm.queue.plan import QueuePlan
from seeds import fresh_rng


# A step of a decoder: a row is written to a cache, and the cache is read.
@ir_module("llvm", "llvm:1")
def Decoder(
    cache: R.Tensor(("n", 8), "float32", "llvm:0"),
    row: R.Tensor((1, 8), "float32", "llvm:0"),
    place: R.Tensor((1, 1), "int64", "llvm:0"),
    query: R.Tensor((8, 1), "float32", "llvm:0"),
):
    with R.dataflow():
        new = R.scatter_nd(cache, place, R.multiply(row, R.const(2.0, "float32")))
        scores = R.nn.relu(R.matmul(new, query))
        there = R.to_vdevice(scores, "llvm:1")
        result = R.exp(there)
        R.output(new, result)
    return (new, result)


def arguments(rng, n=6):
    return [
        rng.standard_normal((n, 8)).astype("float32"),
        rng.standard_normal((1, 8)).astype("float32"),
        np.array([[n - 2]]),
        rng.standard_normal((8, 1)).astype("float32"),
    ]


def expected(cache, row, place, query):
    new = cache.copy()
    new[int(place[0, 0])] = 2 * row[0]
    return new, np.exp(np.maximum(new @ query, 0))


def check(actual, want):
    for one, other in zip(actual, want, strict=True):
        np.testing.assert_allclose(one.numpy(), other, rtol=1e-5)


@pytest.fixture(scope="module")
def executable():
    return rh.compile(Decoder, donate=["cache"])


@pytest.fixture
def vm(executable):
    return rh.vm.VirtualMachine(executable)


def test_results_reuse_the_memory_of_donated_arguments(vm):
    rng = fresh_rng()
    assert vm["main"].signature.donated == ("cache",)
    for n in (6, 3, 6):
        args = arguments(rng, n)
        want = expected(*args)
        tensor = tvm.runtime.tensor(args[0])
        new, result = vm["main"](tensor, *args[1:])
        check((new, result), want)
        assert new.data_ptr() == tensor.data_ptr()
        before = [array.copy() for array in args[1:]]
        new, result = vm["main"](args[0], *args[1:])
        check((new, result), want)
        np.testing.assert_array_equal(args[0], want[0])
        assert new.data_ptr() == args[0].ctypes.data
        assert all((one == other).all() for one, other in zip(args[1:], before, strict=True))


def test_a_cache_goes_from_call_to_call(vm):
    cache, row, _, query = arguments(fresh_rng(), 4)
    want, new = cache.copy(), tvm.runtime.tensor(cache)
    address = new.data_ptr()
    for place in (0, 3, 1):
        want, scores = expected(want, row + place, np.array([[place]]), query)
        new, result = vm["main"](new, row + place, np.array([[place]]), query)
        check((new, result), (want, scores))
        assert new.data_ptr() == address


def test_submitted_calls_consume_it_too(vm):
    args = arguments(fresh_rng())
    want, tensor = expected(*args), tvm.runtime.tensor(args[0])
    new, result = vm.submit("main", tensor, *args[1:]).result(timeout=60)
    check((new, result), want)
    assert new.data_ptr() == tensor.data_ptr()


def test_after_export_and_load(executable, tmp_path):
    executable.export_library(str(tmp_path / "decoder.so"))
    machine = rh.vm.VirtualMachine(rh.load(str(tmp_path / "decoder.so")))
    args = arguments(fresh_rng())
    want = expected(*args)
    new, result = machine["main"](*args)
    check((new, result), want)
    assert new.data_ptr() == args[0].ctypes.data


def test_arguments_that_cannot_be_overwritten_in_place_are_copied(vm):
    args = arguments(fresh_rng())
    want = expected(*args)
    for cache in (np.asfortranarray(args[0]), np.concatenate([args[0]] * 2, 1)[:, :8]):
        before = cache.copy()
        check(vm["main"](cache, *args[1:]), want)
        np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("is_known", [False, True])
def test_memory_that_must_not_be_overwritten_is_refused(vm, is_known):
    args = arguments(fresh_rng())
    if is_known:  # a call that looks like this one was found to fit
        vm["main"](args[0].copy(), *args[1:])
    args[0].flags.writeable = False
    with pytest.raises(rh.BindingError, match="'cache' of 'main' is donated, found a read-only numpy array"):
        vm["main"](*args)
    out = np.zeros((7, 8), "float32")
    with pytest.raises(rh.BindingError, match="'cache' of 'main' is donated, and argument 'row' shares memory with it"):
        vm["main"](out[:6], out[5:6], *args[2:])
    both = tvm.runtime.tensor(out)
    check(vm["main"](both, *args[1:]), expected(out, *args[1:]))  # the machine is usable


def test_inputs_set_before_are_consumed_by_one_run(vm):
    args = arguments(fresh_rng())
    want = expected(*args)
    vm.set_input("main", *args)
    vm.invoke_stateful("main")
    check(vm.get_outputs("main"), want)
    with pytest.raises(rh.BindingError, match=r"no inputs set.*a run consumes 'cache'"):
        vm.invoke_stateful("main")


def test_without_donation_nothing_is_overwritten():
    machine = rh.vm.VirtualMachine(rh.compile(Decoder))
    args = arguments(fresh_rng())
    want, tensor = expected(*args), tvm.runtime.tensor(args[0])
    before = [array.copy() for array in args]
    check(machine["main"](tensor, *args[1:]), want)
    check(machine["main"](*args), want)
    np.testing.assert_array_equal(tensor.numpy(), before[0])
    assert all((one == other).all() for one, other in zip(args, before, strict=True))


def test_lowered_modules_say_what_they_write_to():
    assert rh.compile(rh.get_pipeline()(InPlace)).signature("main").copied == ("x",)


@pytest.mark.parametrize("donates", [False, True])
def test_kernels_of_the_user_that_work_in_place(donates):
    exe = rh.compile(InPlace, donate=["x"] if donates else None)
    signature = exe.signature("main")
    assert (signature.donated, signature.copied) == ((("x",), ()) if donates else ((), ("x",)))
    machine = rh.vm.VirtualMachine(exe)
    x = np.arange(4, dtype="float32")
    for value in (x.copy(), tvm.runtime.tensor(x)):
        y, twice = machine["main"](value)
        np.testing.assert_array_equal(y.numpy(), x + 1)
        np.testing.assert_array_equal(twice.numpy(), 2 * x + 2)
        now = value if isinstance(value, np.ndarray) else value.numpy()
        np.testing.assert_array_equal(now, x + 1 if donates else x)
    machine.set_input("main", x)
    for _ in range(1 if donates else 3):  # each run starts from what was set
        machine.invoke_stateful("main")
        np.testing.assert_array_equal(machine.get_output("main", 0).numpy(), x + 1)


def test_calls_under_way_consume_nothing_that_others_take(executable):
    vm = rh.vm.VirtualMachine(executable, max_in_flight=8)
    rng = fresh_rng()
    _, row, place, query = arguments(rng)
    caches = [tvm.runtime.tensor(rng.standard_normal((40, 8)).astype("float32")) for _ in range(4)]
    befores = [cache.numpy() for cache in caches]
    shared = np.from_dlpack(caches[1])[8:9]
    is_open, execute = threading.Event(), QueuePlan.execute

    def late(plan, index, call):
        assert is_open.wait(60)
        return execute(plan, index, call)

    with mock.patch.object(QueuePlan, "execute", late):
        fence = vm.submit("main", caches[0], shared, place, query, copy=False)
        under_way = "of a call of 'main' that is under way, and"
        with pytest.raises(rh.BindingError, match=f"'cache' of 'main' shares memory with argument 'cache' {under_way}"):
            vm.submit("main", caches[0], row, place, query)
        with pytest.raises(rh.BindingError, match=f"'row' of 'main' .* 'cache' {under_way} that one consumes it"):
            vm["main"](caches[2], np.from_dlpack(caches[0])[8:9], place, query)
        with pytest.raises(rh.BindingError, match=f"'cache' of 'main' .* 'row' {under_way} this call consumes it"):
            vm.submit("main", caches[1], row, place, query)
        beside = vm.submit("main", caches[2], shared, place, query)  # both only read this one
        third = vm.submit("main", caches[3], row, place, query)
        is_open.set()
        check(fence.result(60), expected(befores[0], shared, place, query))
        check(beside.result(60), expected(befores[2], shared, place, query))
        check(third.result(60), expected(befores[3], row, place, query))
    once = expected(befores[0], shared, place, query)[0]
    check(vm.submit("main", caches[0], row, place, query).result(60), expected(once, row, place, query))


# The first step reads the donated argument; the second step is on another device.
@ir_module("llvm", "llvm:1")
def Early(x: R.Tensor(("n", 8), "float32", "llvm:0")):
    with R.dataflow():
        result = R.exp(R.to_vdevice(R.sum(x, axis=[0]), "llvm:1"))
        R.output(result)
    return result


def test_memory_that_a_call_has_given_back_is_free():
    """A call drops an argument after its last reader; the address is another array's then."""
    executable = rh.compile(Early, donate=["x"])
    vm, other = (rh.vm.VirtualMachine(executable, max_in_flight=32) for _ in range(2))
    is_open, execute, calls = threading.Event(), QueuePlan.execute, []

    def late(plan, index, call):
        if plan.steps[index].device == 1:
            calls.append(call)
            assert is_open.wait(60)
        return execute(plan, index, call)

    def submit(*args):
        """A call whose first step is over."""
        count = len(calls)
        fences.append(vm.submit("main", *args))
        while len(calls) == count or calls[-1].values[0] is not None:
            time.sleep(1e-4)

    fences = []
    with mock.patch.object(QueuePlan, "execute", late):
        x = np.ones((4, 8), "float32")
        submit(x[:])
        tensor = tvm.runtime.tensor(x)
        fences.append(vm.submit("main", tensor))
        for again in (x, x[1:3], np.from_dlpack(tensor)[2:]):  # the caller has them still
            for call in (vm["main"].submit, other["main"].submit, vm["main"], other["main"]):
                with pytest.raises(
                    rh.BindingError, match="shares memory with argument 'x' of a call of 'main' that is"
                ):
                    call(again)
        address, gone = x.ctypes.data, weakref.ref(x)
        del x, again
        assert gone() is None
        arrays = [np.full((4, 8), i, "float32") for i in range(8)]
        assert address in [array.ctypes.data for array in arrays]
        fences += [vm.submit("main", array) for array in arrays]
        is_open.set()
        for fence, value in zip(fences, (1, 1, *range(8)), strict=True):
            np.testing.assert_allclose(fence.result(60).numpy(), np.exp(np.full(8, 4.0 * value)), rtol=1e-5)
    other["main"](tensor)  # whose call has ended
