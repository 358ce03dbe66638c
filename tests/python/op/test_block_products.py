"""`R.hetero.dequantize_blocks` and `R.hetero.block_matmul`: their types, their text, and what they refuse."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import ir as I
from tvm.script import relax as R

import relax_hetero as rh
from relax_hetero.errors import EncodingError


@I.ir_module
class Module:
    @R.function
    def main(
        data: R.Tensor((70, 48), "uint8"),
        scales: R.Tensor((70, 3), "float32"),
        zeros: R.Tensor((70, 3), "uint8"),
        x: R.Tensor((2, "m", 90), "float32"),
        weight: R.Tensor((3, 12, 32), "int32"),
        packed_scales: R.Tensor((3, 3, 32), "float32"),
        bias: R.Tensor((70,), "float32"),
    ) -> R.Tensor((2, "m", 70), "float16"):
        with R.dataflow():
            w = R.hetero.dequantize_blocks(data, scales, zeros, depth=90, block=32)
            y = R.hetero.block_matmul(
                x, weight, packed_scales, bias, columns=70, block=32, expression='cast(add(x0, x1), "float16")'
            )
            R.output(w, y)
        return y


def test_types():
    first, second = Module["main"].body.blocks[0].bindings
    m = Module["main"].params[3].ty.shape.values[1]
    assert_structural_equal(first.var.ty, relax.TensorType([70, 90], "float32"))
    assert_structural_equal(second.var.ty, relax.TensorType([2, m, 70], "float16"), map_free_vars=True)


def test_text_there_and_back():
    text = Module.script(show_meta=True)
    assert 'R.hetero.dequantize_blocks(data, scales, zeros, depth=90, block=32, bits=4, format="")' in text
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


def infer(op, *types, **attributes):
    call = op(*(relax.Var(f"x{i}", relax.TensorType(*ty)) for i, ty in enumerate(types)), **attributes)
    return relax.BlockBuilder().normalize(call).ty


DATA, SCALES = ((70, 48), "uint8"), ((70, 3), "float32")


@pytest.mark.parametrize(
    ("types", "attributes", "found"),
    [
        ([DATA, SCALES], {"depth": 97, "block": 32}, r"operand 0 has shape \[70, 48\], expected rows of 49 bytes"),
        ([DATA, SCALES], {"depth": 64, "block": 32}, r"operand 1 has shape \[70, 3\], expected \[70, 2\]"),
        ([DATA, SCALES], {"depth": 96, "block": 36}, "blocks of 36, expected a multiple of 8"),
        ([((70, 36), "uint8")], {"depth": 64, "format": "q4_k"}, "rows of 64 weights, expected a multiple of 256"),
        ([((70, 36), "uint8")], {"depth": 64, "format": "q8_0"}, r"\[70, 36\], expected \(68 bytes a row of 64"),
        ([DATA, SCALES], {"depth": 64, "format": "q8_0"}, "found 2 operands, expected rows of q8_0 alone"),
        ([DATA, SCALES], {"depth": 64, "format": "q3_k"}, "format 'q3_k', expected one of q8_0, "),
        ([DATA], {"depth": 64, "block": 32}, "found 1 operands, expected 2"),
        ([DATA, ((70, 3), "float16")], {"depth": 96, "block": 32}, "expected a tensor of float32"),
        ([((70, 48), "int8"), SCALES], {"depth": 96, "block": 32}, "expected a tensor of uint8"),
        ([DATA, SCALES, ((70, 3), "int8")], {"depth": 96, "block": 32}, "operand 2 .* expected a tensor of uint8 or"),
    ],
)
def test_weights_that_do_not_fit(types, attributes, found):
    with pytest.raises(EncodingError, match=found):
        infer(rh.op.dequantize_blocks, *types, **attributes)


X, PACKED, PACKED_SCALES = ((4, 96), "float32"), ((3, 12, 32), "int32"), ((3, 3, 32), "float32")


@pytest.mark.parametrize(
    ("types", "attributes", "found"),
    [
        ([((96,), "float32"), PACKED, PACKED_SCALES], {}, r"expected \(..., m, k\)"),
        ([((4, 80), "float32"), PACKED, PACKED_SCALES], {}, r"operand 1 has shape \[3, 12, 32\], expected \[3, 10, 32"),
        ([X, PACKED, ((3, 2, 32), "float32")], {}, r"operand 2 has shape \[3, 2, 32\], expected \[3, 3, 32\]"),
        ([X, PACKED, PACKED_SCALES], {"zeros": True}, "found 3 operands, expected 4 at least"),
        ([X, PACKED, PACKED_SCALES], {"expression": "add(x0, x1)"}, "needs 1 operands besides"),
        ([((4, 96), "float16"), PACKED, PACKED_SCALES], {}, "operand 0 .* expected a tensor of float32"),
    ],
)
def test_products_that_do_not_fit(types, attributes, found):
    with pytest.raises(EncodingError, match=found):
        infer(rh.op.block_matmul, *types, columns=70, block=32, **attributes)


def test_operands_that_are_no_expressions():
    with pytest.raises(EncodingError, match="dequantize_blocks: operand 1 is a float"):
        rh.op.dequantize_blocks(relax.Var("data", relax.TensorType(*DATA)), 1.0, depth=96, block=32)
