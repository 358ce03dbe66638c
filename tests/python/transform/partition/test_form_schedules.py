"""FormSchedules: the steps of functions that use several devices, before and after."""

import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.transform.partition.form_schedules import FormSchedules, schedules_of
from transform.outlines import BUMP, CALLEE, D0, D1, FIRST, ONE, SECOND, TWO, V2, V4, Kernels, with_main


def after(main, **functions):
    """The module that the pass makes of some public functions, which it leaves as they are."""
    mod = with_main(main.with_attr("global_symbol", "main"))
    for name, func in functions.items():
        mod[name] = relax.utils.copy_with_new_vars(func).with_attr("global_symbol", name)
    result = FormSchedules()(mod)
    assert FormSchedules()(result).same_as(result)
    for gv, func in mod.functions.items():
        assert_structural_equal(result[gv.name_hint], func)
    relax.analysis.well_formed(result)  # raises
    return result


def schedule(mod, function="main"):
    """The schedule of a function, None where it has none."""
    schedules = {schedule.function: schedule for schedule in schedules_of(mod)}
    return schedules.get(function)


def steps(mod, function="main"):
    """A schedule as text: `device: function [reads] -> [makes]`, with `to` for transfers."""
    lines = []
    for step in schedule(mod, function).steps:
        what = step.function or f"to from {step.source}"
        sizes = f" sizes {' '.join(step.sizes)}" if step.sizes else ""
        lines.append(f"{' '.join(map(str, step.devices))}: {what} {[*step.reads]} -> {[*step.makes]}{sizes}")
    return [*lines, schedule(mod, function).results]


