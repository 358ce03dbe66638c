"""RealizeVDevice: the RFC's examples, and how devices spread inside one function."""

import sys

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import check_pass, ir_module, ops_of
from relax_hetero import PlacementError, VDevice
from relax_hetero.transform import RealizeVDevice, verify_placement
from relax_hetero.transform.placement.realize_vdevice import realize_vdevice


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    """Check that the pass gives `expected`, which is placed, well-formed and left alone by a second run."""
    verify_placement(check_pass(RealizeVDevice(), before, expected))


def test_rfc_return_annotation():
    @ir_module("llvm", "cuda")
    class ModBefore:
        @R.function
        def func1(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")) -> R.Tensor(
            (2, 3), "float32", "cuda:0"
        ):
            a = R.add(x, y)
            b = R.multiply(a, x)
            return b

    @ir_module("llvm", "cuda")
    class ModExpected:
        @R.function
        def func1(x: R.Tensor((2, 3), "float32", "cuda:0"), y: R.Tensor((2, 3), "float32", "cuda:0")) -> R.Tensor(
            (2, 3), "float32", "cuda:0"
        ):
            a: R.Tensor((2, 3), "float32", "cuda:0") = R.add(x, y)
            b: R.Tensor((2, 3), "float32", "cuda:0") = R.multiply(a, x)
            return b

    check(ModBefore, ModExpected)


