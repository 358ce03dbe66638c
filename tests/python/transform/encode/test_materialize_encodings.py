"""MaterializeEncodings: encoded ops become kernels on stored tensors; epilogues are fused; identity layouts vanish."""

from dataclasses import replace

import pytest
import tvm
from tvm import tirx
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.encoding import Expression, MatmulProblem, PackedLayout
from relax_hetero.errors import EncodingError
from relax_hetero.transform import MaterializeEncodings
from transform.toy_resolvers import PANELS, empty_kernel, toy_resolvers

V4 = {"kind": "llvm", "mcpu": "x86-64-v4"}
V2 = {"kind": "llvm", "mcpu": "x86-64-v2"}
_SIZES = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=7, k=3>"
LHS, RHS, OUT = (f"matmul[{i}]{_SIZES}" for i in range(3))
_OPEN = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=7, k=3>"
M_LHS, M_RHS, M_OUT = (f"matmul[{i}]{_OPEN}" for i in range(3))
ROWS = "identity<2>"
W_PANELS = "pack<outer=[1, 0] inner=[1:4]>"
C_LHS, C_RHS, C_OUT = (
    "pack<outer=[0, 1] inner=[0:2]>",
    "pack<outer=[1, 0] inner=[1:2]>",
    "pack<outer=[0, 1] inner=[0:2, 1:2]>",
)


@pytest.fixture(autouse=True)
def toys():
    with toy_resolvers() as resolvers:
        yield resolvers


def stubs(mod):
    """`mod` with kernels reduced to their signatures."""
    body = empty_kernel([]).body
    functions = {
        gv: tirx.PrimFunc(func.params, body, func.ret_type, func.attrs) if isinstance(func, tirx.PrimFunc) else func
        for gv, func in mod.functions.items()
    }
    return tvm.IRModule(functions, attrs=mod.attrs, global_infos=mod.global_infos)


def check(before, expected):
    after = MaterializeEncodings()(before)
    assert_structural_equal(stubs(after), stubs(expected))
    assert MaterializeEncodings()(after).same_as(after)


def test_one_device(toys):
    """Row-major operands are taken as they are, the packed constant too; the elementwise op is the epilogue."""

    @ir_module(V4)
    def Before(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        w: R.Tensor((2, 3, 4), "float32", "llvm:0"),
        b: R.Tensor((7,), "float32", "llvm:0"),
    ) -> R.Tensor((5, 7), "float32", "llvm:0"):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="matmul_5x7x3_llvm_0")
            d = R.hetero.elementwise(c, b, expression="relu(add(x0, x1))", encoding=OUT, layout=ROWS)
            y = R.hetero.unset_encoding(d, OUT, layout=ROWS)
            R.output(y)
        return y

    @ir_module(V4)
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def matmul_5x7x3_llvm_0_add_relu(
            x: T.Buffer((T.int64(5), T.int64(3)), "float32"),
            w: T.Buffer((T.int64(2), T.int64(3), T.int64(4)), "float32"),
            b: T.Buffer((T.int64(7),), "float32"),
            y: T.Buffer((T.int64(5), T.int64(7)), "float32"),
        ):
            T.func_attr(
                {
                    "op_pattern": 8,
                    "relax_hetero.operations": 210,
                    "relax_hetero.precision": "f32",
                    "relax_hetero.ops": ["matmul", "add", "relu"],
                    "target": T.target(V4),
                    "tirx.noalias": True,
                }
            )
            T.evaluate(0)

        @R.function
        def main(
            x: R.Tensor((5, 3), "float32", "llvm:0"),
            w: R.Tensor((2, 3, 4), "float32", "llvm:0"),
            b: R.Tensor((7,), "float32", "llvm:0"),
        ) -> R.Tensor((5, 7), "float32", "llvm:0"):
            cls = Expected
            with R.dataflow():
                y = R.call_tir(
                    cls.matmul_5x7x3_llvm_0_add_relu, (x, w, b), out_ty=R.Tensor((5, 7), "float32", "llvm:0")
                )
                R.output(y)
            return y

    check(Before, Expected)
    (problem,) = toys["llvm"]._solved
    assert problem.epilogue.expression == Expression.parse("relu(add(x0, x1))")
    assert [(o.shape, o.index_map, o.layout.is_identity) for o in problem.epilogue.operands] == [((7,), ("n",), True)]
    assert (problem.lhs.shape, problem.rhs.shape, problem.result.shape) == ((5, 3), (3, 7), (5, 7))
    assert problem.rhs.layout == PANELS and problem.init is None and problem.acc_dtype == "float32"


