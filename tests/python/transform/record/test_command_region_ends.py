"""Ends of command buffers: control flow, effects, work in place, and calls that must be checked as they run."""

from tvm.script import relax as R
from tvm.script import tirx as T

from relax_hetero.transform import FormCommandBuffers
from relax_hetero.transform.record.region_attrs import regions_of
from transform.outlines import (
    BUMP,
    CALLEE,
    D0,
    D1,
    FIRST,
    ONE,
    SECOND,
    STRIDED,
    TWO,
    outline,
    with_main,
)


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


def test_a_match_cast_of_a_runs_result_ends_it():
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
    """`m` becomes known after the run that made the viewed tensor."""

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


def test_work_in_place_joins_if_its_operand_has_no_later_reader():
    @R.function(check_well_formed=False)
    def main(x: FIRST):
        with R.dataflow():
            w = R.call_tir(ONE, (x,), out_ty=FIRST)
            a = R.call_tir(ONE, (w,), out_ty=FIRST)
            b = R.call_tir_inplace(BUMP, (w,), inplace_indices=[0], out_ty=[FIRST])
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            gv = (a, b, c)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["main_commands: one one bump two"]


def test_work_in_place_ends_a_run():
    """A run may not write to an argument, nor to a value that is read later or elsewhere; nothing moves across."""

    @R.function(check_well_formed=False)
    def argument(x: FIRST):
        with R.dataflow():
            w = R.call_tir(ONE, (x,), out_ty=FIRST)
            a = R.call_tir(ONE, (w,), out_ty=FIRST)
            b = R.call_tir_inplace(BUMP, (x,), inplace_indices=[0], out_ty=[FIRST])
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (c,), out_ty=FIRST)
            gv = (a, d)
            R.output(gv)
        return gv

    @R.function(check_well_formed=False)
    def read_later(x: FIRST):
        with R.dataflow():
            w = R.call_tir(ONE, (x,), out_ty=FIRST)
            v: FIRST = R.reshape(w, R.shape([4]))
            a = R.call_tir(ONE, (w,), out_ty=FIRST)
            b = R.call_tir_inplace(BUMP, (w,), inplace_indices=[0], out_ty=[FIRST])
            c = R.call_tir(TWO, (b,), out_ty=FIRST)
            d = R.call_tir(TWO, (v,), out_ty=FIRST)
            gv = (a, c, d)
            R.output(gv)
        return gv

    @R.function(check_well_formed=False)
    def read_outside(x: FIRST):
        w = R.call_tir(ONE, (x,), out_ty=FIRST)
        a = R.call_tir(ONE, (w,), out_ty=FIRST)
        b = R.call_tir_inplace(BUMP, (w,), inplace_indices=[0], out_ty=[FIRST])
        c = R.call_tir(TWO, (b,), out_ty=FIRST)
        d = R.call_tir(TWO, (c,), out_ty=FIRST)
        return (a, w, d)

    @R.function(check_well_formed=False)
    def given_away(x: FIRST):
        with R.dataflow():
            w = R.call_tir(ONE, (x,), out_ty=FIRST)
            a = R.call_tir(ONE, (w,), out_ty=FIRST)
            t: SECOND = R.to_vdevice(w, D1)
            b = R.call_tir_inplace(BUMP, (w,), inplace_indices=[0], out_ty=[FIRST])
            gv = (a, b, t)
            R.output(gv)
        return gv

    for main in (argument, read_later, read_outside):
        mod = with_main(main.with_attr("global_symbol", "main"))
        assert outline(mod) == ["main_commands: one one", "call_tir_inplace", "main_commands_1: two two"]
    assert "call_tir_inplace" in outline(with_main(given_away.with_attr("global_symbol", "main")))


def test_a_donated_argument_may_be_written_to_in_a_run():
    @R.function(check_well_formed=False)
    def main(x: FIRST, cache: FIRST):
        R.func_attr({"relax_hetero.donated": [1]})
        with R.dataflow():
            w = R.call_tir(ONE, (cache,), out_ty=FIRST)
            b = R.call_tir_inplace(BUMP, (cache,), inplace_indices=[0], out_ty=[FIRST])
            c = R.call_tir(TWO, (w,), out_ty=FIRST)
            gv = (b, c)
            R.output(gv)
        return gv

    after = FormCommandBuffers()(with_main(main))
    assert outline(with_main(main)) == ["call_tir_inplace"]
    (region,) = regions_of(after)
    assert [(slot.name, slot.access) for slot in region.slots] == [("cache", "read-write"), ("c", "write")]
    assert [[o.index for o in command.operands if o.space == "slot"] for command in region.commands] == [[0], [0], [1]]


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