def test_rfc_hint_on_result():
    """Values before s3 have the same vdevice: the hint disappears."""

    @ir_module("cuda", "llvm")
    class ModBefore:
        @R.function
        def func2(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                s1 = R.add(x, y)
                s2 = R.multiply(s1, s1)
                s3 = R.hint_on_device(s2, tvm.cpu())
                R.output(s3)
            return s3

    @ir_module("cuda", "llvm")
    class ModExpected:
        @R.function
        def func2(x: R.Tensor((2, 3), "float32", "llvm"), y: R.Tensor((2, 3), "float32", "llvm")):
            with R.dataflow():
                s1: R.Tensor((2, 3), "float32", "llvm") = R.add(x, y)
                s2: R.Tensor((2, 3), "float32", "llvm") = R.multiply(s1, s1)
                s3: R.Tensor((2, 3), "float32", "llvm") = s2
                R.output(s3)
            return s3

    check(ModBefore, ModExpected)


def test_rfc_caller_and_callee():
    """The hint in the caller reaches the callee."""

    @ir_module("llvm", "cuda")
    class ModBefore:
        @R.function
        def callee(x: R.Tensor((2, 3), "float32")):
            r = R.add(x, x)
            return r

        @R.function
        def caller(x: R.Tensor((2, 3), "float32")):
            cls = ModBefore
            s1 = cls.callee(x)
            s2 = R.hint_on_device(s1, tvm.cuda())
            s3 = R.add(s2, s2)
            return s3

    @ir_module("llvm", "cuda")
    class ModExpected:
        @R.function
        def callee(x: R.Tensor((2, 3), "float32", "cuda")):
            r: R.Tensor((2, 3), "float32", "cuda") = R.add(x, x)
            return r

        @R.function
        def caller(x: R.Tensor((2, 3), "float32", "cuda")):
            cls = ModExpected
            s1: R.Tensor((2, 3), "float32", "cuda") = cls.callee(x)
            s2: R.Tensor((2, 3), "float32", "cuda") = s1
            s3: R.Tensor((2, 3), "float32", "cuda") = R.add(s2, s2)
            return s3

    check(ModBefore, ModExpected)


def test_rfc_to_vdevice_between_hints():
    @ir_module("llvm", "cuda")
    class Before:
        @R.function
        def foo(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32")):
            with R.dataflow():
                x1 = R.hint_on_device(x, tvm.cpu())
                y1 = R.hint_on_device(y, tvm.cuda())
                s1 = R.add(x1, x1)
                s2 = R.to_vdevice(s1, "cuda:0")
                s = R.add(y1, s2)
                R.output(s)
            return s

    @ir_module("llvm", "cuda")
    class Expected:
        @R.function
        def foo(x: R.Tensor((2, 3), "float32", "llvm"), y: R.Tensor((2, 3), "float32", "cuda")):
            with R.dataflow():
                x1: R.Tensor((2, 3), "float32", "llvm") = x
                y1: R.Tensor((2, 3), "float32", "cuda") = y
                s1: R.Tensor((2, 3), "float32", "llvm") = R.add(x1, x1)
                s2: R.Tensor((2, 3), "float32", "cuda") = R.to_vdevice(s1, "cuda:0")
                s: R.Tensor((2, 3), "float32", "cuda") = R.add(y1, s2)
                R.output(s)
            return s

    check(Before, Expected)


def test_rfc_forward():
    """The example of the RFC's section on normalization."""

    @ir_module("llvm", "cuda")
    class Before:
        @R.function
        def before(x: R.Tensor((2, 3), "float32", "cuda"), y: R.Tensor((2, 3), "float32", "cuda")) -> R.Tensor(
            (2, 3), "float32"
        ):
            a = R.add(x, y)
            b = R.multiply(a, x)
            return b

    @ir_module("llvm", "cuda")
    class After:
        @R.function
        def before(x: R.Tensor((2, 3), "float32", "cuda"), y: R.Tensor((2, 3), "float32", "cuda")) -> R.Tensor(
            (2, 3), "float32", "cuda"
        ):
            a: R.Tensor((2, 3), "float32", "cuda") = R.add(x, y)
            b: R.Tensor((2, 3), "float32", "cuda") = R.multiply(a, x)
            return b

    check(Before, After)


def test_free_values_get_the_first_vdevice():
    @ir_module("cuda", "llvm")
    def Before(x: R.Tensor((2, 3), "float32"), y: R.Tensor((2, 3), "float32", "llvm")):
        a = R.exp(x)
        b = R.exp(y)
        return (a, b)

    @ir_module("cuda", "llvm")
    def Expected(x: R.Tensor((2, 3), "float32", "cuda"), y: R.Tensor((2, 3), "float32", "llvm")):
        a: R.Tensor((2, 3), "float32", "cuda") = R.exp(x)
        b: R.Tensor((2, 3), "float32", "llvm") = R.exp(y)
        return (a, b)

    check(Before, Expected)


def test_fixed_beats_hint():
    """Round one comes before round two: the operand is fixed, so the hint becomes a transfer."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2, 3), "float32", "llvm:0")):
        a = R.exp(x)
        b = R.hint_on_device(a, tvm.cpu(1))
        c = R.exp(b)
        return c

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2, 3), "float32", "llvm:0")):
        a: R.Tensor((2, 3), "float32", "llvm:0") = R.exp(x)
        b: R.Tensor((2, 3), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
        c: R.Tensor((2, 3), "float32", "llvm:1") = R.exp(b)
        return c

    check(Before, Expected)


def test_a_value_used_by_transfers_only_stays_free():
    """A transfer places its result, not its operand; one to where the value already is goes away."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2, 3), "float32")):
        a = R.to_vdevice(x, "llvm:1")
        b = R.to_vdevice(x, "llvm:0")
        return (a, b)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2, 3), "float32", "llvm:0")):
        a: R.Tensor((2, 3), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        b: R.Tensor((2, 3), "float32", "llvm:0") = x
        return (a, b)

    check(Before, Expected)


def test_chain_of_hints():
    @ir_module("llvm", "llvm:1", "c:2")
    def Before(x: R.Tensor((2, 3), "float32")):
        a = R.hint_on_device(x, tvm.cpu(1))
        b = R.hint_on_device(a, tvm.cpu(2))
        c = R.hint_on_device(b, tvm.cpu(2))
        return c

    @ir_module("llvm", "llvm:1", "c:2")
    def Expected(x: R.Tensor((2, 3), "float32", "llvm:1")):
        a: R.Tensor((2, 3), "float32", "llvm:1") = x
        b: R.Tensor((2, 3), "float32", "c") = R.to_vdevice(a, "c")
        c: R.Tensor((2, 3), "float32", "c") = b
        return c

    check(Before, Expected)


def test_nested_tuples_leaf_by_leaf():
    @ir_module("llvm", "llvm:1")
    def Before(p: R.Tuple(R.Tensor((2,), "float32"), R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Shape(["n"])))):
        q = p[1]
        a = q[0]
        b = p[0]
        t = ((a, b), R.exp(b))
        return (t, p)

    @ir_module("llvm", "llvm:1")
    def Expected(
        p: R.Tuple(R.Tensor((2,), "float32", "llvm:0"), R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Shape(["n"]))),
    ):
        n = T.int64()
        q: R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Shape([n])) = p[1]
        a: R.Tensor((2,), "float32", "llvm:1") = q[0]
        b: R.Tensor((2,), "float32", "llvm:0") = p[0]
        gv: R.Tensor((2,), "float32", "llvm:0") = R.exp(b)
        t: R.Tuple(
            R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Tensor((2,), "float32", "llvm:0")),
            R.Tensor((2,), "float32", "llvm:0"),
        ) = ((a, b), gv)
        return (t, p)

    check(Before, Expected)


