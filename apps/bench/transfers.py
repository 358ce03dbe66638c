"""The rate of `to_vdevice` between every two devices.

python apps/bench/transfers.py --vdevice llvm --vdevice cuda:0 --vdevice cuda:1 --megabytes 256 --torch

A CPU sends a GPU an argument in plain memory, such as numpy's; an argument in pinned memory (`rh.vm.pinned_array`); or
the result of a kernel, where only the transfer is timed, in plain calls and in submitted ones. ``--torch`` also times
PyTorch's copies of as many bytes between the same devices, with pinned memory, which shows the rate of the link, and
with plain memory. Between two GPUs, "in order" is the time from a kernel's end to the next kernel's begin on the other
one, with a small copy between them, that GPUs need where the host is ahead of them (`scaling.GPU_TRANSFER_SECONDS`).
Between two CPUs nothing moves, but the result is a copy: results never share memory with arguments.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import numpy as np
import tvm
from rich.console import Console
from rich.progress import track
from rich.table import Table
from smoke import smoke
from tvm import relax

import relax_hetero as rh
from relax_hetero.target.vdevice import device_name, parse_vdevices

COLUMNS = {
    "GB/s": "GB/s",
    "torch pinned GB/s": "torch, pinned",
    "torch pageable GB/s": "torch, plain",
    "milliseconds": "milliseconds",
    "latency_us": "latency, µs",
    "in_order_us": "in order, µs",
}
CROSSINGS = 8, 40
"""Transfers of two calls, whose difference in time is that of the others."""
GPU_EXTENT = 8192
"""Rows of the products that a GPU computes while the host issues these transfers: some tens of milliseconds."""


def transfer_module(
    vdevices: list[relax.VDevice], source: int, target: int, elements: int, made: bool = False
) -> tvm.IRModule:
    """`main(x)` on vdevice `source` returns x, or a kernel's result from x, on vdevice `target`."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((elements,), "float32", vdevices[source]))
    with builder.function("main", [x]):
        with builder.dataflow():
            value = builder.emit(relax.op.negative(x)) if made else x
            result = builder.emit_output(relax.op.to_vdevice(value, vdevices[target]))
        builder.emit_func_output(result)
    mod = builder.get()
    mod.update_global_info("vdevice", vdevices)
    return mod


def crossing_module(vdevices: list[relax.VDevice], source: int, target: int, count: int, extent: int) -> tvm.IRModule:
    """`main(x)` crosses between two devices after products that keep the first one busy."""
    builder, square = relax.BlockBuilder(), relax.TensorType((extent, extent), "float32", vdevices[source])
    x = relax.Var("x", square)
    with builder.function("main", [x]):
        with builder.dataflow():
            product = builder.emit(relax.op.matmul(builder.emit(relax.op.matmul(x, x)), x))
            value: relax.Expr = builder.emit(relax.op.max(product, axis=[0]))
            for number in range(count):
                end = (target, source)[number % 2]
                value = builder.emit(relax.op.to_vdevice(builder.emit(relax.op.negative(value)), vdevices[end]))
            result = builder.emit_output(relax.op.negative(value))
        builder.emit_func_output(result)
    mod = builder.get()
    mod.update_global_info("vdevice", vdevices)
    return mod


def seconds_in_order(
    vdevices: list[relax.VDevice], source: int, target: int, rounds: int, extent: int = GPU_EXTENT
) -> float:
    """Seconds of a crossing between two devices that the host has issued before."""
    seconds = []
    for count in CROSSINGS:
        vm = rh.vm.VirtualMachine(rh.compile(crossing_module(vdevices, source, target, count, extent)))
        x = tvm.runtime.tensor(np.full((extent, extent), 1 / extent, "float32"), vm.devices[source])
        seconds.append(seconds_per_call(vm, [vm.devices[source], vm.devices[target]], x, rounds))
    return (seconds[1] - seconds[0]) / (CROSSINGS[1] - CROSSINGS[0])


def machine(*transfer: Any) -> rh.vm.VirtualMachine:
    """A machine for `transfer_module`."""
    return rh.vm.VirtualMachine(rh.compile(transfer_module(*transfer)))


def plain_input(vm: rh.vm.VirtualMachine, source: int, elements: int) -> tvm.runtime.Tensor:
    """An input on its device, in memory that is not pinned."""
    return tvm.runtime.tensor(np.ones(elements, "float32"), vm.devices[source])


def pinned_input(elements: int) -> np.ndarray:
    """An input in pinned memory."""
    x = rh.vm.pinned_array(elements)
    x[...] = 1
    return x


def seconds_per_call(vm: rh.vm.VirtualMachine, devices: list[tvm.runtime.Device], x: Any, rounds: int) -> float:
    """Median seconds of one transfer, both devices idle before and after."""

    def call() -> float:
        for device in devices:
            device.sync()
        start = time.perf_counter()
        vm["main"](x)
        for device in devices:
            device.sync()
        return time.perf_counter() - start

    return median_of(call, rounds)


def seconds_of_transfer(vm: rh.vm.VirtualMachine, x: Any, rounds: int) -> float:
    """Median seconds of the transfer alone, in plain calls."""

    def call() -> float:
        rows = vm.profile("main", x).rows
        return sum(row.microseconds for row in rows if row.symbol == "to_device") / 1e6

    return median_of(call, rounds)


