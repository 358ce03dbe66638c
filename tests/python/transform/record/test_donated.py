"""Donated parameters: valid ones, and in-place work by their only user."""

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from modules import check_pass, ir_module
from relax_hetero.transform.record.donated import DONATED, with_donated
from relax_hetero.transform.record.form_command_buffers import form_command_buffers
from relax_hetero.transform.record.update_donated import update_donated
from transform.outlines import V4, called, check


@ir_module(V4)
class Plain:
    @T.prim_func(private=True, s_tir=True)
    def add(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
        T.func_attr({"relax_hetero.tied": [[0, 2], [1, 2]]})
        with T.sblock("root"):
            T.reads()
            T.writes()
            for i in range(4):
                C[i] = A[i] + B[i]

    @R.function
    def main(x: R.Tensor((4,), "float32", "llvm:0"), cache: R.Tensor((4,), "float32", "llvm:0")):
        R.func_attr({"relax_hetero.donated": [1]})
        cls = Plain
        with R.dataflow():
            new = R.call_tir(cls.add, (x, cache), out_ty=R.Tensor((4,), "float32", "llvm:0"))
            R.output(new)
        return new


def test_a_kernel_by_itself():
    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def add_in_place(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.func_attr({"tirx.noalias": False})
            with T.sblock("root"):
                T.reads()
                T.writes()
                for i in range(4):
                    B[i] = A[i] + B[i]

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), cache: R.Tensor((4,), "float32", "llvm:0")):
            R.func_attr({"relax_hetero.donated": [1]})
            cls = Expected
            with R.dataflow():
                new = R.call_tir_inplace(
                    cls.add_in_place,
                    (x, cache),
                    inplace_indices=[1],
                    out_ty=R.Tensor((4,), "float32", "llvm:0"),
                )
                R.output(new)
            return new

    check_pass(update_donated, Plain, Expected, map_free_vars=True)
    plain = tvm.IRModule(
        {gv: f.without_attr(DONATED) if gv.name_hint == "main" else f for gv, f in Plain.functions.items()},
        global_infos=Plain.global_infos,
    )
    assert update_donated(plain).same_as(plain)


