"""plan_storages: tensors alive at once have different storages, and no storage is larger than its tensors."""

from itertools import combinations

import tvm
from hypothesis import given, settings
from hypothesis import strategies as st
from tvm import tirx
from tvm_ffi import structural_map

from relax_hetero.transform.lower.plan_memory import plan_storages
from relax_hetero.transform.record.plan_arena import Lifetime, min_bytes

N, S = tirx.Var("n", "int64"), tirx.Var("s", "int64")
SIZES = {
    "4n": lambda n, s: 4 * n,
    "6144n": lambda n, s: 6144 * n,
    "1536n": lambda n, s: n * 1536,
    "4096ns": lambda n, s: n * s * 4096,
    "(n + s)800": lambda n, s: (n + s) * 800,
    "100": lambda n, s: 100,
    "0": lambda n, s: 0,
}


@st.composite
def lifetimes(draw):
    values = []
    for begin in range(draw(st.integers(0, 25))):
        for size in draw(st.lists(st.sampled_from(sorted(SIZES)), max_size=2)):
            values.append((size, begin, begin + draw(st.integers(0, 8))))
    return values


@given(lifetimes(), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_values_have_room_and_do_not_meet(values, n, s):
    plan = plan_storages([Lifetime(SIZES[size](N, S), begin, end) for size, begin, end in values])
    nbytes = [number(size, n, s) for size in plan.nbytes]
    assert len(plan.of) == len(values) and set(plan.of) == set(range(len(nbytes)))
    for (size, _, _), storage in zip(values, plan.of, strict=True):
        assert SIZES[size](n, s) <= nbytes[storage]
    for i, j in combinations(range(len(values)), 2):
        if plan.of[i] == plan.of[j]:
            assert values[i][2] < values[j][1] or values[j][2] < values[i][1]


def number(expr, n, s):
    """An expression over N and S where these are numbers."""
    if isinstance(expr, int):
        return expr
    sizes = {N: tirx.const(n, "int64"), S: tirx.const(s, "int64")}
    return int(tvm.sym.Analyzer().simplify(structural_map(expr, (tvm.ir.Var, sizes.get))))


@given(st.lists(st.tuples(st.sampled_from([64, 128, 640, 4096]), st.integers(0, 20), st.integers(0, 6)), max_size=25))
@settings(max_examples=150, deadline=None)
def test_storages_are_at_most_those_of_an_exact_size_pool(values):
    """Total size is at most that of a pool that reuses memory of exactly equal size."""
    plan = plan_storages([Lifetime(size, begin, begin + length) for size, begin, length in values])
    by_size = [
        min_bytes([Lifetime(size, begin, begin + length) for size, begin, length in values if size == only])
        for only in (64, 128, 640, 4096)
    ]
    assert sum(plan.nbytes) <= sum(by_size)


def test_a_large_value_takes_the_place_of_a_small_one_that_is_gone():
    plan = plan_storages([Lifetime(64, 0, 0), Lifetime(640, 1, 1), Lifetime(128, 2, 3), Lifetime(64, 3, 3)])
    assert plan.nbytes == [640, 64] and plan.of == [0, 0, 0, 1]
