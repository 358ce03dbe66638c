"""Bindings that join a command buffer: their order in a function after FormCommandBuffers."""

import tvm
from tvm import relax
from tvm.script import relax as R

from relax_hetero.tir.cuda.all_reduce import ALL_REDUCE
from relax_hetero.transform import FormCommandBuffers
from transform.outlines import (
    D0,
    D1,
    FIRST,
    ONE,
    SECOND,
    TWO,
    Kernels,
    lines,
    outline,
    with_main,
)


def test_transfers_of_a_runs_results_end_it():
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


def test_a_run_waits_only_for_operands_of_its_first_kernel():
    """The transfer and the first kernel do not wait for each other."""

    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            t = R.to_vdevice(z, D0)
            b = R.call_tir(TWO, (t,), out_ty=FIRST)
            gv = (a, b)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["one", "to_vdevice", "two"]


def test_transfers_that_come_no_later_go_before_it():
    @R.function(check_well_formed=False)
    def main(x: SECOND, z: SECOND):
        with R.dataflow():
            s = R.to_vdevice(x, D0)
            a = R.call_tir(ONE, (s,), out_ty=FIRST)
            t = R.to_vdevice(z, D0)
            b = R.call_tir(TWO, (t,), out_ty=FIRST)
            gv = (a, b)
            R.output(gv)
        return gv

    assert outline(with_main(main)) == ["to_vdevice", "to_vdevice", "main_commands: one two"]


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


def test_readers_of_a_later_value_start_a_run():
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


def with_sums(main):
    """The module, in which `two` is the kernel of a sum on both devices."""
    mod = with_main(main)
    mod.update_func(TWO, mod[TWO].with_attr(ALL_REDUCE, ""))
    return mod


def test_no_transfer_comes_between_the_kernels_of_a_sum():
    """A transfer after the first kernel would wait for it, and the second kernel for the transfer."""

    @R.function(check_well_formed=False)
    def main(x: FIRST, z: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            b = R.call_tir(ONE, (z,), out_ty=SECOND)
            b_sent = R.to_vdevice(b, D0)
            c = R.call_tir(ONE, (b_sent,), out_ty=FIRST)
            a_sent = R.to_vdevice(a, D1)
            d = R.call_tir(ONE, (a_sent,), out_ty=SECOND)
            first = R.call_tir(TWO, (c,), out_ty=FIRST)
            second = R.call_tir(TWO, (d,), out_ty=SECOND)
            gv = (first, second)
            R.output(gv)
        return gv

    before = ["one", "one", "to_vdevice", "one", "to_vdevice"]
    assert outline(with_sums(main)) == [*before, "main_commands: one two", "main_commands_1: two"]


def test_no_transfer_moves_between_the_kernels_of_a_sum():
    """The first device's run has ended, and the transfer does not read what the second one has computed since."""

    @R.function(check_well_formed=False)
    def main(x: FIRST, y: SECOND):
        with R.dataflow():
            a = R.call_tir(ONE, (x,), out_ty=FIRST)
            first = R.call_tir(TWO, (a,), out_ty=FIRST)
            b = R.call_tir(ONE, (y,), out_ty=SECOND)
            second = R.call_tir(TWO, (b,), out_ty=SECOND)
            first_sent = R.to_vdevice(first, D1)
            x_sent = R.to_vdevice(x, D1)
            c = R.call_tir(ONE, (second,), out_ty=SECOND)
            gv = (first_sent, x_sent, c)
            R.output(gv)
        return gv

    runs = ["main_commands: one two", "main_commands_1: one two one"]
    assert outline(with_sums(main)) == [*runs, "to_vdevice", "to_vdevice"]


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
    assert list(lines(after, inner.body)) == ["main_commands: one two"]
