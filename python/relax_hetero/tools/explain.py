"""``relax-hetero explain``: explain an ONNX or GGUF file without compiling it, or a compiled library."""

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
from ..report.text.plan_tables import plan_tables
from .command import INPUT, INPUT_FILE, OUTPUT, accuracy_option, command, json_option, refuse_overwriting, verify_option
from .models import gguf_options, has_weights, is_onnx, is_saved, load_library, obtain, placed_module, refuse_compiled
from .placement_options import PlacementOptions, placement_options

if TYPE_CHECKING:
    from tvm.relax import VDevice

    from ..frontend.gguf.model_plan import ModelPlan
    from ..llm.token_cost import TokenCost
    from ..vm import Executable

_TRACED_CALLS = 4  # number of calls in a report's timeline


@command("explain")
@click.argument("model", type=INPUT)
@click.argument("sections", nargs=-1, type=click.Choice([*SECTIONS, ALL]), metavar="[SECTIONS]...")
@click.option(
    "--profile",
    is_flag=True,
    help="Measure a decode step of a language model, part by part; with --html, measure each kernel of any model.",
)
@click.option(
    "--html",
    type=OUTPUT,
    metavar="FILE",
    help="Compile MODEL, and write a report for a browser to this file; without --profile, that of a GGUF file shows "
    "its plan, without compiling.",
)
@click.option(
    "--compare", type=OUTPUT, metavar="FILE", help="Show in the report of --html what changed since this earlier one."
)
@click.option(
    "--summary",
    is_flag=True,
    help="Show only an overview: devices, ops by device and reason, and a line for each section.",
)
@click.option(
    "--context",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Plan a GGUF file with a cache for so many tokens of a sequence; the default is that of chat.",
)
@click.option(
    "--slots", type=click.IntRange(min=1), help="Plan a GGUF file with a cache for so many sequences; the default is 8."
)
@click.option(
    "--expert-counts",
    type=INPUT_FILE,
    metavar="FILE",
    help="Plan a GGUF file by cost with the most frequent experts of this file, which serve --count-experts wrote, on "
    "the fastest device.",
)
@placement_options
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
    context: int | None,
    slots: int | None,
    expert_counts: Path | None,
    placing: PlacementOptions,
    key: bytes | None,
    accuracy: str,
    as_json: bool,
) -> None:
    """Show where the ops of MODEL are placed, and why: an ONNX or GGUF file, a folder, or a compiled library.

    SECTIONS are some of ops, transfers, collectives, encodings, kernels, commands, steps, memory and token; the default
    is all. The folder of a saved language model stands for the library in it.

    An ONNX file goes through all passes, but is not compiled. The last line says whether the compile cache has it.

    A GGUF file or a folder of Hugging Face is planned in seconds: what goes where and why, bytes on each device,
    expected tokens per second, and what more memory would bring. With SECTIONS or --summary, it goes through all passes
    like an ONNX file.

    \b
    relax-hetero explain model.onnx --vdevice llvm --vdevice cuda:0 --place '/encoder/*=cuda:0'
    relax-hetero explain model.so ops kernels
    relax-hetero explain model.so --summary
    relax-hetero explain model.gguf --vdevice llvm --vdevice cuda --memory-limit cuda=24GiB
    relax-hetero explain model.gguf token --profile
    relax-hetero explain model.onnx --html report.html --profile
    """
    if has_weights(model) and not (sections or summary or profile):
        _show_plan(model, html, compare, placing, context, slots, expert_counts, as_json)
        return
    if (context, slots, expert_counts) != (None, None, None):
        raise click.UsageError(
            "--context, --slots and --expert-counts go with the plan of a GGUF file: without sections and --profile"
        )
    if html is not None:
        executable = _write_report(
            model, html, compare, profile, placing, key, accuracy, (*sections, *["--summary"] * summary)
        )
        if as_json:
            print_json(explanation_of(executable, model.name).to_json())
        return
    if compare is not None:
        raise click.UsageError("--compare goes with --html FILE, whose report shows what changed")
    if profile:
        explanation = _explain_measured(model, placing)
    elif is_saved(model):
        explanation = explanation_of(load_library(model / "model.so", placing, key).executable, model.name)
    elif is_onnx(model):
        explanation = _explain_source(model, placing, accuracy)
    else:
        refuse_compiled(model, accuracy=accuracy)
        explanation = explanation_of(load_library(model, placing, key).executable, model.name)
    if as_json:
        print_json(explanation.to_json())
    else:
        show(explanation.tables(*(() if summary else sections or (ALL,))))


