"""plan_arena: values that meet have bytes of their own, and few bytes are wasted."""

from itertools import combinations

import pytest
import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm_ffi import structural_map

from relax_hetero.transform.record.plan_arena import ARENA_ALIGNMENT, Lifetime, min_bytes, plan_arena


@st.composite
def lifetimes(draw, sizes):
    """Values in the order of the commands that make them, as a region records them."""
    values = []
    for begin in range(draw(st.integers(0, 30))):
        for nbytes in draw(st.lists(sizes, max_size=2)):
            values.append(Lifetime(nbytes, begin, begin + draw(st.integers(0, 8))))
    return values


def check(values, offsets, sizes, total):
    """No two values that are there at one time share a byte; all begin at cache lines, within the arena."""
    for offset, size in zip(offsets, sizes, strict=True):
        assert offset % ARENA_ALIGNMENT == 0
        assert 0 <= offset and offset + size <= total
    for i, j in combinations(range(len(values)), 2):
        if values[i].begin <= values[j].end and values[j].begin <= values[i].end and sizes[i] and sizes[j]:
            assert offsets[i] + sizes[i] <= offsets[j] or offsets[j] + sizes[j] <= offsets[i]


@given(lifetimes(st.sampled_from([0, 1, 63, 64, 65, 1000, 4096, 5000])))
@settings(max_examples=200, deadline=None)
def test_values_of_known_sizes(values):
    arena = plan_arena(values)
    sizes = [value.nbytes for value in values]
    check(values, arena.offsets, sizes, arena.nbytes)
    assert min_bytes(values) <= arena.nbytes <= 2 * min_bytes(values)


N, S = tirx.Var("n", "int64"), tirx.Var("s", "int64")
SIZES = {
    "4n": lambda n, s: 4 * n,
    "6144n": lambda n, s: 6144 * n,
    "1536n": lambda n, s: n * 1536,
    "4096ns": lambda n, s: n * s * 4096,
    "4096sn": lambda n, s: 4096 * s * n,
    "48nss": lambda n, s: n * 48 * s * s,
    "(n + s)800": lambda n, s: (n + s) * 800,
    "100": lambda n, s: 100,
}


@given(lifetimes(st.sampled_from(sorted(SIZES))), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_values_of_symbolic_sizes(values, n, s):
    arena = plan_arena([Lifetime(SIZES[value.nbytes](N, S), value.begin, value.end) for value in values])
    sizes = [SIZES[value.nbytes](n, s) for value in values]
    check(values, [number(offset, n, s) for offset in arena.offsets], sizes, number(arena.nbytes, n, s))


def number(expr, n, s):
    """An expression over N and S where these are numbers."""
    if isinstance(expr, int):
        return expr
    sizes = {N: tirx.const(n, "int64"), S: tirx.const(s, "int64")}
    return int(tvm.sym.Analyzer().simplify(structural_map(expr, (tvm.ir.Var, sizes.get))))


def test_a_chain_takes_the_bytes_of_two():
    arena = plan_arena([Lifetime(1000, i, i + 1) for i in range(100)])
    assert arena.nbytes == 2 * 1024
    assert sorted(set(arena.offsets)) == [0, 1024]


def test_values_of_one_command_do_not_share_bytes():
    """One command reads the first and writes the second."""
    assert plan_arena([Lifetime(64, 0, 1), Lifetime(64, 1, 1)]).nbytes == 128
    assert plan_arena([Lifetime(64, 0, 0), Lifetime(64, 1, 1)]).nbytes == 64


def test_multiples_of_one_symbol_are_planned_as_numbers_are():
    """A wide value takes the place of two narrow ones that are gone."""
    sizes = [N * 1536, N * 1536, N * 3072]
    arena = plan_arena([Lifetime(sizes[0], 0, 1), Lifetime(sizes[1], 1, 1), Lifetime(sizes[2], 2, 2)])
    assert number(arena.nbytes, 7, 0) == 7 * 3072


def test_nothing_takes_nothing():
    assert plan_arena([]).nbytes == 0


@pytest.mark.parametrize("count", [1000])
def test_many_values_that_all_meet(count):
    arena = plan_arena([Lifetime(64, i, count) for i in range(count)])
    assert sorted(arena.offsets) == list(range(0, 64 * count, 64))
