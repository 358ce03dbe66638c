"""VerifyEncodings: errors for plain consumers of encoded values."""

import pytest
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.errors import EncodingError
from relax_hetero.transform import VerifyEncodings
from relax_hetero.transform.encode.encoded_values import encoded_values

ENC = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=4, n=4, k=4>"
OTHER = "<float32 * float32 -> float32; (m, k) * (n, k) -> (m, n); m=4, n=4, k=4>"
TILES = "pack<outer=[0, 1] inner=[0:2]>"


def refused(module, *parts):
    with pytest.raises(EncodingError) as caught:
        VerifyEncodings()(module)
    for part in parts:
        assert part in str(caught.value)


def test_encoded_values_through_transfers_names_and_branches():
    @ir_module("llvm", "llvm:1")
    def Module(c: R.Tensor((), "bool", "llvm"), x: R.Tensor((4, 4), "float32", "llvm")):
        a: R.Tensor((4, 4), "float32", "llvm") = R.hetero.set_encoding(x, "matmul[0]" + ENC, TILES)
        b = a
        d: R.Tensor((4, 4), "float32", "llvm:1") = R.to_vdevice(b, "llvm:1")
        e: R.Tensor((4, 4), "float32", "llvm:1") = R.hetero.unset_encoding(d, "matmul[0]" + ENC, TILES)
        if c:
            y: R.Tensor((4, 4), "float32", "llvm") = R.hetero.unset_encoding(a, "matmul[0]" + ENC, TILES)
            z = y
        else:
            z = x
        return (e, z)

    values = {var.name: value for var, value in encoded_values(Module["main"]).items()}
    assert list(values) == ["a", "b", "d"]
    assert {str(value.encoding) for value in values.values()} == {"matmul[0]" + ENC}
    assert {str(value.layout) for value in values.values()} == {TILES}
    assert VerifyEncodings()(Module).same_as(Module)


def test_stock_op():
    @I.ir_module
    class Module:
        @R.function
        def compute(x: R.Tensor((4, 4), "float32")):
            with R.dataflow():
                laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
                sums = R.add(x, laid_out)
                R.output(sums)
            return sums

    refused(Module, "relax.add", "'sums'", "'compute'", "'laid_out'", "matmul[0]<", "unset_encoding")


def test_branch():
    @ir_module()
    def Module(c: R.Tensor((), "bool"), x: R.Tensor((4, 4), "float32")):
        laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        if c:
            y = R.exp(laid_out)
            z = y
        else:
            z = x
        return z

    refused(Module, "relax.exp", "'laid_out'")


def test_results_of_functions_and_branches():
    @ir_module()
    def Leaves(x: R.Tensor((4, 4), "float32")):
        laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        return laid_out

    @ir_module()
    def InTuple(x: R.Tensor((4, 4), "float32")):
        laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        return (x, laid_out)

    @ir_module()
    def Branch(c: R.Tensor((), "bool"), x: R.Tensor((4, 4), "float32")):
        if c:
            laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            z = laid_out
        else:
            z = x
        return z

    for module in (Leaves, InTuple, Branch):
        refused(module, "leaves function 'main'", "laid_out" if module is not Branch else "matmul[0]<")


def test_tuples_calls_and_kernels():
    @ir_module()
    def InTuple(x: R.Tensor((4, 4), "float32")):
        laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        pair = (laid_out, x)
        y = pair[1]
        return y

    @I.ir_module
    class ToFunction:
        @R.function
        def callee(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
            return x

        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            y = ToFunction.callee(laid_out)
            return y

    @I.ir_module
    class ToKernel:
        @T.prim_func(private=True, s_tir=True)
        def kernel(x: T.Buffer((4, 4), "float32"), y: T.Buffer((4, 4), "float32")):
            for i, j in T.grid(4, 4):
                with T.sblock("copy"):
                    vi, vj = T.axis.remap("SS", [i, j])
                    y[vi, vj] = x[vi, vj]

        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            laid_out = R.hetero.set_encoding(x, "matmul[0]" + ENC)
            y = R.call_tir(ToKernel.kernel, (laid_out,), out_ty=R.Tensor((4, 4), "float32"))
            return y

    refused(InTuple, "Tuple", "'pair'", "'laid_out'")
    refused(ToFunction, "callee", "'laid_out'")
    refused(ToKernel, "relax.call_tir", "'laid_out'")


def test_operands_of_encoded_ops():
    @ir_module()
    def PlainOperand(x: R.Tensor((4, 4), "float32")):
        lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        y = R.hetero.matmul(lhs, x, encoding="matmul[2]" + ENC)
        z = R.hetero.unset_encoding(y, "matmul[2]" + ENC)
        return z

    @ir_module()
    def OtherEncoding(x: R.Tensor((4, 4), "float32")):
        lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        rhs = R.hetero.set_encoding(x, "matmul[1]" + OTHER)
        y = R.hetero.matmul(lhs, rhs, encoding="matmul[2]" + ENC)
        z = R.hetero.unset_encoding(y, "matmul[2]" + ENC)
        return z

    @ir_module()
    def OtherLayout(x: R.Tensor((4, 4), "float32")):
        lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC, TILES)
        z = R.hetero.unset_encoding(lhs, "matmul[0]" + ENC, "identity<2>")
        return z

    @ir_module()
    def Twice(x: R.Tensor((4, 4), "float32")):
        first = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        second = R.hetero.set_encoding(first, "matmul[0]" + ENC)
        z = R.hetero.unset_encoding(second, "matmul[0]" + ENC)
        return z

    @ir_module()
    def SecondOperand(x: R.Tensor((4, 4), "float32")):
        first = R.hetero.set_encoding(x, "matmul[0]" + ENC)
        second = R.hetero.set_encoding(x, "matmul[1]" + ENC)
        e = R.hetero.elementwise(first, second, expression="add(x0, x1)", encoding="matmul[0]" + ENC)
        z = R.hetero.unset_encoding(e, "matmul[0]" + ENC)
        return z

    refused(PlainOperand, "relax.hetero.matmul", "'y'", "operand 1 is plain", "matmul[1]<")
    refused(OtherEncoding, "operand 1 is variable 'rhs'", "(m, k) * (n, k)", "(m, k) * (k, n)")
    refused(OtherLayout, "relax.hetero.unset_encoding", TILES, "identity<2>")
    refused(Twice, "relax.hetero.set_encoding", "'first'", "expected a plain tensor")
    refused(SecondOperand, "relax.hetero.elementwise", "operand 1 is variable 'second'")


def test_relayout_says_where_it_comes_from():
    @ir_module()
    def Module(x: R.Tensor((4, 4), "float32")):
        lhs = R.hetero.set_encoding(x, "matmul[0]" + ENC, TILES)
        other = R.hetero.relayout(lhs, "matmul[0]" + ENC, "identity<2>", "pack<outer=[1, 0] inner=[]>")
        z = R.hetero.unset_encoding(other, "matmul[0]" + ENC, "identity<2>")
        return z

    refused(Module, "relax.hetero.relayout", TILES, "pack<outer=[1, 0] inner=[]>")
