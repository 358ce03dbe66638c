"""``relax-hetero explain``: the explanation of an ONNX file that is not compiled, or of a compiled library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..display.console import console, print_json, show
from ..report.text.call_tables import Schedules
from ..report.text.command_tables import CommandBuffers
from ..report.text.explanation import ALL, SECTIONS, Explanation, explanation_of
from .command import accuracy_option, command, json_option, refuse_overwriting, verify_option
from .models import gguf_options, is_gguf, is_onnx, load_library, obtain, placed_module, refuse_compiled
from .placing import Placing, placing_options

if TYPE_CHECKING:
    from tvm.relax import VDevice

    from ..llm.token_cost import TokenCost
    from ..vm import Executable

# Calls of a report's timeline.
_TRACED = 4


@command("explain")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("sections", nargs=-1, type=click.Choice([*SECTIONS, ALL]))
@click.option(
    "--profile",
    is_flag=True,
    help="Measure a decode step of a language model, part by part; with --html, measure each kernel of any model.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Compile MODEL, and write a report for a browser to this file.",
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Show in the report of --html what changed since this earlier one.",
)
@click.option(
    "--summary",
    is_flag=True,
    help="Show an overview alone: devices, ops by device and reason, and a line for each section.",
)
@placing_options
@verify_option
@accuracy_option
@json_option
def explain_command(
    model: Path,
    sections: tuple[str, ...],
    summary: bool,
    profile: bool,
    html: Path | None,
    compare: Path | None,
    placing: Placing,
    key: bytes | None,
    accuracy: str,
    as_json: bool,
) -> None:
    """Show where the ops of MODEL (an ONNX or GGUF file, or a compiled library) are placed, and why.

    SECTIONS choose among ops, transfers, encodings, kernels, commands, steps, memory and token; without them all are
    shown. A folder of a language model that was saved is taken for the library in it.

    An ONNX or GGUF file is imported, placed, given layouts and cut into kernels and command buffers, but not compiled;
    whether it was before, and can be found in the compile cache, stands at the end.

    \b
    relax-hetero explain model.onnx --vdevice llvm --vdevice cuda:0 --place '/encoder/*=cuda:0'
    relax-hetero explain model.so ops kernels
    relax-hetero explain model.so --summary
    relax-hetero explain model.gguf token --profile
    relax-hetero explain model.onnx --html report.html --profile
    """
    if html is not None:
        executable = _report(
            model, html, compare, profile, placing, key, accuracy, (*sections, *["--summary"] * summary)
        )
        if as_json:
            print_json(explanation_of(executable, model.name).to_json())
        return
    if compare is not None:
        raise click.UsageError("--compare goes with --html FILE, whose report shows what changed")
    if profile:
        explanation = _profiled(model, placing)
    elif model.is_dir():
        explanation = explanation_of(load_library(model / "model.so", placing, key).executable, model.name)
    elif is_onnx(model):
        explanation = _of_onnx(model, placing, accuracy)
    else:
        refuse_compiled(model, accuracy=accuracy)
        explanation = explanation_of(load_library(model, placing, key).executable, model.name)
    if as_json:
        print_json(explanation.to_json())
    else:
        show(explanation.tables(*(() if summary else sections or (ALL,))))


def _report(
    model: Path,
    html: Path,
    compare: Path | None,
    profile: bool,
    placing: Placing,
    key: bytes | None,
    accuracy: str,
    sections: Sequence[str],
) -> Executable:
    """Write the report of a model, compiled here unless it is already."""
    from ..report.written_report import read_report, report_path, write_report

    if sections:
        raise click.UsageError(f"{sections[0]} does not go with --html: a report has every section")
    refuse_overwriting(report_path(html), model)
    if compare is not None:
        read_report(compare)
    measured: dict[str, Any] = {}
    if not (is_gguf(model) or model.is_dir()):
        executable = obtain(model, placing, True, key, accuracy=accuracy).executable
        measured = _measured(executable, placing) if profile else {}
    elif model.is_dir() and not profile:
        executable = load_library(model / "model.so", placing, key).executable
    else:
        if key is not None and model.is_dir():
            load_library(model / "model.so", placing, key)  # refuses what was not signed with it
        executable, measured = _language_model(model, placing, profile)
    with console(stderr=True).status("Writing"):  # figures of devices may be measured
        write_report(executable, html, **measured, compare=compare, title=model.stem)
    console(stderr=True).print(f"Wrote {html}: open it in a browser.", markup=False)
    return executable


def _language_model(path: Path, placing: Placing, profile: bool) -> tuple[Executable, dict[str, Any]]:
    """Compiled or loaded, and what was measured of it."""
    import relax_hetero.llm as llm

    options = {} if path.is_dir() and not placing.given else gguf_options(path, placing)
    with console(stderr=True).status(f"Compiling {path.name}") as status:
        model, _ = llm.load(path, **options)
        if not profile:
            return model.executable, {}
        status.update(f"Measuring {path.name}")
        return model.executable, {"profile": model.profile(), "token": model.token_cost(profile=True)}


def _measured(executable: Executable, placing: Placing) -> dict[str, Any]:
    """The profile of one call on random inputs, and the trace of a few that overlap."""
    from ..vm.machine import VirtualMachine
    from .arrays import random_arrays

    inputs = list(random_arrays(executable.signature(), dict(placing.shapes), 0, {}).values())
    machine = VirtualMachine(executable)
    with console(stderr=True).status("Measuring"):
        machine.submit("main", *inputs).result()  # threads begin, memory comes
        profile = machine.profile("main", *inputs)
        with machine.trace(limit=_TRACED) as trace:
            for _ in range(_TRACED):
                machine.submit("main", *inputs)
    return {"profile": profile, "trace": trace}


def _profiled(path: Path, placing: Placing) -> Explanation:
    """Explanation of a language model, compiled and measured."""
    import relax_hetero.llm as llm

    if not (path.is_dir() or is_gguf(path)):
        raise click.UsageError(f"--profile goes with a language model: a GGUF file or a folder; found {path.name}")
    options = {} if path.is_dir() and not placing.given else gguf_options(path, placing)
    with console(stderr=True).status(f"Measuring {path.name}"):
        model, _ = llm.load(path, **options)
        return replace(explanation_of(model.executable, path.name), token=model.token_cost(profile=True))


def _token_cost_of(path: Path, vdevices: Sequence[VDevice], compiled: Explanation) -> TokenCost | None:
    """Expected cost of a token of a GGUF file's model."""
    from ..frontend.auto.cost_model import CostModel
    from ..frontend.from_gguf import hyperparameters_of
    from ..frontend.gguf.file import read_gguf
    from ..llm.token_cost import TRANSFERS, ModelInfo, PartCost, token_cost, with_estimate

    if not is_gguf(path) or compiled.commands is None:
        return None
    model = hyperparameters_of(read_gguf(path))
    buffers, names = compiled.commands, list(compiled.targets)
    share = model.experts_used / model.experts if model.experts else 1.0
    facts = ModelInfo(model.windows, share, model.vocabulary)
    cost = token_cost(buffers.regions, buffers.kernels, names, compiled.entries, buffers.single_calls, info=facts)
    costs = CostModel.for_vdevices(vdevices)

    def seconds(part: PartCost) -> float:
        index = names.index(part.device)
        if part.part != TRANSFERS:
            device = costs.devices[index]
            return part.calls * device.launch + (part.weights + part.cache) / device.bandwidth
        links = [link for (_, target), link in costs.links.items() if target == index]
        return max(part.calls * link.latency + part.transferred / link.bandwidth for link in links)

    return None if cost is None else with_estimate(cost, seconds)


