"""How products are cut into tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tvm import tirx

from relax_hetero.tir.core.work_split import MIN_WORK, Unit, part, ravel, split_work, tasks_for, unravel

COUNTS = st.integers(1, 60)


@given(cores=st.integers(1, 9), batch=COUNTS, rows=COUNTS, columns=COUNTS)
def test_tasks_cover_the_work_once(cores: int, batch: int, rows: int, columns: int) -> None:
    split = split_work(cores, batch, rows, columns, (8, 32), 1024)
    assert 1 <= split.tasks <= cores
    done = []
    for task in range(split.tasks):
        ranges = [
            range(*part(size, parts, number))
            for size, parts, number in zip(
                (batch, rows, columns), (split.batch, split.rows, split.columns), split.parts_of(task), strict=True
            )
        ]
        done += [(b, r, c) for b in ranges[0] for r in ranges[1] for c in ranges[2]]
    assert sorted(done) == [(b, r, c) for b in range(batch) for r in range(rows) for c in range(columns)]


def test_small_products_are_not_cut() -> None:
    assert split_work(8, 1, 1, 1, (8, 32), 256).tasks == 1


def test_few_rows_share_the_columns_and_many_are_shared() -> None:
    few = split_work(2, 1, 4, 128, (8, 32), 4096)
    many = split_work(2, 1, 128, 128, (8, 32), 4096)
    assert (few.rows, few.columns) == (1, 2)
    assert (many.rows, many.columns) == (2, 1)


def test_batches_go_first() -> None:
    assert split_work(2, 12, 16, 4, (8, 32), 64).batch == 2


def test_cores_without_a_batch_of_their_own_share_rows() -> None:
    split = split_work(8, 2, 64, 4, (8, 32), 512)
    assert (split.batch, split.tasks) == (2, 8)


@given(extents=st.lists(st.integers(1, 9), min_size=1, max_size=4), data=st.data())
def test_positions_and_their_numbers(extents: list[int], data: st.DataObject) -> None:
    position = [data.draw(st.integers(0, extent - 1)) for extent in extents]
    number = tirx.IntImm("int64", ravel(position, extents))
    assert [int(place) for place in unravel(number, extents)] == position


@pytest.mark.parametrize("unit", MIN_WORK)
def test_little_work_stays_on_one_core_and_unknown_work_is_shared(unit: Unit) -> None:
    assert tasks_for(4, unit, MIN_WORK[unit] - 1) == 1
    assert tasks_for(4, unit, MIN_WORK[unit]) == 4
    assert tasks_for(4, unit, None) == tasks_for(4, unit, tirx.Var("n", "int64")) == 4
    assert tasks_for(1, unit, None) == 1
