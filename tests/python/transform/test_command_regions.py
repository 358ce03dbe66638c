"""What joins a command buffer and what ends it: the order of a function's bindings after FormCommandBuffers."""

import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T
from tvm_ffi import structural_walk

from relax_hetero.transform import FormCommandBuffers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}


def outline(mod, function="main"):
    """What a function does, in order: kernels by name, command buffers as `name: kernels`, ops and kinds of others."""
    after = FormCommandBuffers()(mod)
    relax.analysis.well_formed(after)  # raises
    assert FormCommandBuffers()(after).same_as(after)
    return list(_lines(after, after[function].body))


def _lines(mod, body):
    for block in body.blocks:
        for binding in block.bindings:
            value = binding.value
            if isinstance(value, relax.If):
                yield [list(_lines(mod, branch)) for branch in (value.true_branch, value.false_branch)]
            elif isinstance(binding, relax.MatchCast):
                yield "match_cast"
            elif isinstance(value, relax.Call):
                yield _called(mod, value)


def _called(mod, call):
    if isinstance(call.op, tvm.ir.GlobalVar):
        return call.op.name_hint
    if not isinstance(call.op, tvm.ir.Op):
        return call.op.global_symbol
    if call.op.name != "relax.call_tir":
        return call.op.name.removeprefix("relax.")
    name = call.args[0].name_hint
    steps: list[str] = []
    structural_walk(mod[name].body, (tvm.ir.GlobalVar, lambda gv: steps.append(gv.name_hint.split("_")[0])))
    return f"{name}: {' '.join(steps)}" if steps else name.split("_")[0]  # the rest names a device