def test_work_on_each_side_of_a_transfer_is_a_step():
    @ir_module(V4, (V2, 1))
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def one(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def two(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @R.function(private=True)
        def main_step(x: R.Tensor((4,), "float32", "llvm:0")) -> R.Tensor((4,), "float32", "llvm:0"):
            cls = Expected
            with R.dataflow():
                a = R.call_tir(cls.one, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b = R.call_tir(cls.two, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                R.output(b)
            return b

        @R.function(private=True)
        def main_step_1(
            t: R.Tensor((4,), "float32", "llvm:1"),
        ) -> R.Tuple(R.Tensor((4,), "float32", "llvm:1"), R.Tensor((2, 2), "float32", "llvm:1")):
            cls = Expected
            with R.dataflow():
                c = R.call_tir(cls.one, (t,), out_ty=R.Tensor((4,), "float32", "llvm:1"))
                d: R.Tensor((2, 2), "float32", "llvm:1") = R.reshape(c, R.shape([2, 2]))
                R.output(c, d)
            return (c, d)

    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(TWO, (a,), out_ty=FIRST)
            t = R.to_vdevice(b, D1)
            c = R.call_tir(ONE, (t,), out_ty=SECOND)
            d = R.reshape(c, R.shape([2, 2]))
            gv = (c, (d, x), d)
            R.output(gv)
        return gv

    mod = after(main)
    assert schedule(mod).overlaps() is False
    for name in ("main_step", "main_step_1"):
        assert_structural_equal(mod[name], Expected[name], map_free_vars=True)
    assert steps(mod) == [
        "0: main_step [0] -> [1]",
        "1: to from 0 [1] -> [2]",
        "1: main_step_1 [2] -> [3, 4]",
        (3, (4, 0), 4),
    ]


def test_sizes_that_tensors_do_not_give_come_as_a_shape():
    @R.function(check_well_formed=False)
    def main(x: R.Tensor(("n",), "float32", D0), s: R.Shape(["m"])):
        n = T.int64()
        m = T.int64()
        with R.dataflow():
            a = R.call_dps_packed("f", (x,), out_ty=R.Tensor((n * m,), "float32", D0))
            t = R.to_vdevice(a, D1)
            b = R.reshape(t, (m, n))
            c = R.call_dps_packed("f", (b, m), out_ty=R.Tensor((m,), "float32", D1))
            R.output(c)
        return c

    mod = after(main)
    assert steps(mod) == [
        "0: main_step [0] -> [2] sizes m",
        "1: to from 0 [2] -> [3]",
        "1: main_step_1 [3] -> [4] sizes m n",
        4,
    ]


def test_results_that_no_work_makes():
    @R.function(check_well_formed=False)
    def main(x: FIRST, p: R.Tuple(FIRST, R.Tuple(SECOND))):
        with R.dataflow():
            inner = p[1]
            t = R.to_vdevice(x, D1)
            flat = R.reshape(x, R.shape([4]))
            a = R.call_tir(ONE, (t,), out_ty=SECOND)
            b = R.call_tir(ONE, (x,), out_ty=FIRST)
            gv = (x, p, inner, flat, t, R.const(1.0, "float32"), a, b)
            R.output(gv)
        return gv

    mod = after(main)
    text = steps(mod)
    assert text[-1] == (0, 1, 5, 6, 2, 7, 3, 4)
    assert text[:3] == ["1: to from 0 [0] -> [2]", "1: main_step [2] -> [3]", "0: main_step_1 [0] -> [4]"]
    assert [line.split(" ", 2)[2] for line in text[3:-1]] == ["[1] -> [5]", "[0] -> [6]", "[] -> [7]"]
    assert schedule(mod).overlaps()
    assert not schedule(mod).overlaps({0: "cpu", 1: "cpu"})


def test_branches_and_calls_hold_the_devices_that_they_use():
    @R.function(check_well_formed=False)
    def main(x: FIRST, choice: R.Tensor((), "bool", D1)):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        if choice:
            s = R.to_vdevice(a, D1)
            b = R.call_tir(ONE, (s,), out_ty=SECOND)
            c = R.to_vdevice(b, D0)
        else:
            c = a
        d = R.to_vdevice(c, D1)
        e: FIRST = CALLEE(c)
        f = R.call_dps_packed("f", (d,), out_ty=SECOND)
        return (e, f)

    assert steps(after(main)) == [
        "0: main_step [0] -> [2]",
        "0 1: main_step_1 [1, 2] -> [3]",
        "1: to from 0 [3] -> [4]",
        "0: main_step_2 [3] -> [5]",
        "1: main_step_3 [4] -> [6]",
        (5, 6),
    ]


def test_a_function_on_one_device_is_a_step():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        t = R.to_vdevice(x, D1)
        return t

    @R.function(check_well_formed=False)
    def main_step(x: SECOND):
        a = R.call_tir(ONE, (x,), out_ty=SECOND)
        return a

    mod = after(main, main_step=main_step)
    assert steps(mod) == ["1: to from 0 [0] -> [1]", 1]
    assert steps(mod, "main_step") == ["1: main_step [0] -> [1]", 1]


def test_names_do_not_clash():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        t = R.to_vdevice(a, D1)
        return t

    @R.function(check_well_formed=False)
    def main_step(x: SECOND):
        return x

    assert steps(after(main, main_step=main_step))[0] == "0: main_step_1 [0] -> [1]"


def test_unused_work_is_not_a_step():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        t = R.to_vdevice(a, D1)
        b = R.call_tir(ONE, (t,), out_ty=SECOND)
        unused = R.call_tir(TWO, (b,), out_ty=SECOND)
        return a

    assert steps(after(main)) == ["0: main_step [0] -> [1]", 1]


def test_functions_that_overwrite_their_own_values_may_be_cut():
    @R.function(check_well_formed=False)
    def main(x: FIRST, cache: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            t = R.to_vdevice(a, D1)
            b = R.call_tir(ONE, (t,), out_ty=SECOND)
            c = R.call_tir_inplace(BUMP, (cache,), inplace_indices=[0], out_ty=SECOND)
            gv = (b, c)
            R.output(gv)
        return gv

    assert schedule(after(main)) is not None


def test_functions_whose_order_matters_have_none():
    @R.function(check_well_formed=False)
    def reads_what_is_overwritten(x: FIRST, cache: SECOND):
        with R.dataflow():
            t = R.to_vdevice(cache, D0)
            c = R.call_tir_inplace(BUMP, (cache,), inplace_indices=[0], out_ty=SECOND)
            gv = (t, c)
            R.output(gv)
        return gv

    @R.function(check_well_formed=False, pure=False)
    def effects(x: FIRST):
        t = R.to_vdevice(x, D1)
        a = R.call_packed("f", t, ty_args=(SECOND,))
        return a

    @R.function(check_well_formed=False)
    def checks(x: R.Tensor(dtype="float32", ndim=1, vdevice=D0)):
        y = R.match_cast(x, FIRST)
        t = R.to_vdevice(y, D1)
        return t

    for func in (reads_what_is_overwritten, effects, checks):
        assert schedule(after(func)) is None


def test_modules_of_one_device_are_left_alone():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        a = R.call_tir(ONE, (x,), out_ty=FIRST)
        return a

    mod = tvm.IRModule({**dict(Kernels.functions.items()), tvm.ir.GlobalVar("main"): main})
    mod.update_global_info("vdevice", [D0])
    assert FormSchedules()(mod).same_as(mod)
