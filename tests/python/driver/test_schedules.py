"""Functions on two devices, compiled: what may run at the same time does, and files keep the steps."""

import threading

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module

both = threading.Barrier(2)


@tvm_ffi.register_global_func("relax_hetero.test.meet", override=True)
def meet(value):
    """Wait for the other half; an error where it does not run meanwhile."""
    both.wait(20)
    return value


@ir_module({"kind": "llvm", "num-cores": 1}, ({"kind": "llvm", "num-cores": 1}, 1))
def Halves(x: R.Tensor((4,), "float32", "llvm:0")):
    with R.dataflow():
        here = R.call_pure_packed("relax_hetero.test.meet", R.exp(x), ty_args=(R.Tensor((4,), "float32", "llvm:0"),))
        moved = R.to_vdevice(x, "llvm:1")
        there = R.call_pure_packed("relax_hetero.test.meet", moved, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
        half = R.to_vdevice(here, "llvm:1")
        result = R.add(half, there)
        R.output(result)
    return result


@ir_module({"kind": "llvm", "num-cores": 1}, ({"kind": "llvm", "num-cores": 1}, 1))
class Apart:
    """Two functions, each on a device of its own."""

    @R.function
    def first(x: R.Tensor((4,), "float32", "llvm:0")):
        with R.dataflow():
            y = R.call_pure_packed("relax_hetero.test.meet", x, ty_args=(R.Tensor((4,), "float32", "llvm:0"),))
            z = R.exp(y)
            R.output(z)
        return z

    @R.function
    def second(x: R.Tensor((4,), "float32", "llvm:1")):
        with R.dataflow():
            y = R.call_pure_packed("relax_hetero.test.meet", x, ty_args=(R.Tensor((4,), "float32", "llvm:1"),))
            z = R.tanh(y)
            R.output(z)
        return z


@pytest.fixture
def x():
    return np.arange(4, dtype="float32") / 4


def test_independent_halves_of_a_call_run_at_the_same_time(x):
    vm = rh.vm.VirtualMachine(rh.compile(Halves))
    for fence in [vm.submit("main", x) for _ in range(3)]:
        np.testing.assert_allclose(fence.result(60).numpy(), np.exp(x) + x, rtol=1e-6)


def test_functions_on_different_devices_run_at_the_same_time(x):
    vm = rh.vm.VirtualMachine(rh.compile(Apart))
    fences = vm.submit("first", x), vm.submit("second", x)
    for fence, want in zip(fences, (np.exp(x), np.tanh(x)), strict=True):
        np.testing.assert_allclose(fence.result(60).numpy(), want, rtol=1e-5)


def test_files_keep_the_steps(x, tmp_path):
    executable = rh.compile(Halves)
    executable.export_library(tmp_path / "halves.so")
    loaded = rh.load(tmp_path / "halves.so")
    assert loaded.metadata.schedules == executable.metadata.schedules != ()
    actual = rh.vm.VirtualMachine(loaded).submit("main", x).result(60)
    np.testing.assert_allclose(actual.numpy(), np.exp(x) + x, rtol=1e-6)


# Results that are arguments, weights, each other's memory and sizes.
@ir_module("llvm", "llvm:1")
def Shown(x: R.Tensor(("n", 4), "float32", "llvm:0"), both: R.Tuple(R.Tensor((3,), "float32", "llvm:1"))):
    n = T.int64()
    with R.dataflow():
        moved = R.to_vdevice(both[0], "llvm:0")
        y: R.Tensor((n, 4), "float32", "llvm:0") = R.exp(x)
        z: R.Tensor((n, 4), "float32", "llvm:1") = R.to_vdevice(y, "llvm:1")
        gv = ((both, moved), x, R.const(np.ones(3, "float32")), y, z, R.shape_of(z), R.prim_value(n))
        R.output(gv)
    return gv


@pytest.mark.parametrize("submits", [True, False])
def test_results_have_memory_of_their_own_and_sizes_are_results_too(submits):
    vm = rh.vm.VirtualMachine(rh.compile(Shown))
    x, w = np.random.standard_normal((5, 4)).astype("float32"), np.random.standard_normal(3).astype("float32")
    args = tvm.runtime.tensor(x), (tvm.runtime.tensor(w, tvm.cpu(1)),)
    for _ in range(2):
        got = vm.submit("main", *args).result(60) if submits else vm["main"](*args)
        (((first,), moved), same, ones, y, z, shape, n) = got
        assert (shape, n) == ((5, 4), 5)
        for actual, want in zip(
            (first, moved, same, ones, y, z), (w, w, x, np.ones(3), np.exp(x), np.exp(x)), strict=True
        ):
            np.testing.assert_allclose(actual.numpy(), want, rtol=1e-6)
            tvm.runtime.tensor(np.full(want.shape, np.nan, "float32")).copyto(actual)
    np.testing.assert_array_equal(args[0].numpy(), x)
    np.testing.assert_array_equal(args[1][0].numpy(), w)