def test_results_on_several_devices():
    """A return annotation places each field of the tuple, and what it is made from."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")) -> R.Tuple(
        R.Tensor((2,), "float32", "llvm:1"), R.Tensor((2,), "float32")
    ):
        a = R.exp(x)
        b = R.exp(y)
        return (a, b)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:1"), y: R.Tensor((2,), "float32", "llvm:0")) -> R.Tuple(
        R.Tensor((2,), "float32", "llvm:1"), R.Tensor((2,), "float32", "llvm:0")
    ):
        a: R.Tensor((2,), "float32", "llvm:1") = R.exp(x)
        b: R.Tensor((2,), "float32", "llvm:0") = R.exp(y)
        return (a, b)

    check(Before, Expected)


def test_tuple_of_results():
    """split makes all its results on one device."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((4,), "float32")):
        s = R.split(x, 2)
        a = s[1]
        b = R.hint_on_device(a, tvm.cpu(1))
        return (b, s)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((4,), "float32", "llvm:1")):
        s: R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Tensor((2,), "float32", "llvm:1")) = R.split(x, 2)
        a: R.Tensor((2,), "float32", "llvm:1") = s[1]
        b: R.Tensor((2,), "float32", "llvm:1") = a
        return (b, s)

    check(Before, Expected)


def test_if_ties_branches_and_result_but_not_its_condition():
    """cpu(1) is the host, the last CPU vdevice; the condition is read there."""

    @ir_module("llvm", "llvm:1")
    def Before(c: R.Tensor((), "bool", "llvm:0"), x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        if c:
            a = R.exp(x)
        else:
            a = R.tanh(y)
        b = R.to_vdevice(a, "llvm:0")
        d = R.hint_on_device(a, tvm.cpu(1))
        return (b, d)

    @ir_module("llvm", "llvm:1")
    def Expected(
        c: R.Tensor((), "bool", "llvm:0"),
        x: R.Tensor((2,), "float32", "llvm:1"),
        y: R.Tensor((2,), "float32", "llvm:1"),
    ):
        c1: R.Tensor((), "bool", "llvm:1") = R.to_vdevice(c, "llvm:1")
        if c1:
            a1: R.Tensor((2,), "float32", "llvm:1") = R.exp(x)
            a: R.Tensor((2,), "float32", "llvm:1") = a1
        else:
            a2: R.Tensor((2,), "float32", "llvm:1") = R.tanh(y)
            a: R.Tensor((2,), "float32", "llvm:1") = a2
        b: R.Tensor((2,), "float32", "llvm:0") = R.to_vdevice(a, "llvm:0")
        d: R.Tensor((2,), "float32", "llvm:1") = a
        return (b, d)

    check(Before, Expected)


def test_match_cast():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor(("m",), "float32"), o: R.Object, p: R.Object):
        n = T.int64()
        a = R.match_cast(x, R.Tensor((n,), "float32", "llvm:1"))
        b = R.match_cast(o, R.Tensor((n,), "float32"))
        d = R.add(a, b)
        e = R.match_cast(p, R.Tensor(ndim=2))
        return (d, e)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor(("m",), "float32", "llvm:1"), o: R.Object, p: R.Object):
        n = T.int64()
        a = R.match_cast(x, R.Tensor((n,), "float32", "llvm:1"))
        b = R.match_cast(o, R.Tensor((n,), "float32", "llvm:1"))
        d: R.Tensor((n,), "float32", "llvm:1") = R.add(a, b)
        e = R.match_cast(p, R.Tensor(ndim=2, vdevice="llvm:0"))
        return (d, e)

    check(Before, Expected)


