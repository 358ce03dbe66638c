"""``relax-hetero run``: call a model once, show or save its outputs, and compare them with ONNX Runtime."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..display.console import console, print_json, print_table
from ..errors import BindingError, HeteroError
from .arrays import random_arrays, read_arrays, write_arrays
from .command import (
    INPUT_FILE,
    OUTPUT_FILE,
    accuracy_option,
    cache_option,
    checks_option,
    command,
    json_option,
    refuse_overwriting,
    verify_option,
)
from .models import Model, is_onnx, obtain, refuse_language_model
from .onnxruntime_reference import Comparison, compare, reference
from .placement_options import PlacementOptions, placement_options


@command("run")
@click.argument("model", type=INPUT_FILE)
@click.option(
    "--input",
    "files",
    multiple=True,
    metavar="[NAME=]FILE",
    help="An .npy file for one input, or an .npz file with several. Repeatable; inputs not given are random.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the random inputs.")
@click.option("--function", "function_name", default="main", help="Name of the function to call.")
@click.option(
    "--device",
    "remap",
    multiple=True,
    metavar="VDEVICE=DEVICE",
    help="Run a device of the model on another one, such as cuda:1=cuda:0. Repeatable.",
)
@click.option("--output", type=OUTPUT_FILE, metavar="OUT.npz", help="File to write the outputs to.")
@click.option("--check", is_flag=True, help="Compare with ONNX Runtime; exit with 1 where they differ.")
@click.option(
    "--onnx", type=INPUT_FILE, metavar="MODEL.onnx", help="ONNX file that a library was compiled from, for --check."
)
@click.option("--rtol", type=click.FloatRange(min=0), default=1e-3, help="Relative tolerance of --check.")
@click.option("--atol", type=click.FloatRange(min=0), default=1e-4, help="Absolute tolerance of --check.")
@placement_options
@verify_option
@cache_option
@checks_option
@accuracy_option
@json_option
def run_command(
    model: Path,
    files: tuple[str, ...],
    seed: int,
    function_name: str,
    remap: tuple[str, ...],
    output: Path | None,
    check: bool,
    onnx: Path | None,
    rtol: float,
    atol: float,
    placing: PlacementOptions,
    key: bytes | None,
    cache: bool,
    checks: str,
    accuracy: str,
    as_json: bool,
) -> None:
    """Run MODEL, a compiled library or an ONNX file, once.

    \b
    relax-hetero run model.so --input inputs.npz --output outputs.npz
    relax-hetero run model.onnx --vdevice llvm --vdevice cuda:0 --place-auto --check
    """
    from ..report.text.explanation import print_idle_devices

    if check and onnx is None and not is_onnx(model):
        raise click.UsageError("--check needs the ONNX file that the library was compiled from: --onnx MODEL.onnx")
    if function_name == "main":
        refuse_language_model(model)
    devices = _device_map(remap)
    if output is not None:
        refuse_overwriting(output, model, *filter(None, [onnx]))
    compiled = obtain(model, placing, cache, key, checks, accuracy)
    inputs = _make_inputs(compiled, function_name, files, dict(placing.shapes), seed)
    outputs, output_devices, seconds = _call(compiled, function_name, inputs, devices)
    if output is not None:
        write_arrays(output, outputs)
    comparisons = _compare_all(outputs, reference(onnx or model)(inputs), rtol, atol) if check else None
    report = RunReport(inputs, outputs, output_devices, {**compiled.seconds, "run": seconds}, comparisons, output)
    if as_json:
        print_json(report.to_json())
    else:
        report.print()
        print_idle_devices(compiled.executable)
    if not all(comparison.passed for comparison in comparisons or ()):
        click.echo(f"error: {model.name} differs from ONNX Runtime (rtol {rtol:g}, atol {atol:g})", err=True)
        sys.exit(1)


def _device_map(remap: tuple[str, ...]) -> dict[str, str] | None:
    devices: dict[str, str] = {}
    for text in remap:
        source, divider, destination = text.partition("=")
        if not divider or not source or not destination:
            raise click.UsageError(f"--device {text!r} is not VDEVICE=DEVICE, such as cuda:1=cuda:0")
        devices[source] = destination
    return devices or None


def _make_inputs(
    model: Model, function_name: str, files: tuple[str, ...], shapes: dict[str, list[int]], seed: int
) -> dict[str, np.ndarray]:
    signature = model.executable.signature(function_name)
    names = [
        spec.name
        for index, spec in enumerate(signature.inputs)
        if index < signature.num_input or spec.name in signature.defaults
    ]
    symbols = {extent for spec in signature.inputs for extent in getattr(spec, "shape", None) or ()}
    unknown = [name for name in shapes if name not in names and name not in symbols]
    # For an ONNX file, from_onnx has checked the names already, and replaced the dimensions by numbers.
    if unknown and model.onnx is None:
        raise BindingError(f"--shape names {unknown[0]!r}, which is neither an input nor a dimension of {signature}")
    return random_arrays(signature, shapes, seed, read_arrays(files, names))


def _call(
    model: Model, function_name: str, inputs: dict[str, np.ndarray], devices: dict[str, str] | None
) -> tuple[dict[str, np.ndarray], dict[str, str], float]:
    """Outputs and their devices by ONNX name, and the time of the call including the copies to the host."""
    import relax_hetero as rh

    machine = rh.vm.VirtualMachine(model.executable, devices=devices)
    signature = model.executable.signature(function_name)
    start = time.perf_counter()
    values = flatten(machine.call(function_name, (), inputs))
    arrays = [value.numpy() for value in values]
    seconds = time.perf_counter() - start
    names = [spec.name for spec in signature.outputs]
    if len(names) != len(values):
        names = [f"output_{index}" for index in range(len(values))]
    output_devices = {name: str(value.device) for name, value in zip(names, values, strict=True)}
    return dict(zip(names, arrays, strict=True)), output_devices, seconds


def flatten(result: Any) -> list[Any]:
    """Tensors of a result in order, with nested tuples (of Python or TVM) flattened."""
    return [result] if hasattr(result, "numpy") else [tensor for element in result for tensor in flatten(element)]


def _compare_all(
    outputs: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float, atol: float
) -> list[Comparison]:
    if len(outputs) != len(expected):
        raise HeteroError(
            f"ONNX Runtime gives {len(expected)} outputs ({', '.join(expected)}), this library {len(outputs)}"
        )
    # By name if the names agree, else by position.
    pairs = zip(outputs, expected, strict=True) if set(outputs) != set(expected) else ((name, name) for name in outputs)
    return [compare(theirs, outputs[ours], expected[theirs], rtol, atol) for ours, theirs in pairs]


@dataclass(frozen=True)
class RunReport:
    """Result of a call."""

    # Arrays by ONNX name.
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]
    devices: dict[str, str]  # devices of the outputs by name
    seconds: dict[str, float]  # time of each step; ``run`` includes the copies to the host
    comparisons: list[Comparison] | None  # comparisons of all outputs; None without ``--check``
    output_file: Path | None  # file that the outputs were written to

    def print(self) -> None:
        """Print tables."""
        columns = ["output", "type", "device", "min", "mean", "max"]
        rows = [
            [name, _type(array), self.devices[name], *(f"{value:.6g}" for value in _statistics(array))]
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
        """Convert to JSON data."""
        described = []
        for name, array in self.outputs.items():
            low, mean, high = _statistics(array)
            statistics = {"min": low, "mean": mean, "max": high}
            described.append({"name": name, **_shape(array), "device": self.devices[name], **statistics})
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
