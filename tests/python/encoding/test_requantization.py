"""Requantizing expressions with fewer ops: what they become, and that they compute the same bytes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.encoding.expression import Expression
from relax_hetero.encoding.requantization import numbers_as_operands, simplify_requantization


def simplified(text, dtypes=("int32",), **constants):
    numbers = {int(name[1:]): np.asarray(array, "float32") for name, array in constants.items()}
    return simplify_requantization(Expression.parse(text), dtypes, numbers)


def test_scales_and_shifts_take_the_division_in():
    text = "cast(clip(add(round(divide(add(multiply(cast(x0,'float32'),x1),x2),0.5)),3.0),0.0,255.0),'uint8')"
    expression, constants = simplified(text, ("int32", "float32", "float32"), x1=[1, 2], x2=[3, 4])
    assert expression == Expression.parse(
        "cast(clip(add(round(add(multiply(cast(x0,'float32'),x3),x4)),3.0),0.0,255.0),'uint8')"
    )
    assert {number: array.tolist() for number, array in constants.items()} == {3: [2, 4], 4: [6, 8]}


def test_unknown_operands_keep_one_factor():
    text = "cast(clip(round(divide(multiply(cast(x0,'float32'),x1),0.5)),0.0,255.0),'uint8')"
    expression, constants = simplified(text, ("int32", "float32"))
    assert expression == Expression.parse(
        "cast(clip(round(multiply(multiply(cast(x0,'float32'),x1),2.0)),0.0,255.0),'uint8')"
    )
    assert constants == {}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("cast(clip(add(round(relu(x0)),3.0),0.0,255.0),'uint8')", "cast(clip(add(round(x0),3.0),3.0,255.0),'uint8')"),
        ("cast(clip(round(relu(x0)),-128.0,127.0),'int8')", "cast(clip(round(x0),0.0,127.0),'int8')"),
        ("divide(relu(x0),0.5)", "divide(relu(x0),0.5)"),  # rounds nothing
        ("round(divide(x0,0.0))", "round(divide(x0,0.0))"),
    ],
)
def test_bounds(text, expected):
    assert simplified(text, ("float32",)) == (Expression.parse(expected), {})


def test_quantize_then_dequantize_stays_a_float():
    quantized = "cast(clip(add(round(multiply(x0,4.0)),3.0),0.0,255.0),'uint8')"
    text = f"relu(multiply(cast(subtract(cast({quantized},'int32'),3),'float32'),0.25))"
    assert simplified(text, ("float32",)) == (
        Expression.parse("relu(multiply(clip(round(multiply(x0,4.0)),-3.0,252.0),0.25))"),
        {},
    )


def test_operands_of_bytes_are_made_floats_at_once_but_no_wider_ones():
    text = "round(cast(subtract(cast(x0,'int32'),3),'float32'))"
    assert str(simplified(text, ("uint8",))[0]) == "round(subtract(cast(x0, 'float32'), 3.0))"
    assert simplified(text, ("int32",))[0] == Expression.parse(text)


@given(
    st.integers(1, 1 << 30),
    st.floats(2**-10, 2**10, width=32),
    st.floats(2**-10, 2**10, width=32),
    st.integers(0, 255),
    st.booleans(),
)
def test_bytes_are_the_same_but_for_halves(seed, first, second, zero, has_relu):
    rng = np.random.default_rng(seed)
    x0 = rng.integers(-(1 << 16), 1 << 16, 200).astype("int32")
    x1, x2 = rng.uniform(2**-8, 1, 200).astype("float32"), rng.uniform(-99, 99, 200).astype("float32")
    x3 = rng.integers(0, 256, 200).astype("uint8")
    total = "add(multiply(cast(x0,'float32'),x1),x2)"
    total = f"relu({total})" if has_relu else total
    middle = f"cast(clip(add(round(divide({total},{first!r})),{float(zero)}),0.0,255.0),'uint8')"
    back = f"multiply(cast(subtract(cast({middle},'int32'),{zero}),'float32'),{first!r})"
    other = f"multiply(cast(subtract(cast(x3,'int32'),{zero}),'float32'),{second!r})"
    text = f"cast(clip(add(round(divide(add({back},{other}),{second!r})),{float(zero)}),0.0,255.0),'uint8')"
    types = ("int32", "float32", "float32", "uint8")
    expression, constants = simplified(text, types, x1=x1, x2=x2)
    got = expression.evaluate([x0, x1, x2, x3, *constants.values()])
    want = Expression.parse(text).evaluate([x0, x1, x2, x3])
    # A unit of the first rounding is first/second units of the second one.
    difference = np.abs(got.astype(int) - want.astype(int))
    assert difference.max() <= 1 + np.ceil(first / second)
    assert (difference > 0).mean() < 0.2
    assert sum(term.op in ("divide", "relu") for term in expression.terms()) == 0


def test_numbers_of_layers_become_operands_and_those_of_formulas_stay():
    text = "cast(clip(add(round(multiply(add(cast(subtract(x0,7),'float32'),1.0),3.5)),131.0),0.0,255.0),'uint8')"
    expression, numbers = numbers_as_operands(Expression.parse(text), ["int32"])
    assert expression == Expression.parse(
        "cast(clip(add(round(multiply(add(cast(subtract(x0,x1),'float32'),1.0),x2)),x3),0.0,255.0),'uint8')"
    )
    assert [(number.dtype, number.shape, number.item()) for number in numbers] == [
        ("int32", (), 7), ("float32", (), 3.5), ("float32", (), 131)
    ]  # fmt: skip


def test_bounds_that_hold_a_zero_point_are_those_of_bytes():
    expression, numbers = numbers_as_operands(
        Expression.parse("multiply(clip(round(x0),-3.0,252.0),0.25)"), ["float32"]
    )
    assert str(expression) == "multiply(subtract(clip(add(round(x0), x1), 0.0, 255.0), x1), x2)"
    assert [number.item() for number in numbers] == [3, 0.25]
    for text in ("clip(round(x0),-128.0,127.0)", "clip(round(x0),0.0,255.0)", "clip(x0,-3.0,252.0)"):
        assert numbers_as_operands(Expression.parse(text), ["float32"]) == (Expression.parse(text), [])