def seconds_of_step(vm: rh.vm.VirtualMachine, x: Any, rounds: int) -> float:
    """Median seconds of the transfer alone, in submitted calls, one after the other."""

    def call() -> float:
        with vm.trace() as trace:
            vm.submit("main", x).result()
        (traced,) = trace.calls
        times = [ran.end - ran.begin for ran in traced.ran if ran.step >= 0 and traced.plan.steps[ran.step].is_transfer]
        return sum(times) / 1e9

    return median_of(call, rounds)


def median_of(call: Callable[[], float], rounds: int) -> float:
    """The median of the values that calls return; the first call, which allocates, does not count."""
    return statistics.median([call() for _ in range(rounds + 1)][1:])


def torch_seconds(source: relax.VDevice, target: relax.VDevice, nbytes: int, rounds: int, pinned: bool) -> float:
    """Median seconds of PyTorch's copy between two devices, at least one of them a GPU."""
    import torch

    places = [f"cuda:{v.vdevice_id}" if v.target.kind.name == "cuda" else "cpu" for v in (source, target)]
    ours, theirs = (torch.ones(nbytes, dtype=torch.uint8, device=p, pin_memory=pinned and p == "cpu") for p in places)

    def call() -> float:
        start = time.perf_counter()
        theirs.copy_(ours, non_blocking=True)
        for place in places:
            if place != "cpu":
                torch.cuda.synchronize(place)
        return time.perf_counter() - start

    return median_of(call, rounds)


def torch_figures(source: relax.VDevice, target: relax.VDevice, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of PyTorch's copies between two devices: none between two CPUs, one figure between two GPUs."""
    kinds = [vdevice.target.kind.name for vdevice in (source, target)]
    if "cuda" not in kinds:
        return {}
    memories = {"torch pinned GB/s": True, "torch pageable GB/s": False}
    if kinds == ["cuda", "cuda"]:
        del memories["torch pageable GB/s"]
    return {
        name: nbytes / torch_seconds(source, target, nbytes, rounds, pinned) / 1e9 for name, pinned in memories.items()
    }


def rows_between(vdevices: list[relax.VDevice], source: int, target: int, elements: int, rounds: int) -> list[dict]:
    """Measurements between two devices, by the kind of tensor sent."""
    vm = machine(vdevices, source, target, elements)
    devices = [vm.devices[source], vm.devices[target]]
    seconds_of = {"an argument": seconds_per_call(vm, devices, plain_input(vm, source, elements), rounds)}
    if vdevices[target].target.kind.name == "cuda" and vdevices[source].target.kind.name != "cuda":
        seconds_of["a pinned argument"] = seconds_per_call(vm, devices, pinned_input(elements), rounds)
        making = machine(vdevices, source, target, elements, True)
        x = plain_input(making, source, elements)
        seconds_of["what a kernel made"] = seconds_of_transfer(making, x, rounds)
        seconds_of["what a kernel made, submitted"] = seconds_of_step(making, x, rounds)
    names = [device_name(v, vdevices) for v in vdevices]
    rows = [
        {
            "from": names[source],
            "to": names[target],
            "sent": sent,
            "GB/s": elements * 4 / seconds / 1e9,
            "milliseconds": seconds * 1e3,
        }
        for sent, seconds in seconds_of.items()
    ]
    small = machine(vdevices, source, target, 16)
    rows[0]["latency_us"] = seconds_per_call(small, devices, plain_input(small, source, 16), 101) * 1e6
    if all(vdevices[end].target.kind.name == "cuda" for end in (source, target)):
        rows[0]["in_order_us"] = seconds_in_order(vdevices, source, target, rounds) * 1e6
    return rows


@click.command()
@click.option(
    "--vdevice", "specs", multiple=True, default=("llvm", "llvm"), show_default=True, help="A device, repeated."
)
@click.option("--megabytes", default=256, show_default=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--torch", "with_torch", is_flag=True, help="Also time PyTorch's copies.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(megabytes=1, rounds=1)
def main(specs: tuple[str, ...], megabytes: int, rounds: int, with_torch: bool, as_json: bool) -> None:
    vdevices = parse_vdevices(specs)
    elements = megabytes * 1_000_000 // 4
    rows: list[dict] = []
    pairs = list(itertools.permutations(range(len(vdevices)), 2))
    for source, target in track(pairs, "transfers", console=Console(stderr=True), transient=True):
        device_rows = rows_between(vdevices, source, target, elements, rounds)
        if with_torch:
            device_rows[0].update(torch_figures(vdevices[source], vdevices[target], elements * 4, rounds))
        rows += device_rows
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(title=f"to_vdevice, {megabytes} MB, median of {rounds}; latency: 64 bytes")
    figures = {key: title for key, title in COLUMNS.items() if any(key in row for row in rows)}
    for column in ("from", "to", "sent", *figures.values()):
        table.add_column(column, justify="left" if column in ("from", "to", "sent") else "right")
    for row in rows:
        numbers = (f"{row[key]:.1f}" if key in row else "" for key in figures)
        table.add_row(row["from"], row["to"], row["sent"], *numbers)
    Console().print(table)


if __name__ == "__main__":
    main()
