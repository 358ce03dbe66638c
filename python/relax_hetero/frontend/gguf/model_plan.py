"""Plan of a language model before anything is compiled: what goes where, its bytes, and the expected speed.

All numbers follow from the file's metadata and the cost model (`part_costs`); no weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from ...errors import FrontendError
from ...target.hosts import host_of
from ...target.mesh import mesh_positions
from ...target.vdevice import is_cpu, lookup, vdevice_index
from ..onnx.placement_rules import Patterns, PlacementRules, rule_pairs
from .activation_types import ActivationTypes, names_of
from .choose_rules import ChosenRules, choose_rules, mesh_of
from .expert_rules import split_rules
from .part_costs import first_streamed_rows, prefill_steps, step_seconds, streamed_seconds, streamed_step_seconds
from .place_layers import LayerProblem, bytes_on
from .scaling import Fleet, Pipeline
from .tensor_parallel import dealt_rules, split_caches

if TYPE_CHECKING:
    from .file import GgufFile
    from .plan_layers import LayerPlan, PlanSearch

PROMPTS = (512, 4096)
"""Tokens of the prompts whose speed is estimated."""

_CURVE_POINTS = 33
_GIB = 1 << 30


@dataclass(frozen=True)
class PlacedPart:
    """A part of the model on its device."""

    name: str  # as in `Part`
    layer: int | None  # None for embeddings and output
    device: str
    # Bytes on the device.
    weights: int
    cache: int
    seconds: float  # time of a decode step
    reason: str
    experts: tuple[int, ...] = ()  # numbers of the experts, if experts of the layer are on several devices


@dataclass(frozen=True)
class DeviceUse:
    """Memory and time of a device."""

    name: str
    # Bytes of weights, of the cache, and an estimate of those of activations, context and code.
    weights: int
    cache: int
    working: int
    limit: int | None  # maximum of all of them; None without a limit
    seconds: float  # time of a decode step that the device works
    # Figures of the cost model: bytes per second, and operations per second of products with quantized weights.
    bandwidth: float
    products: float

    @property
    def left(self) -> int | None:
        """Bytes that are left of the limit; negative if the plan exceeds it."""
        return None if self.limit is None else self.limit - self.weights - self.cache - self.working


@dataclass(frozen=True)
class Speed:
    """Expected speed of some work."""

    work: str  # "decode" or "prefill"
    # Number of tokens, and maximum rows of a call.
    tokens: int
    chunk: int
    seconds: float  # time of all tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class MoreMemory:
    """Effect of one GiB more on a device."""

    device: str
    tokens_per_second: float  # speed of decoding
    # Name of a part -> number of layers whose part moves there; experts of a layer are a fraction.
    parts: dict[str, float]


@dataclass(frozen=True)
class Streaming:
    """Copies of a layer's experts to a GPU for a chunk, compared with products on the CPU (`stream_experts`)."""

    # The devices.
    source: str
    target: str
    rows: int | None  # shortest chunk for which copies are faster; None if they never are
    seconds: dict[int, tuple[float, float]]  # rows of a chunk -> seconds of a layer on the CPU, and with copies


@dataclass(frozen=True)
class ModelPlan:
    """Plan of a language model."""

    # Names of the file and of its architecture.
    model: str
    architecture: str
    layers: int
    experts: int
    experts_used: int
    # Maximum positions of a sequence, sequences of the cache, and positions in the cache during the decode step.
    context: int
    slots: int
    cached: int
    is_auto: bool  # True if placed by cost, False by rules
    figures: str  # source of the cost model's figures: "tables" or "measured"
    parts: tuple[PlacedPart, ...]
    devices: tuple[DeviceUse, ...]
    speeds: tuple[Speed, ...]
    more: tuple[MoreMemory, ...]  # for each kind of device with a limit, if placed by cost
    # Device with a limit -> pairs of a limit and tokens per second of decoding, None if the model does not fit.
    curves: dict[str, list[tuple[int, float | None]]]
    streaming: Streaming | None  # None if no experts are on a CPU beside a GPU
    excluded: str = ""  # a faster plan that needs links which the GPUs lack; empty without one

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        data = asdict(self)
        for device, entry in zip(self.devices, data["devices"], strict=True):
            entry["left"] = device.left
        for speed, entry in zip(self.speeds, data["speeds"], strict=True):
            entry["tokens_per_second"] = speed.tokens_per_second
        if self.streaming is not None:
            data["streaming"]["seconds"] = {str(rows): pair for rows, pair in self.streaming.seconds.items()}
        return data


