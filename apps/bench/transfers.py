"""How fast `to_vdevice` moves a tensor between every two devices.

python apps/bench/transfers.py --vdevice llvm --vdevice cuda:0 --vdevice cuda:1 --megabytes 256 --torch

The host's memory is not pinned, as numpy's is not. With ``--torch``, PyTorch's copies of as many bytes between the same
devices stand beside, those of the host from and to pinned memory: what the link can do. Between two CPUs nothing moves,
but the result is a copy: results never share memory with arguments.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time

import click
import numpy as np
import tvm
from rich.console import Console
from rich.progress import track
from rich.table import Table
from tvm import relax

import relax_hetero as rh
from relax_hetero.vdevice import device_name, parse_vdevices


def transfer_module(vdevices: list[relax.VDevice], source: int, target: int, elements: int) -> tvm.IRModule:
    """`main(x)` on vdevice `source` returns x on vdevice `target`."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((elements,), "float32", vdevices[source]))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.to_vdevice(x, vdevices[target])))
    mod = builder.get()
    mod.update_global_info("vdevice", vdevices)
    return mod


def seconds_per_call(vm: rh.vm.VirtualMachine, source: int, target: int, elements: int, rounds: int) -> float:
    """Median seconds of one transfer, both devices idle before and after; the input is on its device already."""
    devices = vm.devices[source], vm.devices[target]
    x = tvm.runtime.tensor(np.ones(elements, "float32"), devices[0])
    times = []
    for _ in range(rounds + 1):
        for device in devices:
            device.sync()
        start = time.perf_counter()
        vm["main"](x)
        devices[1].sync()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first call allocates


def torch_seconds(source: relax.VDevice, target: relax.VDevice, nbytes: int, rounds: int) -> float | None:
    """Median seconds of PyTorch's copy between two devices, pinned where it is the host's; None between two CPUs."""
    import torch

    kinds = [device.target.kind.name for device in (source, target)]
    if "cuda" not in kinds:
        return None
    places = [
        f"cuda:{v.vdevice_id}" if kind == "cuda" else "cpu" for kind, v in zip(kinds, (source, target), strict=True)
    ]
    ours, theirs = (torch.ones(nbytes, dtype=torch.uint8, device=p, pin_memory=p == "cpu") for p in places)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        theirs.copy_(ours, non_blocking=True)
        for place in places:
            if place != "cpu":
                torch.cuda.synchronize(place)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@click.command()
@click.option(
    "--vdevice", "specs", multiple=True, default=("llvm", "llvm"), show_default=True, help="A device, repeated."
)
@click.option("--megabytes", default=256, show_default=True)
@click.option("--rounds", default=11, show_default=True)
@click.option("--torch", "with_torch", is_flag=True, help="PyTorch's copies beside, pinned where the host's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(specs: tuple[str, ...], megabytes: int, rounds: int, with_torch: bool, as_json: bool) -> None:
    vdevices = parse_vdevices(specs)
    elements = megabytes * 1_000_000 // 4
    names = [device_name(v, vdevices) for v in vdevices]
    rows = []
    pairs = list(itertools.permutations(range(len(vdevices)), 2))
    for source, target in track(pairs, "transfers", console=Console(stderr=True), transient=True):
        vm = rh.vm.VirtualMachine(rh.compile(transfer_module(vdevices, source, target, elements)))
        seconds = seconds_per_call(vm, source, target, elements, rounds)
        latency = seconds_per_call(
            rh.vm.VirtualMachine(rh.compile(transfer_module(vdevices, source, target, 16))), source, target, 16, 101
        )
        row = {
            "from": names[source],
            "to": names[target],
            "GB/s": elements * 4 / seconds / 1e9,
            "milliseconds": seconds * 1e3,
            "latency_us": latency * 1e6,
        }
        theirs = torch_seconds(vdevices[source], vdevices[target], elements * 4, rounds) if with_torch else None
        if theirs is not None:
            row["torch GB/s"] = elements * 4 / theirs / 1e9
        rows.append(row)
    if as_json:
        click.echo(json.dumps(rows))
        return
    table = Table(title=f"to_vdevice, {megabytes} MB, median of {rounds}; latency: 64 bytes")
    figures = {"GB/s": "GB/s", "torch GB/s": "torch", "milliseconds": "milliseconds", "latency_us": "latency, µs"}
    figures = {key: title for key, title in figures.items() if any(key in row for row in rows)}
    for column in ("from", "to", *figures.values()):
        table.add_column(column, justify="left" if column in ("from", "to") else "right")
    for row in rows:
        table.add_row(row["from"], row["to"], *(f"{row[key]:.1f}" if key in row else "" for key in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