def test_match_cast_of_a_packed_result_is_on_its_call():
    """An R.Object result lacks a device; once it is known to be a tensor, it is where the call's tensors are."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32", "llvm:1")):
        o = R.call_pure_packed("make", x, ty_args=R.Object)
        t = R.match_cast(o, R.Tensor((2,), "float32"))
        return t

    after = RealizeVDevice()(Before)
    verify_placement(after)
    assert after["main"].ret_ty.vdevice.vdevice_id == 1


def test_call_tir_and_its_kin():
    @ir_module("llvm", "llvm:1")
    class Before:
        @T.prim_func(s_tir=True)
        def copy(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("copy"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v]

        @T.prim_func(s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("increment"):
                    v = T.axis.spatial(4, i)
                    a[v] = a[v] + T.float32(1)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32")):
            cls = Before
            a = R.call_tir(cls.copy, (x,), out_ty=R.Tensor((4,), "float32"))
            b = R.call_tir_inplace(cls.increment, (a,), inplace_indices=[0], out_ty=R.Tensor((4,), "float32"))
            d = R.call_dps_packed("dps", (b, b), out_ty=[R.Tensor((4,), "float32"), R.Tensor((4,), "float32")])
            e = d[0]
            f = R.call_pure_packed("pure", e, ty_args=R.Tensor((4,), "float32"))
            g = R.call_packed("impure", f, ty_args=R.Tensor((4,), "float32"))
            h = R.call_inplace_packed("inplace", g, inplace_indices=[0], ty_args=R.Tensor((4,), "float32"))
            i = R.call_builtin_with_ctx("builtin", (h,), ty_args=R.Tensor((4,), "float32"))
            j = R.call_tir_with_grad(cls.copy, (i,), out_ty=R.Tensor((4,), "float32"), te_grad_name="grad")
            k = R.hint_on_device(j, tvm.cpu(1))
            return k

    @ir_module("llvm", "llvm:1")
    class Expected:
        @T.prim_func(s_tir=True)
        def copy(a: T.Buffer((4,), "float32"), b: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("copy"):
                    v = T.axis.spatial(4, i)
                    b[v] = a[v]

        @T.prim_func(s_tir=True)
        def increment(a: T.Buffer((4,), "float32")):
            for i in range(4):
                with T.sblock("increment"):
                    v = T.axis.spatial(4, i)
                    a[v] = a[v] + T.float32(1)

        @R.function(pure=False)
        def main(x: R.Tensor((4,), "float32", "llvm:1")):
            cls = Expected
            a = R.call_tir(cls.copy, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
            b = R.call_tir_inplace(cls.increment, (a,), inplace_indices=[0], out_ty=R.Tensor((4,), "float32", "llvm:1"))
            d = R.call_dps_packed(
                "dps", (b, b), out_ty=[R.Tensor((4,), "float32", "llvm:1"), R.Tensor((4,), "float32", "llvm:1")]
            )
            e = d[0]
            f = R.call_pure_packed("pure", e, ty_args=R.Tensor((4,), "float32", "llvm:1"))
            g = R.call_packed("impure", f, ty_args=R.Tensor((4,), "float32", "llvm:1"))
            h = R.call_inplace_packed("inplace", g, inplace_indices=[0], ty_args=R.Tensor((4,), "float32", "llvm:1"))
            i = R.call_builtin_with_ctx("builtin", (h,), ty_args=R.Tensor((4,), "float32", "llvm:1"))
            j = R.call_tir_with_grad(cls.copy, (i,), out_ty=R.Tensor((4,), "float32", "llvm:1"), te_grad_name="grad")
            k: R.Tensor((4,), "float32", "llvm:1") = j
            return k

    check(Before, Expected)


def test_out_ty_places_the_op():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((4,), "float32")):
        a = R.call_dps_packed("f", (x,), out_ty=[R.Tensor((4,), "float32"), R.Tensor((4,), "float32", "llvm:1")])
        return a

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((4,), "float32", "llvm:1")):
        a = R.call_dps_packed(
            "f", (x,), out_ty=[R.Tensor((4,), "float32", "llvm:1"), R.Tensor((4,), "float32", "llvm:1")]
        )
        return a

    check(Before, Expected)


def test_constants_live_where_they_are_used():
    """A bound constant goes with its first use; elsewhere it is a constant of its own. Never a conflict."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((), "float32", "llvm:0"), y: R.Tensor((), "float32", "llvm:1")):
        c = R.const(2.0)
        a = R.add(y, c)
        b = R.add(x, c)
        t = (c, x)
        d = t[0]
        e = R.add(x, d)
        return (a, b, e, c)

    after = RealizeVDevice()(Before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    bindings = after["main"].body.blocks[0].bindings
    where = {b.var.name: int(b.var.ty.vdevice.vdevice_id) for b in bindings if b.var.name != "t"}
    assert where == {"c": 1, "a": 1, "b": 0, "d": 0, "e": 0}
    first, other = bindings[1].value.args[1], bindings[2].value.args[1]
    assert isinstance(first, relax.Var) and first.name == "c"
    assert isinstance(other, tvm.ir.GenericConst) and other.ty.vdevice.vdevice_id == 0
    assert_structural_equal(RealizeVDevice()(after), after)


def test_one_constant_object_per_device():
    """Uses on one device keep sharing it, so that it is uploaded once."""
    devices = [VDevice("llvm"), VDevice("llvm", 1)]
    ty = [relax.TensorType([], "float32", device) for device in devices]
    constant = relax.const(1.0)
    x, y = relax.Var("x", ty[0]), relax.Var("y", ty[1])
    builder = relax.BlockBuilder()
    with builder.function("main", [x, y]):
        sums = [builder.emit(relax.op.add(var, constant)) for var in (x, y, x, y)]
        builder.emit_func_output(relax.Tuple(sums))
    mod = builder.get()
    mod.update_global_info("vdevice", devices)
    after = RealizeVDevice()(mod)
    used = [binding.value.args[1] for binding in after["main"].body.blocks[0].bindings[:4]]
    assert used[0].same_as(used[2]) and used[1].same_as(used[3]) and not used[0].same_as(used[1])
    assert [int(constant.ty.vdevice.vdevice_id) for constant in used] == [0, 1, 0, 1]


def test_hinted_constants_are_made_on_the_device():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((), "float32", "llvm:0")):
        a = R.hint_on_device(R.const(1.0), tvm.cpu(1))
        b = R.to_vdevice(R.const(1.0), "llvm:0")
        d = R.add(x, b)
        return (a, d)

    after = RealizeVDevice()(Before)
    verify_placement(after)
    assert not {"relax.to_vdevice", "relax.hint_on_device"} & set(ops_of(after))