def plan_model(
    problem: LayerProblem,
    placement: PlacementRules | Literal["auto"],  # as for `from_gguf`
) -> ModelPlan:
    """Plan a language model.

    Raises FrontendError if a list of experts is invalid, `from_gguf` refuses a mesh of a rule, or only a part of the
    model, or of the devices, is on one, and PlacementError if the model does not fit, and VDeviceError if a device of a
    rule is not in the list.
    """
    is_auto, costs, limits = isinstance(placement, str), problem.search.costs, problem.limits
    if isinstance(placement, str):
        placement = choose_rules(problem)
    groups = _groups_of(problem, placement)
    reasons, excluded = (placement.reasons, placement.excluded) if isinstance(placement, ChosenRules) else ({}, "")
    if groups is not None:
        plan = _shared_plan(problem, groups, reasons.get("*", "rule '*'"), is_auto)
        return replace(plan, excluded=excluded)
    layout = _layout(problem, placement, reasons)
    # More memory brings the same on each of several equal devices.
    kinds = {(repr(costs.devices[device]), limit): device for device, limit in reversed(limits.items())}
    limited = sorted(kinds.values()) if is_auto else []
    step = problem.search.step
    placed = tuple(
        PlacedPart(
            part.name,
            None if part.name in ("embd", "inputs", "output") else part.layer,
            problem.names[device],
            round(part.resident_bytes[device] - part.resident_cache),
            round(part.resident_cache),
            part.seconds(device, costs, step),
            reason,
            part.experts,
        )
        for part, device, reason in zip(layout.search.parts, layout.plan.devices, layout.reasons, strict=True)
    )
    streaming = _streaming(problem, layout)
    devices = [
        _device_use(problem, placed, index, layout.plan.resident_bytes.get(index, 0.0))
        for index in range(len(problem.names))
    ]
    plan = _plan(problem, is_auto, placed, devices, _speeds(problem, layout, streaming))
    return replace(
        plan,
        more=tuple(_more_memory(problem, layout, device) for device in limited),
        curves={problem.names[device]: _curve(problem, device) for device in limited},
        streaming=streaming,
        excluded=excluded,
    )


def _plan(
    problem: LayerProblem,
    is_auto: bool,
    parts: Sequence[PlacedPart],
    devices: Sequence[DeviceUse],
    speeds: Sequence[Speed],
) -> ModelPlan:
    """A plan without the effects of more memory, and of copies of experts."""
    model, cache = problem.model, problem.cache
    return ModelPlan(
        model=problem.file.path.name,
        architecture=model.name,
        layers=model.layers,
        experts=model.experts,
        experts_used=model.experts_used,
        context=cache.context,
        slots=cache.sequences,
        cached=problem.search.step.cached,
        is_auto=is_auto,
        figures=problem.search.costs.figures,
        parts=tuple(parts),
        devices=tuple(devices),
        speeds=tuple(speeds),
        more=(),
        curves={},
        streaming=None,
    )


def _groups_of(problem: LayerProblem, placement: PlacementRules) -> Pipeline | None:
    """Groups of devices that share layers by some rules; None if each rule names one device."""
    if isinstance(placement, ChosenRules):
        return placement.groups
    vdevices, pairs, count = problem.vdevices, rule_pairs(placement), len(problem.vdevices)
    meshes = [mesh_positions(lookup(device, vdevices)) for _, device in pairs]
    if not any(meshes):
        return None
    if [pattern for pattern, _ in pairs] != ["*"] or meshes[0] != tuple(range(count)):
        raise FrontendError(
            f"placement has the rules {dict(pairs)}: plans of meshes are for all layers and all of the "
            f"{count} devices, expected {{'*': 'vdevice[0:{count}]'}}, \"auto\", or single devices"
        )
    split_caches(problem.model, dealt_rules(pairs, problem.model, vdevices), vdevices)  # refuse what loading does
    costs = problem.search.costs
    return Pipeline(problem.search.parts, problem.model, costs, Fleet.of_vdevices(vdevices, costs), count, 1)


