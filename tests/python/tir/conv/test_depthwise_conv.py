"""Grouped convolutions: depthwise, few channels a group, groups that fill vectors of their own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from marks import in_turns
from relax_hetero.encoding.problem import Window
from seeds import fresh_rng
from tir.convolutions_of import assert_near, check, conv_problem, random_operands, reference, run, with_epilogue
from tir.kernel_runs import NAMES, VECTOR_NAMES

pytestmark = pytest.mark.sampled(4)

SAME = Window(3, before=1, after=1)
WIDE = Window(5, 2, 1, 2, 1)
CASES = {
    "depthwise": ((40, 40), (9, 19), (SAME, SAME), 40),
    "depthwise 5x5, stride": ((37, 37), (11, 13), (WIDE, WIDE), 37),
    "depthwise, dilation": ((16, 16), (9, 12), (Window(3, 1, 3, 3, 3), Window(2, 1, 2, 0, 2)), 16),
    "two outputs a channel": ((21, 42), (6, 9), (SAME, SAME), 21),
    "three outputs a channel": ((12, 36), (6, 9), (SAME, SAME), 12),
    "twenty outputs a channel": ((2, 40), (6, 9), (SAME, SAME), 2),
    "groups of 2": ((34, 34), (6, 11), (SAME, SAME), 17),
    "groups of 4": ((12, 12), (6, 11), (WIDE, SAME), 3),
    "groups of 8": ((64, 64), (6, 11), (SAME, SAME), 8),
    "groups of 5": ((15, 15), (6, 11), (SAME, SAME), 3),
    "groups of 16": ((48, 48), (6, 11), (SAME, SAME), 3),
    "groups of 34": ((20, 68), (6, 11), (Window(1), Window(1)), 2),
    "groups of 64": ((12, 128), (6, 11), (SAME, SAME), 2),
    "groups of 101": ((4, 202), (3, 4), (SAME, SAME), 2),
    "fewer outputs": ((16, 8), (6, 11), (SAME, SAME), 4),
    "sequence": ((24, 24), (50,), (Window(31, before=15, after=15),), 24),
    "volume": ((20, 20), (4, 5, 6), (SAME, SAME, Window(3, 2, 1, 1, 1)), 20),
}


@pytest.mark.parametrize(("case", "name"), in_turns(CASES, NAMES))
def test_groups(name: str, case: str, tmp_path: Path) -> None:
    check(conv_problem(name, *CASES[case]), name, tmp_path)


@pytest.mark.parametrize("groups", [10, 40])
@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_symbolic_batch_and_float64(name: str, groups: int, tmp_path: Path) -> None:
    problem = conv_problem(name, (40, 40), (9, 15), (SAME, SAME), groups, batch="s0", dtype="float64")
    for batch in (1, 3):
        check(problem, name, tmp_path, batch)


@pytest.mark.parametrize("groups", [10, 37], ids=["groups", "depthwise"])
@pytest.mark.parametrize("name", VECTOR_NAMES)
def test_epilogue(name: str, groups: int, tmp_path: Path) -> None:
    channels = groups * (1 if groups == 37 else 4)
    problem = conv_problem(name, (channels, channels), (9, 15), (SAME, SAME), groups, batch=2)
    problem = with_epilogue(problem, "relu(add(add(x0, x1), x2))", "n", "bny")
    arrays = random_operands(problem, fresh_rng())
    want = np.maximum(reference(problem, *arrays[:2]) + arrays[2] + arrays[3], 0)
    assert_near(problem, run(problem, name, tmp_path, arrays), want)


def test_channels_do_not_reach_each_other(tmp_path: Path) -> None:
    problem = conv_problem(NAMES[0], (40, 40), (5, 9), (SAME, SAME), 10)
    data, weight = random_operands(problem, fresh_rng())
    data[:, 17] = np.nan
    got = run(problem, NAMES[0], tmp_path, [data, weight])
    assert np.isnan(got[:, 16:20]).all()
    assert np.isfinite(np.delete(got, range(16, 20), axis=1)).all()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    groups=st.integers(1, 40),
    ins=st.integers(1, 5),
    outs=st.integers(1, 9),
    size=st.integers(1, 4),
    stride=st.integers(1, 2),
    pad=st.integers(0, 3),
    extents=st.tuples(st.integers(4, 6), st.integers(4, 20)),
    name=st.sampled_from(VECTOR_NAMES),
)
def test_any_groups(
    groups: int, ins: int, outs: int, size: int, stride: int, pad: int, extents: tuple, name: str, tmp_path: Path
) -> None:
    window = Window(size, stride, 1, pad, pad)
    check(conv_problem(name, (groups * ins, groups * outs), extents, (window, window), groups), name, tmp_path)
