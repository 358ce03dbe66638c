"""Results reuse the memory of operands that nothing else reads, and only of these."""

import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import relax
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import ir_module
from relax_hetero.transform.record.form_command_buffers import Draft, form_command_buffers, take_operands
from relax_hetero.transform.record.region_attrs import regions_of
from relax_hetero.transform.record.region_ir import RegionValue
from transform.outlines import V4, called, check


def test_a_chain_uses_the_memory_of_its_last_result():
    """`a` and `b` are transient and read once; `x` is the caller's."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def scale(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 1]]})
            with T.sblock("root"):
                T.reads()
                T.writes()
                for i in range(4):
                    B[i] = A[i] * T.float32(2)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                a = R.call_tir(cls.scale, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b = R.call_tir(cls.scale, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                c = R.call_tir(cls.scale, (b,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                R.output(c)
            return c

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(x: T.Buffer((T.int64(4),), "float32"), c: T.Buffer((T.int64(4),), "float32")):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Expected
            with R.dataflow():
                buffer = R.call_tir(cls.main_commands, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                c: R.Tensor((4,), "float32", "llvm:0") = buffer
                R.output(c)
            return c

    after = check(Before, Expected)
    assert called(after, "main_commands") == ["scale", "scale_in_place", "scale_in_place"]
    assert len(after["scale_in_place"].params) == 1
    (region,) = regions_of(form_command_buffers(Before))
    assert [[(o.space, o.index) for o in c.operands] for c in region.commands] == [
        [("slot", 0), ("slot", 1)],
        [("slot", 1)],
        [("slot", 1)],
    ]
    assert [slot.access for slot in region.slots] == ["read", "write"]


def test_values_that_are_read_again_keep_their_memory():
    """`a` is read by a later kernel, `b` by another operand of the same kernel, `c` after the run, `k` is constant."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def add(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 2]]})
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                k = R.const([1.0, 2.0, 3.0, 4.0], "float32")
                a = R.call_tir(cls.add, (x, k), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b = R.call_tir(cls.add, (a, x), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                c = R.call_tir(cls.add, (b, b), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                d = R.call_tir(cls.add, (c, a), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                e = R.call_tir(cls.add, (k, d), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                gv = (c, e)
                R.output(gv)
            return gv

    mod = form_command_buffers(relax.transform.CanonicalizeBindings()(Before))
    assert called(mod, "main_commands") == ["add"] * 5


def test_views_are_of_the_same_memory():
    """`flat` shows `a`, which is read after `b` is made; nothing reads `c` but through its view."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def scale(A: T.Buffer((2, 2), "float32"), B: T.Buffer((2, 2), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 1]]})
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def add(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 2]]})
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((2, 2), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                a = R.call_tir(cls.scale, (x,), out_ty=R.Tensor((2, 2), "float32", "llvm:0"))
                flat: R.Tensor((4,), "float32", "llvm:0") = R.reshape(a, R.shape([4]))
                b = R.call_tir(cls.scale, (a,), out_ty=R.Tensor((2, 2), "float32", "llvm:0"))
                c = R.call_tir(cls.scale, (b,), out_ty=R.Tensor((2, 2), "float32", "llvm:0"))
                shown: R.Tensor((4,), "float32", "llvm:0") = R.reshape(c, R.shape([4]))
                d = R.call_tir(cls.add, (shown, flat), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                R.output(d)
            return d

    mod = form_command_buffers(Before)
    assert called(mod, "main_commands") == ["scale", "scale", "scale_in_place", "add_in_place"]


VDEVICE = rh.VDevice("llvm")


@st.composite
def programs(draw):
    """Drafts over a few inputs: every kernel reads up to three values and ties some of them; some values are wanted."""
    count = draw(st.integers(1, 3))
    values = [RegionValue(relax.TensorType([4], "float32", VDEVICE), f"x{i}") for i in range(count)]
    free = [value for value in values if draw(st.booleans())]
    drafts, ties = [], {}
    for now in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
        result = RegionValue(relax.TensorType([4], "float32", VDEVICE), f"v{now}", now, now)
        for value in reads:
            value.end = now
        kernel = tvm.ir.GlobalVar(f"k{now}")
        ties[kernel] = [(i, len(reads)) for i in range(len(reads)) if draw(st.booleans())]
        drafts.append(Draft(kernel, reads, [result], (), result.name))
        values.append(result)
    for draft in drafts:
        draft.makes[0].is_result = draw(st.booleans())
    return values[:count], free, drafts, ties


@given(programs())
@settings(max_examples=200, deadline=None)
def test_every_kernel_reads_the_right_values(program):
    inputs, free, drafts, ties = program
    results = [draft.makes[0] for draft in drafts]
    reused = take_operands(drafts, ties.__getitem__, results, free)
    memory = {value: value for value in inputs}
    for draft in drafts:
        assert all(memory[value.root] is value for value in draft.reads)
        result = draft.makes[0]
        assert (draft in reused) == bool(draft.stored_over) == (result.root is not result)
        if draft in reused:
            ((_, operand),) = draft.stored_over.items()
            tied = [number for number, _ in ties[draft.kernel]]
            assert operand in tied
            assert all(i in tied for i, value in enumerate(draft.reads) if value.root is result.root)
        memory[result.root] = result
    assert all(memory[value.root] is value for value in results if value.is_result)
    overwritten = [value for value in inputs if memory[value] is not value]
    assert all(value in free and memory[value].is_result for value in overwritten)


def test_the_last_reader_is_always_taken():
    program = [RegionValue(relax.TensorType([4], "float32", VDEVICE), name) for name in "xab"]
    x, a, b = program
    x.end, a.begin, a.end, b.begin, b.end, b.is_result = 0, 0, 1, 1, 1, True
    first, second = Draft(tvm.ir.GlobalVar("f"), [x], [a], (), "a"), Draft(tvm.ir.GlobalVar("g"), [a], [b], (), "b")
    assert take_operands([first, second], lambda _: [(0, 1)], [a, b], [x]) == [first, second]
    assert b.root is x
