"""Symbolic dimensions: one value per name, expressions checked once their names are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relax_hetero as rh
from relax_hetero.artifact.dims import DimValues, parse_dim

expressions = st.recursive(
    st.one_of(st.integers(0, 9).map(str), st.sampled_from(["n", "m"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        st.tuples(st.sampled_from(["min", "max"]), inner, inner).map(lambda t: f"{t[0]}({t[1]}, {t[2]})"),
    ),
    max_leaves=6,
)


@given(expressions, st.integers(0, 50), st.integers(1, 50))
def test_expressions_mean_what_python_means(text, n, m):
    expression = parse_dim(text)
    assert expression.evaluate is not None
    assert expression.evaluate({"n": n, "m": m}) == eval(text, {"n": n, "m": m})


@given(st.text(max_size=12))
def test_any_text_parses(text):
    parse_dim(text)


def test_expressions_wait_for_their_names():
    dims = DimValues()
    dims.match("n*2 + 1", 7, "argument 'x'", 0)
    dims.match("n", 3, "argument 'y'", 0)
    dims.settle()
    dims.match("n // 2", 2, "argument 'z' dimension 1")
    with pytest.raises(rh.BindingError, match=r"argument 'z' dimension 1 is 2, expected n // 2 = 1 \(n is 3\)"):
        dims.settle()


def test_expressions_over_unknown_names_are_names():
    dims = DimValues()
    dims.match("a + b", 5, "argument 'x' dimension 0")
    dims.match("a + b", 6, "argument 'y' dimension 0")
    with pytest.raises(rh.BindingError, match="'y' dimension 0 is 6, expected 5: a \\+ b is 5 by argument 'x'"):
        dims.settle()


def test_names_that_are_not_identifiers():
    dims = DimValues()
    for where in ("x", "y"):
        dims.match("batch size!", 4, where)
    dims.settle()
    assert dims.values == {"batch size!": 4}


def test_division_by_a_zero_extent_is_left_to_the_machine():
    dims = DimValues()
    dims.match("n", 0, "x")
    dims.match("8 // n", 1, "y")
    dims.settle()


def test_copies_are_independent():
    first = DimValues()
    first.match("n", 1, "x")
    second = first.copy()
    second.match("m", 2, "y")
    assert first.values == {"n": 1}
