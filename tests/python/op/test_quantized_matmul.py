"""`R.hetero.dequantize_blocks` and `R.hetero.block_matmul`: their types, their text, and what they refuse."""

import pytest
import tvm
from tvm import relax
from tvm.ir import assert_structural_equal
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.errors import EncodingError


@ir_module()
def Module(
    data: R.Tensor((70, 48), "uint8"),
    scales: R.Tensor((70, 3), "float32"),
    zeros: R.Tensor((70, 3), "uint8"),
    x: R.Tensor((2, "m", 90), "float32"),
    weight: R.Tensor((3, 1920), "uint8"),
    bias: R.Tensor((70,), "float32"),
) -> R.Tensor((2, "m", 70), "float16"):
    with R.dataflow():
        w = R.hetero.dequantize_blocks(data, scales, zeros, depth=90, block=32)
        y = R.hetero.block_matmul(x, weight, bias, columns=70, block=32, expression='cast(add(x0, x1), "float16")')
        R.output(w, y)
    return y


def test_types():
    first, second = Module["main"].body.blocks[0].bindings
    m = Module["main"].params[3].ty.shape.values[1]
    assert_structural_equal(first.var.ty, relax.TensorType([70, 90], "float32"))
    assert_structural_equal(second.var.ty, relax.TensorType([2, m, 70], "float16"), map_free_vars=True)


def test_text_there_and_back():
    text = Module.script(show_meta=True)
    sizes = 'depth=90, block=32, bits=4, format="", activation_bits=16, rows=""'
    assert f"R.hetero.dequantize_blocks(data, scales, zeros, {sizes})" in text
    assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(Module)), Module)


def infer(op, *types, **attributes):
    call = op(*(relax.Var(f"x{i}", relax.TensorType(*ty)) for i, ty in enumerate(types)), **attributes)
    return relax.BlockBuilder().normalize(call).ty


DATA, SCALES = ((70, 48), "uint8"), ((70, 3), "float32")


@pytest.mark.parametrize(
    ("types", "attributes", "message"),
    [
        ([DATA, SCALES], {"depth": 97, "block": 32}, r"operand 0 has shape \[70, 48\], expected rows of 49 bytes"),
        ([DATA, SCALES], {"depth": 64, "block": 32}, r"operand 1 has shape \[70, 3\], expected \[70, 2\]"),
        ([DATA, SCALES], {"depth": 96, "block": 36}, "blocks of 36, expected a multiple of 8"),
        ([((70, 36), "uint8")], {"depth": 64, "format": "q4_k"}, "rows of 64 weights, expected a multiple of 256"),
        ([((70, 36), "uint8")], {"depth": 64, "format": "q8_0"}, r"\[70, 36\], expected \(68 bytes a row of 64"),
        ([DATA, SCALES], {"depth": 64, "format": "q8_0"}, "found 2 operands, expected rows of q8_0 alone"),
        ([DATA, SCALES], {"depth": 64, "format": "q3_0"}, "format 'q3_0', expected one of q8_0, "),
        ([DATA], {"depth": 64, "block": 32}, "found 1 operands, expected 2"),
        ([DATA, ((70, 3), "float16")], {"depth": 96, "block": 32}, "expected a tensor of float32"),
        ([((70, 48), "int8"), SCALES], {"depth": 96, "block": 32}, "expected a tensor of uint8"),
        ([DATA, SCALES, ((70, 3), "int8")], {"depth": 96, "block": 32}, "operand 2 .* expected a tensor of uint8 or"),
    ],
)
def test_weights_that_do_not_fit(types, attributes, message):
    with pytest.raises(EncodingError, match=message):
        infer(rh.op.dequantize_blocks, *types, **attributes)


FRAGMENT_SCALES = ((5, 3, 8, 2), "float16")
X4, INDEX, EXPERT_PANELS = ((5, 1, 1, 96), "float32"), ((5, 2), "int32"), ((9, 1920), "uint8")


def test_products_by_experts_have_a_row_for_each_that_is_chosen():
    for rows in (X4, ((5, 2, 1, 96), "float32")):
        result = infer(rh.op.block_matmul, rows, EXPERT_PANELS, INDEX, columns=70, block=32, experts=3)
        assert [int(extent) for extent in result.shape.values] == [5, 2, 1, 70]


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ([X4, ((3, 1920), "uint8"), INDEX], r"operand 1 has shape \[3, 1920\], expected \[9, 1920\]"),
        ([X4, EXPERT_PANELS], "found 2 operands, expected 3 at least"),
        ([X4, EXPERT_PANELS, ((5, 2), "float32")], "operand 2 .* expected a tensor of int32 or int64"),
        ([X4, EXPERT_PANELS, ((4, 2), "int32")], r"\[5, 1, 1, 96\] and \[4, 2\], expected \(tokens, 1 or used, 1, k\)"),
        ([((5, 3, 1, 96), "float32"), EXPERT_PANELS, INDEX], r"\[5, 3, 1, 96\] and \[5, 2\], expected"),
        ([((5, 96), "float32"), EXPERT_PANELS, INDEX], r"\[5, 96\] and \[5, 2\], expected"),
        ([X4, ((5, 2, 32, 4), "int32"), FRAGMENT_SCALES], "found 3 experts with 70 columns, expected whole fragments"),
    ],
)
def test_experts_that_do_not_fit(types, message):
    with pytest.raises(EncodingError, match=message):
        infer(rh.op.block_matmul, *types, columns=70, block=32, experts=3)