def test_a_command_buffer():
    """Both kernels write over the cache; other readers must see its old content."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def add(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32"), C: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 2]]})
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), cache: R.Tensor((4,), "float32", "llvm:0")):
            R.func_attr({"relax_hetero.donated": [1]})
            cls = Before
            with R.dataflow():
                some = R.call_tir(cls.add, (cache, x), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                new = R.call_tir(cls.add, (some, x), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                other = R.call_tir(cls.add, (x, new), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                gv = (new, other)
                R.output(gv)
            return gv

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def main_commands(
            cache: T.Buffer((T.int64(4),), "float32"),
            x: T.Buffer((T.int64(4),), "float32"),
            other: T.Buffer((T.int64(4),), "float32"),
        ):
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((4,), "float32", "llvm:0"), cache: R.Tensor((4,), "float32", "llvm:0")):
            R.func_attr({"relax_hetero.donated": [1]})
            cls = Expected
            with R.dataflow():
                buffer = R.call_tir_inplace(
                    cls.main_commands,
                    (cache, x),
                    inplace_indices=[-1, 0],
                    out_ty=[R.Tensor((4,), "float32", "llvm:0"), R.Tensor((4,), "float32", "llvm:0")],
                )
                new: R.Tensor((4,), "float32", "llvm:0") = buffer[1]
                other: R.Tensor((4,), "float32", "llvm:0") = buffer[0]
                gv = (new, other)
                R.output(gv)
            return gv

    after = check(Before, Expected)
    assert called(after, "main_commands") == ["add_in_place", "add_in_place", "add"]


def test_parameters_with_other_readers_are_left_alone():
    """The cache is returned too, so neither the command buffer nor a kernel may write to it."""

    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 1]]})
            T.evaluate(0)

        @R.function
        def main(cache: R.Tensor((4,), "float32", "llvm:0")):
            R.func_attr({"relax_hetero.donated": [0]})
            cls = Before
            with R.dataflow():
                new = R.call_tir(cls.twice, (cache,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                gv = (new, cache)
                R.output(gv)
            return gv

    assert update_donated(Before).same_as(Before)
    assert form_command_buffers(Before).same_as(Before)


def test_parameters_with_reshaped_views_are_left_alone():
    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def twice(A: T.Buffer((4,), "float32"), B: T.Buffer((4,), "float32")):
            T.func_attr({"relax_hetero.tied": [[0, 1]]})
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def bump(A: T.Buffer((4,), "float32")):
            T.evaluate(0)

        @R.function
        def main(cache: R.Tensor((2, 2), "float32", "llvm:0"), other: R.Tensor((2, 2), "float32", "llvm:0")):
            R.func_attr({"relax_hetero.donated": [0, 1]})
            cls = Before
            with R.dataflow():
                flat: R.Tensor((4,), "float32", "llvm:0") = R.reshape(cache, R.shape([4]))
                a = R.call_tir(cls.twice, (flat,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                b = R.call_tir(cls.twice, (a,), out_ty=R.Tensor((4,), "float32", "llvm:0"))
                shown: R.Tensor((4,), "float32", "llvm:0") = R.reshape(other, R.shape([4]))
                c = R.call_tir_inplace(
                    cls.bump, (shown,), inplace_indices=[0], out_ty=R.Tensor((4,), "float32", "llvm:0")
                )
                gv = (b, c)
                R.output(gv)
            return gv

    after = form_command_buffers(Before)
    relax.analysis.well_formed(after)  # raises
    assert called(after, "main_commands") == ["twice", "twice_in_place"]
    calls = [b.value for b in after["main"].body.blocks[0].bindings if isinstance(b.value, relax.Call)]
    assert sorted(call.op.name for call in calls) == ["relax.call_tir", "relax.call_tir_inplace", "relax.reshape"]


@I.ir_module
class Named:
    @R.function
    def main(x: R.Tensor((4,), "float32"), s: R.Shape([4]), w: R.Tensor((4,), "float32")):
        R.func_attr({"num_input": 2, "input_names": ["input:0", "shape"]})
        with R.dataflow():
            y = R.add(x, w)
            R.output(y)
        return y

    @R.function
    def inner(x: R.Tensor((4,), "float32")):
        with R.dataflow():
            y = R.exp(x)
            R.output(y)
        return y

    @R.function
    def outer(x: R.Tensor((4,), "float32")):
        y: R.Tensor((4,), "float32") = Named.inner(x)
        z: R.Tensor((4,), "float32") = R.add(x, y)
        return z


def test_names_of_callers_and_functions():
    noted = with_donated(Named, {"main": ["input:0"], "outer": ("x",)})
    assert [list(noted[name].attrs[DONATED]) for name in ("main", "outer")] == [[0], [0]]
    assert DONATED not in noted["inner"].attrs
    assert list(with_donated(Named, ["input:0"])["main"].attrs[DONATED]) == [0]


@pytest.mark.parametrize(
    ("donate", "message"),
    [
        (["x"], r"names 'x', which function 'main' lacks; it has \['input:0', 'shape', 'w'\]"),
        ("x", "gives 'x' for function 'main', expected a list of input names"),
        (["shape"], "names 'shape' of function 'main', which is .*expected a tensor"),
        (["w"], "names 'w' of function 'main', a parameter that set_params gives once"),
        ({"other": ["x"]}, r"names function 'other', which the module lacks; it has \['inner', 'main', 'outer'\]"),
        ({"inner": ["x"]}, r"inputs of function 'inner', which \['outer'\] call"),
    ],
)
def test_parameters_that_cannot_be_donated(donate, message):
    with pytest.raises(rh.HeteroError, match=message):
        rh.compile(Named, donate=donate)


def test_lowered_modules_are_refused():
    with pytest.raises(rh.HeteroError, match="not lowered"):
        rh.compile(rh.get_pipeline()(Plain), donate=["cache"])
