"""Run any ONNX model on one device, then cut over two, and compare.

python apps/onnx_two_devices/run.py model.onnx                          # half of the nodes on each of two CPU devices
python apps/onnx_two_devices/run.py model.onnx --fraction 0.8 --vdevice llvm --vdevice cuda
python apps/onnx_two_devices/run.py model.onnx --place 'Conv=vdevice:1'
"""

from __future__ import annotations

import argparse
import glob
import json
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from rich.console import Console

import relax_hetero as rh

SECOND = "vdevice:1"


def baseline() -> dict[str, str]:
    """A target for any CPU of this architecture, next to the native one: other code for the same model."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    return {"kind": "llvm", "mcpu": "x86-64-v2" if x86 else "generic"}


def cut(model: onnx.ModelProto, fraction: float) -> dict[str, str]:
    """A placement with the first `fraction` of the nodes on the first device and the others on the second."""
    # Names as from_onnx makes them: a node's own, else its op type and position.
    names = [node.name or f"{node.op_type}_{index}" for index, node in enumerate(model.graph.node)]
    return {glob.escape(name): SECOND for name in names[round(len(names) * fraction) :]}


def random_inputs(executable: Any, seed: int) -> dict[str, np.ndarray]:
    """Standard normal floats, and integers 0 and 1, which are valid as masks and as indices."""
    generator = np.random.default_rng(seed)
    arrays = {}
    for spec in executable.signature().inputs:
        if any(not isinstance(extent, int) for extent in spec.shape):
            raise SystemExit(f"input {spec.name} has the symbolic shape {spec.shape}: say --shape {spec.name}=…")
        if spec.dtype.startswith("float"):
            arrays[spec.name] = generator.standard_normal(spec.shape).astype(spec.dtype)
        else:
            arrays[spec.name] = generator.integers(0, 2, spec.shape).astype(spec.dtype)
    return arrays


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; returns the exit code: 0 if both results agree."""
    options = _parse(arguments)
    screen = Console(highlight=False)
    executables: dict[str, Any] = {}
    for label, vdevices in (("one device", options.vdevice[:1]), ("two devices", options.vdevice)):
        # Import for one device first: it says what is wrong with a file that is not a model.
        rules = _rules(options) if executables else None
        with screen.status(f"Compiling for {label}"):
            module = rh.from_onnx(str(options.model), vdevices=vdevices, placement=rules, shapes=options.shape)
            executables[label] = rh.compile(module)
    executables["two devices"].explain()

    inputs = random_inputs(executables["one device"], options.seed)
    outputs = {}
    for label, executable in executables.items():
        machine = rh.vm.VirtualMachine(executable)
        outputs[label], seconds = _timed(machine, inputs, 1 if options.smoke else options.repeat)
        screen.print(f"{label}: {seconds * 1e3:.2f} ms, median of {options.repeat} calls", markup=False)
    return _compare(executable, outputs["one device"], outputs["two devices"], screen)


def _rules(options: argparse.Namespace) -> Any:
    return options.place or cut(onnx.load(str(options.model), load_external_data=False), options.fraction)


def _timed(machine: Any, inputs: dict[str, np.ndarray], repeat: int) -> tuple[list[np.ndarray], float]:
    """The outputs, and the median seconds of a call whose outputs are copied to the host."""
    seconds = []
    for _ in range(repeat):
        start = time.perf_counter()
        result = machine["main"](**inputs)
        arrays = [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]
        seconds.append(time.perf_counter() - start)
    return arrays, statistics.median(seconds)


def _compare(executable: Any, one: list[np.ndarray], two: list[np.ndarray], screen: Console) -> int:
    same = True
    for spec, a, b in zip(executable.signature().outputs, one, two, strict=True):
        agrees = np.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
        difference = float(np.max(np.abs(a.astype("float64") - b.astype("float64")), initial=0.0))
        verdict = "same" if agrees else "DIFFERS"
        screen.print(f"{spec.name} {list(a.shape)}: {verdict}, largest difference {difference:.1e}", markup=False)
        same = same and agrees
    return 0 if same else 1


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="an ONNX file")
    parser.add_argument("--vdevice", action="append", type=_vdevice, help="a device; repeat it (default: two CPUs)")
    parser.add_argument("--fraction", type=float, default=0.5, help="share of the nodes on the first device")
    parser.add_argument("--place", action="append", type=_place, metavar="PATTERN=DEVICE", help="a placement rule")
    parser.add_argument("--shape", action="append", type=_shape, metavar="NAME=1x3x224x224", help="an input's shape")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random inputs")
    parser.add_argument("--smoke", action="store_true", help="one timed call: does the command work?")
    parser.add_argument("--repeat", type=int, default=5, help="timed calls (default 5)")
    options = parser.parse_args(arguments)
    options.vdevice = options.vdevice or ["llvm", baseline()]
    if len(options.vdevice) < 2:
        parser.error("--vdevice: two devices are needed")
    if not options.model.is_file():
        parser.error(f"there is no file {options.model}")
    options.place = dict(options.place or ())
    options.shape = dict(options.shape or ()) or None
    return options


def _vdevice(text: str) -> str | dict[str, Any]:
    return json.loads(text) if text.startswith("{") else text


def _place(text: str) -> tuple[str, str]:
    pattern, divider, device = text.rpartition("=")
    if not divider:
        raise argparse.ArgumentTypeError(f"{text!r} is not PATTERN=DEVICE")
    return pattern, device


def _shape(text: str) -> tuple[str, list[int]]:
    name, divider, extents = text.rpartition("=")
    if not divider:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SHAPE")
    return name, [int(extent) for extent in extents.split("x") if extent]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except rh.HeteroError as error:
        sys.exit(f"error: {error}")
