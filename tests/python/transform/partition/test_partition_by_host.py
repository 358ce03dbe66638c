"""PartitionByHost: a function for each host, before and after."""

from functools import partial

import pytest
import tvm
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import check_pass, ir_module
from relax_hetero.transform import PartitionByHost

A = {"kind": "llvm", "keys": ["cpu", "host:a"]}
B = {"kind": "llvm", "keys": ["cpu", "host:b"]}


check = partial(check_pass, PartitionByHost())


def refused(before: tvm.IRModule) -> str:
    with pytest.raises(rh.HeteroError) as error:
        PartitionByHost()(before)
    return str(error.value)


def test_crossing_values_are_sent_and_received():
    @ir_module(A, B)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor((4,), "float32", "b/llvm:0"):
        with R.dataflow():
            y = R.exp(x)
            z: R.Tensor((4,), "float32", "b/llvm:0") = R.to_vdevice(y, "b/llvm:0")
            w = R.negative(z)
            R.output(w)
        return w

    @ir_module(A, B)
    class Expected:
        @R.function(pure=False)
        def main_a(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Shape(ndim=0):
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            y: R.Tensor((4,), "float32", "a/llvm:0") = R.exp(x)
            R.call_packed("relax_hetero.host.send", y, R.str("b"), R.prim_value(0), ty_args=(R.Tuple,))
            return R.shape([])

        @R.function(pure=False)
        def main_b(x: R.Shape(ndim=0)) -> R.Tensor((4,), "float32", "b/llvm:0"):
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            z = R.call_packed(
                "relax_hetero.host.receive",
                R.str("a"),
                R.prim_value(0),
                ty_args=(R.Tensor((4,), "float32", "b/llvm:0"),),
            )
            w: R.Tensor((4,), "float32", "b/llvm:0") = R.negative(z)
            return w

    check(Before, Expected)


def test_there_and_back_uses_two_channels():
    @ir_module(A, B)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor((4,), "float32", "a/llvm:0"):
        y = R.exp(x)
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.negative(z)
        v = R.to_vdevice(w, "a/llvm:0")
        u = R.add(v, y)
        return u

    @ir_module(A, B)
    class Expected:
        @R.function(pure=False)
        def main_a(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor((4,), "float32", "a/llvm:0"):
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            y: R.Tensor((4,), "float32", "a/llvm:0") = R.exp(x)
            R.call_packed("relax_hetero.host.send", y, R.str("b"), R.prim_value(0), ty_args=(R.Tuple,))
            v = R.call_packed(
                "relax_hetero.host.receive",
                R.str("b"),
                R.prim_value(1),
                ty_args=(R.Tensor((4,), "float32", "a/llvm:0"),),
            )
            u: R.Tensor((4,), "float32", "a/llvm:0") = R.add(v, y)
            return u

        @R.function(pure=False)
        def main_b(x: R.Shape(ndim=0)) -> R.Shape(ndim=0):
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            z = R.call_packed(
                "relax_hetero.host.receive",
                R.str("a"),
                R.prim_value(0),
                ty_args=(R.Tensor((4,), "float32", "b/llvm:0"),),
            )
            w: R.Tensor((4,), "float32", "b/llvm:0") = R.negative(z)
            R.call_packed("relax_hetero.host.send", w, R.str("a"), R.prim_value(1), ty_args=(R.Tuple,))
            return R.shape([])

    check(Before, Expected)


def test_tuples_keep_their_structure_on_every_host():
    @ir_module(A, B)
    def Before(p: R.Tuple(R.Tensor((4,), "float32", "a/llvm:0"), R.Tensor((4,), "float32", "b/llvm:0"))) -> R.Tuple(
        R.Tensor((4,), "float32", "a/llvm:0"), R.Tuple(R.Tensor((4,), "float32", "b/llvm:0"))
    ):
        x = p[0]
        y = p[1]
        alone = (y,)
        z = R.exp(x)
        return (z, alone)

    @ir_module(A, B)
    class Expected:
        @R.function
        def main_a(
            p: R.Tuple(R.Tensor((4,), "float32", "a/llvm:0"), R.Shape(ndim=0)),
        ) -> R.Tuple(R.Tensor((4,), "float32", "a/llvm:0"), R.Tuple(R.Shape(ndim=0))):
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            x: R.Tensor((4,), "float32", "a/llvm:0") = p[0]
            z: R.Tensor((4,), "float32", "a/llvm:0") = R.exp(x)
            return (z, (R.shape([]),))

        @R.function
        def main_b(
            p: R.Tuple(R.Shape(ndim=0), R.Tensor((4,), "float32", "b/llvm:0")),
        ) -> R.Tuple(R.Shape(ndim=0), R.Tuple(R.Tensor((4,), "float32", "b/llvm:0"))):
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            y: R.Tensor((4,), "float32", "b/llvm:0") = p[1]
            alone: R.Tuple(R.Tensor((4,), "float32", "b/llvm:0")) = (y,)
            return (R.shape([]), alone)

    check(Before, Expected)


def test_a_constant_is_on_its_host_alone():
    @ir_module(A, B)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")):
        y = R.add(x, R.const(1.0, "float32"))
        z = R.to_vdevice(y, "b/llvm:0")
        w = R.multiply(z, R.const(2.0, "float32"))
        pair = (w, R.const(3.0, "float32"))
        return pair

    result = PartitionByHost()(rh.transform.RealizeVDevice()(Before))
    relax.analysis.well_formed(result)  # raises
    # Values that nothing places are on the first device.
    assert constant_values(result["main_a"]) == [1.0, 3.0] and constant_values(result["main_b"]) == [2.0]


def constant_values(func: relax.Function) -> list[float]:
    """The first elements of a function's constants."""
    values: list[float] = []

    def visit(expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst) and isinstance(expr.value, tvm.runtime.Tensor):
            values.append(float(expr.value.numpy().flat[0]))

    relax.analysis.post_order_visit(func, visit)
    return values


def test_sizes_that_a_host_lacks_are_its_first_parameter():
    @ir_module(A, B)
    def Before(x: R.Tensor(("n", 4), "float32", "a/llvm:0"), y: R.Tensor((1,), "float32", "b/llvm:0")) -> R.Tensor(
        ("n",), "float32", "b/llvm:0"
    ):
        n = T.int64()
        z: R.Tensor((n,), "float32", "b/llvm:0") = R.broadcast_to(y, R.shape([n]))
        return z

    @ir_module(A, B)
    class Expected:
        @R.function
        def main_a(x: R.Tensor(("n", 4), "float32", "a/llvm:0"), y: R.Shape(ndim=0)) -> R.Shape(ndim=0):
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            return R.shape([])

        @R.function
        def main_b(sizes: R.Shape(["n"]), x: R.Shape(ndim=0), y: R.Tensor((1,), "float32", "b/llvm:0")) -> R.Tensor(
            ("n",), "float32", "b/llvm:0"
        ):
            n = T.int64()
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main", "relax_hetero.sizes_first": True})
            z: R.Tensor((n,), "float32", "b/llvm:0") = R.broadcast_to(y, R.shape([n]))
            return z

    check(Before, Expected)


def test_sizes_that_a_tensor_tells_are_sent():
    @ir_module(A, B)
    def Before(
        x: R.Tensor(ndim=1, dtype="float32", vdevice="a/llvm:0"), y: R.Tensor((1,), "float32", "b/llvm:0")
    ) -> R.Tensor(ndim=1, dtype="float32", vdevice="b/llvm:0"):
        k = T.int64()
        j: R.Tensor((k,), "float32", "a/llvm:0") = R.match_cast(x, R.Tensor((k,), "float32", "a/llvm:0"))
        z: R.Tensor((k + 1,), "float32", "b/llvm:0") = R.broadcast_to(y, R.shape([k + 1]))
        return z

    @ir_module(A, B)
    class Expected:
        @R.function(pure=False)
        def main_a(x: R.Tensor(ndim=1, dtype="float32", vdevice="a/llvm:0"), y: R.Shape(ndim=0)) -> R.Shape(ndim=0):
            k = T.int64()
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            j: R.Tensor((k,), "float32", "a/llvm:0") = R.match_cast(x, R.Tensor((k,), "float32", "a/llvm:0"))
            R.call_packed("relax_hetero.host.send", R.shape([k]), R.str("b"), R.prim_value(0), ty_args=(R.Tuple,))
            return R.shape([])

        @R.function(pure=False)
        def main_b(x: R.Shape(ndim=0), y: R.Tensor((1,), "float32", "b/llvm:0")) -> R.Tensor(
            ndim=1, dtype="float32", vdevice="b/llvm:0"
        ):
            k = T.int64()
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            sizes: R.Shape(ndim=1) = R.call_packed(
                "relax_hetero.host.receive", R.str("a"), R.prim_value(0), ty_args=(R.Shape(ndim=1),)
            )
            known: R.Shape([k]) = R.match_cast(sizes, R.Shape([k]))
            z: R.Tensor((k + 1,), "float32", "b/llvm:0") = R.broadcast_to(y, R.shape([k + 1]))
            return z

    check(Before, Expected)


def test_a_condition_is_sent_to_the_hosts_of_the_branches():
    @ir_module(A, B)
    def Before(c: R.Tensor((), "bool", "a/llvm:0"), y: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor(
        (4,), "float32", "b/llvm:0"
    ):
        if c:
            z = R.exp(y)
        else:
            z = R.negative(y)
        return z

    @ir_module(A, B)
    class Expected:
        @R.function(pure=False)
        def main_a(c: R.Tensor((), "bool", "a/llvm:0"), y: R.Shape(ndim=0)) -> R.Shape(ndim=0):
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            R.call_packed("relax_hetero.host.send", c, R.str("b"), R.prim_value(0), ty_args=(R.Tuple,))
            return R.shape([])

        @R.function(pure=False)
        def main_b(c: R.Shape(ndim=0), y: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor(
            (4,), "float32", "b/llvm:0"
        ):
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            condition = R.call_packed(
                "relax_hetero.host.receive",
                R.str("a"),
                R.prim_value(0),
                ty_args=(R.Tensor((), "bool", "b/llvm:0"),),
            )
            if condition:
                z: R.Tensor((4,), "float32", "b/llvm:0") = R.exp(y)
            else:
                z: R.Tensor((4,), "float32", "b/llvm:0") = R.negative(y)
            return z

    check(Before, Expected)


def test_a_call_is_made_by_each_host_of_the_function():
    @ir_module(A, B)
    class Before:
        @R.function(private=True)
        def alone(y: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor((4,), "float32", "b/llvm:0"):
            z = R.exp(y)
            return z

        @R.function(private=True)
        def both(x: R.Tensor(("n",), "float32", "a/llvm:0")) -> R.Tensor(("n",), "float32", "b/llvm:0"):
            z = R.exp(x)
            y = R.to_vdevice(z, "b/llvm:0")
            return y

        @R.function
        def main(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Tensor((4,), "float32", "b/llvm:0"):
            cls = Before
            y: R.Tensor((4,), "float32", "b/llvm:0") = cls.both(x)
            z = cls.alone(y)
            return z

    @ir_module(A, B)
    class Expected:
        @R.function(private=True)
        def alone_b(y: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor((4,), "float32", "b/llvm:0"):
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "alone"})
            z = R.exp(y)
            return z

        @R.function(pure=False, private=True)
        def both_a(x: R.Tensor(("n",), "float32", "a/llvm:0")) -> R.Shape(ndim=0):
            n = T.int64()
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "both"})
            z: R.Tensor((n,), "float32", "a/llvm:0") = R.exp(x)
            R.call_packed("relax_hetero.host.send", z, R.str("b"), R.prim_value(0), ty_args=(R.Tuple,))
            return R.shape([])

        @R.function(pure=False, private=True)
        def both_b(sizes: R.Shape(["n"]), x: R.Shape(ndim=0)) -> R.Tensor(("n",), "float32", "b/llvm:0"):
            n = T.int64()
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "both", "relax_hetero.sizes_first": True})
            y = R.call_packed(
                "relax_hetero.host.receive",
                R.str("a"),
                R.prim_value(0),
                ty_args=(R.Tensor((n,), "float32", "b/llvm:0"),),
            )
            return y

        @R.function(pure=False)
        def main_a(x: R.Tensor((4,), "float32", "a/llvm:0")) -> R.Shape(ndim=0):
            cls = Expected
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            y: R.Shape(ndim=0) = cls.both_a(x)
            return R.shape([])

        @R.function(pure=False)
        def main_b(x: R.Shape(ndim=0)) -> R.Tensor((4,), "float32", "b/llvm:0"):
            cls = Expected
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            y: R.Tensor((4,), "float32", "b/llvm:0") = cls.both_b(R.shape([4]), R.shape([]))
            z: R.Tensor((4,), "float32", "b/llvm:0") = cls.alone_b(y)
            return z

    check(Before, Expected)


def test_a_requirement_is_checked_by_each_host_that_works_after_it():
    @ir_module(A, B)
    def Before(x: R.Tensor(("n",), "float32", "a/llvm:0"), y: R.Tensor(("n",), "float32", "b/llvm:0")) -> R.Tuple(
        R.Tensor(("n",), "float32", "a/llvm:0"), R.Tensor(("n",), "float32", "b/llvm:0")
    ):
        n = T.int64()
        _ = R.hetero.require(n > 3, "n is larger")
        z = R.exp(y)
        _ = R.hetero.require(n > 4, "n is even larger")
        w = R.exp(z)
        v = R.exp(x)
        _ = R.hetero.require(n < 9, "n is not too large")
        u = R.exp(w)
        return (v, u)

    @ir_module(A, B)
    class Expected:
        @R.function
        def main_a(x: R.Tensor(("n",), "float32", "a/llvm:0"), y: R.Shape(ndim=0)) -> R.Tuple(
            R.Tensor(("n",), "float32", "a/llvm:0"), R.Shape(ndim=0)
        ):
            n = T.int64()
            R.func_attr({"relax_hetero.host": "a", "relax_hetero.part_of": "main"})
            _ = R.hetero.require(n > 3, "n is larger")
            _ = R.hetero.require(n > 4, "n is even larger")
            v = R.exp(x)
            return (v, R.shape([]))

        @R.function
        def main_b(x: R.Shape(ndim=0), y: R.Tensor(("n",), "float32", "b/llvm:0")) -> R.Tuple(
            R.Shape(ndim=0), R.Tensor(("n",), "float32", "b/llvm:0")
        ):
            n = T.int64()
            R.func_attr({"relax_hetero.host": "b", "relax_hetero.part_of": "main"})
            _ = R.hetero.require(n > 3, "n is larger")
            z = R.exp(y)
            _ = R.hetero.require(n > 4, "n is even larger")
            w = R.exp(z)
            _ = R.hetero.require(n < 9, "n is not too large")
            u = R.exp(w)
            return (R.shape([]), u)

    check(Before, Expected)


def test_a_module_without_hosts_stays_itself():
    @ir_module({"kind": "llvm"}, ({"kind": "llvm"}, 1))
    def Before(x: R.Tensor((4,), "float32", "llvm:0")):
        y = R.to_vdevice(x, "llvm:1")
        return y

    assert PartitionByHost()(Before).same_as(Before)


def test_a_closure_is_refused():
    @ir_module(A, B)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")):
        @R.function
        def inner(y: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
            z = R.exp(y)
            return z

        w = inner(x)
        return w

    message = refused(Before)
    assert "'main'" in message and "'w'" in message and "without closures" in message


def test_a_value_without_a_device_is_refused():
    @ir_module(A, B)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")):
        y: R.Tensor((4,), "float32") = R.exp(x)
        return y

    message = refused(Before)
    assert "'main'" in message and "'y' has no device" in message and "RealizeVDevice" in message


def test_some_vdevices_without_a_host_are_refused():
    @ir_module(A, {"kind": "llvm"})
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0")):
        return x

    message = refused(Before)
    assert "vdevice 1" in message and "'a'" in message and "no host" in message


def test_an_object_that_two_hosts_need_is_refused():
    @ir_module(A, B, pure=False)
    def Before(x: R.Tensor((4,), "float32", "a/llvm:0"), y: R.Tensor((4,), "float32", "b/llvm:0")) -> R.Tensor(
        (4,), "float32", "b/llvm:0"
    ):
        made = R.call_packed("make", x, ty_args=(R.Object,))
        z = R.call_packed("use", made, y, ty_args=(R.Tensor((4,), "float32", "b/llvm:0"),))
        return z

    message = refused(Before)
    assert "'main'" in message and "'made' is an object of host 'a' that host 'b' needs" in message