def _of_onnx(path: Path, placing: Placing, accuracy: str) -> Explanation:
    from ..driver.commands.command_metadata import regions_as_linked
    from ..driver.compile import memory_plan_of, optional_indices
    from ..driver.compile_cache import find_cached
    from ..target.vdevice import device_name, vdevices_of
    from ..transform.encode.accuracies import with_accuracy
    from ..transform.ir.remarks import remarks_of
    from ..transform.pipeline import pipeline_steps
    from ..transform.record.region_attrs import kernels_of

    module = with_accuracy(placed_module(path, placing), accuracy, "explain")
    cache = find_cached(module)
    vdevices = vdevices_of(module)
    targets = {device_name(v, vdevices): str(v.target) for v in vdevices}
    optional = [list(targets)[index] for index in optional_indices(module, placing.optional)]
    with console(stderr=True).status(f"Lowering {path.name}"):
        for step in pipeline_steps():
            module = step.run(module)
    found = remarks_of(module).to_data()
    regions = regions_as_linked(module)
    commands = CommandBuffers(list(targets), regions, kernels_of(module), remarks_of(module).single_calls or ())
    explanation = Explanation(
        path.name,
        targets,
        found["placement"] or [],
        found["encodings"],
        found["fusions"],
        commands,
        found["placement_estimate"],
        memory_plan_of(module),
        Schedules(list(targets), remarks_of(module).schedules or ()),
        cache,
        optional,
    )
    return replace(explanation, token=_token_cost_of(path, vdevices, explanation))