def _shared_plan(problem: LayerProblem, groups: Pipeline, reason: str, is_auto: bool) -> ModelPlan:
    """The plan of a model whose layers are on groups of devices that share each; bytes are those of one device."""
    step, placed, devices = problem.search.step, list[PlacedPart](), list[DeviceUse]()
    for stage, parts in enumerate(groups.stages):
        name = mesh_of(groups, stage).replace("vdevice", problem.names[0].partition(":")[0])
        own = []
        for part in parts:
            share = 1 if part.name == "embd" else groups.tensor
            weights, cached = (part.resident_bytes[0] - part.resident_cache) / share, part.resident_cache / share
            seconds = groups.seconds([part], 1, step.rows, step.cached)
            layer = None if part.name in ("embd", "inputs", "output") else part.layer
            own.append(PlacedPart(part.name, layer, name, round(weights), round(cached), seconds, reason))
        placed += own
        for _ in range(groups.tensor):
            devices.append(_device_use(problem, own, len(devices), groups.stage_bytes[stage]))
    devices += [_device_use(problem, [], index, 0.0) for index in range(len(devices), len(problem.names))]
    cache, longest = problem.cache, max(problem.cache.chunks)
    speeds = [Speed("decode", 1, 1, groups.decode(1, step.cached)[0])]
    speeds += [
        Speed("prefill", tokens, min(longest, tokens), groups.prefill(tokens, longest))
        for tokens in PROMPTS
        if tokens <= cache.context
    ]
    return _plan(problem, is_auto, placed, devices, speeds)


@dataclass(frozen=True)
class _Layout:
    """Placed parts: each is on one device, unlike those of a `LayerProblem`; the reasons are in the same order."""

    search: PlanSearch
    plan: LayerPlan
    reasons: list[str]

    def layers(self, device: int) -> dict[str, float]:
        """Number of layers whose part is on a device, by the name of the part; some of it is a fraction of a layer."""
        counts: dict[str, float] = {}
        whole: dict[tuple[str, int], float] = {}
        for part in self.search.parts:
            key = part.name, part.layer
            whole[key] = whole.get(key, 0.0) + part.resident_bytes[device]
        for part, at in zip(self.search.parts, self.plan.devices, strict=True):
            share = (at == device) * part.resident_bytes[device] / whole[part.name, part.layer]
            counts[part.name] = counts.get(part.name, 0.0) + share
        return counts


def _layout(problem: LayerProblem, rules: PlacementRules, reasons: Mapping[str, str]) -> _Layout:
    """Place parts by rules as `from_gguf` does; `reasons` has those of generated patterns."""
    vdevices = problem.vdevices
    split = split_rules(rules, problem.model, vdevices)
    types = ActivationTypes(None, "float32", split.rules, vdevices)
    parts = problem.parts(types.device_of, split.groups)
    search, texts = replace(problem.search, parts=parts), split.reasons(reasons)
    devices = [types.device_of(part.variable) for part in parts]
    plan = search.plan([vdevice_index(device, vdevices) for device in devices if device is not None])
    patterns = [types.pattern_of(part.variable) for part in parts]
    return _Layout(
        search, plan, ["default device" if each is None else texts.get(each, f"rule {each!r}") for each in patterns]
    )


def patterns_without_matrix(file: GgufFile, rules: PlacementRules) -> list[str]:
    """Patterns that match no product of a file's matrix; if they match no other op, `from_gguf` refuses them."""
    pairs = rule_pairs(rules)
    patterns = Patterns(pattern for pattern, _ in pairs)
    tensors = [name.removesuffix(".weight") for name, each in file.tensors.items() if len(each.shape) > 1]
    matched = patterns.matching(chain.from_iterable(names_of(name) for name in [*tensors, "output"]))
    # `split_rules` checks lists of experts.
    return [pattern for i, (pattern, _) in enumerate(pairs) if i not in matched and "_exps[" not in pattern]