@I.ir_module
class Kernels:
    """What the modules below are made of."""

    I.module_global_infos({"vdevice": [I.vdevice(V4, 0), I.vdevice(V2, 1)]})

    @T.prim_func(private=True, s_tir=True)
    def one(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def two(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def strided(a: T.handle, b: T.handle):
        A = T.match_buffer(a, (4,), "float32", strides=(T.int64(),))
        B = T.match_buffer(b, (4,), "float32")
        T.evaluate(0)

    @T.prim_func(private=True, s_tir=True)
    def bump(A: T.Buffer((4,), "float32")):
        T.evaluate(0)

    @R.function
    def callee(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
        return x


D0, D1 = Kernels.global_infos["vdevice"]
ONE, TWO, STRIDED, BUMP, CALLEE = map(Kernels.get_global_var, ("one", "two", "strided", "bump", "callee"))
FIRST = R.Tensor((4,), "float32", D0)
SECOND = R.Tensor((4,), "float32", D1)


def with_main(main):
    """The kernels, and a function that calls them."""
    functions = {**dict(Kernels.functions.items()), tvm.ir.GlobalVar("main"): main}
    return tvm.IRModule(functions, global_infos=Kernels.global_infos)


def test_transfers_of_what_a_run_made_end_it():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            t = R.to_vdevice(b, D1)
            c = R.call_tir(ONE, (t,), out_ty=SECOND)
            d = R.call_tir(TWO, (c,), out_ty=SECOND)
            R.output(d)
        return d

    assert outline(with_main(main)) == ["main_commands: one two", "to_vdevice", "main_commands_1: one two"]


def test_transfers_of_other_things_go_before_it():
    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            t = R.to_vdevice(z, D0)
            b = R.call_tir(TWO, (t,), out_ty=FIRST)
            gv = (a, b)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["to_vdevice", "main_commands: one two"]


def test_runs_of_two_devices_grow_side_by_side():
    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            p = R.call_tir(ONE, (z,), out_ty=SECOND)
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            q = R.call_tir(TWO, (p,), out_ty=SECOND)
            gv = (b, q)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one two", "main_commands_1: one two"]


def test_a_transfer_waits_for_no_work_after_it():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            t = R.to_vdevice(b, D1)
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (d, t)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one", "to_vdevice", "main_commands_1: two two"]


def test_what_reads_a_later_value_starts_a_run():
    """The last kernel cannot join the first run: what it reads comes back from a device that waited for that run."""

    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            p = R.call_tir(ONE, (z,), out_ty=SECOND)
            q = R.call_tir(ONE, (p,), out_ty=SECOND)
            t = R.to_vdevice(q, D0)
            c = R.call_tir(TWO, (t,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (b, d)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == [
        "main_commands: one one",
        "main_commands_1: one one",
        "to_vdevice",
        "main_commands_2: two two",
    ]


def test_a_single_kernel_stays_a_call():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            t = R.to_vdevice(a, D1)
            b = R.call_tir(TWO, (t,), out_ty=SECOND)
            R.output(b)
        return b

    mod = with_main(main)
    assert outline(mod) == ["one", "to_vdevice", "two"]
    assert FormCommandBuffers()(mod).same_as(mod)


def test_branches_have_runs_of_their_own():
    @R.function(check_well_formed=False)
    def main(x: FIRST, choice: R.Tensor((), "bool", D1)):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        b = R.call_tir(ONE, (a,), out_ty=FIRST)
        if choice:
            c = R.call_tir(ONE, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            e = d
        else:
            f = R.call_tir(TWO, (a,), out_ty=FIRST)
            e = f
        g = R.call_tir(TWO, (e,), out_ty=FIRST)
        h = R.call_tir(TWO, (g,), out_ty=FIRST)
        return h

    assert outline(with_main(main)) == [
        "main_commands_1: one one",
        [["main_commands: one two"], ["two"]],
        "main_commands_2: two two",
    ]


def test_a_match_cast_of_what_a_run_made_ends_it():
    @R.function(check_well_formed=False)
    def main(x: FIRST, y: R.Tensor("float32", ndim=1)):
        n = T.int64()
        m = T.int64()
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            u = R.match_cast(y, R.Tensor((m,), "float32"))  # may come first
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            v = R.match_cast(b, R.Tensor((n,), "float32", D0))
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (d, u, v)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == [
        "match_cast",
        "main_commands: one one",
        "match_cast",
        "main_commands_1: two two",
    ]


def test_a_view_waits_for_the_sizes_in_it():
    """`m` is named after the run that made what is viewed."""

    @R.function(check_well_formed=False)
    def main(x: FIRST):
        m = T.int64()
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            v = R.match_cast(b, R.Tensor((m,), "float32", D0))
            w: R.Tensor((m, 1), "float32", D0) = R.reshape(a, R.shape([m, 1]))
            gv = (b, w)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one", "match_cast", "reshape"]


def test_types_that_say_less_than_the_call():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a: R.Tensor("float32", ndim=1) = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (x,), out_ty=FIRST)
            c: R.Tensor(ndim=1) = R.call_tir(TWO, (b,), out_ty=FIRST)
            gv = (a, c)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one two"]


def test_functions_with_effects_end_a_run():
    @R.function(pure=False, check_well_formed=False)
    def main(x: FIRST):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        b = R.call_tir(ONE, (a,), out_ty=FIRST)
        _ = R.call_packed("test.effect", x, ty_args=(R.Object,))
        c = R.call_tir(TWO, (x,), out_ty=FIRST)
        d = R.call_tir(TWO, (c,), out_ty=FIRST)
        return (b, d)

    assert outline(with_main(main)) == ["main_commands: one one", "test.effect", "main_commands_1: two two"]


def test_pure_packed_functions_go_before_a_run():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            p = R.call_pure_packed("test.pure", x, ty_args=(FIRST,))
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            gv = (b, p)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["call_pure_packed", "main_commands: one two"]


def test_calls_of_relax_functions_end_a_run():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        b = R.call_tir(ONE, (a,), out_ty=FIRST)
        c: FIRST = CALLEE(x)
        d = R.call_tir(TWO, (b,), out_ty=FIRST)
        e = R.call_tir(TWO, (c,), out_ty=FIRST)
        return (d, e)

    assert outline(with_main(main)) == ["main_commands: one one", "callee", "main_commands_1: two two"]


def test_work_in_place_ends_a_run():
    """What is written was read by the run before it; nothing may move across."""

    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            w = R.call_tir(ONE, (x,), out_ty=FIRST)
            a = R.call_tir(ONE, (w,), out_ty=FIRST)
            b = R.call_tir_inplace(BUMP, (w,), inplace_indices=[0], out_ty=[FIRST])
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (a, d)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one", "call_tir_inplace", "main_commands_1: two two"]


def test_a_kernel_that_needs_checks_ends_a_run():
    """One of strided tensors, which no plain pointer says."""

    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (a,), out_ty=FIRST)
            c = R.call_tir(STRIDED, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (b,), out_ty=FIRST)
            e = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (d, e)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one", "strided", "main_commands_1: two two"]


def test_extents_that_do_not_provably_fit_are_left_to_the_machine():
    """TVM's own check refuses this call when it is made; a pointer would not."""

    @R.function(check_well_formed=False)
    def main(x: R.Tensor(("n",), "float32", D0), y: R.Tensor((4,), "float16", D0), z: R.Tensor((2, 2), "float32", D0)):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (y,), out_ty=FIRST)
            c = R.call_tir(ONE, (z,), out_ty=FIRST)
            gv = (a, b, c)
            R.output(gv)
        return gv

    mod = with_main(main)
    assert FormCommandBuffers()(mod).same_as(mod)


def test_a_module_without_devices_is_left_alone():
    mod = tvm.IRModule(dict(Kernels.functions.items()))
    assert FormCommandBuffers()(mod).same_as(mod)


def test_every_function_has_its_buffers():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            R.output(b)
        return b

    mod = with_main(main)
    mod["other"] = relax.utils.copy_with_new_vars(main).with_attr("global_symbol", "other")
    assert outline(mod) == ["main_commands: one two"]
    assert outline(mod, "other") == ["other_commands: one two"]


def test_local_functions_have_theirs():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        @R.function
        def inner(y: FIRST) -> FIRST:
            a = R.call_tir(ONE, (y,), out_ty=FIRST)
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            return b

        c: FIRST = inner(x)
        return c

    after = FormCommandBuffers()(with_main(main))
    (inner,) = (b.value for b in after["main"].body.blocks[0].bindings if isinstance(b.value, relax.Function))
    assert list(_lines(after, inner.body)) == ["main_commands: one two"]
