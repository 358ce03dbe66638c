"""``relax-hetero explain``: the explanation of an ONNX file that is not compiled, or of a compiled library."""

from __future__ import annotations

from pathlib import Path

import click

from .call_tables import Schedules
from .command import accuracy_option, command, json_option, verify_option
from .command_tables import CommandBuffers
from .console import console, print_json, show
from .explanation import ALL, SECTIONS, Explanation, explanation_of
from .models import is_onnx, load_library, placed_module, refuse_compiled
from .placing import Placing, placing_options


@command("explain")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("sections", nargs=-1, type=click.Choice([*SECTIONS, ALL]))
@click.option("--summary", is_flag=True, help="An overview: devices, ops by device and reason, a line a section.")
@placing_options
@verify_option
@accuracy_option
@json_option
def explain_command(
    model: Path,
    sections: tuple[str, ...],
    summary: bool,
    placing: Placing,
    key: bytes | None,
    accuracy: str,
    as_json: bool,
) -> None:
    """Show where the ops of MODEL (an ONNX file or a compiled library) are placed, and why.

    SECTIONS choose among ops, transfers, encodings, kernels, commands, steps and memory; without them all are shown.

    An ONNX file is imported, placed, given layouts and cut into kernels and command buffers, but not compiled; whether
    it was before, and can be found in the compile cache, stands at the end.

    \b
    relax-hetero explain model.onnx --vdevice llvm --vdevice cuda:0 --place '/encoder/*=cuda:0'
    relax-hetero explain model.so ops kernels
    relax-hetero explain model.so --summary
    """
    if is_onnx(model):
        explanation = _of_onnx(model, placing, accuracy)
    else:
        refuse_compiled(model, accuracy=accuracy)
        explanation = explanation_of(load_library(model, placing, key).executable, model.name)
    if as_json:
        print_json(explanation.to_json())
    else:
        show(explanation.tables(*(() if summary else sections or (ALL,))))


def _of_onnx(path: Path, placing: Placing, accuracy: str) -> Explanation:
    from ..driver.commands.command_metadata import regions_as_linked
    from ..driver.compile import memory_plan_of
    from ..driver.compile_cache import look_up
    from ..driver.optional_devices import optional_indices
    from ..driver.pipeline import pipeline_steps
    from ..target.vdevice import device_name, vdevices_of
    from ..transform.encode.accuracies import with_accuracy
    from ..transform.ir.findings import findings_of
    from ..transform.record.region_attrs import kernels_of

    module = with_accuracy(placed_module(path, placing), accuracy, "explain")
    cache = look_up(module)
    vdevices = vdevices_of(module)
    targets = {device_name(v, vdevices): str(v.target) for v in vdevices}
    optional = [list(targets)[index] for index in optional_indices(module, placing.optional)]
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
        optional,
    )
