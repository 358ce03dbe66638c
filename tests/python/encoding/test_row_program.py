"""Programs of rows as text: there and back, and what is refused."""

import pytest

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.row_program import KINDS, Reduction, RowProgram, operands_of, replaced
from relax_hetero.errors import EncodingError

SOFTMAX = "r0 = max(x0); r1 = sum(exp(subtract(x0, r0))); multiply(exp(subtract(x0, r0)), divide(1.0, r1))"


@pytest.mark.parametrize(
    "text",
    [
        SOFTMAX,
        "relu(x0)",
        "r0 = mean(x0); r0",
        "r0 = prod(add(x1, x0)); r1 = min(x0); where(x2, r0, add(r1, x1))",
        "r0 = sum(x0); cast(multiply(r0, 0.5), 'float16')",
    ],
)
def test_text_there_and_back(text):
    program = RowProgram.parse(text)
    assert str(program) == text
    assert RowProgram.parse(str(program)) == program


def test_reductions_are_operands_after_the_programs():
    program = RowProgram.parse("r0 = max(x1); add(r0, x0)")
    assert program.num_operands == 2
    assert program.reductions == (Reduction("max", Expression.operand(1)),)
    assert program.result == Expression.parse("add(x2, x0)")
    assert [operands_of(expression) for expression in program.expressions] == [[1], [0, 2]]


def test_type_of_the_result():
    assert RowProgram.parse(SOFTMAX).dtype(["float32"]) == "float32"
    assert RowProgram.parse("r0 = sum(cast(x0, 'float32')); cast(r0, 'float16')").dtype(["float16"]) == "float16"
    with pytest.raises(EncodingError, match="element types"):
        RowProgram.parse("r0 = sum(x0); add(r0, x1)").dtype(["float32", "float16"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("r1 = max(x0); r1", "r1 = max"),
        ("r0 = median(x0); r0", "median"),
        ("r0 = max(r1); r1 = sum(x0); r0", "before it is defined"),
        ("add(x0, r0)", "before it is defined"),
        ("r0 = max(x0); r0; x0; ", "expected"),
        ("add(x0, x2)", r"uses operands \[0, 2\]"),
        ("1.0", "expected"),
        ("", "expression"),
        ("r0 = sum(nothing(x0)); r0", "nothing"),
    ],
)
def test_other_text_is_refused(text, message):
    with pytest.raises(EncodingError, match=message):
        RowProgram.parse(text)


def test_the_outermost_term_is_replaced():
    outer = Expression.parse("add(exp(x0), exp(x0))").term
    inner = Expression.parse("exp(x0)").term
    assert replaced(outer, {inner: Expression.operand(1).term}) == Expression.parse("add(x1, x1)").term
    both = {outer: Expression.operand(2).term, inner: Expression.operand(1).term}
    assert replaced(outer, both) == Expression.operand(2).term


def test_kinds_are_named():
    assert set(KINDS) == {"sum", "mean", "max", "min", "prod"}
