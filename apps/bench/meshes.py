"""Networks over a mesh of equal devices, every device on a part of each batch or of each op, against one device.

python apps/bench/meshes.py bert resnet50                              # two CPU devices of one core; one of two threads
python apps/bench/meshes.py bert --batch 1 --split ops                 # the work of each op, for one sentence
python apps/bench/meshes.py bert --devices 4 --split both              # pairs share the ops of a half of the batch
python apps/bench/meshes.py resnet50 --vdevice cuda --batch 64         # GPUs; one GPU has the same batch

The batch of the mesh is one call of `submit`; the result on the host ends it. Results are compared before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import numpy as np
import onnx
from bars import Check, verdict
from model_zoo import model_path, random_arrays
from model_zoo.batches import with_batch
from smoke import SMALL_MODEL, smoke
from turns import take_turns

import relax_hetero as rh

CPU_BAR, GPU_BAR = 0.9, 1.8
"""Minimum speed over one device: with as many threads as the mesh has devices, and of a single GPU."""
ALLOWED = {"llvm": 1e-5, "cuda": 1e-3}
"""Largest difference relative to an output's largest number."""


def session(model: onnx.ModelProto, inputs: dict[str, np.ndarray], **options: Any) -> Callable[[], list[np.ndarray]]:
    """A call of a compiled model: outputs in host memory."""
    vm = rh.vm.VirtualMachine(rh.compile(rh.from_onnx(model, **options)))

    def call() -> list[np.ndarray]:
        result = vm.submit("main", **inputs).result()
        return [tensor.numpy() for tensor in (result if isinstance(result, tuple) else (result,))]

    return call


@click.command(help=__doc__)
@click.argument("models", nargs=-1, required=True)
@click.option("--vdevice", default="llvm", show_default=True)
@click.option("--devices", default=2, show_default=True, help="Devices of the mesh.")
@click.option("--batch", default=8, show_default=True)
@click.option("--split", type=click.Choice(["batches", "ops", "both"]), default="batches", show_default=True)
@click.option("--rounds", default=15, show_default=True)
@smoke(models=lambda models: models and [SMALL_MODEL], batch=2, rounds=1)
def main(models: tuple[str, ...], vdevice: str, devices: int, batch: int, split: str, rounds: int) -> None:
    """Time one device and a mesh in turns."""
    if split == "both" and devices % 2:
        raise click.UsageError(f"--split both: found {devices} devices, expected an even number, as pairs share ops")
    checks = []
    for name in models:
        model = with_batch(onnx.load(str(model_path(name))), batch)
        inputs = random_arrays(model.graph, {}, 0)
        is_cpu = vdevice == "llvm"
        one: Any = {"kind": "llvm", "num-cores": devices} if is_cpu else vdevice
        part: Any = {"kind": "llvm", "num-cores": 1} if is_cpu else vdevice
        counts = {"batches": (devices, 1), "ops": (1, devices), "both": (devices // 2, 2)}[split]
        over_mesh = dict(zip(("data_parallel", "tensor_parallel"), counts, strict=True))
        calls = {
            "one": session(model, inputs, vdevices=one),
            "mesh": session(model, inputs, vdevices=[part] * devices, **over_mesh),
        }
        for actual, expected in zip(calls["mesh"](), calls["one"](), strict=True):
            difference = np.abs(actual - expected).max() / max(np.abs(expected).max(), 1e-30)
            if not difference <= ALLOWED.get(vdevice, 1e-3):  # NaN differs, too
                raise SystemExit(f"{name}: the results differ by {difference:.1e} of the largest number")
        timings = take_turns(calls, rounds)
        ms = {way: timing.median * 1e3 for way, timing in timings.items()}
        print(
            f"{name}: batch {batch}, one device {ms['one']:.2f} ms, a mesh of {devices} {ms['mesh']:.2f} ms", flush=True
        )
        check = Check(f"{name}: speed over one device", ms["one"] / ms["mesh"], CPU_BAR if is_cpu else GPU_BAR)
        print(f"{verdict(check)}: {check}", flush=True)
        checks.append(check)
    if not all(check.passed for check in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
