"""KeepUnreadCalls: code that a module only calls is not dropped with its unread results."""

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform import KeepUnreadCalls

X = np.arange(4, dtype="float32")
HEARD = []


@tvm.register_global_func("test.unread.hear", override=True)
def hear(value, *rest):
    HEARD.append(value.numpy().tolist())


@I.ir_module
class Before:
    @R.function(private=True)
    def inner(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]))):
        _ = f(x)
        return x

    @R.function
    def main(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]))):
        cls = Before
        with R.dataflow():
            y = R.add(x, x)
            unread = R.call_pure_packed("test.unread.hear", y, ty_args=R.Tensor((4,), "float32"))
            z = R.exp(y)
            read = R.call_pure_packed("test.unread.same", z, ty_args=R.Tensor((4,), "float32"))
            dead = R.add(z, z)
            w = cls.inner(read, f)
            R.output(read)
        return read


@I.ir_module
class Expected:
    @R.function(private=True, pure=False)
    def inner(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]), False)):
        _ = f(x)
        return x

    @R.function(pure=False)
    def main(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tuple([]))):
        cls = Expected
        with R.dataflow():
            y = R.add(x, x)
            R.output(y)
        unread = R.call_packed("test.unread.hear", y, ty_args=R.Tensor((4,), "float32"))
        with R.dataflow():
            z = R.exp(y)
            read = R.call_pure_packed("test.unread.same", z, ty_args=R.Tensor((4,), "float32"))
            dead = R.add(z, z)
            R.output(read)
        w = cls.inner(read, f)
        return read


def test_unread_calls_become_impure():
    after = KeepUnreadCalls()(Before)
    assert_structural_equal(after, Expected)
    assert KeepUnreadCalls()(after).same_as(after)


def test_calls_that_are_read_stay():
    @ir_module()
    def Read(x: R.Tensor((4,), "float32"), f: R.Callable([R.Tensor((4,), "float32")], R.Tensor((4,), "float32"))):
        with R.dataflow():
            y = f(x)
            z = R.call_pure_packed("test.unread.same", y, ty_args=R.Tensor((4,), "float32"))
            R.output(z)
        return z

    assert KeepUnreadCalls()(Read).same_as(Read)


@ir_module("llvm", "llvm:1")
class Forms:
    """Forms of calls whose results nobody reads."""

    @R.function
    def packed(x: R.Tensor((4,), "float32", "llvm:0")):
        y = R.call_pure_packed("test.unread.hear", x, ty_args=R.Object)
        return x

    @R.function
    def in_place(x: R.Tensor((4,), "float32", "llvm:0")):
        y = R.call_inplace_packed("test.unread.hear", x, inplace_indices=0, ty_args=R.Tensor((4,), "float32"))
        return x

    @R.function
    def into_result(x: R.Tensor((4,), "float32", "llvm:0")):
        with R.dataflow():
            y = R.call_dps_packed("test.unread.hear", (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            z = R.add(x, x)
            R.output(z)
        return x

    @R.function(private=True)
    def bound(a: R.Tensor((4,), "float32", "llvm:0"), x: R.Tensor((4,), "float32", "llvm:0")):
        b = R.call_pure_packed("test.unread.hear", a, ty_args=R.Tuple([]))
        return x

    @R.function
    def closure(x: R.Tensor((4,), "float32", "llvm:0")):
        cls = Forms
        closure = R.make_closure(cls.bound, (x,))
        y = R.invoke_pure_closure(closure, (x,), ty_args=R.Tensor((4,), "float32", "llvm:0"))
        return x

    @R.function
    def local(x: R.Tensor((4,), "float32", "llvm:0")):
        @R.function
        def inside(a: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            b = R.call_pure_packed("test.unread.hear", a, x, ty_args=R.Object)
            return a

        y = inside(x)
        return x

    @R.function
    def branch(x: R.Tensor((4,), "float32", "llvm:0")):
        p = R.less(R.max(x), R.const(0.0, "float32"))
        if p:
            y = R.call_pure_packed("test.unread.same", x, ty_args=R.Tensor((4,), "float32", "llvm:0"))
        else:
            y = R.call_pure_packed("test.unread.hear", x, ty_args=R.Tensor((4,), "float32", "llvm:0"))
        return x

    @R.function
    def overlapping(x: R.Tensor((4,), "float32", "llvm:0")):
        with R.dataflow():
            there = R.add(R.to_vdevice(x, "llvm:1"), R.to_vdevice(x, "llvm:1"))
            y = R.call_pure_packed("test.unread.hear", x, ty_args=R.Object)
            here = R.add(x, x)
            R.output(there, here)
        return (x, here, there)


@pytest.fixture(scope="module")
def vm():
    tvm.register_global_func("test.unread.same", lambda x: x, override=True)
    return rh.vm.VirtualMachine(rh.compile(Forms))


@pytest.mark.parametrize("form", ["packed", "in_place", "into_result", "closure", "local", "branch", "overlapping"])
def test_they_run_once_in_each_call(vm, form):
    for call in (vm[form], lambda x: vm.submit(form, x).result(60)):
        HEARD.clear()
        result = call(X)
        assert HEARD == [X.tolist()]
        np.testing.assert_array_equal((result[0] if isinstance(result, tuple) else result).numpy(), X)


def test_stock_tvm_runs_them_too():
    tvm.register_global_func("test.unread.same", lambda x: x, override=True)
    executables = [
        relax.VirtualMachine(relax.build(Before, "llvm"), tvm.cpu()),
        rh.vm.VirtualMachine(rh.compile(Before)),
    ]
    for machine in executables:
        HEARD.clear()
        machine["main"](tvm.runtime.tensor(X), hear)
        np.testing.assert_allclose(HEARD, [2 * X, np.exp(2 * X)], rtol=1e-6)
