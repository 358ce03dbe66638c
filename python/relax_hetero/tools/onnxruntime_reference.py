"""ONNX Runtime as a reference for outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import HeteroError


@dataclass(frozen=True)
class Comparison:
    """Comparison of one output with the reference."""

    name: str  # ONNX name of the output
    # Largest absolute and relative difference; NaN if shapes differ.
    max_abs: float
    max_rel: float
    # Number of elements outside of the tolerance, and of all elements.
    wrong: int
    total: int
    problem: str = ""  # reason why they cannot be compared (shapes, element types); empty if they can

    @property
    def passed(self) -> bool:
        """True if all elements are within the tolerance."""
        return self.wrong == 0 and not self.problem


def reference(model: Path, threads: int = 0) -> Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]:
    """Make a function that runs `model` with ONNX Runtime on the CPU.

    Raises HeteroError if ONNX Runtime is not installed or refuses the model.
    """
    try:
        import onnxruntime
    except ImportError:
        raise HeteroError("comparing needs ONNX Runtime, which is not installed: pip install onnxruntime") from None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's errors have no other common base class
        raise HeteroError(f"ONNX Runtime refuses {model}: {error}") from error
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, Any]:
        try:
            return dict(zip(names, session.run(None, dict(inputs)), strict=True))
        except Exception as error:
            raise HeteroError(f"ONNX Runtime fails on {model}: {error}") from error

    return run


def compare(name: str, outputs: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> Comparison:
    """Compare as `numpy.isclose` does, NaN equal to NaN."""
    if not isinstance(expected, np.ndarray):
        return Comparison(name, np.nan, np.nan, 0, 0, f"the reference gives a {type(expected).__name__}")
    if outputs.shape != expected.shape or outputs.dtype != expected.dtype:
        types = [f"{array.dtype}{list(array.shape)}" for array in (outputs, expected)]
        return Comparison(name, np.nan, np.nan, 0, expected.size, f"is {types[0]}, expected {types[1]}")
    if outputs.dtype.kind not in "fiub":
        wrong = int((outputs != expected).sum())
        return Comparison(name, float(wrong > 0), float(wrong > 0), wrong, expected.size)
    a, b = outputs.astype("float64"), expected.astype("float64")
    with np.errstate(invalid="ignore"):
        # The difference of equal infinities would be NaN.
        difference = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
        scale = np.maximum(np.abs(b), np.finfo("float32").tiny)
        relative = difference / scale
    wrong = int((~np.isclose(a, b, rtol=rtol, atol=atol, equal_nan=True)).sum())
    largest = [float(np.max(values, initial=0.0)) for values in (difference, relative)]
    return Comparison(name, largest[0], largest[1], wrong, expected.size)
