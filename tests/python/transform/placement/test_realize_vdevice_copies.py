"""RealizeVDevice(insert_copies=True): where devices meet, one transfer per value and destination."""

import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module, ops_of
from relax_hetero import VDevice
from relax_hetero.transform import RealizeVDevice, verify_placement


def place(before: tvm.IRModule) -> tvm.IRModule:
    after = RealizeVDevice(insert_copies=True)(before)
    verify_placement(after)
    relax.analysis.well_formed(after)
    assert_structural_equal(RealizeVDevice()(after), after)
    assert_structural_equal(RealizeVDevice(insert_copies=True)(after), after)
    return after


def check(before: tvm.IRModule, expected: tvm.IRModule) -> None:
    assert_structural_equal(place(before), expected)


def test_one_transfer_reused():
    """The op takes its first placed operand's device; x is copied once, before its first use there."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        with R.dataflow():
            a = R.hint_on_device(x, tvm.cpu(0))
            b = R.hint_on_device(y, tvm.cpu(1))
            c = R.add(b, a)
            d = R.multiply(c, a)
            e = R.add(a, d)
            R.output(d, e)
        return (d, e)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
        with R.dataflow():
            a: R.Tensor((2,), "float32", "llvm:0") = x
            b: R.Tensor((2,), "float32", "llvm:1") = y
            a1: R.Tensor((2,), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
            c: R.Tensor((2,), "float32", "llvm:1") = R.add(b, a1)
            d: R.Tensor((2,), "float32", "llvm:1") = R.multiply(c, a1)
            d0: R.Tensor((2,), "float32", "llvm:0") = R.to_vdevice(d, "llvm:0")
            e: R.Tensor((2,), "float32", "llvm:0") = R.add(a, d0)
            R.output(d, e)
        return (d, e)

    check(Before, Expected)


def test_result_comes_before_operands():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:0")):
        a = R.call_dps_packed("f", (x, y), out_ty=R.Tensor((2,), "float32", "llvm:1"))
        return a

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:0")):
        x1: R.Tensor((2,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        y1: R.Tensor((2,), "float32", "llvm:1") = R.to_vdevice(y, "llvm:1")
        a = R.call_dps_packed("f", (x1, y1), out_ty=R.Tensor((2,), "float32", "llvm:1"))
        return a

    check(Before, Expected)


def test_a_free_value_goes_with_its_first_use():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32", "llvm:0")):
        a = R.exp(x)
        b: R.Tensor((2,), "float32", "llvm:1") = R.tanh(a)
        c: R.Tensor((2,), "float32", "llvm:0") = R.add(a, y)
        return (b, c)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:1"), y: R.Tensor((2,), "float32", "llvm:0")):
        a: R.Tensor((2,), "float32", "llvm:1") = R.exp(x)
        b: R.Tensor((2,), "float32", "llvm:1") = R.tanh(a)
        a0: R.Tensor((2,), "float32", "llvm:0") = R.to_vdevice(a, "llvm:0")
        c: R.Tensor((2,), "float32", "llvm:0") = R.add(a0, y)
        return (b, c)

    check(Before, Expected)


def test_both_branches_share_a_transfer_in_front_of_the_if():
    @ir_module("llvm", "llvm:1")
    def Before(c: R.Tensor((), "bool", "llvm:1"), x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32")):
        a = R.hint_on_device(x, tvm.cpu(0))
        b = R.hint_on_device(y, tvm.cpu(1))
        if c:
            r = R.concat((b, a))
        else:
            r = R.concat((b, a))
        return r

    @ir_module("llvm", "llvm:1")
    def Expected(
        c: R.Tensor((), "bool", "llvm:1"),
        x: R.Tensor((2,), "float32", "llvm:0"),
        y: R.Tensor((2,), "float32", "llvm:1"),
    ):
        a: R.Tensor((2,), "float32", "llvm:0") = x
        b: R.Tensor((2,), "float32", "llvm:1") = y
        x1: R.Tensor((2,), "float32", "llvm:1") = R.to_vdevice(a, "llvm:1")
        if c:
            r1: R.Tensor((4,), "float32", "llvm:1") = R.concat((b, x1))
            r: R.Tensor((4,), "float32", "llvm:1") = r1
        else:
            r2: R.Tensor((4,), "float32", "llvm:1") = R.concat((b, x1))
            r: R.Tensor((4,), "float32", "llvm:1") = r2
        return r

    check(Before, Expected)


def test_a_transfer_that_one_branch_needs_stays_in_it():
    """So does what brings a branch's result to where the other's is."""

    @ir_module("llvm", "llvm:1")
    def Before(
        c: R.Tensor((), "bool", "llvm:1"),
        x: R.Tensor((2,), "float32", "llvm:0"),
        y: R.Tensor((2,), "float32", "llvm:1"),
    ) -> R.Tensor((2,), "float32"):
        if c:
            r: R.Tensor((2,), "float32") = y
        else:
            r: R.Tensor((2,), "float32") = x
        return r

    after = place(Before)
    branches = after["main"].body.blocks[-1].bindings[-1].value
    copies = [ops_of(branch).count("relax.to_vdevice") for branch in (branches.true_branch, branches.false_branch)]
    assert copies == [0, 1]
    assert after["main"].ret_ty.vdevice.vdevice_id == 1


def test_tuples_are_taken_apart():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(
            p: R.Tuple(R.Tensor((2,), "float32"), R.Tuple(R.Tensor((2,), "float32"), R.Shape(["n"]))),
        ) -> R.Tensor((2,), "float32"):
            q = p[1]
            r = q[0]
            b: R.Tensor((2,), "float32", "llvm:1") = R.exp(r)
            return b

        @R.function
        def main(
            t: R.Tuple(R.Tensor((2,), "float32"), R.Tuple(R.Tensor((2,), "float32"), R.Shape(["n"]))),
        ) -> R.Tensor((2,), "float32"):
            cls = Before
            q = t[1]
            p = q[0]
            a: R.Tensor((2,), "float32", "llvm:0") = R.tanh(p)
            r: R.Tensor((2,), "float32", "llvm:1") = cls.f(t)
            s = R.to_vdevice(a, "llvm:1")
            u = R.add(r, s)
            return u

    after = place(Before)
    assert ops_of(after["main"]).count("relax.to_vdevice") == 2
    assert [int(ty.vdevice.vdevice_id) for ty in (after["main"].params[0].ty.fields[0], after["main"].ret_ty)] == [0, 1]


def test_results_made_on_one_device_and_wanted_on_two():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((4,), "float32")):
        s: R.Tuple(R.Tensor((2,), "float32", "llvm:1"), R.Tensor((2,), "float32", "llvm:0")) = R.split(x, 2)
        return s

    after = place(Before)
    split = after["main"].body.blocks[0].bindings[0].value
    assert [int(field.vdevice.vdevice_id) for field in split.ty.fields] == [1, 1]
    assert [int(field.vdevice.vdevice_id) for field in after["main"].ret_ty.fields] == [1, 0]
    assert ops_of(after).count("relax.to_vdevice") == 1


def test_transfers_of_the_program_are_reused():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
        a = R.to_vdevice(x, "llvm:1")
        b = R.concat((y, x))
        c = R.to_vdevice(x, "llvm:1")
        return (a, b, c)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
        a: R.Tensor((2,), "float32", "llvm:1") = R.to_vdevice(x, "llvm:1")
        b: R.Tensor((4,), "float32", "llvm:1") = R.concat((y, a))
        c: R.Tensor((2,), "float32", "llvm:1") = a
        return (a, b, c)

    check(Before, Expected)


def test_transfers_are_not_reused_after_something_may_have_written():
    @ir_module("llvm", "llvm:1", pure=False)
    def Before(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
        a = R.concat((y, x))
        _ = R.call_packed("increment", x)
        b = R.concat((y, x))
        return (a, b)

    assert ops_of(place(Before)).count("relax.to_vdevice") == 2


def test_a_dataflow_variable_is_copied_inside_its_block():
    """And a copy that is needed outside is an output of the block."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32", "llvm:0"), y: R.Tensor((2,), "float32", "llvm:1")):
        with R.dataflow():
            a = R.exp(x)
            b = R.concat((y, a))
            d = R.concat((y, x))
            R.output(b, d)
        e = R.concat((y, x))
        return (b, d, e)

    after = place(Before)
    bindings = after["main"].body.blocks[0].bindings
    kinds = {binding.var.name: isinstance(binding.var, relax.DataflowVar) for binding in bindings}
    assert kinds == {"a": True, "a_llvm_1": True, "b": False, "x_llvm_1": False, "d": False}
    assert ops_of(after).count("relax.to_vdevice") == 2


