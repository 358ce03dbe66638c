"""RealizeVDevice across functions: calls, recursion, clones, function values and closures."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module, ops_of
from relax_hetero import PlacementError
from relax_hetero.transform import RealizeVDevice, verify_placement


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    after = place(before)
    assert_structural_equal(after, expected)


def place(before: tvm.IRModule, insert_copies: bool = False) -> tvm.IRModule:
    after = RealizeVDevice(insert_copies)(before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    assert_structural_equal(RealizeVDevice(insert_copies)(after), after)
    return after


def devices(func: relax.Function) -> list[int]:
    """The vdevice_id of every tensor parameter and of the result (of its fields, if a tuple)."""
    types = [param.ty for param in func.params] + [func.ret_ty]
    flat = [field for ty in types for field in (ty.fields if isinstance(ty, tvm.ir.TupleType) else [ty])]
    return [int(ty.vdevice.vdevice_id) for ty in flat if isinstance(ty, relax.TensorType)]


def test_callee_places_its_caller():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
            cls = Before
            a = cls.callee(x, y)
            return a

        @R.function
        def callee(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")) -> R.Tuple(
            R.Tensor((2,), "float32"), R.Tensor((2,), "float32")
        ):
            a: R.Tensor((2,), "float32", "llvm:1") = R.exp(y)
            return (x, a)

    @ir_module("llvm", "llvm:1")
    class Expected:
        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Expected
            a: R.Tuple(R.Tensor((2,), "float32", "llvm:0"), R.Tensor((2,), "float32", "llvm:1")) = cls.callee(x, y)
            return a

        @R.function
        def callee(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")) -> R.Tuple(
            R.Tensor((2,), "float32", "llvm:0"), R.Tensor((2,), "float32", "llvm:1")
        ):
            a: R.Tensor((2,), "float32", "llvm:1") = R.exp(y)
            return (x, a)

    check(Before, Expected)


def test_one_function_on_two_devices_is_cloned():
    """The first call in module order keeps the name, on any device; the clone is private."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.square(y)
            b = cls.square(x)
            c = cls.square(b)
            d = cls.square(a)
            return (c, d)

        @R.function
        def square(z: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            a = R.multiply(z, z)
            return a

    @ir_module("llvm", "llvm:1")
    class Expected:
        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Expected
            a: R.Tensor((2,), "float32", "llvm:1") = cls.square(y)
            b: R.Tensor((2,), "float32", "llvm:0") = cls.square_llvm_0(x)
            c: R.Tensor((2,), "float32", "llvm:0") = cls.square_llvm_0(b)
            d: R.Tensor((2,), "float32", "llvm:1") = cls.square(a)
            return (c, d)

        @R.function
        def square(z: R.Tensor((2,), "float32", "llvm:1")) -> R.Tensor((2,), "float32", "llvm:1"):
            a: R.Tensor((2,), "float32", "llvm:1") = R.multiply(z, z)
            return a

        @R.function(private=True)
        def square_llvm_0(z: R.Tensor((2,), "float32", "llvm:0")) -> R.Tensor((2,), "float32", "llvm:0"):
            a: R.Tensor((2,), "float32", "llvm:0") = R.multiply(z, z)
            return a

    check(Before, Expected)


def test_clones_call_clones():
    """A function that is needed twice needs what it calls twice."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def inner(z: R.Tensor((2,), "float32")):
            a = R.exp(z)
            return a

        @R.function
        def outer(z: R.Tensor((2,), "float32")):
            cls = Before
            a = cls.inner(z)
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.outer(x)
            b = cls.outer(y)
            return (a, b)

    after = place(Before)
    names = {gvar.name_hint: devices(func) for gvar, func in after.functions.items()}
    assert names == {
        "inner": [0, 0],
        "inner_llvm_1": [1, 1],
        "outer": [0, 0],
        "outer_llvm_1": [1, 1],
        "main": [0, 1, 0, 1],
    }
    called = after["outer_llvm_1"].body.blocks[0].bindings[0].value.op
    assert called.name_hint == "inner_llvm_1"


def test_a_clone_name_that_is_taken():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            return R.exp(z)

        @R.function
        def f_llvm_1(z: R.Tensor((2,), "float32")):
            return R.tanh(z)

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.f(x)
            b = cls.f(y)
            c = cls.f_llvm_1(a)
            return (b, c)

    after = place(Before)
    assert {gvar.name_hint for gvar in after.functions} == {"f", "f_llvm_1", "f_llvm_1_1", "main"}


def test_symbolic_shapes_survive_cloning():
    """Two functions may not share a symbolic variable."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(z: R.Tensor(("n", 2), "float32")):
            a = R.exp(z)
            return a

        @R.function
        def main(x: R.Tensor(("n", 2), "float32", "llvm:0"), y: R.Tensor(("m", 2), "float32", "llvm:1")):
            cls = Before
            a = cls.f(x)
            b = cls.f(y)
            return (a, b)

    after = place(Before)
    first, second = (after[name].params[0].ty.shape.values[0] for name in ("f", "f_llvm_1"))
    assert not first.same_as(second)


def test_each_call_of_a_free_function_is_on_its_own():
    """A call whose arguments are free does not follow another call: it gets the default device."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            return R.exp(z)

        @R.function
        def main(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.f(x)
            b = cls.f(y)
            return (a, b)

    after = place(Before)
    assert devices(after["main"]) == [0, 1, 0, 1]
    assert devices(after["f"]) == [0, 0] and devices(after["f_llvm_1"]) == [1, 1]


def test_public_function_takes_the_device_of_its_caller():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            return R.exp(z)

        @R.function
        def unused(z: R.Tensor((2,), "float32")):
            return R.exp(z)

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.f(x)
            return a

    after = place(Before)
    assert devices(after["f"]) == [1, 1] and after["f"].attrs["global_symbol"] == "f"
    assert devices(after["unused"]) == [0, 0]


def test_hint_inside_a_callee_counts_in_round_two():
    @ir_module("llvm", "llvm:1")
    class Free:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a = R.hint_on_device(z, tvm.cpu(1))
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32")):
            cls = Free
            a = R.exp(x)
            b = cls.f(a)
            return b

    assert devices(place(Free)["main"]) == [1, 1]

    @ir_module("llvm", "llvm:1")
    class Placed:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a = R.hint_on_device(z, tvm.cpu(1))
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:0")):
            cls = Placed
            b = cls.f(x)
            return b

    after = place(Placed)
    assert devices(after["main"]) == [0, 1] and devices(after["f"]) == [0, 1]
    assert "relax.to_vdevice" in ops_of(after["f"])


def test_recursion():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def loop(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            cls = Before
            if c:
                a = R.exp(x)
                b: R.Tensor((2,), "float32") = cls.loop(c, a)
                r = R.add(b, a)
            else:
                r = R.tanh(x)
            return r

        @R.function
        def main(c: R.Tensor((), "bool", "llvm:1"), x: R.Tensor((2,), "float32")):
            cls = Before
            y = cls.loop(c, x)
            z = R.hint_on_device(y, tvm.cpu(1))
            return z

    after = place(Before)
    assert devices(after["loop"]) == [1, 1, 1] and devices(after["main"]) == [1, 1, 1]
    assert len(after.functions) == 2


def test_mutual_recursion_on_two_devices():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function(private=True)
        def even(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            cls = Before
            if c:
                r: R.Tensor((2,), "float32") = cls.odd(c, x)
            else:
                r: R.Tensor((2,), "float32") = R.exp(x)
            return r

        @R.function(private=True)
        def odd(c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            cls = Before
            if c:
                r: R.Tensor((2,), "float32") = cls.even(c, x)
            else:
                r: R.Tensor((2,), "float32") = R.tanh(x)
            return r

        @R.function
        def main(
            c: R.Tensor((), "bool"), x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")
        ):
            cls = Before
            a: R.Tensor((2,), "float32") = cls.even(c, x)
            b: R.Tensor((2,), "float32") = cls.odd(c, y)
            return (a, b)

    after = place(Before)
    assert {gvar.name_hint: devices(func) for gvar, func in after.functions.items()} == {
        "even": [0, 0, 0],
        "even_llvm_0_llvm_1": [0, 1, 1],
        "odd": [0, 0, 0],
        "odd_llvm_0_llvm_1": [0, 1, 1],
        "main": [0, 0, 1, 0, 1],
    }


def test_tuples_as_parameters_and_results():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def swap(p: R.Tuple(R.Tensor((2,), "float32"), R.Tensor((3,), "float32"))):
            a = p[0]
            b = p[1]
            return (b, a)

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:1"), y: R.Tensor((3,), "float32")):
            cls = Before
            t = cls.swap((x, y))
            a = t[0]
            b = t[1]
            return (a, b)

    after = place(Before)
    assert devices(after["swap"]) == [1, 0, 0, 1] and devices(after["main"]) == [1, 0, 0, 1]


def test_local_function_shares_the_devices_around_it():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32", "llvm:1"), y: R.Tensor((2,), "float32")):
        @R.function
        def inner(z: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            r = R.add(z, x)
            return r

        a = inner(y)
        return a

    after = place(Before)
    assert devices(after["main"]) == [1, 1, 1]
    inner = after["main"].body.blocks[0].bindings[0]
    assert devices(inner.value) == [1, 1] and inner.var.ty.ret.vdevice.vdevice_id == 1


def test_function_as_an_argument():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def apply(
            f: R.Callable((R.Tensor((2,), "float32"),), R.Tensor((2,), "float32"), True), x: R.Tensor((2,), "float32")
        ) -> R.Tensor((2,), "float32"):
            y: R.Tensor((2,), "float32") = f(x)
            return y

        @R.function
        def twice(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            y = R.add(x, x)
            return y

        @R.function
        def main(x: R.Tensor((2,), "float32", "llvm:1")):
            cls = Before
            a = cls.apply(cls.twice, x)
            return a

    after = place(Before)
    assert devices(after["twice"]) == [1, 1]
    assert after["apply"].params[0].ty.params[0].vdevice.vdevice_id == 1


def test_closures():
    """Arguments that make_closure binds are the last parameters."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function(private=True)
        def body(x: R.Tensor((2,), "float32"), y: R.Tensor((3,), "float32")):
            a = R.exp(x)
            b = R.exp(y)
            return (a, b)

        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32"), y: R.Tensor((3,), "float32", "llvm:1")):
            cls = Before
            closure = R.make_closure(cls.body, (y,))
            t = R.invoke_closure(closure, (x,), ty_args=R.Tuple(R.Tensor((2,), "float32"), R.Tensor((3,), "float32")))
            return t

    after = place(Before)
    assert devices(after["body"]) == [0, 1, 0, 1] and devices(after["main"]) == [0, 1, 0, 1]


def test_unknown_closure_is_refused_with_several_devices():
    @ir_module("llvm", "llvm:1", pure=False)
    def Before(closure: R.Object, x: R.Tensor((2,), "float32")):
        t = R.invoke_closure(closure, (x,), ty_args=R.Tensor((2,), "float32"))
        return t

    with pytest.raises(PlacementError, match="relax.invoke_closure binding 't' in function 'main'.*is unknown"):
        RealizeVDevice()(Before)


def test_unknown_closure_is_fine_with_one_device():
    @ir_module("llvm", pure=False)
    def Before(closure: R.Object, x: R.Tensor((2,), "float32")):
        t = R.invoke_closure(closure, (x,), ty_args=R.Tensor((2,), "float32"))
        return t

    assert devices(place(Before)["main"]) == [0, 0]


def test_function_values_cannot_be_transferred():
    """`apply` calls its argument on one device, what it is given works on another: not even copies help."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def apply(
            f: R.Callable((R.Tensor((2,), "float32"),), R.Tensor((2,), "float32"), True), x: R.Tensor((2,), "float32")
        ) -> R.Tensor((2,), "float32"):
            a: R.Tensor((2,), "float32", "llvm:0") = R.exp(x)
            b = R.hint_on_device(a, tvm.cpu(0))
            y: R.Tensor((2,), "float32") = f(x)
            z: R.Tensor((2,), "float32", "llvm:0") = R.tanh(y)
            return z

        @R.function
        def twice(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            y: R.Tensor((2,), "float32", "llvm:1") = R.add(x, x)
            return y

        @R.function
        def main(x: R.Tensor((2,), "float32")):
            cls = Before
            a = cls.apply(cls.twice, x)
            return a

    with pytest.raises(PlacementError, match="cannot be transferred"):
        RealizeVDevice(insert_copies=True)(Before)
    with pytest.raises(PlacementError, match="two devices meet"):
        RealizeVDevice()(Before)


def test_the_order_of_functions_does_not_matter():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def a(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            cls = Before
            r = cls.b(x)
            return r

        @R.function
        def b(x: R.Tensor((2,), "float32")) -> R.Tensor((2,), "float32"):
            r = R.exp(x)
            return r

        @R.function
        def c(x: R.Tensor((2,), "float32")):
            cls = Before
            r = cls.a(x)
            s = R.to_vdevice(r, "llvm:0")
            t = R.hint_on_device(r, tvm.cpu(1))
            return (s, t)

    expected = place(Before)
    functions = list(Before.functions.items())
    for order in ((2, 1, 0), (1, 2, 0), (0, 2, 1)):
        mod = tvm.IRModule(dict(functions[index] for index in order), global_infos=Before.global_infos)
        assert_structural_equal(place(mod), expected)


def test_types_that_tvm_infers_from_hints_are_not_annotations():
    """Stock inference types the result of a hint like its operand, here llvm:0, and so all that follows from it."""

    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(x: R.Tensor((4,), "float32", "llvm:0")):
            b = R.hint_on_device(x, tvm.cpu(1))
            d = R.exp(b)
            return d

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), c: R.Tensor((), "bool", "llvm:1")):
            cls = Before
            y = cls.f(x)
            if c:
                w = R.exp(y)
            else:
                w = R.hint_on_device(x, tvm.cpu(1))
            t = (w, x)
            u = t[0]
            v = R.add(u, y)
            return (v, x)

    assert Before["f"].ret_ty.vdevice.vdevice_id == 0  # inferred by TVM from the hint's operand
    after = place(Before)
    assert devices(after["f"]) == [0, 1] and devices(after["main"]) == [0, 1, 1, 0]
