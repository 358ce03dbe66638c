"""``relax-hetero explain``: what runs where, how it is stored, what crosses between devices, and why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import HeteroError
from .command import command, json_option
from .console import console, print_json
from .models import is_onnx, load_library, placed_onnx
from .placing import Placing, placing_options

if TYPE_CHECKING:
    from .explanation import Explanation


@command("explain")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--summary", is_flag=True, help="Only the totals and the transfers, not every op.")
@placing_options
@json_option
def explain_command(model: Path, summary: bool, placing: Placing, as_json: bool) -> None:
    """Show where every op of MODEL (an ONNX file or a compiled library) is placed, stored and fused, and why.

    Also shows which kernels run as one command buffer, what that takes and what it does, and what memory a call takes.
    An ONNX file is imported, placed, given layouts and cut into kernels and command buffers, but not compiled; whether
    it was before, and can be found in the compile cache, stands at the end.

    \b
    relax-hetero explain model.onnx --vdevice llvm --vdevice cuda:0 --place '/encoder/*=cuda:0'
    relax-hetero explain model.so --summary
    """
    explanation = _of_onnx(model, placing) if is_onnx(model) else _of_library(model, placing)
    if as_json:
        print_json(explanation.to_json())
    else:
        explanation.print(every_op=not summary)


def _of_onnx(path: Path, placing: Placing) -> Explanation:
    from ..driver.commands.command_metadata import regions_as_linked
    from ..driver.compile_cache import look_up
    from ..driver.memory_report import memory_plan_of
    from ..driver.pipeline import pipeline_steps
    from ..target.vdevice import device_name, vdevices_of
    from ..transform.ir.findings import findings_of
    from ..transform.record.region_attrs import kernels_of
    from .command_tables import CommandBuffers
    from .explanation import Explanation
    from .schedule_tables import Schedules

    module = placed_onnx(path, placing)
    cache = look_up(module)
    vdevices = vdevices_of(module)
    targets = {device_name(v, vdevices): str(v.target) for v in vdevices}
    with console(stderr=True).status(f"Lowering {path.name}"):
        for step in pipeline_steps():
            module = step.run(module)
    found = findings_of(module).to_data()
    regions = regions_as_linked(module)
    commands = CommandBuffers(list(targets), regions, kernels_of(module), findings_of(module).single_calls or ())
    return Explanation(
        path.name,
        targets,
        found["placement"] or [],
        found["encodings"],
        found["fusions"],
        commands,
        found["placement_estimate"],
        memory_plan_of(module),
        Schedules(list(targets), findings_of(module).schedules or ()),
        cache,
    )


def _of_library(path: Path, placing: Placing) -> Explanation:
    from ..artifact.metadata import device_names
    from .command_tables import CommandBuffers
    from .explanation import Explanation
    from .schedule_tables import Schedules

    executable = load_library(path, placing).executable
    about = executable.metadata
    if about.placement is None:
        raise HeteroError(f"{path} holds no placement report; it was not made by this library's compiler")
    names = device_names(about.devices)
    targets = {name: device.target for name, device in zip(names, about.devices, strict=True)}
    commands = CommandBuffers(names, about.regions, about.kernels, about.single_calls)
    return Explanation(
        path.name,
        targets,
        about.placement,
        about.encodings,
        about.fusions,
        commands,
        about.placement_estimate,
        executable.memory_plan,
        Schedules(names, about.schedules),
        about.cache,
    )
