"""``relax-hetero devices``: the devices of this machine, and their measured figures."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..display.console import console, print_json, print_table
from ..display.text import bytes_text
from ..report.text.target_text import target_text
from .command import command, json_option

if TYPE_CHECKING:
    from tvm import relax

    from ..frontend.auto.measure_devices import Figures


@command("devices")
@click.option("--measure/--no-measure", default=True, show_default=True, help="Measure the devices, or list them only.")
@click.option("--again", is_flag=True, help="Measure again what was measured before.")
@json_option
def devices_command(measure: bool, again: bool, as_json: bool) -> None:
    """List the CPU and the GPUs of this machine: cores, instructions, memory, measured peaks and links.

    Measuring takes some seconds for each device and pair, once per machine; automatic placement uses the figures.
    """
    vdevices = _local_vdevices()
    devices = [_describe(v) for v in vdevices]
    figures = _measure(vdevices, again) if measure else None
    if as_json:
        print_json({"devices": devices, "measured": None if figures is None else _figures_json(figures, devices)})
        return
    columns = ["device", "model", "target", "cores", "instructions", "memory"]
    rows = [
        # The target of a CPU would repeat the instructions.
        [
            d["name"],
            d["model"],
            "llvm" if d["name"].startswith("llvm") else target_text(d["target"]),
            str(d["cores"]),
            d["instructions"],
            bytes_text(d["memory"]),
        ]
        for d in devices
    ]
    print_table("Devices", columns, rows, ["cores", "memory"])
    if figures is not None:
        _print_figures(figures, [d["name"] for d in devices])


def local_devices() -> list[dict[str, Any]]:
    """Describe the CPU and the GPUs of this machine as JSON data; imports TVM."""
    return [_describe(vdevice) for vdevice in _local_vdevices()]


def _local_vdevices() -> list[relax.VDevice]:
    from ..target.backend import backends
    from ..target.vdevice import parse_vdevices

    return parse_vdevices(["llvm", *(f"{kind.kind}:{index}" for kind in backends() for index in range(kind.count()))])


def _describe(vdevice: relax.VDevice) -> dict[str, Any]:
    import tvm

    from ..system import installed_memory, processor_name
    from ..target.backend import backend_of
    from ..target.cpu_cores import cpus_of_nodes
    from ..target.cpu_target import cpu_target_of
    from ..target.gpu_target import gpu_target_of
    from ..target.instruction_names import instruction_names
    from ..target.vdevice import is_cpu

    names = {"name": f"{vdevice.target.kind.name}:{int(vdevice.vdevice_id)}", "target": str(vdevice.target)}
    if is_cpu(vdevice):
        cpu = cpu_target_of(vdevice.target)
        instructions = ", ".join(instruction_names(cpu.features))
        properties = {
            "model": processor_name(),
            "cores": cpu.threads,
            "numa_nodes": len(cpus_of_nodes()),
            "instructions": instructions,
            "memory": installed_memory() or 0,
        }
    else:
        backend_of(vdevice.target).load()
        device = tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id))
        gpu = gpu_target_of(vdevice.target)
        properties = {
            "model": backend_of(vdevice.target).device_name(int(vdevice.vdevice_id)),
            "cores": int(device.multi_processor_count or 0),
            "instructions": gpu.tensor or "plain",
            "memory": int(device.total_global_memory or 0),
        }
    return {**names, **properties}


def _measure(vdevices: list[relax.VDevice], again: bool) -> Figures | None:
    from ..frontend.auto.measure_devices import figures_of

    with console(stderr=True).status("Measuring"):
        return figures_of(vdevices, "all" if again else "missing")


def _figures_json(figures: Figures, described: list[dict[str, Any]]) -> dict[str, Any]:
    names = [device["name"] for device in described]
    links = [{"from": names[a], "to": names[b], **asdict(link)} for (a, b), link in figures.links.items()]
    devices = dict(zip(names, map(asdict, figures.devices), strict=True))
    return {"devices": devices, "links": links, "other_work": figures.other_work}


def _print_figures(figures: Figures, names: list[str]) -> None:
    types = list(dict.fromkeys(dtype for device in figures.devices for dtype in device.products))
    rows: Iterable[list[str]] = (
        [
            name,
            *(f"{device.products[dtype] / 1e12:.3g}" if dtype in device.products else "-" for dtype in types),
            f"{device.bandwidth / 1e9:.0f}",
            f"{device.launch * 1e6:.2f}",
            f"{device.call * 1e6:.0f}",
        ]
        for name, device in zip(names, figures.devices, strict=True)
    )
    columns = [
        "device",
        *(f"{dtype}, Tflop/s" for dtype in types),
        "memory, GB/s",
        "small kernel, µs",
        "small call, µs",
    ]
    print_table("Measured", columns, rows, columns[1:])
    if figures.links:
        columns = ["from", "to", "GB/s", "small copy, µs", "step to step, µs"]
        rows = (
            [
                names[a],
                names[b],
                f"{link.bandwidth / 1e9:.1f}",
                f"{link.latency * 1e6:.0f}",
                f"{link.crossing * 1e6:.0f}",
            ]
            for (a, b), link in figures.links.items()
        )
        print_table("Links", columns, rows, columns[2:])
