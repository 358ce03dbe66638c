"""Packed layouts: against numpy, over every permutation, tile and shape that hypothesis thinks of."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import tvm
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from relax_hetero.encoding import PackedLayout
from relax_hetero.errors import EncodingError


@st.composite
def layouts(draw, max_rank=4):
    rank = draw(st.integers(1, max_rank))
    inner = draw(st.permutations(range(rank)))[: draw(st.integers(0, rank))]
    return PackedLayout(
        tuple(draw(st.permutations(range(rank)))), tuple(inner), tuple(draw(st.integers(1, 5)) for _ in inner)
    )


@st.composite
def cases(draw):
    layout = draw(layouts())
    return layout, tuple(draw(st.integers(0, 9)) for _ in layout.outer_perm)


def _element_by_element(layout: PackedLayout, array: np.ndarray) -> np.ndarray:
    """Array stored by the definition of tensor.pack, one element at a time."""
    stored = np.zeros(layout.packed_shape(array.shape), array.dtype)
    for index in np.ndindex(*array.shape):
        outer = [index[d] // layout.tile(d) for d in layout.outer_perm]
        inner = [index[d] % layout.tile(d) for d in layout.inner_dims]
        stored[(*outer, *inner)] = array[index]
    return stored


@given(cases())
def test_pack_is_what_the_definition_says(case):
    layout, shape = case
    array = np.arange(1, 1 + int(np.prod(shape)), dtype="int32").reshape(shape)
    stored = layout.pack(array)
    np.testing.assert_array_equal(stored, _element_by_element(layout, array))
    assert stored.flags.c_contiguous
    np.testing.assert_array_equal(layout.unpack(stored, shape), array)


@given(layouts())
def test_text_round_trips(layout):
    assert PackedLayout.parse(str(layout)) == layout
    assert str(PackedLayout.parse(str(layout))) == str(layout)


@given(cases(), st.randoms(use_true_random=False))
def test_transposed_has_the_same_bytes(case, random):
    layout, shape = case
    perm = list(range(len(shape)))
    random.shuffle(perm)
    array = np.arange(int(np.prod(shape)), dtype="int16").reshape(shape)
    np.testing.assert_array_equal(layout.transposed(perm).pack(array.transpose(perm)), layout.pack(array))


@given(cases(), st.sampled_from(["float32", "int8", "bfloat16", "float64", "float16"]))
def test_storage_bytes_are_those_of_what_is_stored(case, dtype):
    layout, shape = case
    array = np.zeros(shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert layout.storage_bytes(shape, dtype) == layout.pack(array).nbytes


@given(cases())
def test_symbolic_extents_give_the_same_shape(case):
    layout, shape = case
    names = [tirx.Var(f"s{d}", "int64") for d in range(len(shape))]
    analyzer = tvm.sym.Analyzer()
    for name, extent in zip(names, shape, strict=True):
        analyzer.bind(name, tirx.IntImm("int64", extent))

    def value(expression):
        return int(analyzer.simplify(expression))

    assert tuple(map(value, map(_expression, layout.packed_shape(names)))) == layout.packed_shape(shape)
    assert value(_expression(layout.storage_bytes(names, "float32"))) == layout.storage_bytes(shape, "float32")


def _expression(extent):
    return tirx.IntImm("int64", extent) if isinstance(extent, int) else extent


COMPENSATED = PackedLayout((1, 0), (1, 0), (16, 4), compensation=True)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("shape", [(5, 3), (4, 16), (33, 40), (1, 1), (0, 5), (7, 0)])
def test_compensation_is_in_front_of_every_panel(shape, dtype):
    rng = np.random.default_rng(list(shape))
    array = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)
    stored = COMPENSATED.pack(array)
    assert stored.shape == COMPENSATED.packed_shape(shape)
    assert COMPENSATED.storage_bytes(shape, dtype) == stored.nbytes
    plain = PackedLayout((1, 0), (1, 0), (16, 4)).pack(array)
    np.testing.assert_array_equal(stored[:, 1:], plain)
    sums = np.ascontiguousarray(stored[:, 0]).view("int32").reshape(-1)[: shape[1]]
    np.testing.assert_array_equal(sums, -128 * array.astype("int32").sum(axis=0))
    np.testing.assert_array_equal(COMPENSATED.unpack(stored, shape), array)


def test_compensation_of_transposed_and_batched_weights():
    rng = np.random.default_rng(3)
    array = rng.integers(-128, 127, (6, 9), dtype="int8", endpoint=True)
    np.testing.assert_array_equal(COMPENSATED.transposed((1, 0)).pack(array.T), COMPENSATED.pack(array))
    batched = PackedLayout((0, 2, 1), (2, 1), (16, 4), compensation=True)
    both = np.stack([array, -(array // 2)])
    np.testing.assert_array_equal(batched.pack(both), np.stack([COMPENSATED.pack(one) for one in both]))


def test_identity():
    assert str(PackedLayout.identity(3)) == "identity<3>"
    assert PackedLayout.parse("identity<3>").is_identity
    assert not PackedLayout((1, 0)).is_identity
    assert PackedLayout.identity(2).packed_shape((5, 7)) == (5, 7)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PackedLayout((0, 0)),
        lambda: PackedLayout((1, 2)),
        lambda: PackedLayout((0, 1), (0,), ()),
        lambda: PackedLayout((0, 1), (0, 0), (2, 2)),
        lambda: PackedLayout((0, 1), (2,), (4,)),
        lambda: PackedLayout((0, 1), (1,), (0,)),
        lambda: PackedLayout((0, 1), (1,), (8,), compensation=True),
        lambda: PackedLayout.identity(2).packed_shape((1, 2, 3)),
        lambda: PackedLayout.parse("pack<outer=[0] inner=[x:2]>"),
        lambda: PackedLayout.parse(""),
        lambda: PackedLayout.parse("pack<outer=[] inner=[]>"),
        lambda: PackedLayout.parse("pack<outer=[, ] inner=[]>"),
        lambda: PackedLayout.parse("pack<outer=[0, 1] inner=[0]>"),
        lambda: PackedLayout.parse("pack<outer=[0, 1] inner=[0:1:2]>"),
        lambda: PackedLayout.parse("identity<99999999999>"),
    ],
)
def test_layouts_that_contradict_themselves(make):
    with pytest.raises(EncodingError):
        make()


@pytest.mark.parametrize("dtype, columns", [("float16", 64), ("int8", 128), ("float32", 32)])
def test_a_swizzle_moves_chunks_of_16_bytes_within_their_row(dtype, columns):
    layout = PackedLayout((1, 0), (1, 0), (64, columns), swizzle=True)
    x = np.arange(130 * 70).reshape(130, 70).astype(dtype)
    stored = layout.pack(x)
    assert stored.shape == layout.packed_shape(x.shape)
    per_chunk = columns // 8
    for k, n in ((0, 0), (129, 69), (77, 13), (31, 66)):
        row, column = n % 64, k % columns
        chunk = (column // per_chunk) ^ (row % 8)
        assert stored[n // 64, k // columns, row, chunk * per_chunk + column % per_chunk] == x[k, n]
    np.testing.assert_array_equal(layout.unpack(stored, x.shape), x)
    assert PackedLayout.parse(str(layout)) == layout
    assert layout.transposed((1, 0)).swizzle


def test_a_swizzle_needs_rows_and_columns():
    with pytest.raises(EncodingError, match="two tile axes"):
        PackedLayout((1, 0), (1,), (64,), swizzle=True)
    with pytest.raises(EncodingError, match="multiple of 8"):
        PackedLayout((1, 0), (1, 0), (4, 64), swizzle=True)
