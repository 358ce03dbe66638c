"""Index maps of heads as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.encoding.heads import Heads
from relax_hetero.errors import EncodingError

TEXT = "(b, m, h*d) * (b, n, g*d+96) * (b, n, g*e+192) -> (b, m, h*e); b=1, h=12, g=12, m=?, n=?, d=8, e=8"


def test_text_goes_round() -> None:
    heads = Heads.parse(TEXT)
    assert str(heads) == TEXT
    assert heads.key.dims == (("b",), ("n",), ("g", "d"))
    assert heads.key.starts == (0, 0, 96)
    assert heads.size("h") == 12
    assert heads.size("m") == -1
    assert heads.value.index_map == ("b", "n", "g*e")


def test_one_place_of_a_dimension() -> None:
    text = TEXT.replace("(b, m, h*d)", "(1+2, b, m, h, d)")
    assert str(Heads.parse(text)) == text
    assert Heads.parse(text).query.dims[0] == ()


def test_a_map_moves_in_its_last_dimension() -> None:
    assert str(Heads.parse(TEXT).key.shifted(4)) == "b, n, g*d+100"


@given(st.permutations(["b", "m", "h", "d"]), st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_any_order(names: list[str], starts: list[int]) -> None:
    dims = ", ".join(f"{name}+{start}" if start else name for name, start in zip(names, starts, strict=True))
    text = TEXT.replace("(b, m, h*d)", f"({dims})")
    assert str(Heads.parse(text)) == text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("->", "=>", "is not a map of heads"),
        ("h*d)", "h^d)", r"found dimension 'h\^d'"),
        ("h*d)", "h)", "query runs along"),
        ("h*d)", "h*h*d)", "query runs along"),
        ("g*e+192", "g*d+192", "value runs along"),
        ("h=12", "h=?", "are numbers"),
        ("g=12", "g=5", "multiple of g"),
        ("g=12", "g=0", "are numbers"),
        ("b=1, ", "", "expected sizes of b, h, g, m, n, d, e"),
        ("m=?", "m=x", "a number or"),
        ("(b, m, h*e)", "(b, m, h*e+1)", "the result is not a slice"),
    ],
)
def test_malformed_maps_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(EncodingError, match=message):
        Heads.parse(TEXT.replace(old, new, 1) if old in TEXT else TEXT)