def _show_plan(
    path: Path,
    html: Path | None,
    compare: Path | None,
    placing: PlacementOptions,
    context: int | None,
    slots: int | None,
    expert_counts: Path | None,
    as_json: bool,
) -> None:
    """Print the plan of a GGUF file, or write it as a page."""
    from ..report.written_report import report_path, write_plan

    if compare is not None:
        raise click.UsageError("--compare goes with the report of a compiled model: --profile, or a saved folder")
    if html is not None:
        refuse_overwriting(report_path(html), path)
    if expert_counts is not None and not placing.auto:
        raise click.UsageError("--expert-counts is for --place-auto, or --memory-limit, which implies it")
    plan = _plan(path, placing, context, slots, expert_counts)
    if html is not None:
        write_plan(plan, html)
        console(stderr=True).print(f"Wrote {html}: open it in a browser.", markup=False)
    if as_json:
        print_json(plan.to_json())
    elif html is None:
        show(plan_tables(plan))


def _plan(
    path: Path, placing: PlacementOptions, context: int | None, slots: int | None, expert_counts: Path | None
) -> ModelPlan:
    """Plan a GGUF file as `llm.load` would place it."""
    from ..frontend import CostModel
    from ..frontend.auto.auto_placement import memory_limits
    from ..frontend.from_gguf import from_gguf
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.gguf.model_plan import patterns_without_matrix, plan_model
    from ..frontend.gguf.place_experts import read_expert_counts
    from ..frontend.gguf.place_layers import LayerProblem
    from ..frontend.language_model_files import read_language_model
    from ..llm.model_loader import CHUNKS, default_cache
    from ..target.make_vdevice import parse_vdevices

    options = gguf_options(path, placing)
    devices = parse_vdevices(options["vdevices"])
    limits = memory_limits(options.get("memory_limit"), devices)
    file = read_language_model(path)
    model = hyperparameters_of(file)
    counts = read_expert_counts(expert_counts, model)
    cache = default_cache(model, devices, context, slots)
    placement = options["placement"]
    with console(stderr=True).status(f"Planning {path.name}"):  # may measure the devices, once per machine
        if placement and not placing.auto and patterns_without_matrix(file, placement):
            # Refuses patterns that match nothing.
            from_gguf(file, devices, placement, chunks=CHUNKS[:1], context=cache.context, stream_experts=None)
        problem = LayerProblem(file, model, cache, devices, CostModel.measured(devices), limits, counts)
        return plan_model(problem, placement or {})


def _write_report(
    model: Path,
    html: Path,
    compare: Path | None,
    profile: bool,
    placing: PlacementOptions,
    key: bytes | None,
    accuracy: str,
    sections: Sequence[str],
) -> Executable:
    """Write the report of a model, which is compiled unless it is a library."""
    from ..report.written_report import read_report, report_path, write_report

    if sections:
        raise click.UsageError(f"{sections[0]} does not go with --html: a report has every section")
    refuse_overwriting(report_path(html), model)
    if compare is not None:
        read_report(compare)
    measured: dict[str, Any] = {}
    if not (has_weights(model) or is_saved(model)):
        executable = obtain(model, placing, True, key, accuracy=accuracy).executable
        measured = _measure(executable, placing) if profile else {}
    elif is_saved(model) and not profile:
        executable = load_library(model / "model.so", placing, key).executable
    else:
        if key is not None and is_saved(model):
            load_library(model / "model.so", placing, key)  # checks the signature
        executable, measured = _load_language_model(model, placing, profile)
    with console(stderr=True).status("Writing"):  # may measure the devices
        write_report(executable, html, **measured, compare=compare, title=model.stem)
    console(stderr=True).print(f"Wrote {html}: open it in a browser.", markup=False)
    return executable


def _load_language_model(path: Path, placing: PlacementOptions, profile: bool) -> tuple[Executable, dict[str, Any]]:
    """Compile or load a language model, and measure it if `profile` is true."""
    import relax_hetero.llm as llm

    options = {} if is_saved(path) and not placing.is_given else gguf_options(path, placing)
    with console(stderr=True).status(f"Compiling {path.name}") as status:
        model, _ = llm.load(path, **options)
        if not profile:
            return model.executable, {}
        status.update(f"Measuring {path.name}")
        return model.executable, {"profile": model.profile(), "token": model.token_cost(profile=True)}


