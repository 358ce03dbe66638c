"""Tail-recursive functions run as loops: any number of trips, with branches and other work."""

import numpy as np
import pytest
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.driver.link.link import with_trips
from relax_hetero.transform import LowerToVM
from relax_hetero.transform.ir.rewriting import walk_bindings


@I.ir_module
class Counted:
    @R.function(private=True)
    def loop(i: R.Tensor((), "int64"), n: R.Tensor((), "int64"), v: R.Tensor((2,), "float32")) -> R.Tuple(
        R.Tensor((), "int64"), R.Tensor((2,), "float32")
    ):
        cls = Counted
        c = R.less(i, n)
        if c:
            i1 = R.add(i, R.const(1, "int64"))
            w = R.negative(v)
            r: R.Tuple(R.Tensor((), "int64"), R.Tensor((2,), "float32")) = cls.loop(i1, n, w)
        else:
            r: R.Tuple(R.Tensor((), "int64"), R.Tensor((2,), "float32")) = (i, v)
        return r

    @R.function
    def main(n: R.Tensor((), "int64"), x: R.Tensor((2,), "float32")):
        cls = Counted
        y = cls.loop(R.const(0, "int64"), n, x)
        return y


@I.ir_module
class Branches:
    """Two calls of itself in tail position, one in an inner branch; results that come out of two others."""

    @R.function
    def main(i: R.Tensor((), "int64"), n: R.Tensor((), "int64"), v: R.Tensor((2,), "float32")) -> R.Tensor(
        (2,), "float32"
    ):
        cls = Branches
        c = R.less(i, n)
        if c:
            i1 = R.add(i, R.const(1, "int64"))
            rest = R.mod(i, R.const(3, "int64"))
            third = R.equal(rest, R.const(0, "int64"))
            if third:
                w = R.add(v, v)
                a: R.Tensor((2,), "float32") = cls.main(i1, n, w)
                inner = a
            else:
                large = R.greater(R.sum(v), R.const(100.0, "float32"))
                if large:
                    b = R.negative(v)
                else:
                    u = R.add(v, R.const(1.0, "float32"))
                    b: R.Tensor((2,), "float32") = cls.main(i1, n, u)
                inner = b
            r = inner
        else:
            r = R.multiply(v, R.const(0.5, "float32"))
        return r


@I.ir_module
class NotLast:
    """Work after the call of itself: real recursion."""

    @R.function
    def main(i: R.Tensor((), "int64"), v: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
        cls = NotLast
        c = R.greater(i, R.const(0, "int64"))
        if c:
            i1 = R.subtract(i, R.const(1, "int64"))
            a: R.Tensor((2,), "float32") = cls.main(i1, v)
            r = R.add(a, v)
        else:
            r = v
        return r


def machine(mod):
    return rh.vm.VirtualMachine(rh.compile(mod, cache=False))


def test_trips_take_no_stack():
    count, y = machine(Counted)["main"](100_001, np.float32([1, 2]))
    assert int(count.numpy()) == 100_001
    np.testing.assert_array_equal(y.numpy(), [-1, -2])


@np.errstate(over="ignore")
def expected(i, n, v):
    while i < n:
        if i % 3 == 0:
            i, v = i + 1, v + v
        elif v.sum() > 100:
            return -v
        else:
            i, v = i + 1, v + 1
    return v / 2


def test_calls_in_several_branches():
    vm = machine(Branches)
    for n, start in ((0, 1), (1, 1), (5, 1), (50, 1), (20_000, -(2.0**10))):
        x = np.float32([start, start])
        np.testing.assert_allclose(vm["main"](0, n, x).numpy(), expected(0, n, x), rtol=1e-6)


def test_recursion_stays():
    vm = machine(NotLast)
    np.testing.assert_array_equal(vm["main"](5, np.float32([1, 2])).numpy(), [6, 12])
    lowered = LowerToVM()(rh.get_pipeline()(NotLast))
    assert with_trips(lowered)[1] == []


def test_one_trip_stands_in_the_place_of_the_function():
    """Loop-invariant arguments are not passed on, and no recursive call is left."""
    mod, (loop,) = with_trips(LowerToVM()(rh.get_pipeline()(Counted)))
    assert (loop.name, loop.trip, loop.params) == ("loop", "loop_trip", ("i", "n", "v"))
    assert loop.carried == (0, 2)
    trip = mod["loop"]
    assert trip.attrs["global_symbol"] == "loop_trip"
    assert not any(
        isinstance(b.value, relax.Call) and b.value.op.same_as(mod.get_global_var("loop")) for b in walk_bindings(trip)
    )


def test_the_function_itself_is_left_alone_without_such_a_call():
    @I.ir_module
    class Plain:
        @R.function
        def main(x: R.Tensor((2,), "float32")):
            y = R.add(x, x)
            return y

    lowered = LowerToVM()(rh.get_pipeline()(Plain))
    assert with_trips(lowered) == (lowered, [])


@pytest.mark.parametrize("path", ["exported.so"])
def test_loops_are_in_the_file(path, tmp_path):
    exe = rh.compile(Counted, cache=False)
    exe.export_library(str(tmp_path / path))
    vm = rh.vm.VirtualMachine(rh.load(str(tmp_path / path)))
    assert int(vm["main"](50_000, np.float32([1, 2]))[0].numpy()) == 50_000
