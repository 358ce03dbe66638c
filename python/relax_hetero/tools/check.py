"""``relax-hetero check``: checks node by node that an ONNX file can be imported, without compiling it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..display.console import console, print_json, show
from .command import INPUT_FILE, command, json_option
from .models import input_names
from .placement_options import PlacementOptions, placement_options


@command("check")
@click.argument("model", type=INPUT_FILE)
@placement_options
@json_option
def check_command(model: Path, placing: PlacementOptions, as_json: bool) -> None:
    """Show which nodes of MODEL (an ONNX file) are supported, on which devices, and what is missing.

    Exits with 1 if a node is refused. Nothing is compiled.

    \b
    relax-hetero check model.onnx
    relax-hetero check model.onnx --vdevice llvm --vdevice cuda:0 --shape input_ids=1x128
    """
    import relax_hetero as rh

    if placing.rules or placing.auto or placing.optional:
        raise click.UsageError(
            "check tries every node on every --vdevice: --place, --place-auto and --optional do not go with it"
        )
    options = placing.import_options(input_names(model))
    with console(stderr=True).status(f"Importing {model.name}"):
        report = rh.onnx_report(str(model), options.get("vdevices"), options.get("shapes"), options.get("limits"))
    if as_json:
        print_json(report.to_json())
    else:
        show(report.tables())
    if not report:
        sys.exit(1)
