"""Results of ONNX Runtime for a model, and comparison with this library's."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

import relax_hetero as rh

from .harness import REFUSED, RIGHT, Outcome, reference

onnxruntime.set_default_logger_severity(4)


class RefusedByReference(Exception):
    """ONNX Runtime refuses a model, or a call of it."""


class Unsupported(RefusedByReference):
    """ONNX Runtime lacks a kernel for a combination of types: it says nothing about sizes."""


def session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    """A session on one thread that computes what the model says, without rewriting it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    try:
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:
        kind = Unsupported if "NOT_IMPLEMENTED" in str(error) or "Type Error" in str(error) else RefusedByReference
        raise kind(str(error)) from error


def run_reference(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """ONNX Runtime's results."""
    try:
        with reference():
            return [np.asarray(value) for value in session(model).run(None, dict(inputs))]
    except RefusedByReference:
        raise
    except Exception as error:
        kind = Unsupported if "NOT_IMPLEMENTED" in str(error) else RefusedByReference
        raise kind(str(error)) from error


def compared(
    model: onnx.ModelProto, calls: Sequence[Mapping[str, np.ndarray]], vdevices: Sequence[str] = ("llvm",)
) -> list[Outcome]:
    """An outcome for each call of a model on some devices, or one if the model is refused."""
    try:
        vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, vdevices=list(vdevices))))
    except rh.HeteroError as error:
        return [_refused(model, calls[0], error)]
    except Exception:
        return [Outcome("foreign", f"{_text(model)}\n{traceback.format_exc()[-2500:]}")]
    return [_call(vm, model, inputs) for inputs in calls]


def _call(vm: rh.vm.VirtualMachine, model: onnx.ModelProto, inputs: Mapping[str, np.ndarray]) -> Outcome:
    shapes = {name: (str(value.dtype), value.shape) for name, value in inputs.items()}
    try:
        expected: list[np.ndarray] | Exception = run_reference(model, inputs)
    except RefusedByReference as error:
        expected = error
    try:
        result = vm["main"](**guarded(inputs))
    except rh.HeteroError as error:
        return _refused(model, inputs, error) if isinstance(expected, list) else REFUSED
    except Exception:
        return Outcome("foreign", f"{_text(model)}\n{shapes}\n{traceback.format_exc()[-2500:]}")
    if isinstance(expected, Unsupported):
        return Outcome("skipped")
    if isinstance(expected, Exception):
        return Outcome("accepted", f"{_text(model)}\n{shapes}\nONNX Runtime: {str(expected)[:600]}")
    results = [np.asarray(part.numpy()) for part in (result if isinstance(result, tuple) else (result,))]
    for number, (mine, its) in enumerate(zip(results, expected, strict=True)):
        complaint = difference(mine, its)
        if complaint:
            return Outcome("wrong", f"{_text(model)}\n{shapes}\nresult {number}: {complaint}")
    return RIGHT


def _refused(model: onnx.ModelProto, inputs: Mapping[str, np.ndarray], error: Exception) -> Outcome:
    """Outcome where this library refuses a model: harmless if ONNX Runtime refuses it, too."""
    try:
        run_reference(model, inputs)
    except RefusedByReference:
        return REFUSED
    shapes = {name: (str(value.dtype), value.shape) for name, value in inputs.items()}
    return Outcome("declined", f"{_text(model)}\n{shapes}\n{error}")


def guarded(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inputs at the ends of pages that nobody may touch: reading far beyond one ends the process."""
    return {name: _before_guard(value) for name, value in inputs.items()}


def difference(mine: np.ndarray, its: np.ndarray) -> str:
    """Why two results are not the same; nothing if they are, within what float arithmetic leaves open."""
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return f"{mine.dtype}{mine.shape}, expected {its.dtype}{its.shape}"
    if mine.dtype.kind != "f":
        different = mine != its
    else:
        tolerance = {2: 2e-2, 4: 1e-3, 8: 1e-6}[mine.dtype.itemsize]
        with np.errstate(all="ignore"):
            a, b = mine.astype("float64"), its.astype("float64")
            scale = np.max(np.abs(b[np.isfinite(b)]), initial=1.0)
            close = np.abs(a - b) <= tolerance * (np.abs(b) + min(scale, 1e4))
            different = ~(close | (a == b) | (np.isnan(a) & np.isnan(b)))
    if not different.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(different)[0])
    return f"{int(different.sum())} of {different.size} differ, at {place} {mine[place]}, expected {its[place]}"


def _before_guard(value: np.ndarray) -> np.ndarray:
    from .guard_pages import before_guard

    return before_guard(value)


def _text(model: onnx.ModelProto) -> str:
    path = Path(tempfile.gettempdir()) / "relax_hetero_fuzz_last.onnx"
    onnx.save(model, path)
    return onnx.printer.to_text(model)[:3000]
