"""What ``relax-hetero run`` says about a call."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .console import console, print_table
from .onnxruntime_reference import Comparison


@dataclass(frozen=True)
class Ran:
    """A call that was made.

    Attributes
    ----------
    inputs, outputs
        Arrays by ONNX name.
    places
        The device each output was left on, by name.
    seconds
        Time of each step; ``run`` is the call with its copies to the host.
    comparisons
        One per output, or None where none was asked for.
    output_file
        Where the outputs were written, if anywhere.
    """

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    places: dict[str, str]
    seconds: dict[str, float]
    comparisons: list[Comparison] | None
    output_file: Path | None

    def print(self) -> None:
        """Print tables for people."""
        columns = ["output", "type", "device", "min", "mean", "max"]
        rows = [
            [name, _type(array), self.places[name], *(f"{value:.6g}" for value in _statistics(array))]
            for name, array in self.outputs.items()
        ]
        print_table(f"Ran in {self.seconds['run'] * 1e3:.2f} ms", columns, rows, right=columns[3:])
        if self.comparisons is not None:
            columns = ["output", "max abs diff", "max rel diff", "outside tolerance", "verdict"]
            checks = [
                [c.name, f"{c.max_abs:.3g}", f"{c.max_rel:.3g}", f"{c.wrong:,} of {c.total:,}", _verdict(c)]
                for c in self.comparisons
            ]
            print_table("Against ONNX Runtime", columns, checks, right=columns[1:4])
        if self.output_file is not None:
            console().print(f"Wrote {self.output_file}", markup=False)

    def to_json(self) -> dict[str, Any]:
        """The same as JSON data."""
        described = []
        for name, array in self.outputs.items():
            low, mean, high = _statistics(array)
            statistics = {"min": low, "mean": mean, "max": high}
            described.append({"name": name, **_shape(array), "device": self.places[name], **statistics})
        check = None
        if self.comparisons is not None:
            outputs = [{**asdict(comparison), "passed": comparison.passed} for comparison in self.comparisons]
            check = {"passed": all(comparison.passed for comparison in self.comparisons), "outputs": outputs}
        return {
            "inputs": [{"name": name, **_shape(array)} for name, array in self.inputs.items()],
            "outputs": described,
            "seconds": self.seconds,
            "output_file": None if self.output_file is None else str(self.output_file),
            "check": check,
        }


def _shape(array: np.ndarray) -> dict[str, Any]:
    return {"shape": list(array.shape), "dtype": str(array.dtype)}


def _type(array: np.ndarray) -> str:
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"


def _statistics(array: np.ndarray) -> tuple[float, float, float]:
    if array.size == 0 or array.dtype.kind not in "fiub":
        return float("nan"), float("nan"), float("nan")
    values = array.astype("float64")
    return float(values.min()), float(values.mean()), float(values.max())


def _verdict(comparison: Comparison) -> str:
    return "same" if comparison.passed else comparison.problem or "differs"
