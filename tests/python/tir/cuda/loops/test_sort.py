"""Sorts of GPUs, launch after launch, against numpy: as CPU code, and by the interpreter, which knows races."""

import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_interpreter
from relax_hetero.tir.commands.table_kernel import is_one_launch
from relax_hetero.tir.cuda.loops.sort import SortProblem, sort_kernel, sort_steps

sys.path.insert(0, str(Path(__file__).parents[1]))
from on_cpu import run


def data_of(shape, dtype):
    rng = np.random.default_rng(0)
    if dtype.startswith("float"):
        return rng.choice([0.0, -0.0, 1, 2, 3.5, -7, np.nan, np.inf, -np.inf, 4, 5, -1e-3], shape).astype(dtype)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(dtype)
    least, largest = np.iinfo(dtype).min, np.iinfo(dtype).max
    x = rng.integers(least, largest, shape, dtype, endpoint=True)
    return np.where(rng.random(shape) < 0.5, rng.choice(np.array([least, largest, 3], dtype), shape), x)


def order_of(x, axis, descending):
    """Places of the sorted elements: equal ones in order, NaN greater than all numbers."""
    if not x.dtype.name.startswith("float"):
        ranks = np.unique(x, return_inverse=True)[1].reshape(x.shape)
        return np.argsort(-ranks if descending else ranks, axis, kind="stable")
    nan, numbers = np.isnan(x), np.nan_to_num(x.astype("float64"), nan=0.0, posinf=np.inf, neginf=-np.inf)
    keys = (-numbers, ~nan) if descending else (numbers, nan)
    return np.lexsort(keys, axis)


def check(problem, tile, execute=run):
    x = data_of(problem.shape, problem.dtype)
    results = list(problem.shape)
    results[problem.axis] = problem.count
    outputs = [np.full(results, 1, problem.dtype)] * problem.values
    outputs += [np.full(results, 77, problem.indices)] if problem.indices else []
    outer = [extent for axis, extent in enumerate(problem.shape) if axis != problem.axis]
    steps, pairs = sort_steps(problem, tile), []
    for step in steps:
        kernel = sort_kernel(problem, step)
        assert is_one_launch(kernel)
        buffers = (
            outputs if step.is_last else [np.zeros((*outer, step.output_length), dtype) for dtype in problem.pair_types]
        )
        data = [x] if step.is_first or (step.is_last and problem.values) else []
        execute(kernel, *data, *pairs, *buffers)
        pairs = buffers
    order = np.take(order_of(x, problem.axis, problem.descending), range(problem.count), problem.axis)
    if problem.values:
        np.testing.assert_array_equal(outputs[0], np.take_along_axis(x, order, problem.axis))
    if problem.indices:
        np.testing.assert_array_equal(outputs[-1], order)
    return steps


@pytest.mark.sampled(4)
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize(
    "shape, axis, dtype, count",
    [
        ((3, 50), 1, "float32", 50),  # tiles, merged
        ((2, 70), 1, "float16", 3),  # tiles of tiles
        ((2, 37, 3), 1, "int64", 20),  # merged as far as wanted; strides
        ((7, 10), 0, "bool", 7),  # lines that share a block
        ((5, 9), 1, "uint32", 9),
        ((33,), 0, "uint64", 33),
        ((2, 40), 1, "float64", 40),
        ((1, 1), 1, "int8", 1),
        ((0, 40), 1, "float32", 40),
    ],
)
def test_sorts(shape, axis, dtype, count, descending):
    check(SortProblem(shape, axis, dtype, descending, count, True, "int64"), 16)


def test_launches():
    steps = sort_steps(SortProblem((9, 9000), 1, "float32", False, 9000, True, ""))
    assert [(step.is_merge, step.output_length) for step in steps] == [(False, 9000)] + [(True, 9000)] * 3
    few = sort_steps(SortProblem((9, 100_000), 1, "float32", False, 10, True, ""))
    assert [(step.is_merge, step.output_length) for step in few] == [(False, 3910), (False, 160), (False, 10)]
    assert [step.run for step in few] == [256, 256, 256]
    assert [step.is_last for step in few] == [False, False, True]
    assert [step.run for step in sort_steps(SortProblem((1, 8400), 1, "float32", True, 300, True, ""))] == [2048, 2048]


@pytest.mark.parametrize(
    "shape, dtype, count",
    [
        ((1, 300), "int64", 300),
        pytest.param((2, 300), "float32", 300, marks=pytest.mark.slow),
        pytest.param((3, 300), "float32", 5, marks=pytest.mark.slow),
    ],
)
def test_no_races(shape, dtype, count):
    steps = check(SortProblem(shape, 1, dtype, True, count, True, "int32"), 64, gpu_interpreter.run)
    assert len(steps) > 1
