"""``relax-hetero devices``: the devices of this machine, and their measured figures."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..display.console import console, print_json, print_table
from ..display.text import bytes_text
from ..errors import HeteroError, printable
from ..report.text.target_text import target_text
from .command import command, json_option

if TYPE_CHECKING:
    from tvm import relax

    from ..frontend.auto.measure_devices import Figures


@command("devices")
@click.option("--measure/--no-measure", default=True, help="Measure the devices, or list them only.")
@click.option("--again", is_flag=True, help="Measure again what was measured before.")
@json_option
def devices_command(measure: bool, again: bool, as_json: bool) -> None:
    """List the CPU and the GPUs of this machine: cores, instructions, memory, measured peaks and links.

    Measuring takes some seconds for each device and pair, once per machine; automatic placement uses the figures.
    """
    vdevices, devices = _describe_devices()
    figures = _measure(list(vdevices.values()), again) if measure else None
    failures = {device["name"]: device["error"] for device in devices if "error" in device}
    if figures is not None:
        failures |= {" and ".join(names): error for names, error in _named(figures.failures, vdevices)}
    if as_json:
        print_json({"devices": devices, "measured": None if figures is None else _figures_json(figures, vdevices)})
    else:
        _print_devices(devices)
        if figures is not None:
            _print_figures(figures, list(vdevices))
    for name, error in failures.items():
        click.echo(f"error: {name}: {printable(error)}", err=True)
    if failures:
        sys.exit(1)


def _print_devices(devices: list[dict[str, Any]]) -> None:
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
    gpus = [d for d in devices if "peers" in d]
    if len(gpus) > 1:
        rows = [[d["name"], ", ".join(d["peers"]) or "none: NCCL sums over a mesh of these GPUs"] for d in gpus]
        print_table("Peer access", ["device", "reaches the memory of"], rows)


def local_devices() -> list[dict[str, Any]]:
    """Describe the CPU and the GPUs of this machine as JSON data, with the `error` of those that fail; imports TVM."""
    return _describe_devices()[1]


def _describe_devices() -> tuple[dict[str, relax.VDevice], list[dict[str, Any]]]:
    """Devices that work, by name, and descriptions of all."""
    from ..target.backend import backends
    from ..target.vdevice import parse_vdevices

    vdevices, described = {}, []
    for name in ("llvm:0", *(f"{kind.kind}:{index}" for kind in backends() for index in range(kind.count()))):
        try:
            (vdevice,) = parse_vdevices([name])
            described.append({"name": name, "target": str(vdevice.target), **_describe(vdevice)})
            vdevices[name] = vdevice
        except (HeteroError, RuntimeError) as error:  # a driver's error is a RuntimeError
            absent = {"target": "", "model": "", "cores": 0, "instructions": "", "memory": 0}
            described.append({"name": name, **absent, "error": str(error)})
    indices = {name: (str(vdevice.target.kind.name), int(vdevice.vdevice_id)) for name, vdevice in vdevices.items()}
    kinds = {kind.kind: kind for kind in backends()}
    for device in described:
        kind, index = indices.get(device["name"], ("", 0))
        others = {name: other for name, (of, other) in indices.items() if of == kind and other != index}
        access = {name: kinds[kind].accesses_peer(index, other) for name, other in others.items()}
        if None not in access.values() and access:
            device["peers"] = [name for name, can_access in access.items() if can_access]
    return vdevices, described


def _describe(vdevice: relax.VDevice) -> dict[str, Any]:
    import tvm

    from ..system import installed_memory, processor_name
    from ..target.backend import backend_of
    from ..target.cpu_cores import cpus_of_nodes
    from ..target.cpu_target import cpu_target_of
    from ..target.gpu_target import gpu_target_of
    from ..target.instruction_names import instruction_names
    from ..target.vdevice import is_cpu

    if is_cpu(vdevice):
        cpu = cpu_target_of(vdevice.target)
        instructions = ", ".join(instruction_names(cpu.features))
        return {
            "model": processor_name(),
            "cores": cpu.threads,
            "numa_nodes": len(cpus_of_nodes()),
            "instructions": instructions,
            "memory": installed_memory() or 0,
        }
    backend_of(vdevice.target).load()
    device = tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id))
    return {
        "model": backend_of(vdevice.target).device_name(int(vdevice.vdevice_id)),
        "cores": int(device.multi_processor_count or 0),
        "instructions": gpu_target_of(vdevice.target).tensor or "plain",
        "memory": int(device.total_global_memory or 0),
    }


def _measure(vdevices: list[relax.VDevice], again: bool) -> Figures:
    from ..frontend.auto.measure_devices import known_figures_of

    with console(stderr=True).status("Measuring"):
        return known_figures_of(vdevices, "all" if again else "missing")


def _named(failures: dict[tuple[int, ...], str], names: Iterable[str]) -> list[tuple[list[str], str]]:
    """Errors with the names of their devices."""
    listed = list(names)
    return [([listed[index] for index in indices], error) for indices, error in failures.items()]


def _figures_json(figures: Figures, vdevices: Iterable[str]) -> dict[str, Any]:
    names = list(vdevices)
    links = [{"from": names[a], "to": names[b], **asdict(link)} for (a, b), link in figures.links.items()]
    failures = [{"devices": devices, "error": error} for devices, error in _named(figures.failures, names)]
    devices = {names[index]: asdict(device) for index, device in figures.devices.items()}
    return {"devices": devices, "links": links, "other_work": figures.other_work, "failures": failures}


def _print_figures(figures: Figures, names: list[str]) -> None:
    types = list(dict.fromkeys(dtype for device in figures.devices.values() for dtype in device.products))
    rows: Iterable[list[str]] = (
        [
            names[index],
            *(f"{device.products[dtype] / 1e12:.3g}" if dtype in device.products else "-" for dtype in types),
            f"{device.bandwidth / 1e9:.0f}",
            f"{device.launch * 1e6:.2f}",
            f"{device.call * 1e6:.0f}",
        ]
        for index, device in figures.devices.items()
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
