"""``relax-hetero compile``: compile an ONNX file to a library."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..display.console import console, print_json
from ..display.text import bytes_text
from ..errors import BuildError
from ..report.text.target_text import target_text
from .command import (
    INPUT_FILE,
    OUTPUT_FILE,
    accuracy_option,
    cache_option,
    checks_option,
    command,
    json_option,
    key_option,
    refuse_overwriting,
)
from .models import compile_onnx
from .placement_options import PlacementOptions, placement_options


@command("compile")
@click.argument("model", type=INPUT_FILE)
@click.option(
    "-o", "--output", required=True, metavar="OUT.so", type=OUTPUT_FILE, help="Library to write, with code and weights."
)
@placement_options
@key_option("Sign the library with the key in this file, of at least 16 bytes.")
@cache_option
@checks_option
@accuracy_option
@json_option
def compile_command(
    model: Path,
    output: Path,
    placing: PlacementOptions,
    key: bytes | None,
    cache: bool,
    checks: str,
    accuracy: str,
    as_json: bool,
) -> None:
    """Compile MODEL (an ONNX file) into one library for all its devices.

    \b
    relax-hetero compile model.onnx -o model.so
    relax-hetero compile model.onnx -o model.so --vdevice llvm --vdevice cuda:0 --place '/encoder/*=cuda:0'
    relax-hetero compile model.onnx -o model.so --vdevice '{"kind":"llvm","mcpu":"x86-64-v2"}'
    """
    if not output.parent.is_dir():
        raise BuildError(f"cannot write {output}: there is no folder {output.parent}")
    refuse_overwriting(output, model)
    compiled = compile_onnx(model, placing, cache, checks, accuracy)
    start = time.perf_counter()
    compiled.executable.export_library(str(output), key=key)
    compiled.seconds["export"] = time.perf_counter() - start
    summary = _summarize(compiled.executable, output, compiled.seconds)
    if as_json:
        print_json(summary)
        return
    stdout = console()
    stdout.print(f"Wrote {output} ({bytes_text(summary['bytes'])}): {summary['signature']}", markup=False)
    for device in summary["devices"]:
        note = ", optional" if device["optional"] else ""
        stdout.print(f"  {device['name']}  {target_text(device['target'])}{note}", markup=False)
    stdout.print(
        "  " + ", ".join(f"{step} {seconds:.1f} s" for step, seconds in compiled.seconds.items()), markup=False
    )
    stdout.print(f"  compile cache: {compiled.executable.metadata.cache}", markup=False)


def _summarize(executable: Any, output: Path, seconds: dict[str, float]) -> dict[str, Any]:
    from ..artifact.metadata import device_names

    return {
        "output": str(output),
        "bytes": output.stat().st_size,
        "devices": [
            {
                "name": name,
                "target": device.target,
                "vdevice_id": device.vdevice_id,
                "default": device.default,
                "optional": index in executable.metadata.optional,
            }
            for index, (name, device) in enumerate(
                zip(device_names(executable.devices), executable.devices, strict=True)
            )
        ],
        "signature": str(executable.signature()),
        "seconds": {step: round(value, 4) for step, value in seconds.items()},
        "cache": asdict(executable.metadata.cache),
    }
