"""The encoded ops: they print, parse, compare and survive JSON, and refuse what does not fit."""

import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

from modules import ir_module
from relax_hetero.encoding.encoding import Encoding
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.errors import EncodingError
from relax_hetero.op.encoded import (
    SET,
    EncodingAttrs,
    elementwise,
    encoded_op,
    matmul,
    prepacked,
    relayout,
    set_encoding,
    unset_encoding,
)

ENC = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=3, k=4>"
DYN = "<uint8 * int8 -> int32; (b0, m, k) * (k, n) -> (b0, m, n); b0=?, m=?, n=3, k=4>"
TILES = "pack<outer=[1, 0] inner=[1:2, 0:4]>"


@ir_module("llvm", "c")
class Module:
    @R.function
    def main(
        x: R.Tensor((5, 4), "float32", "c"),
        w: R.Tensor((2, 1, 2, 4), "float32", "c"),
        b: R.Tensor((3,), "float32", "c"),
    ):
        with R.dataflow():
            lhs: R.Tensor((5, 4), "float32", "c") = R.hetero.set_encoding(x, "matmul[0]" + ENC, "identity<2>")
            rhs: R.Tensor((4, 3), "float32", "c") = R.hetero.prepacked(w, "4x3", "matmul[1]" + ENC, TILES)
            out: R.Tensor((5, 3), "float32", "c") = R.hetero.matmul(
                lhs, rhs, b, encoding="matmul[2]" + ENC, layout="identity<2>", kernel="some_kernel"
            )
            e: R.Tensor((5, 3), "float32", "c") = R.hetero.elementwise(
                out, b, expression="clip(leaky_relu(add(x0, x1), 0.1), -1.0, inf)", encoding="matmul[2]" + ENC,
                layout="identity<2>",
            )  # fmt: skip
            r: R.Tensor((5, 3), "float32", "c") = R.hetero.relayout(
                e, encoding="matmul[2]" + ENC, layout=TILES, from_layout="identity<2>"
            )
            y: R.Tensor((5, 3), "float32", "c") = R.hetero.unset_encoding(r, "matmul[2]" + ENC, TILES)
            R.output(y)
        return y

    @R.function
    def symbolic(x: R.Tensor(("b", "m", 4), "uint8"), w: R.Tensor((4, 3), "int8")) -> R.Tensor(
        ("b", "m", 3), "float32"
    ):
        with R.dataflow():
            lhs = R.hetero.set_encoding(x, "batch_matmul[0]" + DYN)
            rhs = R.hetero.set_encoding(w, "batch_matmul[1]" + DYN)
            out = R.hetero.matmul(lhs, rhs, encoding="batch_matmul[2]" + DYN)
            e = R.hetero.elementwise(out, expression="cast(x0, 'float32')", encoding="batch_matmul[2]" + DYN)
            y = R.hetero.unset_encoding(e, "batch_matmul[2]" + DYN)
            R.output(y)
        return y


def test_text():
    text = Module.script(show_meta=True)
    assert 'R.hetero.set_encoding(x, encoding="matmul[0]<float32 * float32 -> float32; (m, k) * (k, n)' in text
    assert 'expression="clip(leaky_relu(add(x0, x1), 0.1), -1.0, inf)"' in text
    assert_structural_equal(tvm.script.from_source(text), Module)


def test_json():
    again = tvm.ir.load_json(tvm.ir.save_json(Module))
    assert_structural_equal(again, Module)
    ops = [encoded_op(binding.value) for binding in again["main"].body.blocks[0].bindings]
    names = ["set_encoding", "prepacked", "matmul", "elementwise", "relayout", "unset_encoding"]
    assert ops == [f"relax.hetero.{name}" for name in names]
    assert again["main"].body.blocks[0].bindings[2].value.attrs.kernel == "some_kernel"


def test_comparison_sees_every_attribute():
    x = relax.Var("x", relax.TensorType([4, 4], "float32"))
    base = "<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=4, n=4, k=4>"
    calls = [
        set_encoding(x, "matmul[0]" + base),
        set_encoding(x, "matmul[1]" + base),
        set_encoding(x, "matmul[0]" + base, "identity<2>"),
        unset_encoding(x, "matmul[0]" + base),
        relayout(x, "matmul[0]" + base, "identity<2>", TILES),
        relayout(x, "matmul[0]" + base, TILES, "identity<2>"),
        matmul(x, x, encoding="matmul[2]" + base),
        matmul(x, x, x, encoding="matmul[2]" + base),
        matmul(x, x, encoding="matmul[2]" + base, kernel="other"),
        elementwise(x, expression="relu(x0)", encoding="matmul[2]" + base),
        elementwise(x, expression="tanh(x0)", encoding="matmul[2]" + base),
        prepacked(x, "4x4", "matmul[1]" + base, "identity<2>"),
    ]
    for i, one in enumerate(calls):
        for j, other in enumerate(calls):
            assert tvm_ffi.structural_equal(one, other) == (i == j)
    assert len({tvm_ffi.structural_hash(call) for call in calls}) == len(calls)


