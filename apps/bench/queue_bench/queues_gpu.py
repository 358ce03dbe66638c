"""Pipelines over GPUs by queues: from CPU to GPU to CPU, and over two GPUs.

python apps/bench/queue_bench/queues_gpu.py
python apps/bench/queue_bench/queues_gpu.py --calls 32 --milliseconds 4 --json

Stages are as many products of matrices as take the wanted time. The first pipeline's time per call is compared with
the time of its slowest stage alone, the second's with that of the same model on one GPU; all calls are submitted.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import tvm
from rich.console import Console
from rich.table import Table
from tvm import relax

import relax_hetero as rh
from relax_hetero.target.cpu_cores import num_cores
from relax_hetero.target.vdevice import with_vdevices

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bars import Check, verdict  # noqa: E402
from smoke import smoke  # noqa: E402

PIPELINE_BAR, TWO_GPUS_BAR = 1.15, 1.8
PROBE = 4
"""Number of products that are timed to find the number for a stage."""


@dataclass(frozen=True)
class Work:
    """The operands of one product.

    Attributes
    ----------
    rows, width : int
        Extents of the left matrix; the right one is square.
    dtype : str
    """

    rows: int
    width: int
    dtype: str

    def array(self) -> np.ndarray:
        """A left matrix."""
        return np.random.default_rng(0).standard_normal((self.rows, self.width)).astype(self.dtype)

    def module(self, devices: list[relax.VDevice], stages: list[tuple[int, int]]) -> tvm.IRModule:
        """`main(x)`: each stage is a number of products on a device (by index), with transfers between stages.

        The weights keep the magnitude of numbers.
        """
        weight = np.random.default_rng(1).standard_normal((self.width, self.width)) / self.width**0.5
        constant = relax.const(weight.astype(self.dtype))
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorType((self.rows, self.width), self.dtype, devices[stages[0][0]]))
        with builder.function("main", [x]):
            with builder.dataflow():
                value, where = x, stages[0][0]
                for device, products in stages:
                    if device != where:
                        value, where = builder.emit(relax.op.to_vdevice(value, devices[device])), device
                    for _ in range(products):
                        value = builder.emit(relax.op.matmul(value, constant))
                result = builder.emit_output(value)
            builder.emit_func_output(result)
        return with_vdevices(builder.get(), devices)


def machine(
    work: Work, devices: list[relax.VDevice], stages: list[tuple[int, int]], in_flight: int = 1
) -> rh.vm.VirtualMachine:
    """A machine for some stages."""
    return rh.vm.VirtualMachine(rh.compile(work.module(devices, stages)), max_in_flight=in_flight)


def argument(work: Work, vm: rh.vm.VirtualMachine) -> tvm.runtime.Tensor:
    """The argument of `main`, on its device."""
    return tvm.runtime.tensor(work.array(), vm.devices[vm.executable.signature("main").inputs[0].device])


def seconds_alone(work: Work, device: relax.VDevice, products: int, rounds: int) -> float:
    """Median seconds of one stage running alone; its input is on the device."""
    vm = machine(work, [device], [(0, products)])
    x = argument(work, vm)
    times = []
    for _ in range(rounds + 2):
        begin = time.perf_counter()
        vm["main"](x)
        vm.devices[0].sync()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])  # the first calls allocate and record


def products_for(work: Work, device: relax.VDevice, seconds: float) -> int:
    """The number of products that take `seconds` on a device."""
    return max(1, round(PROBE * seconds / seconds_alone(work, device, PROBE, 5)))


def seconds_per_call(work: Work, vm: rh.vm.VirtualMachine, calls: int, rounds: int) -> float:
    """Least seconds per call of `calls` submitted calls, from the first submission to the last result."""
    x = argument(work, vm)
    expected = vm["main"](x).numpy()
    times = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        fences = [vm.submit("main", x) for _ in range(calls)]
        results = [fence.result() for fence in fences]
        times.append((time.perf_counter() - begin) / calls)
        if not all(np.array_equal(result.numpy(), expected) for result in (results[0], results[-1])):
            raise RuntimeError("submitted calls give other numbers than a plain call")
    return min(times[1:])


def cpu_gpu_cpu(cuda: dict[str, str], seconds: float, calls: int, rounds: int) -> dict[str, Any]:
    """The pipeline from one CPU device to a GPU to another CPU device, each CPU with a quarter of the cores."""
    work = Work(512, 1024, "float32")
    cores = max(1, min(8, num_cores() // 4))
    cpus = [rh.VDevice({**rh.native("llvm").export(), "num-cores": cores}, number) for number in range(2)]
    devices = [cpus[0], rh.VDevice(cuda), cpus[1]]
    products = [products_for(work, devices[index], seconds) for index in (0, 1)]
    stages = [(0, products[0]), (1, products[1]), (2, products[0])]
    stage_seconds = [seconds_alone(work, devices[device], count, 15) for device, count in stages[:2]]
    vm = machine(work, devices, stages, in_flight=8)
    return {
        "cores": cores,
        "products": [count for _, count in stages],
        "stages_ms": [stage_seconds[0] * 1e3, stage_seconds[1] * 1e3, stage_seconds[0] * 1e3],
        "one_call_ms": seconds_per_call(work, vm, 1, 3 * rounds) * 1e3,
        "per_call_ms": seconds_per_call(work, vm, calls, rounds) * 1e3,
    }


def two_gpus(cuda: dict[str, str], seconds: float, calls: int, rounds: int) -> dict[str, Any]:
    """The same two stages on one GPU and on two."""
    work = Work(4096, 1024, "float32")
    devices = [rh.VDevice(cuda, 0), rh.VDevice(cuda, 1)]
    products = products_for(work, devices[0], seconds)
    both = machine(work, devices, [(0, products), (1, products)], in_flight=4)
    one = machine(work, devices[:1], [(0, 2 * products)], in_flight=4)
    return {
        "products": products,
        "one_gpu_ms": seconds_per_call(work, one, calls, rounds) * 1e3,
        "two_gpus_ms": seconds_per_call(work, both, calls, rounds) * 1e3,
    }


def checks(result: dict[str, Any]) -> list[Check]:
    """The bars of the pipelines."""
    bars = []
    if "cpu_gpu_cpu" in result:
        row = result["cpu_gpu_cpu"]
        ratio = row["per_call_ms"] / max(row["stages_ms"])
        bars.append(Check("CPU to GPU to CPU: time per call over the slowest stage's", ratio, PIPELINE_BAR, True))
    if "two_gpus" in result:
        row = result["two_gpus"]
        ratio = row["one_gpu_ms"] / row["two_gpus_ms"]
        bars.append(Check("two GPUs: calls per second over one GPU's", ratio, TWO_GPUS_BAR))
    return bars


@click.command()
@click.option("--calls", default=32, show_default=True, help="Number of calls submitted at once.")
@click.option("--milliseconds", default=5.0, show_default=True, help="Duration of a stage.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--arch", default="sm_90", show_default=True, help="Architecture of the GPUs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(calls=2, milliseconds=0.1, rounds=1)
def main(calls: int, milliseconds: float, rounds: int, arch: str, as_json: bool) -> None:
    """Time pipelines over NVIDIA GPUs."""
    cuda = {"kind": "cuda", "arch": arch}
    result: dict[str, Any] = {"calls": calls}
    result["cpu_gpu_cpu"] = cpu_gpu_cpu(cuda, milliseconds / 1e3, calls, rounds)
    if tvm.cuda(1).exist:
        result["two_gpus"] = two_gpus(cuda, milliseconds / 1e3, calls, rounds)
    if as_json:
        click.echo(json.dumps(result))
        return
    console = Console(highlight=False, width=120)
    for name in ("cpu_gpu_cpu", "two_gpus"):
        table = Table(title=f"{name.replace('_', ' ')}, {calls} calls", title_justify="left")
        for key in result.get(name, {}):
            table.add_column(key.replace("_", " "), justify="right")
        table.add_row(*map(_cell, result.get(name, {}).values()))
        console.print(table)
    for check in checks(result):
        console.print(f"{verdict(check)}: {check}", markup=False)


def _cell(value: Any) -> str:
    parts = value if isinstance(value, list) else [value]
    return ", ".join(f"{part:.2f}" if isinstance(part, float) else str(part) for part in parts)


if __name__ == "__main__":
    main()