def test_a_local_function_cannot_see_dataflow_variables():
    """A copy that a function inside a dataflow block uses is not a dataflow variable."""
    devices = [VDevice("llvm"), VDevice("llvm", 1)]
    here, there = (relax.TensorType([2], "float32", device) for device in devices)
    x, y, z = relax.Var("x", here), relax.Var("y", there), relax.Var("z", there)
    free = relax.TensorType([4], "float32")

    def concat(name, var, kind=relax.DataflowVar):
        call = relax.op.concat([var, x])
        value = relax.Call(call.op, call.args, call.attrs, ret_ty=free)
        return relax.VarBinding(kind(name, free), value)

    inside = concat("inside", z, relax.Var)
    inner = relax.Function([z], sequence(relax.BindingBlock([inside]), inside.var), free)
    f, after = relax.DataflowVar("f", inner.ty), concat("after", y, relax.Var)
    body = sequence(relax.DataflowBlock([relax.VarBinding(f, inner), after]), after.var)
    mod = tvm.IRModule({"main": relax.Function([x, y], body, free)})
    mod.update_global_info("vdevice", devices)
    bindings = place(mod)["main"].body.blocks[0].bindings
    assert [(b.var.name, isinstance(b.var, relax.DataflowVar)) for b in bindings] == [
        ("x_llvm_1", False),
        ("f", True),
        ("after", False),
    ]