def _device_use(problem: LayerProblem, placed: Sequence[PlacedPart], index: int, resident: float) -> DeviceUse:
    """Memory and time of a device with `resident` bytes of weights and cache; parts on a mesh are on each device."""
    name, cost = problem.names[index], problem.search.costs.devices[index]
    own = [part for part in placed if part.device == name or "[" in part.device]
    cached = sum(part.cache for part in own)
    return DeviceUse(
        name,
        round(resident) - cached,
        cached,
        problem.working[index] if own else 0,
        problem.limits.get(index),
        sum(part.seconds for part in own),
        cost.bandwidth,
        cost.products.get("quantized", cost.flops),
    )


def _speeds(problem: LayerProblem, layout: _Layout, streaming: Streaming | None) -> tuple[Speed, ...]:
    search, plan, cache = layout.search, layout.plan, problem.cache
    placed, costs = (search.parts, plan.devices), (search.costs, search.row_bytes)
    speeds = [Speed("decode", 1, 1, plan.seconds)]
    for tokens in PROMPTS:
        if tokens > cache.context:
            continue
        steps, seconds = prefill_steps(tokens, cache.chunks), 0.0
        for step in steps:
            if streaming is not None and streaming.rows is not None and step.rows >= streaming.rows:
                ends = problem.names.index(streaming.source), problem.names.index(streaming.target)
                seconds += streamed_step_seconds(*placed, ends, *costs, step)
            else:
                seconds += step_seconds(*placed, *costs, step)
        speeds.append(Speed("prefill", tokens, steps[0].rows, seconds))
    return tuple(speeds)


def _more_memory(problem: LayerProblem, layout: _Layout, device: int) -> MoreMemory:
    """The plan with a GiB more on a device."""
    rules = problem.rules(problem.best({**problem.limits, device: problem.limits[device] + _GIB}))
    more = _layout(problem, [rule[:2] for rule in rules], {})
    before, after = layout.layers(device), more.layers(device)
    moved = {name: round(count - before[name], 3) for name, count in after.items()}
    parts = {name: count for name, count in moved.items() if count}
    return MoreMemory(problem.names[device], 1 / more.plan.seconds, parts)


def _curve(problem: LayerProblem, device: int) -> list[tuple[int, float | None]]:
    """Tokens per second by the limit of a device, from none of the model to all."""
    whole, working = bytes_on(problem.search.parts, device), problem.working[device]
    sizes = [whole * point / (_CURVE_POINTS - 1) for point in range(_CURVE_POINTS)]
    seconds = problem.fastest_by_limit(device, sizes)
    return [
        (round(size) + working, 1 / time if math.isfinite(time) else None)
        for size, time in zip(sizes, seconds, strict=True)
    ]


def _streaming(problem: LayerProblem, layout: _Layout) -> Streaming | None:
    """Copies of all experts of the first layer with some on a CPU, to the GPU of its router or attention.

    Layers that compute one row of a prompt multiply it on the CPU.
    """
    vdevices, at = problem.vdevices, dict[tuple[str, int], int]()
    placed = list(zip(layout.search.parts, layout.plan.devices, strict=True))
    for part, device in placed:
        at.setdefault((part.name, part.layer), device)
    for part, source in placed:
        if part.name != "experts" or not is_cpu(vdevices[source]) or part.last_row[0]:
            continue
        ends = [at[name, part.layer] for name in ("router", "attn")]
        target = next((end for end in ends if not is_cpu(vdevices[end])), None)
        if target is None or (source, target) not in problem.search.costs.links:
            continue
        if host_of(vdevices[source]) != host_of(vdevices[target]):  # see `stream_experts`
            continue
        whole = next(each for each in problem.search.parts if (each.name, each.layer) == ("experts", part.layer))
        args = whole, source, target, problem.search.costs, problem.search.row_bytes
        seconds = {rows: streamed_seconds(*args, rows) for rows in PROMPTS}
        return Streaming(problem.names[source], problem.names[target], first_streamed_rows(*args), seconds)
    return None
