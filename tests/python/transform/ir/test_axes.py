"""Orders of dimensions: permutations compose as numpy's do, and reshapes apply to permuted values."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from relax_hetero.transform.ir.axes import compose, identity, inverse, is_order_preserving, permuted, reshaped

extents = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=5)


def integers(values):
    return [tirx.IntImm("int64", value) for value in values]


@st.composite
def shape_and_order(draw):
    shape = draw(extents)
    return shape, tuple(draw(st.permutations(range(len(shape)))))


@given(shape_and_order(), st.data())
def test_permutations_compose_as_in_numpy(given_order, data):
    shape, first = given_order
    second = tuple(data.draw(st.permutations(range(len(shape)))))
    array = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(array.transpose(first).transpose(second), array.transpose(compose(first, second)))
    assert compose(first, inverse(first)) == compose(inverse(first), first) == identity(len(shape))
    assert list(array.shape) == permuted(array.transpose(first).shape, first)


@given(shape_and_order())
def test_permutations_that_move_nothing_are_reshapes(given_order):
    shape, axes = given_order
    array = np.arange(np.prod(shape)).reshape(shape)
    moved = array.transpose(axes)
    if is_order_preserving(integers(shape), axes):
        np.testing.assert_array_equal(moved, array.reshape(moved.shape))
    elif array.size > 1:
        assert not np.array_equal(moved, array.reshape(moved.shape)) or len(set(array.shape)) == 1


@given(shape_and_order(), st.data())
def test_a_reshape_applies_to_a_permuted_value(given_order, data):
    shape, axes = given_order
    factors = [part for extent in shape for part in ((2, extent // 2) if extent % 2 == 0 else (extent,))]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(factors)), max_size=len(factors))) | {0, len(factors)})
    target = [int(np.prod(factors[a:b])) for a, b in zip(cuts, cuts[1:], strict=False)]
    target.insert(data.draw(st.integers(0, len(target))), 1)
    plan = reshaped(integers(shape), integers(target), axes)
    assert plan is not None
    array = np.arange(np.prod(shape)).reshape(shape)
    lies = array.transpose(inverse(plan.operand))
    result = lies.reshape([int(extent) for extent in plan.shape]).transpose(plan.result)
    np.testing.assert_array_equal(result, array.reshape(target))


def test_splitting_takes_no_permutation():
    channels_last = (0, 3, 1, 2)
    plan = reshaped(integers([2, 6, 5, 7]), integers([2, 2, 3, 5, 7]), channels_last)
    assert plan is not None and plan.operand == channels_last
    assert [int(extent) for extent in plan.shape] == [2, 5, 7, 2, 3] and plan.result == (0, 3, 4, 1, 2)


def test_merging_puts_neighbours_together():
    shuffled = (0, 4, 3, 1, 2)  # (b, c, g, h, w) of a value stored as (b, h, w, g, c)
    plan = reshaped(integers([2, 3, 2, 5, 7]), integers([2, 6, 5, 7]), shuffled)
    assert plan is not None and plan.operand == (0, 3, 4, 1, 2)
    assert [int(extent) for extent in plan.shape] == [2, 5, 7, 6] and plan.result == (0, 3, 1, 2)


def test_symbolic_extents_match_one_to_one():
    n = tirx.Var("n", "int64")
    plan = reshaped([n, *integers([6, 4])], [n, *integers([2, 3, 4])], (0, 2, 1))
    assert plan is not None and plan.result == (0, 2, 3, 1)
    assert reshaped([n, *integers([6])], [n * 2, *integers([3])], (1, 0)) is None


def test_no_elements_no_correspondence():
    assert reshaped(integers([0, 4]), integers([2, 0]), (1, 0)) is None