def _measure(executable: Executable, placing: PlacementOptions) -> dict[str, Any]:
    """Profile one call on random inputs, and trace a few overlapping ones."""
    from ..vm.machine import VirtualMachine
    from .arrays import random_arrays

    inputs = list(random_arrays(executable.signature(), dict(placing.shapes), 0, {}).values())
    machine = VirtualMachine(executable)
    with console(stderr=True).status("Measuring"):
        machine.submit("main", *inputs).result()  # warm-up: threads start, memory is allocated
        profile = machine.profile("main", *inputs)
        with machine.trace(limit=_TRACED_CALLS) as trace:
            for _ in range(_TRACED_CALLS):
                machine.submit("main", *inputs)
    return {"profile": profile, "trace": trace}


def _explain_measured(path: Path, placing: PlacementOptions) -> Explanation:
    """Explain a language model with measured times of a token."""
    import relax_hetero.llm as llm

    if not (is_saved(path) or has_weights(path)):
        raise click.UsageError(f"--profile goes with a language model: a GGUF file or a folder; found {path.name}")
    options = {} if is_saved(path) and not placing.is_given else gguf_options(path, placing)
    with console(stderr=True).status(f"Measuring {path.name}"):
        model, _ = llm.load(path, **options)
        return replace(explanation_of(model.executable, path.name), token=model.token_cost(profile=True))


def _estimate_token_cost(path: Path, vdevices: Sequence[VDevice], compiled: Explanation) -> TokenCost | None:
    """Estimate the cost of a token with the cost model; None if the file is not a GGUF file."""
    from ..frontend.auto.cost_model import CostModel
    from ..frontend.gguf.hyperparameters import hyperparameters_of
    from ..frontend.language_model_files import read_language_model
    from ..llm.token_cost import TRANSFERS, ModelInfo, PartCost, token_cost, with_estimate

    if not has_weights(path) or compiled.commands is None:
        return None
    model = hyperparameters_of(read_language_model(path))
    buffers, names = compiled.commands, list(compiled.targets)
    expert_share = model.experts_used / model.experts if model.experts else 1.0
    info = ModelInfo(model.windows, expert_share, model.vocabulary)
    cost = token_cost(buffers.regions, buffers.kernels, names, compiled.entries, buffers.single_calls, info=info)
    cost_model = CostModel.for_vdevices(vdevices)

    def seconds(part: PartCost) -> float:
        index = names.index(part.device)
        if part.part != TRANSFERS:
            device = cost_model.devices[index]
            return part.calls * device.launch + (part.weights + part.cache) / device.bandwidth
        links = [link for (_, target), link in cost_model.links.items() if target == index]
        return max(part.calls * link.latency + part.transferred / link.bandwidth for link in links)

    return None if cost is None else with_estimate(cost, seconds)


def _explain_source(path: Path, placing: PlacementOptions, accuracy: str) -> Explanation:
    from ..driver.commands.command_metadata import regions_as_linked
    from ..driver.compile import memory_plan_of, optional_indices
    from ..driver.compile_cache import predict_cache_use
    from ..target.vdevice import device_name, vdevices_of
    from ..transform.encode.accuracies import with_accuracy
    from ..transform.ir.remarks import remarks_of
    from ..transform.pipeline import pipeline_steps
    from ..transform.record.region_attrs import kernels_of
    from ..transform.shard.exchange_by_nccl import collectives_of, exchange_by_nccl

    module = exchange_by_nccl(with_accuracy(placed_module(path, placing), accuracy, "explain"), "auto")
    collectives = collectives_of(module)
    cache = predict_cache_use(module)
    vdevices = vdevices_of(module)
    targets = {device_name(v, vdevices): str(v.target) for v in vdevices}
    optional = [list(targets)[index] for index in optional_indices(module, placing.optional)]
    with console(stderr=True).status(f"Lowering {path.name}"):
        for step in pipeline_steps():
            module = step.run(module)
    remarks = remarks_of(module).to_data()
    regions = regions_as_linked(module)
    commands = CommandBuffers(list(targets), regions, kernels_of(module), remarks_of(module).single_calls or ())
    explanation = Explanation(
        path.name,
        targets,
        remarks["placement"] or [],
        remarks["encodings"],
        remarks["fusions"],
        commands,
        remarks["placement_estimate"],
        memory_plan_of(module),
        Schedules(list(targets), remarks_of(module).schedules or ()),
        cache,
        optional,
        collectives=collectives,
    )
    return replace(explanation, token=_estimate_token_cost(path, vdevices, explanation))
