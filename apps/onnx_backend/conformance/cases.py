"""The cases of `onnx.backend.test`, as plain data: a model, its inputs, its expected outputs and tolerances."""

from __future__ import annotations

import functools
import glob
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
"""The kinds that come with the `onnx` package; `light` and `real` need downloads or have no expected outputs."""

BFLOAT16_RTOL = 2.0**-6  # two units in the last place, as ONNX's own runner allows


LOOSER = {"test_dft_inverse": 1e-6}
"""Absolute tolerances by the beginning of a case's name.

The expected values come from numpy's inverse transform in float32, whose rounding errors are above the tolerance,
1e-7, where the exact result is 0.
"""

DRAWS = "test_bernoulli"
"""Prefix of the names of cases whose expected values are random draws, so that any 0 or 1 is right."""


@dataclass(frozen=True)
class Case:
    """One backend test.

    Attributes
    ----------
    name : str
        `test_...`, unique over all kinds.
    kind : str
        One of `KINDS`.
    data_sets : tuple of (list of object, list of object)
        (inputs, expected outputs) pairs; values are arrays, or lists / None for sequences and optionals.
    """

    name: str
    kind: str
    model: onnx.ModelProto
    data_sets: tuple[tuple[list[Any], list[Any]], ...]
    rtol: float
    atol: float

    @property
    def is_random(self) -> bool:
        """True if the expected values are draws: every 0 and 1 of their type and shape is right."""
        return self.name.startswith(DRAWS)

    @property
    def has_only_tensors(self) -> bool:
        """True if every graph input and output is a tensor, not a sequence or an optional."""
        values = [*self.model.graph.input, *self.model.graph.output]
        return all(value.type.WhichOneof("value") == "tensor_type" for value in values)


def _as_array(value: Any) -> Any:
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    return value


def _read_value(path: str, value_type: onnx.TypeProto) -> Any:
    """Read one serialized tensor, sequence or optional."""
    with open(path, "rb") as file:
        content = file.read()
    if value_type.HasField("sequence_type"):
        sequence = onnx.SequenceProto()
        sequence.ParseFromString(content)
        return numpy_helper.to_list(sequence)
    if value_type.HasField("optional_type"):
        optional = onnx.OptionalProto()
        optional.ParseFromString(content)
        return numpy_helper.to_optional(optional)
    tensor = onnx.TensorProto()
    tensor.ParseFromString(content)
    return numpy_helper.to_array(tensor)


def _read_values(folder: str, prefix: str, infos: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    count = len(glob.glob(os.path.join(folder, f"{prefix}_*.pb")))
    return [_read_value(os.path.join(folder, f"{prefix}_{i}.pb"), infos[i].type) for i in range(count)]


def _read_folder(folder: str) -> tuple[onnx.ModelProto, list[tuple[list[Any], list[Any]]]]:
    model = onnx.load(os.path.join(folder, "model.onnx"))
    data_sets = []
    for data_folder in sorted(glob.glob(os.path.join(folder, "test_data_set*"))):
        inputs = _read_values(data_folder, "input", model.graph.input)
        outputs = _read_values(data_folder, "output", model.graph.output)
        data_sets.append((inputs, outputs))
    return model, data_sets


def _to_case(entry: Any) -> Case:
    if entry.model is None:
        model, data_sets = _read_folder(entry.model_dir)
    else:
        model = entry.model
        data_sets = [([_as_array(x) for x in ins], [_as_array(x) for x in outs]) for ins, outs in entry.data_sets]
    atol = max([entry.atol, *(atol for name, atol in LOOSER.items() if entry.name.startswith(name))])
    return Case(entry.name, entry.kind, model, tuple(data_sets), entry.rtol, atol)


@functools.cache
def _entries() -> dict[str, Any]:
    """Every entry of the suite by name, unread; the suite's generators draw random data, so they are seeded."""
    np.random.seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return {entry.name: entry for kind in KINDS for entry in load_model_tests(kind=kind)}


def case_names() -> list[str]:
    """Names of all cases, sorted."""
    return sorted(_entries())


def load_case(name: str) -> Case:
    """Load one case by name.

    Raises
    ------
    KeyError
        If the suite lacks the case.
    """
    return _to_case(_entries()[name])


def mismatch(expected: Sequence[Any], actual: Sequence[Any], rtol: float, atol: float) -> str | None:
    """Compare outputs by the rules of ONNX's runner: count, shape, dtype, then values with NaN equal to NaN.

    Returns
    -------
    None if they agree, else a sentence about the first difference.
    """
    if len(expected) != len(actual):
        return f"{len(actual)} outputs, expected {len(expected)}"
    for index, (want, got) in enumerate(zip(expected, actual, strict=True)):
        where = f"output {index}"
        if isinstance(want, (list, tuple)):
            if not isinstance(got, (list, tuple)):
                return f"{where}: {type(got).__name__}, expected a sequence"
            inner = mismatch(want, got, rtol, atol)
            if inner is not None:
                return f"{where}: {inner}"
            continue
        if want is None or got is None:
            if want is not got:
                return f"{where}: only one of the two is empty"
            continue
        problem = _array_mismatch(np.asarray(want), np.asarray(got), rtol, atol)
        if problem is not None:
            return f"{where}: {problem}"
    return None


def _array_mismatch(want: np.ndarray, got: np.ndarray, rtol: float, atol: float) -> str | None:
    if got.shape != want.shape:
        return f"shape {got.shape}, expected {want.shape}"
    if want.dtype == object:
        return None if np.array_equal(got, want) else "strings differ"
    if got.dtype != want.dtype:
        return f"dtype {got.dtype}, expected {want.dtype}"
    if want.dtype.kind == "V" or want.dtype.name not in np.sctypeDict:
        # Types of ml_dtypes do not promote with Python floats.
        if want.dtype.name == "bfloat16":
            rtol = max(rtol, BFLOAT16_RTOL)
        want, got = want.astype(np.float32), got.astype(np.float32)
    close = np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
    if np.all(close):
        return None
    worst = np.unravel_index(int(np.argmin(close)), want.shape)
    index = tuple(int(i) for i in worst)
    return f"{int(np.sum(~close))} of {want.size} values differ, first at {index}: {got[worst]}, expected {want[worst]}"
