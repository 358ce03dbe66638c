"""The encoded convolution: it prints, parses, is typed, and refuses what does not fit."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R
from tvm.script import tirx as T

from modules import ir_module
from relax_hetero.encoding.encoding import Encoding
from relax_hetero.errors import EncodingError
from relax_hetero.op.encoded import CONV, conv, encoded_op

ENC = (
    "<float32 * float32 -> float32; (b, c, x0, x1) * (n, k, w0, w1) -> (b, n, y0, y1); b=?, c=4, x0=9, x1=8, "
    "n=6, k=2, w0=3, w1=2, y0=5, y1=6; strides=2x1, padding=1x0x1x0, dilation=1x2, groups=2>"
)


@ir_module("llvm")
def Module(x: R.Tensor(("b", 4, 9, 8), "float32", "llvm"), w: R.Tensor((6, 2, 3, 2), "float32", "llvm")):
    b = T.int64()
    with R.dataflow():
        data: R.Tensor((b, 4, 9, 8), "float32", "llvm") = R.hetero.set_encoding(x, "conv2d[0]" + ENC)
        weight: R.Tensor((6, 2, 3, 2), "float32", "llvm") = R.hetero.set_encoding(w, "conv2d[1]" + ENC)
        out: R.Tensor((b, 6, 5, 6), "float32", "llvm") = R.hetero.conv(
            data, weight, encoding="conv2d[2]" + ENC, layout="pack<outer=[0, 2, 3, 1] inner=[]>", kernel="some"
        )
        y: R.Tensor((b, 6, 5, 6), "float32", "llvm") = R.hetero.unset_encoding(out, "conv2d[2]" + ENC)
        R.output(y)
    return y


def test_text_and_json():
    assert_structural_equal(tvm.script.from_source(Module.script()), Module)
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


def tensor(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(list(shape), dtype))


def typed(call):
    return relax.BlockBuilder().normalize(call).ty


@pytest.mark.parametrize("batch", [1, tvm.tirx.Var("b", "int64")])
def test_types(batch):
    call = conv(tensor(batch, 4, 9, 8), tensor(6, 2, 3, 2), encoding=Encoding.parse("conv2d[2]" + ENC))
    assert encoded_op(call) == CONV
    ty = typed(call)
    assert_structural_equal(ty, relax.TensorType([batch, 6, 5, 6], "float32"))


def test_a_symbolic_image_has_as_many_places():
    h = tvm.tirx.Var("h", "int64")
    encoding = ("conv2d[2]" + ENC).replace("x0=9", "x0=?").replace("y0=5", "y0=?")
    ty = typed(conv(tensor(1, 4, h, 8), tensor(6, 2, 3, 2), encoding=encoding))
    assert tvm.sym.Analyzer().can_prove_equal(ty.shape.values[2], (h + 2 - 3) // 2 + 1)


@pytest.mark.parametrize(
    "data, weight, operand, message",
    [
        ((1, 4, 9, 8), (6, 2, 3, 2), "conv2d[1]", "takes the encoding of its result, found"),
        ((1, 4, 9), (6, 2, 3, 2), "conv2d[2]", "operand 0 has 3 dimensions"),
        ((1, 4, 9, 8), (6, 2, 3, 3), "conv2d[2]", "operand 1 has w1 = 3"),
        ((1, 5, 9, 8), (6, 2, 3, 2), "conv2d[2]", "operand 0 has c = 5"),
    ],
)
def test_refusals(data, weight, operand, message):
    with pytest.raises(EncodingError) as error:
        typed(conv(tensor(*data), tensor(*weight), encoding=operand + ENC))
    assert CONV in str(error.value) and message in str(error.value)


def test_another_type_is_refused():
    with pytest.raises(EncodingError, match="operand 1 is float64, its encoding is for float32"):
        typed(conv(tensor(1, 4, 9, 8), tensor(6, 2, 3, 2, dtype="float64"), encoding="conv2d[2]" + ENC))


def test_a_product_s_encoding_is_refused():
    text = "matmul[2]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=5, n=3, k=4>"
    with pytest.raises(EncodingError, match="the encoding of another op"):
        typed(conv(tensor(5, 4), tensor(4, 3), encoding=text))