def test_two_devices():
    """Tensors are laid out by kernels of the device that the relayout is on, and travel in their physical types."""

    @ir_module(V4, "c:1")
    def Before(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "c:0")) -> R.Tensor(
        (5, 7), "float32", "llvm:0"
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            x2 = R.hetero.relayout(x1, LHS, layout=C_LHS, from_layout=ROWS)
            x3 = R.to_vdevice(x2, "c:0")
            w1 = R.hetero.set_encoding(w, RHS, layout=C_RHS)
            c = R.hetero.matmul(x3, w1, encoding=OUT, layout=C_OUT, kernel="matmul_5x7x3_c_0")
            d = R.to_vdevice(c, "llvm:0")
            e = R.hetero.relayout(d, OUT, layout=W_PANELS, from_layout=C_OUT)
            y = R.hetero.unset_encoding(e, OUT, layout=W_PANELS)
            R.output(y)
        return y

    @ir_module(V4, "c:1")
    class Expected:
        @T.prim_func(private=True, s_tir=True)
        def pack_5x3_llvm_0(
            x: T.Buffer((T.int64(5), T.int64(3)), "float32"),
            y: T.Buffer((T.int64(3), T.int64(3), T.int64(2)), "float32"),
        ):
            T.func_attr({"op_pattern": 8, "relax_hetero.ops": ["pack"], "target": T.target(V4), "tirx.noalias": True})
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def pack_3x7_c_0(
            w: T.Buffer((T.int64(3), T.int64(7)), "float32"),
            y: T.Buffer((T.int64(4), T.int64(3), T.int64(2)), "float32"),
        ):
            T.func_attr({"op_pattern": 8, "relax_hetero.ops": ["pack"], "target": T.target("c"), "tirx.noalias": True})
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def matmul_5x7x3_c_0(
            x: T.Buffer((T.int64(3), T.int64(3), T.int64(2)), "float32"),
            w: T.Buffer((T.int64(4), T.int64(3), T.int64(2)), "float32"),
            y: T.Buffer((T.int64(3), T.int64(4), T.int64(2), T.int64(2)), "float32"),
        ):
            T.func_attr(
                {
                    "op_pattern": 8,
                    "relax_hetero.operations": 210,
                    "relax_hetero.precision": "f32",
                    "relax_hetero.ops": ["matmul"],
                    "target": T.target("c"),
                    "tirx.noalias": True,
                }
            )
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def relayout_5x7_llvm_0(
            x: T.Buffer((T.int64(3), T.int64(4), T.int64(2), T.int64(2)), "float32"),
            y: T.Buffer((T.int64(2), T.int64(5), T.int64(4)), "float32"),
        ):
            T.func_attr(
                {"op_pattern": 8, "relax_hetero.ops": ["relayout"], "target": T.target(V4), "tirx.noalias": True}
            )
            T.evaluate(0)

        @T.prim_func(private=True, s_tir=True)
        def unpack_5x7_llvm_0(
            x: T.Buffer((T.int64(2), T.int64(5), T.int64(4)), "float32"),
            y: T.Buffer((T.int64(5), T.int64(7)), "float32"),
        ):
            T.func_attr({"op_pattern": 8, "relax_hetero.ops": ["unpack"], "target": T.target(V4), "tirx.noalias": True})
            T.evaluate(0)

        @R.function
        def main(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((3, 7), "float32", "c:0")) -> R.Tensor(
            (5, 7), "float32", "llvm:0"
        ):
            cls = Expected
            with R.dataflow():
                x2 = R.call_tir(cls.pack_5x3_llvm_0, (x,), out_ty=R.Tensor((3, 3, 2), "float32", "llvm:0"))
                x3 = R.to_vdevice(x2, "c:0")
                w1 = R.call_tir(cls.pack_3x7_c_0, (w,), out_ty=R.Tensor((4, 3, 2), "float32", "c:0"))
                c = R.call_tir(cls.matmul_5x7x3_c_0, (x3, w1), out_ty=R.Tensor((3, 4, 2, 2), "float32", "c:0"))
                d = R.to_vdevice(c, "llvm:0")
                e = R.call_tir(cls.relayout_5x7_llvm_0, (d,), out_ty=R.Tensor((2, 5, 4), "float32", "llvm:0"))
                y = R.call_tir(cls.unpack_5x7_llvm_0, (e,), out_ty=R.Tensor((5, 7), "float32", "llvm:0"))
                R.output(y)
            return y

    check(Before, Expected)


def test_symbolic_extents():
    """Types keep the program's symbols and expressions of them; kernels that differ only in those are shared."""

    @ir_module("c")
    def Before(
        x: R.Tensor(("b", "s", 3), "float32", "c:0"),
        z: R.Tensor(("u", 3), "float32", "c:0"),
        w: R.Tensor((4, 3, 2), "float32", "c:0"),
    ):
        b = T.int64()
        s = T.int64()
        u = T.int64()
        with R.dataflow():
            f: R.Tensor((b * s, 3), "float32", "c:0") = R.reshape(x, R.shape([b * s, 3]))
            w1 = R.hetero.prepacked(w, "3x7", M_RHS, layout=C_RHS)
            f1 = R.hetero.set_encoding(f, M_LHS, layout=C_LHS)
            c = R.hetero.matmul(f1, w1, encoding=M_OUT, layout=C_OUT, kernel="matmul_Dx7x3_c_0")
            z1 = R.hetero.set_encoding(z, M_LHS, layout=C_LHS)
            d = R.hetero.matmul(z1, w1, encoding=M_OUT, layout=C_OUT, kernel="matmul_Dx7x3_c_0")
            p = R.hetero.unset_encoding(c, M_OUT, layout=C_OUT)
            q = R.hetero.unset_encoding(d, M_OUT, layout=C_OUT)
            R.output(p, q)
        return (p, q)

    after = MaterializeEncodings()(Before)
    calls = {
        binding.var.name: (binding.value.args[0].name_hint, [str(e) for e in binding.var.ty.shape.values])
        for block in after["main"].body.blocks
        for binding in block.bindings
        if getattr(binding.value.op, "name", "") == "relax.call_tir"
    }
    assert calls == {
        "f1": ("pack_Dx3_c_0", ["(b * s + T.int64(1)) // T.int64(2)", "T.int64(3)", "T.int64(2)"]),
        "c": ("matmul_Dx7x3_c_0", ["(b * s + T.int64(1)) // T.int64(2)", "T.int64(4)", "T.int64(2)", "T.int64(2)"]),
        "z1": ("pack_Dx3_c_0", ["(u + T.int64(1)) // T.int64(2)", "T.int64(3)", "T.int64(2)"]),
        "d": ("matmul_Dx7x3_c_0", ["(u + T.int64(1)) // T.int64(2)", "T.int64(4)", "T.int64(2)", "T.int64(2)"]),
        "p": ("unpack_Dx7_c_0", ["b * s", "T.int64(7)"]),
        "q": ("unpack_Dx7_c_0", ["u", "T.int64(7)"]),
    }


_NEXT = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=3, k=7>"
N_LHS, N_RHS, N_OUT = (f"matmul[{i}]{_NEXT}" for i in range(3))


def test_repacked_values_are_not_unpacked_first():
    """From result to left operand, two of them; another plain reader has the row-major tensor made."""

    @ir_module("c")
    def Before(
        x: R.Tensor((3, 3, 2), "float32", "c:0"),
        w: R.Tensor((4, 3, 2), "float32", "c:0"),
        v: R.Tensor((2, 7, 2), "float32", "c:0"),
    ):
        with R.dataflow():
            x1 = R.hetero.prepacked(x, "5x3", LHS, layout=C_LHS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=C_RHS)
            v1 = R.hetero.prepacked(v, "7x3", N_RHS, layout=C_RHS)
            a = R.hetero.matmul(x1, w1, encoding=OUT, layout=C_OUT, kernel="first")
            b = R.hetero.unset_encoding(a, OUT, layout=C_OUT)
            c = R.hetero.set_encoding(b, N_LHS, layout=C_LHS)
            d = R.hetero.matmul(c, v1, encoding=N_OUT, layout=C_OUT, kernel="second")
            e = R.hetero.unset_encoding(d, N_OUT, layout=C_OUT)
            f = R.hetero.set_encoding(e, LHS, layout=C_OUT)
            g = R.hetero.unset_encoding(f, LHS, layout=C_OUT)
            h = R.hetero.set_encoding(g, LHS, layout=C_LHS)
            i: R.Tensor((5, 3), "float32", "c:0") = R.exp(g)
            j = R.hetero.matmul(h, w1, encoding=OUT, layout=C_OUT, kernel="first")
            y = R.hetero.unset_encoding(j, OUT, layout=C_OUT)
            R.output(i, y)
        return (i, y)

    (block,) = MaterializeEncodings()(Before)["main"].body.blocks
    pairs = [(b.var.name, b.value.args[0].name_hint) for b in block.bindings if b.var.name != "i"]
    assert pairs == [
        ("a", "first"),
        ("c", "relayout_5x7_c_0"),
        ("d", "second"),
        ("g", "unpack_5x3_c_0"),
        ("h", "pack_5x3_c_0"),
        ("j", "first"),
        ("y", "unpack_5x7_c_0"),
    ]


def epilogues(toys):
    """(epilogue, its operands' index maps) of every product that was asked for."""
    return [
        (str(p.epilogue.expression), [o.index_map for o in p.epilogue.operands]) if p.epilogue else None
        for p in toys["llvm"]._solved
        if isinstance(p, MatmulProblem)
    ]


def test_a_chain_becomes_one_epilogue(toys):
    """Numbering goes on from op to op; an operand that occurs twice is passed once; x0 may occur anywhere."""

    @ir_module(V4)
    def Before(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        w: R.Tensor((2, 3, 4), "float32", "llvm:0"),
        b: R.Tensor((1, 7), "float32", "llvm:0"),
        r: R.Tensor((5, 7), "float32", "llvm:0"),
        s: R.Tensor((5, 1), "float32", "llvm:0"),
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
            c = R.hetero.matmul(x1, w1, b, encoding=OUT, layout=ROWS, kernel="product")
            d = R.hetero.elementwise(c, b, expression="add(x0, x1)", encoding=OUT, layout=ROWS)
            e: R.Tensor((5, 7), "float32", "llvm:0") = R.exp(r)
            r1 = R.hetero.set_encoding(e, OUT, layout=ROWS)
            f = R.hetero.elementwise(d, r1, b, expression="add(multiply(x0, x1), x2)", encoding=OUT, layout=ROWS)
            g = R.hetero.elementwise(f, s, f, expression="maximum(x2, x1)", encoding=OUT, layout=ROWS)
            y = R.hetero.unset_encoding(g, OUT, layout=ROWS)
            R.output(y)
        return y

    after = MaterializeEncodings()(Before)
    assert epilogues(toys) == [
        ("maximum(add(multiply(add(x0, x1), x2), x1), x3)", [("1", "n"), ("m", "n"), ("m", "1")]),
    ]
    assert toys["llvm"]._solved[0].init.index_map == ("1", "n")
    (block,) = after["main"].body.blocks
    assert [b.var.name for b in block.bindings] == ["e", "y"]  # after the residual is computed
    assert block.bindings[1].value.args[0].name_hint == "product_add_multiply_maximum"


def test_a_value_with_another_user_is_stored(toys):
    """The product with its bias has two users: it ends the epilogue, and what follows is a kernel of its own."""

    @ir_module(V4)
    def Before(
        x: R.Tensor((5, 3), "float32", "llvm:0"),
        w: R.Tensor((2, 3, 4), "float32", "llvm:0"),
        b: R.Tensor((7,), "float32", "llvm:0"),
    ):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="product")
            d = R.hetero.elementwise(c, b, expression="add(x0, x1)", encoding=OUT, layout=ROWS)
            f = R.hetero.elementwise(d, expression="relu(x0)", encoding=OUT, layout=ROWS)
            y = R.hetero.unset_encoding(f, OUT, layout=ROWS)
            z = R.hetero.unset_encoding(d, OUT, layout=ROWS)
            R.output(y, z)
        return (y, z)

    after = MaterializeEncodings()(Before)
    assert epilogues(toys) == [("add(x0, x1)", [("n",)])]
    (block,) = after["main"].body.blocks
    assert [(b.var.name, b.value.args[0].name_hint) for b in block.bindings] == [
        ("z", "product_add"),
        ("y", "relu_5x7_llvm_0"),
    ]


def test_two_results_that_are_one_value():
    @ir_module(V4)
    def Before(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((2, 3, 4), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
            c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="product")
            y = R.hetero.unset_encoding(c, OUT, layout=ROWS)
            z = R.hetero.unset_encoding(c, OUT, layout=ROWS)
            R.output(y, z)
        return (y, z)

    after = MaterializeEncodings()(Before)["main"]
    (block,) = after.body.blocks
    (binding,) = block.bindings
    assert binding.var.name == "y"
    assert [field.same_as(binding.var) for field in after.body.body.fields] == [True, True]


def test_no_product_moves_past_writes_to_its_operands(toys):
    @ir_module(V4)
    class Before:
        @T.prim_func(private=True, s_tir=True)
        def double(x: T.Buffer((T.int64(5), T.int64(3)), "float32")):
            for i, j in T.grid(T.int64(5), T.int64(3)):
                x[i, j] = x[i, j] * T.float32(2)

        @R.function
        def main(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((2, 3, 4), "float32", "llvm:0")):
            cls = Before
            with R.dataflow():
                x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
                w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
                c = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="product")
                x2 = R.call_tir_inplace(
                    cls.double, (x,), inplace_indices=[0], out_ty=R.Tensor((5, 3), "float32", "llvm:0")
                )
                d = R.hetero.elementwise(c, expression="relu(x0)", encoding=OUT, layout=ROWS)
                y = R.hetero.unset_encoding(d, OUT, layout=ROWS)
                R.output(x2, y)
            return (x2, y)

    (block,) = MaterializeEncodings()(Before)["main"].body.blocks
    assert [b.value.args[0].name_hint for b in block.bindings] == ["product", "double", "relu_5x7_llvm_0"]


def a_product():
    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0"), w: R.Tensor((2, 3, 4), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS, layout=ROWS)
            w1 = R.hetero.prepacked(w, "3x7", RHS, layout=W_PANELS)
            product = R.hetero.matmul(x1, w1, encoding=OUT, layout=ROWS, kernel="product")
            y = R.hetero.unset_encoding(product, OUT, layout=ROWS)
            R.output(y)
        return y

    return Mod


def wrong_rank(problem):
    return empty_kernel([problem.lhs, problem.rhs, problem.lhs])


def wrong_shape(problem):
    return empty_kernel([problem.lhs, problem.rhs, replace(problem.result, layout=PackedLayout((0, 1), (1,), (8,)))])


def wrong_type(problem):
    return empty_kernel(
        [problem.lhs, problem.rhs, type(problem.rhs)((5, 7), "int8", ("m", "n"), problem.result.layout)]
    )


def raising(problem):
    raise NotImplementedError("m of 5")


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (lambda problem: None, "found NoneType, expected a PrimFunc"),
        (lambda problem: empty_kernel([problem.lhs]), "expected 3 buffers"),
        (wrong_rank, r"parameter 2 of shape .*, expected \[5, 7\]"),
        (wrong_shape, r"parameter 2 of shape .*, expected \[5, 7\]"),
        (wrong_type, "parameter 2 of type int8, expected float32"),
        (raising, "wrote no kernel for target .*NotImplementedError: m of 5"),
    ],
)
def test_a_kernel_that_does_not_fit_is_refused(toys, kernel, message):
    toys["llvm"].kernel = lambda problem, target: kernel(problem)
    with pytest.raises(EncodingError, match=message) as error:
        MaterializeEncodings()(a_product())
    for part in ("relax.hetero.matmul of variable 'product' in function 'main'", "'toy'", "x86-64-v4"):
        assert part in str(error.value)


def test_layouts_are_needed():
    @ir_module(V4)
    def Mod(x: R.Tensor((5, 3), "float32", "llvm:0")):
        with R.dataflow():
            x1 = R.hetero.set_encoding(x, LHS)
            y = R.hetero.unset_encoding(x1, LHS)
            R.output(y)
        return y

    with pytest.raises(EncodingError, match=r"set_encoding of variable 'x1' in function 'main' lacks a layout"):
        MaterializeEncodings()(Mod)