def test_objects_for_text():
    x = relax.Var("x", relax.TensorType([5, 4], "float32"))
    encoding, layout = Encoding.parse("matmul[0]" + ENC), PackedLayout.identity(2)
    assert_structural_equal(
        set_encoding(x, encoding, layout), set_encoding(x, "matmul[0]" + ENC, "identity<2>"), map_free_vars=True
    )
    first = elementwise(x, expression=Expression.parse("relu(x0)"), encoding=encoding)
    assert_structural_equal(first, elementwise(x, expression="relu(x0)", encoding="matmul[0]" + ENC))
    assert prepacked(x, [20], encoding, "identity<2>").attrs.shape == "20"


def infer(call):
    builder = relax.BlockBuilder()
    with builder.function("main", [arg for arg in call.args if isinstance(arg, relax.Var)]):
        builder.emit_func_output(var := builder.emit(call))
    return var.ty


def raw(name, attrs, *operands):
    """A call that bypasses the checks of our functions."""
    return relax.Call(tvm.ir.Op.get(name), operands, attrs)


def tensor(*shape, dtype="float32", name="x"):
    return relax.Var(name, relax.TensorType(list(shape), dtype))


def test_types():
    m = tvm.tirx.Var("m", "int64")
    sized = "<float16 * float16 -> float32; (m, k) * (n, k) -> (m, n); m=?, n=3, k=4>"
    lhs, rhs = tensor(m, 4, dtype="float16"), tensor(3, 4, dtype="float16", name="w")
    ty = infer(matmul(lhs, rhs, encoding="matmul[2]" + sized))
    assert_structural_equal(ty, relax.TensorType([m, 3], "float32"))
    ty = infer(elementwise(tensor(5, 4), expression="cast(x0, 'uint8')", encoding="matmul[0]" + ENC))
    assert_structural_equal(ty, relax.TensorType([5, 4], "uint8"))
    ty = infer(prepacked(tensor(2, 1, 2, 4), "4x3", "matmul[1]" + ENC, TILES))
    assert_structural_equal(ty, relax.TensorType([4, 3], "float32"))


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: set_encoding(tensor(5, 4), "matmul"), ["'matmul' is not an encoding"]),
        (lambda: set_encoding(tensor(5, 4), "matmul[0]" + ENC, "tiled"), ["'tiled' is not a layout"]),
        (lambda: set_encoding(tensor(5, 4), "matmul[3]" + ENC), ["operand 3"]),
        (lambda: set_encoding(tensor(5, 4), "conv[0]" + ENC), ["'conv'"]),
        (lambda: set_encoding(tensor(5), "matmul[0]" + ENC), ["set_encoding", "1 dimensions"]),
        (lambda: set_encoding(tensor(5, 3), "matmul[0]" + ENC), ["set_encoding", "k = 3", "says 4"]),
        (lambda: unset_encoding(tensor(5, 4), "matmul[2]" + ENC), ["unset_encoding", "n = 4", "says 3"]),
        (
            lambda: matmul(tensor(5, 4), tensor(4, 3, name="w"), encoding="matmul[1]" + ENC),
            ["matmul", "encoding of its result"],
        ),
        (
            lambda: matmul(tensor(5, 4), tensor(3, 4, name="w"), encoding="matmul[2]" + ENC),
            ["matmul", "operand 1", "k = 3"],
        ),
        (
            lambda: matmul(tensor(5, 4), tensor(4, 3, dtype="int8", name="w"), encoding="matmul[2]" + ENC),
            ["matmul", "operand 1 is int8", "float32"],
        ),
        (
            lambda: elementwise(tensor(5, 4), expression="add(x0, x1)", encoding="matmul[0]" + ENC),
            ["elementwise", "needs 2 operands"],
        ),
        (lambda: elementwise(tensor(5, 4), expression="sort(x0)", encoding="matmul[0]" + ENC), ["sort(x0)"]),
        (lambda: elementwise(tensor(5, 4), expression="add(x0", encoding="matmul[0]" + ENC), ["expression"]),
        (
            lambda: elementwise(
                tensor(5, 4), tensor(4, dtype="int8", name="b"), expression="add(x0, x1)", encoding="matmul[0]" + ENC
            ),
            ["add", "float32", "int8"],
        ),
        (
            lambda: prepacked(tensor(2, 1, 2, 3), "4x3", "matmul[1]" + ENC, TILES),
            ["prepacked", "(2, 1, 2, 3)", "(2, 1, 2, 4)"],
        ),
        (
            lambda: matmul(
                tensor(tvm.tirx.Var("m", "int64"), 4),
                tensor(6, 3, name="w"),
                encoding="matmul[2]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=?, n=3, k=?>",
            ),
            ["matmul", "k is 4", "6 in another"],
        ),
        (
            lambda: elementwise(
                tensor(5, 4), tensor(3, name="b"), expression="add(x0, x1)", encoding="matmul[0]" + ENC
            ),
            ["elementwise", "operand 1 has shape (3)", "broadcasts to (5, 4)"],
        ),
        (
            lambda: elementwise(
                tensor(5, 4), tensor(2, 5, 4, name="b"), expression="add(x0, x1)", encoding="matmul[0]" + ENC
            ),
            ["elementwise", "operand 1 has 3 dimensions", "the result 2"],
        ),
        (
            lambda: elementwise(tensor(5, 4), expression="add(1.0, 2.0)", encoding="matmul[0]" + ENC),
            ["elementwise", "add(1.0, 2.0)", "has no operands, expected at least one"],
        ),
        (lambda: elementwise(tensor(5, 3), expression="relu(x0)", encoding="matmul[0]" + ENC), ["k = 3", "says 4"]),
        (
            lambda: matmul(tensor(5, 4), tensor(4, 3, name="w"), tensor(4, 3, name="i"), encoding="matmul[2]" + ENC),
            ["matmul", "operand 2 has shape (4, 3)", "(5, 3)"],
        ),
        (
            lambda: matmul(
                tensor(5, 4), tensor(4, 3, name="w"), tensor(3, dtype="int32", name="i"), encoding="matmul[2]" + ENC
            ),
            ["matmul", "initial accumulator is int32", "float32"],
        ),
        (lambda: set_encoding(tensor(5, 4, dtype="int8"), "matmul[0]" + ENC), ["set_encoding", "operand is int8"]),
        (
            lambda: set_encoding(tensor(5, 4), "matmul[0]" + ENC, "identity<3>"),
            ["set_encoding", "identity<3> is for 3 dimensions"],
        ),
        (
            lambda: set_encoding(tensor(4, 3), "matmul[1]" + ENC, "pack<outer=[1, 0] inner=[1:2, 0:4] +compensation>"),
            ["set_encoding", "compensation, which is for right operands of 8 bits"],
        ),
        (lambda: prepacked(tensor(4, 3), "4xq", "matmul[1]" + ENC, "identity<2>"), ["prepacked", "'4xq'"]),
        (lambda: prepacked(tensor(4, 3), "", "matmul[1]" + ENC, "identity<2>"), ["prepacked", "''"]),
        (lambda: prepacked(tensor(4, 3), "4x3", "matmul[1]" + ENC, ""), ["prepacked", "'' is not a layout"]),
        (lambda: prepacked(tensor(4, 3), "12", "matmul[1]" + ENC, "identity<2>"), ["prepacked", "(12,)"]),
        (
            lambda: prepacked(tensor(5, 3), "5x3", "matmul[1]" + ENC, "identity<2>"),
            ["prepacked", "stored tensor has k = 5"],
        ),
        (lambda: raw(SET, EncodingAttrs("matmul[0]" + ENC, "")), ["set_encoding", "found 0 operands, expected 1"]),
        (lambda: raw(SET, None, tensor(5, 4)), ["set_encoding", "attributes are a NoneType, expected EncodingAttrs"]),
        (lambda: raw(SET, EncodingAttrs("junk", ""), tensor(5, 4)), ["set_encoding", "'junk' is not an encoding"]),
        (lambda: set_encoding([[1.0]], "matmul[0]" + ENC), ["set_encoding", "operand 0 is a list"]),
        (lambda: set_encoding(relax.ShapeExpr([5, 4]), "matmul[0]" + ENC), ["set_encoding", "expected a tensor"]),
    ],
)
def test_refusals(make, parts):
    with pytest.raises(EncodingError) as caught:
        infer(make())
    for part in parts:
        assert part in str(caught.value)
