"""Scatter kernels against numpy: any axis, repeated, negative and missing places, apart and in place."""

from __future__ import annotations

import numpy as np
import pytest
import tvm

from relax_hetero.tir.core.ties import in_place, ties_of
from relax_hetero.tir.scatter import REDUCTIONS, ScatterProblem, scatter_elements_kernel, scatter_nd_kernel
from seeds import fresh_rng
from tir.kernel_runs import NAMES, built, poisoned

COMBINE = {
    "update": lambda old, new: new,
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}


def problem(data, indices, updates, reduction, symbolic):
    names: dict[int, str] = {}

    def dims(shape, first=0):
        return tuple(names.setdefault(d, f"s{d}") if symbolic and i >= first else d for i, d in enumerate(shape))

    # The last extent of the indices of scatter_nd counts positions: it is always known.
    sizes = dims(indices.shape[:-1]) + indices.shape[-1:] if symbolic == "nd" else dims(indices.shape)
    return ScatterProblem(dims(data.shape), sizes, dims(updates.shape), str(data.dtype), str(indices.dtype), reduction)


def elements(data, indices, updates, axis, reduction):
    result, extent = data.copy(), data.shape[axis]
    for place in np.ndindex(*indices.shape):
        index = int(indices[place]) + (extent if indices[place] < 0 else 0)
        if 0 <= index < extent:
            target = (*place[:axis], index, *place[axis + 1 :])
            result[target] = COMBINE[reduction](result[target], updates[place])
    return result


def slices(data, indices, updates, reduction):
    result = data.copy()
    for row in np.ndindex(*indices.shape[:-1]):
        place = tuple(int(i) for i in indices[row])
        if all(0 <= i < extent for i, extent in zip(place, data.shape, strict=False)):
            result[place] = COMBINE[reduction](result[place], updates[row])
    return result


def numbers(rng, shape, dtype):
    return rng.standard_normal(shape).astype(dtype) if "float" in dtype else rng.integers(-9, 9, shape).astype(dtype)


def check(cases, name, folder):
    """Each case: kernel, operands, what is expected."""
    functions = {}
    for i, (func, _, _) in enumerate(cases):
        assert ties_of(func) == [(0, 3)]
        functions |= {f"apart{i}": func, f"over{i}": in_place(func, (0, 3))}
    module = built(functions, name, folder)
    for i, (_, arrays, want) in enumerate(cases):
        out, tensors = poisoned(want.shape, str(want.dtype)), [tvm.runtime.tensor(array) for array in arrays]
        module[f"apart{i}"](*tensors, out)
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-5)
        np.testing.assert_array_equal(tensors[0].numpy(), arrays[0])
        module[f"over{i}"](*tensors)
        np.testing.assert_array_equal(tensors[0].numpy(), out.numpy())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_elements(name, tmp_path):
    rng, cases = fresh_rng(), []
    for axis, reduction in [(0, "update"), (1, "update"), (2, "update"), *((1, r) for r in REDUCTIONS)]:
        for dtype, symbolic in (("float32", False), ("int64", True)):
            data = numbers(rng, (5, 7, 9), dtype)
            shape = tuple(int(rng.integers(1, extent + 1)) for extent in data.shape)
            indices = rng.integers(-8, 12, shape).astype("int32" if symbolic else "int64")
            updates = numbers(rng, shape, dtype)
            func = scatter_elements_kernel(problem(data, indices, updates, reduction, symbolic), axis)
            cases.append((func, (data, indices, updates), elements(data, indices, updates, axis, reduction)))
    check(cases, name, tmp_path)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NAMES)
def test_slices(name, tmp_path):
    rng, cases = fresh_rng(), []
    for depth, reduction in [(1, "update"), (2, "update"), (3, "update"), *((2, r) for r in REDUCTIONS)]:
        for dtype, symbolic in (("float32", ""), ("int32", "nd")):
            data = numbers(rng, (5, 7, 9), dtype)
            indices = rng.integers(-1, 8, (2, 3, depth))
            updates = numbers(rng, (2, 3, *data.shape[depth:]), dtype)
            func = scatter_nd_kernel(problem(data, indices, updates, reduction, symbolic))
            cases.append((func, (data, indices, updates), slices(data, indices, updates, reduction)))
    check(cases, name, tmp_path)


def test_much_data_and_many_updates(tmp_path):
    """Copies are cut into chunks, and updates shared among the cores."""
    rng = fresh_rng()
    data = numbers(rng, (3, 50_001), "float32")
    updates = numbers(rng, (3, 40_000), "float32")
    indices = np.stack([rng.permutation(50_001)[:40_000] for _ in range(3)])
    wide = numbers(rng, (2, 50_001), "float32")
    rows = np.array([[2], [0]])
    cases = [
        (
            scatter_elements_kernel(problem(data, indices, updates, "update", False), 1),
            (data, indices, updates),
            elements(data, indices, updates, 1, "update"),
        ),
        (
            scatter_nd_kernel(problem(data, rows, wide, "add", "")),
            (data, rows, wide),
            slices(data, rows, wide, "add"),
        ),
    ]
    check(cases, "sse", tmp_path)


def test_nothing_of_the_copy_is_left_in_place():
    data, row = np.zeros((300, 300), "float32"), np.zeros((1, 300), "float32")
    func = scatter_nd_kernel(problem(data, np.zeros((1, 1), "int64"), row, "update", ""))
    assert "parallel" in func.script() and "parallel" not in in_place(func, (0, 3)).script()


def test_no_data_and_no_updates(tmp_path):
    empty, none = np.zeros((0, 4), "float32"), np.zeros((0, 1), "int64")
    some = np.ones((2, 4), "float32")
    cases = [
        (scatter_nd_kernel(problem(empty, none, empty, "update", "")), (empty, none, empty), empty),
        (scatter_nd_kernel(problem(some, none, empty, "update", "")), (some, none, empty), some),
    ]
    check(cases, "sse", tmp_path)
