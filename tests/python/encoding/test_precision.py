"""In which element types products are computed, as text."""

import pytest

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.precision import precision, precision_of_arguments
from relax_hetero.encoding.problem import (
    AttentionProblem,
    BlockProductProblem,
    ConvProblem,
    ElementwiseProblem,
    Epilogue,
    MatmulProblem,
    Operand,
)


def operand(dtype, *names):
    return Operand((4,) * len(names), dtype, names, PackedLayout.identity(len(names)))


@pytest.mark.parametrize(
    "lhs, rhs, sums, text",
    [
        ("float32", "float32", "float32", "f32"),
        ("float64", "float64", "float64", "f64"),
        ("bfloat16", "bfloat16", "float32", "bf16"),
        ("float16", "float16", "float32", "f16"),
        ("uint8", "int8", "int32", "u8*s8->s32"),
        ("int8", "int8", "int32", "s8*s8->s32"),
        ("int32", "int32", "int32", "s32*s32->s32"),
    ],
)
def test_products_and_convolutions(lhs, rhs, sums, text):
    result = operand("float32", "m", "n")
    assert precision(MatmulProblem(operand(lhs, "m", "k"), operand(rhs, "k", "n"), result, sums)) == text
    assert precision(ConvProblem(operand(lhs, "b", "c"), operand(rhs, "n", "k"), result, sums, ())) == text


def test_weights_of_4_bits():
    weights = (operand("uint8", "n", "k"), operand("float32", "n"))
    problem = BlockProductProblem(operand("float32", "m", "k"), weights, operand("float32", "m", "n"), 32)
    assert precision(problem) == "int4*f32"


def test_attention():
    heads = operand("bfloat16", "b", "h", "m", "d")
    scores = Epilogue(Expression.operand(0))
    assert precision(AttentionProblem(heads, heads, heads, heads, ((0,) * 4,) * 3, (), scores)) == "bf16"


def test_what_has_no_products():
    x = operand("float32", "d0")
    assert precision(ElementwiseProblem(Expression.parse("relu(x0)"), (x,), x)) == ""
    assert precision_of_arguments(["float32", "int64", "float32", "bool"]) == "f32, s64, bool"
