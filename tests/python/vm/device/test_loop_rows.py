"""Rows that loops collect: tensors that grow, and tensors with room for all."""

import numpy as np
import pytest
import tvm
from tvm.runtime import tensor

import relax_hetero as rh
from relax_hetero.vm.device.builtins import append_row, new_rows, taken_rows, write_row


def scalar(value):
    return tensor(np.array(value, "int64"))


@pytest.mark.parametrize("dtype", ["float32", "bool", "float64"])
@pytest.mark.parametrize("limit", [100, 2**62])
def test_rows_grow(dtype, limit):
    """Capacity doubles if the limit does not bound memory; the first trip's rows are not written to."""
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 2, (37, 3)).astype(dtype)
    first = tensor(np.ones((1, 3), dtype))
    rows = first
    for trip, row in enumerate(expected):
        rows = append_row(rows, tensor(row), scalar(trip), scalar(limit))
    np.testing.assert_array_equal(taken_rows(rows, scalar(len(expected))).numpy(), expected)
    np.testing.assert_array_equal(first.numpy(), np.ones((1, 3), dtype))


def test_no_rows():
    rows = tensor(np.zeros((0, 3), "float32"))
    assert taken_rows(rows, scalar(0)).shape == (0, 3)
    assert new_rows((2,), "float32", scalar(-4), 0).shape == (0, 2)


def test_rows_of_another_shape_are_refused():
    rows = append_row(tensor(np.zeros((0, 2), "float32")), tensor(np.ones(2, "float32")), scalar(0), scalar(9))
    with pytest.raises(rh.HeteroError, match=r"trip 1 .* \[3\].* \[2\]"):
        append_row(rows, tensor(np.ones(3, "float32")), scalar(1), scalar(9))


def test_rows_with_room_for_all():
    rows = new_rows((2, 2), "float32", scalar(3), 0)
    for trip in (2, 0, 1):
        rows = write_row(rows, tensor(np.full((2, 2), trip, "float32")), scalar(trip))
    np.testing.assert_array_equal(rows.numpy()[:, 0, 0], [0, 1, 2])
    empty = write_row(new_rows((0,), "float32", scalar(2), 1), tvm.runtime.empty((0,), "float32"), scalar(1))
    assert empty.shape == (2, 0)