ROWS, EXPERT_SCALES = ((5, 1, 1, 96), "float16"), ((12, 3, 8, 2), "float16")
EXPERT_FRAGMENTS, SHARES = ((12, 2, 32, 4), "int32"), ((5, 2), "float32")
WEIGHTS = [EXPERT_FRAGMENTS, EXPERT_SCALES]


def test_two_products_and_weighted_sums_of_experts():
    attributes = {"columns": 64, "block": 32, "experts": 3}
    pair = infer(
        rh.op.block_matmul, ROWS, *WEIGHTS, *WEIGHTS, INDEX, products=2, expression="add(x0, x1)", **attributes
    )
    assert [int(extent) for extent in pair.shape.values] == [5, 2, 1, 64]
    total = infer(rh.op.block_matmul, ROWS, *WEIGHTS, INDEX, SHARES, shares=True, **attributes)
    assert [int(extent) for extent in total.shape.values] == [5, 64]
    infer(rh.op.block_matmul, X4, *WEIGHTS, INDEX, rounded="bfloat16", **attributes)


@pytest.mark.parametrize(
    ("types", "attributes", "message"),
    [
        ([ROWS, *WEIGHTS, INDEX], {"products": 2}, "found 4 operands, expected 6 at least"),
        ([ROWS, *WEIGHTS, INDEX], {"products": 3}, "found 3 products of 3 experts, expected one product, or two"),
        ([ROWS, *WEIGHTS, INDEX], {"experts": 0, "shares": True}, "found 1 products and shares of 0 experts"),
        ([ROWS, *WEIGHTS, INDEX], {"shares": True}, "found 4 operands, expected 5 at least"),
        ([ROWS, *WEIGHTS, INDEX, ((5, 3), "float32")], {"shares": True}, r"operand 4 has shape \[5, 3\], expected"),
        ([ROWS, *WEIGHTS, INDEX], {"biases": True}, "found 4 operands, expected 5 at least"),
        ([ROWS, *WEIGHTS, INDEX, ((3, 60), "float32")], {"biases": True}, r"operand 4 has shape \[3, 60\], expected"),
        ([ROWS, *WEIGHTS, INDEX], {"rounded": "float16"}, "found float16 that is rounded to float16, expected float32"),
        ([X4, *WEIGHTS, INDEX], {"rounded": "float8"}, "found float32 that is rounded to float8, expected float32 to"),
        ([X4, ((12, 6, 32, 4), "int32"), INDEX], {"format": "f16"}, "float32, which kernels do not multiply by f16"),
    ],
)
def test_products_of_experts_that_do_not_fit(types, attributes, message):
    with pytest.raises(EncodingError, match=message):
        infer(rh.op.block_matmul, *types, **{"columns": 64, "block": 32, "experts": 3, **attributes})


X, PANELS, FRAGMENTS = ((4, 96), "float32"), ((3, 1920), "uint8"), ((5, 2, 32, 4), "int32")


@pytest.mark.parametrize(
    ("types", "attributes", "message"),
    [
        ([((96,), "float32"), PANELS], {}, r"expected \(..., m, k\)"),
        ([X, ((3, 12, 32), "uint8")], {}, r"operand 1 has shape \[3, 12, 32\], expected packed weights"),
        ([((4, 60), "float32"), PANELS], {}, r"operand 1 has shape \[3, 1920\], expected \[2, 1920\]"),
        ([X, ((3, 1921), "uint8")], {}, r"operand 1 has shape \[3, 1921\], expected \[3, 1920\]"),
        ([X, PANELS], {"format": "q5_0"}, r"operand 1 has shape \[3, 1920\], expected \[3, 1914\]"),
        ([X, PANELS], {"expression": "add(x0, x1)"}, "needs 1 more operands"),
        ([((4, 96), "float16"), PANELS], {}, "operand 0 .* expected a tensor of float32"),
        ([X, FRAGMENTS, ((5, 2, 8, 2), "float32")], {}, r"operand 2 has shape \[5, 2, 8, 2\], expected \[5, 3, 8, 2\]"),
        ([X, FRAGMENTS, FRAGMENT_SCALES], {"zeros": True}, "found 3 operands, expected 4 at least"),
    ],
)
def test_products_that_do_not_fit(types, attributes, message):
    with pytest.raises(EncodingError, match=message):
        infer(rh.op.block_matmul, *types, columns=70, block=32, **attributes)


def test_operands_that_are_not_expressions():
    with pytest.raises(EncodingError, match="dequantize_blocks: operand 1 is a float"):
        rh.op.dequantize_blocks(relax.Var("data", relax.TensorType(*DATA)), 1.0, depth=96, block=32)
