"""Encodings as text and as data."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.encoding import Encoding
from relax_hetero.encoding.encoding import DYNAMIC, LHS, RESULT, RHS
from relax_hetero.errors import EncodingError, HeteroError

BATCHED = "batch_matmul[1]<uint8 * int8 -> int32; (b0, m, k) * (k, n) -> (b0, m, n); b0=12, m=?, n=64, k=0>"


@st.composite
def encodings(draw):
    batch = tuple(f"b{i}" for i in range(draw(st.integers(0, 3))))
    # Every batch dimension is one of the left operand, of the right one, or of both.
    sides = [draw(st.sampled_from(["l", "r", "lr"])) for _ in batch]
    maps = []
    for side, last_two in (("l", "mk"), ("r", "kn"), ("", "mn")):
        extents = [name if side in of else "1" for name, of in zip(batch, sides, strict=True)]
        some = [name for name in extents if name != "1" or draw(st.booleans())]
        maps.append(tuple(draw(st.permutations([*some, *last_two]))))
    sizes = tuple((name, draw(st.integers(0, 5000) | st.just(DYNAMIC))) for name in (*batch, "m", "n", "k"))
    types = draw(st.sampled_from([("float32",) * 3, ("uint8", "int8", "int32"), ("bfloat16", "bfloat16", "float32")]))
    return Encoding("batch_matmul" if batch else "matmul", draw(st.integers(0, 2)), types, tuple(maps), sizes)


@given(encodings())
def test_text_round_trips(encoding):
    assert Encoding.parse(str(encoding)) == encoding
    assert pickle.loads(pickle.dumps(encoding)) == encoding


def test_meaning_of_the_fields():
    encoding = Encoding.parse(BATCHED)
    assert str(encoding) == BATCHED
    assert encoding.operand_index == RHS
    assert encoding.index_map == ("k", "n")
    assert encoding.element_type == "int8"
    assert encoding.shape() == (0, 64)
    assert encoding.of(LHS).shape() == (12, DYNAMIC, 0)
    assert encoding.of(RESULT).element_type == "int32"
    assert encoding.of(RESULT).of(RHS) == encoding
    assert encoding.batch_dims == ("b0",)


def test_a_broadcast_dimension_has_size_one():
    text = "batch_matmul[0]<float32 * float32 -> float32; (1, m, k) * (b0, k, n) -> (b0, m, n); b0=3, m=2, n=4, k=5>"
    assert Encoding.parse(text).shape() == (1, 2, 5)


GOOD = "matmul[0]<float32 * float32 -> float32; (m, k) * (k, n) -> (m, n); m=2, n=3, k=4>"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("matmul[0]", "conv[0]", "found op type 'conv'"),
        ("matmul[0]", "conv2d[0]", "a convolution has strides"),
        ("matmul[0]", "matmul[3]", "found operand 3"),
        ("matmul[0]", "batch_matmul[0]", "a batch_matmul has some"),
        ("(m, k)", "(m, n)", "lhs runs along ['m', 'n']"),
        ("(k, n)", "(k, n, k)", "rhs runs along"),
        ("(m, k)", "(b7, m, k)", "no size for ['b7']"),
        (" * float32", "", "have the form 'lhs * rhs -> result'"),
        ("m=2", "m=-2", "found size 'm=-2'"),
        ("m=2", "m", "found size 'm'"),
        ("m=2", "m=\u0663", "found size"),
        ("<float32", "<half", "found element types ['half']"),
        ("-> float32", "-> float32x4", "found element types ['float32x4']"),
        ("k=4", "k=4, k=5", "one each of"),
        ("k=4", "k=4, q=5", "one each of"),
        (">", "", "is not an encoding"),
        (GOOD, "", "is not an encoding"),
    ],
)
def test_text_that_is_not_an_encoding(old, new, message):
    assert Encoding.parse(GOOD)
    text = GOOD.replace(old, new, 1) if old != ">" else GOOD[:-1]
    with pytest.raises(EncodingError) as error:
        Encoding.parse(text)
    assert message in str(error.value) and repr(text) in str(error.value)
    assert isinstance(error.value, HeteroError)


@pytest.mark.parametrize("maps", ["(b0, m, k) * (k, n) -> (m, n)", "(m, k) * (k, n) -> (b0, m, n)"])
def test_a_batch_dimension_is_one_of_the_result_and_of_an_operand(maps):
    text = f"batch_matmul[0]<float32 * float32 -> float32; {maps}; b0=2, m=1, n=1, k=1>"
    with pytest.raises(EncodingError, match="b0 has to be a dimension of the result and of an operand"):
        Encoding.parse(text)


def test_names_of_batch_dimensions():
    text = "batch_matmul[0]<float32 * float32 -> float32; (big, m, k) * (k, n) -> (big, m, n); big=2, m=1, n=1, k=1>"
    with pytest.raises(EncodingError, match="expected one each of b0"):
        Encoding.parse(text)


def test_a_dimension_twice_is_refused():
    text = "batch_matmul[0]<float32 * float32 -> float32; (b0, b0, m, k) * (k, n) -> (b0, m, n); b0=2, m=1, n=1, k=1>"
    with pytest.raises(EncodingError, match="a dimension twice"):
        Encoding.parse(text)
