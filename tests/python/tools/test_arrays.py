"""Arguments of a model: read from files, or random."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from relax_hetero import BindingError, HeteroError
from relax_hetero.tools.arrays import random_arrays, read_arrays, write_arrays
from relax_hetero.vm import FunctionSignature, ShapeSpec, TensorSpec


def signature(*specs: TensorSpec | ShapeSpec) -> FunctionSignature:
    return FunctionSignature("main", specs, ())


def test_npy_files_fill_inputs_in_order(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(2))
    np.save(tmp_path / "b.npy", np.arange(3))
    actual = read_arrays([str(tmp_path / "a.npy"), str(tmp_path / "b.npy")], ["x", "y", "z"])
    assert list(actual) == ["x", "y"] and actual["y"].tolist() == [0, 1, 2]


def test_npy_file_with_a_name(tmp_path: Path):
    np.save(tmp_path / "a.npy", np.arange(2))
    assert list(read_arrays([f"y={tmp_path / 'a.npy'}"], ["x", "y"])) == ["y"]


def test_npz_round_trip_with_any_names(tmp_path: Path):
    arrays = {"file": np.ones(2, "float32"), "/encoder/out.1": np.array(3, "int64"), "empty": np.zeros((0, 4))}
    write_arrays(tmp_path / "out", arrays)
    actual = read_arrays([str(tmp_path / "out")], list(arrays))
    assert list(actual) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(actual[name], array)
        assert actual[name].dtype == array.dtype


def test_unreadable_and_unknown_inputs_are_errors(tmp_path: Path):
    (tmp_path / "text.npy").write_text("no array")
    write_arrays(tmp_path / "in.npz", {"w": np.ones(1)})
    np.save(tmp_path / "a.npy", np.ones(1))
    a = str(tmp_path / "a.npy")
    with pytest.raises(BindingError, match="not a readable"):
        read_arrays([str(tmp_path / "text.npy")], ["x"])
    with pytest.raises(BindingError, match="not a readable"):
        read_arrays([str(tmp_path / "absent.npy")], ["x"])
    with pytest.raises(BindingError, match="no input 'w'; it takes 'x'"):
        read_arrays([str(tmp_path / "in.npz")], ["x"])
    with pytest.raises(BindingError, match="given twice"):
        read_arrays([a, f"x={a}"], ["x", "y"])
    with pytest.raises(BindingError, match="every input already has an array"):
        read_arrays([a, a], ["x"])


def test_random_inputs_are_seeded_and_typed():
    main = signature(
        TensorSpec("x", (2, 3), "float32", 0), TensorSpec("ids", (5,), "int64", 0), TensorSpec("on", (), "bool", 0)
    )
    first, again, other = (random_arrays(main, {}, seed, {}) for seed in (1, 1, 2))
    assert {name: (array.shape, str(array.dtype)) for name, array in first.items()} == {
        "x": ((2, 3), "float32"),
        "ids": ((5,), "int64"),
        "on": ((), "bool"),
    }
    assert set(first["ids"].tolist()) <= {0, 1}
    np.testing.assert_array_equal(first["x"], again["x"])
    assert not np.array_equal(first["x"], other["x"])


def test_given_arrays_replace_random_ones():
    main = signature(TensorSpec("x", (2,), "float32", 0), TensorSpec("y", (2,), "float32", 0))
    mine = np.array([7, 8], "float32")
    assert random_arrays(main, {}, 0, {"y": mine})["y"] is mine


def test_symbolic_dimensions_need_a_shape():
    main = signature(TensorSpec("x", ("n", 4), "bfloat16", 0))
    with pytest.raises(BindingError, match="input 'x' is nx4"):
        random_arrays(main, {}, 0, {})
    array = random_arrays(main, {"x": [2, 4]}, 0, {})["x"]
    assert array.shape == (2, 4) and str(array.dtype) == "bfloat16"
    assert random_arrays(main, {"n": [3]}, 0, {})["x"].shape == (3, 4)


def test_inputs_that_are_not_tensors_are_errors():
    with pytest.raises(BindingError, match="input 's' is a shape, not a tensor"):
        random_arrays(signature(ShapeSpec("s", (1,))), {}, 0, {})


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path):
    path = tmp_path / "absent" / "out.npz"
    with pytest.raises(HeteroError, match=rf"{path} cannot be written: No such file") as raised:
        write_arrays(path, {"y": np.zeros(2)})
    assert ".out.npz" not in str(raised.value)
