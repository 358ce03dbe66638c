"""Operation counts of problems, and their element types."""

from __future__ import annotations

import pytest

from relax_hetero.encoding import PackedLayout
from relax_hetero.encoding.arithmetic import operations, precision, precision_of_arguments
from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.problem import (
    AttentionProblem,
    ConvProblem,
    Dim,
    ElementwiseProblem,
    Epilogue,
    MatmulProblem,
    Operand,
    QuantizedMatmulProblem,
    Window,
)


def operand(names: str, *shape: Dim) -> Operand:
    return Operand(shape, "float32", tuple(names.split()), PackedLayout.identity(len(shape)))


def matmul(rows: Dim) -> MatmulProblem:
    lhs, rhs, result = operand("b m k", 2, rows, 5), operand("b k n", 2, 5, 7), operand("b m n", 2, rows, 7)
    return MatmulProblem(lhs, rhs, result, "float32")


def test_products_count_two_for_a_multiply_add() -> None:
    assert operations(matmul(3)) == 2 * 2 * 3 * 5 * 7
    assert operations(matmul("s0")) == 0


def test_convolutions_count_the_channels_of_one_group_and_the_window() -> None:
    data, result = operand("b c x0 x1", 1, 8, 9, 9), operand("b n y0 y1", 1, 6, 5, 5)
    weight = operand("n k w0 w1", 6, 4, 3, 3)
    window = Window(3, stride=2, before=1, after=1)
    problem = ConvProblem(data, weight, result, "float32", (window, window), groups=2)
    assert operations(problem) == 2 * (6 * 5 * 5) * (4 * 3 * 3)


def test_attention_counts_both_products() -> None:
    query, key = operand("b h m d", 1, 4, 6, 8), operand("b g n d", 1, 2, 10, 8)
    value, result = operand("b g n e", 1, 2, 10, 3), operand("b h m e", 1, 4, 6, 3)
    sizes: tuple[tuple[str, Dim], ...] = (("b", 1), ("h", 4), ("g", 2), ("m", 6), ("n", 10), ("d", 8), ("e", 3))
    starts = ((0,) * 4,) * 3
    scores = Epilogue(Expression.parse("x0"))
    problem = AttentionProblem(query, key, value, result, starts, sizes, scores)
    assert operations(problem) == 2 * (4 * 6 * 10) * (8 + 3)


def test_problems_without_products_count_nothing() -> None:
    x = operand("d0 d1", 3, 4)
    assert operations(ElementwiseProblem(Expression.parse("relu(x0)"), (x,), x)) == 0
    assert operations("pack") == 0


def of_type(dtype, *names):
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
    result = of_type("float32", "m", "n")
    assert precision(MatmulProblem(of_type(lhs, "m", "k"), of_type(rhs, "k", "n"), result, sums)) == text
    assert precision(ConvProblem(of_type(lhs, "b", "c"), of_type(rhs, "n", "k"), result, sums, ())) == text


def test_weights_of_4_bits():
    weights = (of_type("uint8", "n", "k"), of_type("float32", "n"))
    problem = QuantizedMatmulProblem(of_type("float32", "m", "k"), weights, of_type("float32", "m", "n"), 32)
    assert precision(problem) == "int4*f32"


def test_attention():
    heads = of_type("bfloat16", "b", "h", "m", "d")
    scores = Epilogue(Expression.operand(0))
    assert precision(AttentionProblem(heads, heads, heads, heads, ((0,) * 4,) * 3, (), scores)) == "bf16"


def test_problems_without_products():
    x = of_type("float32", "d0")
    assert precision(ElementwiseProblem(Expression.parse("relu(x0)"), (x,), x)) == ""
    assert precision_of_arguments(["float32", "int64", "float32", "bool"]) == "f32, s64, bool"