def sequence(block: relax.BindingBlock, result: relax.Var) -> relax.SeqExpr:
    seq = relax.SeqExpr([block], result)
    relax.expr._update_type(seq, result.ty)
    return seq


def test_objects_have_no_device():
    """They are made and used next to tensors on any device; one that turns out to be a tensor is where it was made."""

    @ir_module("llvm", "llvm:1", pure=False)
    def Before(x: R.Tensor((2,), "float32", "llvm:1"), y: R.Tensor((2,), "float32", "llvm:0")):
        cache = R.call_packed("cache.create", x, ty_args=R.Object)
        a = R.call_packed("cache.store", cache, y, ty_args=R.Object)
        o = R.call_packed("cache.load", cache, x, ty_args=R.Object)
        t = R.match_cast(o, R.Tensor((2,), "float32"))
        u = R.match_cast(o, R.Tensor((2,), "float32", "llvm:0"))
        b = R.concat((y, t))
        return (a, b, u)

    after = place(Before)
    types = {b.var.name: b.var.ty for block in after["main"].body.blocks for b in block.bindings}
    where = {name: int(ty.vdevice.vdevice_id) for name, ty in types.items() if isinstance(ty, relax.TensorType)}
    assert where == {"t": 1, "u_made": 1, "u": 0, "t_llvm_0": 0, "b": 0}


def test_constants_are_not_transferred():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((), "float32", "llvm:1")):
        c: R.Tensor((), "float32", "llvm:0") = R.const(2.0)
        a: R.Tensor((), "float32", "llvm:1") = R.add(x, c)
        return (a, c)

    after = place(Before)
    assert "relax.to_vdevice" not in ops_of(after)
    assert [int(field.vdevice.vdevice_id) for field in after["main"].ret_ty.fields] == [1, 0]


def test_callee_on_another_device():
    @ir_module("llvm", "llvm:1")
    class Before:
        @R.function
        def f(z: R.Tensor((2,), "float32")):
            a: R.Tensor((2,), "float32", "llvm:1") = R.exp(z)
            return a

        @R.function
        def main(x: R.Tensor((2,), "float32")):
            cls = Before
            a = R.hint_on_device(x, tvm.cpu(0))
            y = cls.f(a)
            z = R.concat((a, y))
            w = R.hint_on_device(z, tvm.cpu(0))
            return w

    after = place(Before)
    assert after["f"].params[0].ty.vdevice.vdevice_id == 1
    assert ops_of(after["main"]).count("relax.to_vdevice") == 2


def test_hints_that_disagree():
    """The first counts; the other becomes a transfer."""

    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32")):
        a = R.hint_on_device(x, tvm.cpu(1))
        b = R.hint_on_device(x, tvm.cpu(0))
        return (a, b)

    @ir_module("llvm", "llvm:1")
    def Expected(x: R.Tensor((2,), "float32", "llvm:1")):
        a: R.Tensor((2,), "float32", "llvm:1") = x
        b: R.Tensor((2,), "float32", "llvm:0") = R.to_vdevice(x, "llvm:0")
        return (a, b)

    check(Before, Expected)


def test_nothing_is_inserted_where_nothing_meets():
    @ir_module("llvm", "llvm:1")
    def Before(x: R.Tensor((2,), "float32"), y: R.Tensor((2,), "float32", "llvm:1")):
        a = R.add(x, y)
        b = R.exp(a)
        return b

    assert_structural_equal(place(Before), RealizeVDevice()(Before))