def test_ops_without_operands_go_with_their_use():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor(("n",), "float32", "llvm:1")):
        n = T.int64()
        z = R.zeros(R.shape([n]), "float32")
        o = R.full(R.shape([n]), R.const(1.0), "float32")
        r = R.arange(0, n, 1, "float32")
        a = R.add(z, x)
        b = R.add(o, r)
        return (a, b)

    after = RealizeVDevice()(Before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    where = {b.var.name: int(b.var.ty.vdevice.vdevice_id) for b in after["main"].body.blocks[0].bindings}
    assert where == {"z": 1, "o": 0, "r": 0, "a": 1, "b": 0}


def test_partly_unknown_types_keep_their_known_fields():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor, y: R.Tensor(ndim=3, dtype="float32"), s: R.Shape(ndim=2), i: R.Prim("int64")):
        a = R.exp(x)
        b = R.hint_on_device(a, tvm.cpu(1))
        t = (y, s, i, b)
        return t

    after = RealizeVDevice()(Before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    x, y = (param.ty for param in after["main"].params[:2])
    assert (x.ndim, x.dtype, x.vdevice.vdevice_id) == (-1, None, 1)
    assert (y.ndim, str(y.dtype), y.vdevice.vdevice_id, y.shape) == (3, "float32", 0, None)


def test_names_spans_attributes_and_purity_stay():
    @ir_module("llvm", "llvm:1")
    class Before:
        I.module_attrs({"kept": 1})

        @R.function(pure=False)
        def main(x: R.Tensor((2,), "float32", "llvm:1")):
            R.func_attr({"num_input": 1})
            with R.dataflow():
                inside = R.exp(x)
                outside = R.exp(inside)
                R.output(outside)
            return outside

    after = RealizeVDevice()(Before)
    func, old = after["main"], Before["main"]
    assert after.attrs["kept"] == 1 and func.attrs["num_input"] == 1 and func.attrs["global_symbol"] == "main"
    assert not func.is_pure
    for new, was in zip(func.body.blocks[0].bindings, old.body.blocks[0].bindings, strict=True):
        assert (new.var.name, type(new.var)) == (was.var.name, type(was.var))
        assert new.value.span.same_as(was.value.span) and new.var.ty.vdevice.vdevice_id == 1


def test_equal_vdevices_become_the_modules_own_object():
    """Types that name a copy of a vdevice (TVM compares by identity in places) name the list's afterwards."""
    own = [VDevice("llvm"), VDevice("llvm", 1)]
    x = relax.Var("x", relax.TensorType([2], "float32", VDevice("llvm", 1)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.to_vdevice(x, VDevice("llvm", 0))))
    mod = builder.get()
    mod.update_global_info("vdevice", own)
    with pytest.raises(Exception, match="own vdevice object"):
        verify_placement(mod)
    after = RealizeVDevice()(mod)
    verify_placement(after)
    call = after["main"].body.blocks[0].bindings[0].value
    assert tvm.relax.VDevice.__chandle__(call.attrs.dst_vdevice) == own[0].__chandle__()


def test_a_module_without_vdevices_is_left_alone():
    @ir_module()
    def Before(x: R.Tensor((2,), "float32")):
        return R.exp(x)

    assert RealizeVDevice()(Before).same_as(Before)


@pytest.mark.parametrize("depth", [400])
def test_deeply_nested_ifs(depth):
    """The walk does not use Python's stack. (TVM's own C++ checks do use theirs, so this builds types by hand.)"""
    devices = [VDevice("llvm"), VDevice("llvm", 1)]
    tensor, flag = relax.TensorType([2], "float32"), relax.TensorType([], "bool", devices[0])
    x, c = relax.Var("x", relax.TensorType([2], "float32", devices[1])), relax.Var("c", flag)

    def sequence(bindings, result):
        seq = relax.SeqExpr([relax.BindingBlock(bindings)] if bindings else [], result)
        relax.expr._update_type(seq, result.ty)
        return seq

    body = sequence([], x)
    for index in range(depth):
        var = relax.Var(f"v{index}", tensor)
        value = relax.If(c, body, sequence([], x))
        relax.expr._update_type(value, tensor)
        body = sequence([relax.VarBinding(var, value)], var)
    mod = tvm.IRModule({"main": relax.Function([x, c], body, tensor)})
    mod.update_global_info("vdevice", devices)
    after = RealizeVDevice()(mod)
    verify_placement(after)
    assert after["main"].ret_ty.vdevice.vdevice_id == 1


def test_work_is_linear_in_bindings():
    """Counted in Python calls, not in time: a chain of twice the length does twice the work."""

    def calls(length: int) -> int:
        x = relax.Var("x", relax.TensorType([2], "float32"))
        builder = relax.BlockBuilder()
        with builder.function("main", [x]):
            with builder.dataflow():
                value = x
                for _ in range(length):
                    value = builder.emit(relax.op.add(value, x))
                output = builder.emit_output(value)
            builder.emit_func_output(output)
        mod = builder.get()
        mod.update_global_info("vdevice", [VDevice("llvm"), VDevice("llvm", 1)])
        count = 0

        def profile(_frame: object, event: str, _arg: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            realize_vdevice(mod, insert_copies=True)
        finally:
            sys.setprofile(None)
        return count

    short, long = calls(200), calls(400)
    assert long <= 2 * short


def test_types_that_another_pass_left_behind():
    """A sequence keeps the type it was made with; it follows its value."""
    here, free = relax.TensorType([2], "float32", device := VDevice("llvm")), relax.TensorType([2], "float32")
    x = relax.Var("x", here)
    seq = relax.SeqExpr([], relax.Tuple([x, x]))
    relax.expr._update_type(seq, tvm.ir.TupleType([free, free]))
    mod = tvm.IRModule({"main": relax.Function([x], seq, tvm.ir.TupleType([here, here]))})
    mod.update_global_info("vdevice", [device])
    with pytest.raises(PlacementError, match="return of function 'main': a tensor lacks a device"):
        verify_placement(mod)
    verify_placement(RealizeVDevice()(mod))
