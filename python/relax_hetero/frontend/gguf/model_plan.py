"""Plan of a language model before anything is compiled: what goes where, its bytes, and the expected speed.

All numbers follow from the file's metadata and the cost model (`part_costs`); no weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import tvm

from ...target.vdevice import default_vdevice, is_cpu, lookup, vdevice_index
from ..auto.cost_model import CostModel
from ..onnx.placement_rules import Patterns, PlacementRules, rule_pairs
from ..paged_cache import PagedCache
from .part_costs import Part, first_streamed_rows, prefill_steps, step_seconds, streamed_seconds
from .place_layers import LayerProblem, bytes_on

if TYPE_CHECKING:
    from .file import GgufFile
    from .hyperparameters import Hyperparameters
    from .plan_layers import LayerPlan

PROMPTS = (512, 4096)
"""Tokens of the prompts whose speed is estimated."""

_CURVE_POINTS = 33
_GIB = 1 << 30
_RULE_NAMES = {
    "embd": "token_embd",
    "attn": "attn",
    "ffn": "ffn_down",
    "router": "ffn_gate_inp",
    "experts": "ffn_down_exps",
    "output": "output",
}
"""Variable of a part whose placement rule decides for the part."""


@dataclass(frozen=True)
class PlacedPart:
    """A part of the model on its device.

    Attributes
    ----------
    name : str
        As in `Part`.
    layer : int or None
        None for embeddings and output.
    device : str
    weights, cache : int
        Bytes on the device.
    seconds : float
        Time of a decode step.
    reason : str
    """

    name: str
    layer: int | None
    device: str
    weights: int
    cache: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class DeviceUse:
    """Memory and time of a device.

    Attributes
    ----------
    name : str
    weights, cache, working : int
        Bytes of weights, of the cache, and an estimate of those of activations, context and code.
    limit : int or None
        Maximum of all of them; None without a limit.
    seconds : float
        Time of a decode step that the device works.
    bandwidth, products : float
        Figures of the cost model: bytes per second, and operations per second of products with quantized weights.
    """

    name: str
    weights: int
    cache: int
    working: int
    limit: int | None
    seconds: float
    bandwidth: float
    products: float

    @property
    def left(self) -> int | None:
        """Bytes that are left of the limit; negative if the plan exceeds it."""
        return None if self.limit is None else self.limit - self.weights - self.cache - self.working


@dataclass(frozen=True)
class Speed:
    """Expected speed of some work: tokens per second, and seconds of all tokens."""

    work: str
    tokens: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class MoreMemory:
    """Effect of one GiB more on a device: tokens per second of decoding, and parts that move there by their names."""

    device: str
    tokens_per_second: float
    parts: dict[str, int]


@dataclass(frozen=True)
class Streaming:
    """Copies of a layer's experts to a GPU for a chunk, compared with products on the CPU (`stream_experts`).

    Attributes
    ----------
    source, target : str
        The devices.
    rows : int or None
        Shortest chunk for which copies are faster; None if they never are.
    seconds : dict from int to (float, float)
        Rows of a chunk -> seconds of a layer on the CPU, and with copies.
    """

    source: str
    target: str
    rows: int | None
    seconds: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class ModelPlan:
    """Plan of a language model.

    Attributes
    ----------
    model, architecture : str
        Names of the file and of its architecture.
    layers, experts, experts_used : int
    context, slots, chunk, cached : int
        Maximum positions of a sequence, sequences of the cache, tokens of a prefill chunk, and positions in the cache
        during the decode step.
    is_auto : bool
        True if placed by cost, False by rules.
    figures : str
        Source of the cost model's figures: "tables" or "measured".
    parts : tuple of PlacedPart
    devices : tuple of DeviceUse
    speeds : tuple of Speed
    more : tuple of MoreMemory
        For each kind of device with a limit, if placed by cost.
    curves : dict from str to list of (int, float or None)
        Device with a limit -> pairs of a limit and tokens per second of decoding, None if the model does not fit.
    streaming : Streaming or None
        None if no experts are on a CPU beside a GPU.
    """

    model: str
    architecture: str
    layers: int
    experts: int
    experts_used: int
    context: int
    slots: int
    chunk: int
    cached: int
    is_auto: bool
    figures: str
    parts: tuple[PlacedPart, ...]
    devices: tuple[DeviceUse, ...]
    speeds: tuple[Speed, ...]
    more: tuple[MoreMemory, ...]
    curves: dict[str, list[tuple[int, float | None]]]
    streaming: Streaming | None

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
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevices: list[tvm.relax.VDevice],
    placement: PlacementRules | Literal["auto"],
    costs: CostModel,
    limits: dict[int, int],
) -> ModelPlan:
    """Plan a language model.

    Parameters
    ----------
    file, model, cache : GgufFile, Hyperparameters, PagedCache
    vdevices : list of VDevice
    placement : PlacementRules or "auto"
        As for `from_gguf`; a rule places a part by the name of one of its variables.
    costs : CostModel
        Cost model of these devices.
    limits : mapping from int to int
        Index of a device -> maximum of its memory.

    Raises
    ------
    PlacementError
        If the model does not fit.
    VDeviceError
        If a device of a rule is not in the list.
    """
    problem = LayerProblem(file, model, cache, vdevices, costs, limits)
    search = problem.search
    if isinstance(placement, str):
        plan = problem.best()
        reasons = [problem.reason(*pair, plan) for pair in zip(search.parts, plan.devices, strict=True)]
    else:
        devices, reasons = _devices_by_rules(search.parts, placement, vdevices)
        plan = search.plan(devices)
    is_auto = isinstance(placement, str)
    # More memory brings the same on each of several equal devices.
    kinds = {(repr(costs.devices[device]), limit): device for device, limit in reversed(limits.items())}
    limited = sorted(kinds.values()) if is_auto else []
    chunk, streams = max(cache.chunks), _streams(problem, plan, vdevices)
    placed = tuple(
        PlacedPart(
            part.name,
            None if part.name in ("embd", "output") else part.layer,
            problem.names[device],
            round(part.resident_bytes[device] - part.resident_cache),
            round(part.resident_cache),
            part.seconds(device, costs, search.step),
            reason,
        )
        for part, device, reason in zip(search.parts, plan.devices, reasons, strict=True)
    )
    return ModelPlan(
        model=file.path.name,
        architecture=model.name,
        layers=model.layers,
        experts=model.experts,
        experts_used=model.experts_used,
        context=cache.context,
        slots=cache.sequences,
        chunk=chunk,
        cached=search.step.cached,
        is_auto=is_auto,
        figures=costs.figures,
        parts=placed,
        devices=tuple(_device_use(problem, plan, placed, index) for index in range(len(vdevices))),
        speeds=_speeds(problem, plan, chunk, cache.context),
        more=tuple(_more_memory(problem, plan, device) for device in limited),
        curves={problem.names[device]: _curve(problem, device) for device in limited},
        streaming=_streaming(problem, streams),
    )


def _devices_by_rules(
    parts: Sequence[Part], rules: PlacementRules, vdevices: list[tvm.relax.VDevice]
) -> tuple[list[int], list[str]]:
    """Device and reason of each part."""
    pairs = rule_pairs(rules)
    patterns = Patterns(pattern for pattern, _ in pairs)
    default = vdevice_index(default_vdevice(vdevices), vdevices)
    devices, reasons = [], []
    for part in parts:
        name = _RULE_NAMES[part.name]
        if part.name not in ("embd", "output"):
            name = f"blk.{part.layer}.{name}"
        matching = patterns.matching([name])
        pattern, device = pairs[min(matching)] if matching else ("", None)
        devices.append(default if device is None else vdevice_index(lookup(device, vdevices), vdevices))
        reasons.append(f"rule {pattern!r}" if matching else "default device")
    return devices, reasons


def _device_use(problem: LayerProblem, plan: LayerPlan, placed: Sequence[PlacedPart], index: int) -> DeviceUse:
    name, cost = problem.names[index], problem.search.costs.devices[index]
    own = [part for part in placed if part.device == name]
    cached = sum(part.cache for part in own)
    return DeviceUse(
        name,
        round(plan.resident_bytes.get(index, 0.0)) - cached,
        cached,
        problem.working[index] if own else 0,
        problem.limits.get(index),
        sum(part.seconds for part in own),
        cost.bandwidth,
        cost.products.get("quantized", cost.flops),
    )


def _speeds(problem: LayerProblem, plan: LayerPlan, chunk: int, context: int) -> tuple[Speed, ...]:
    search = problem.search
    speeds = [Speed("decode", 1, plan.seconds)]
    for tokens in PROMPTS:
        if tokens <= context:
            steps = prefill_steps(tokens, chunk)
            args = search.parts, plan.devices, search.costs, search.row_bytes
            speeds.append(Speed("prefill", tokens, sum(step_seconds(*args, step) for step in steps)))
    return tuple(speeds)


def _more_memory(problem: LayerProblem, plan: LayerPlan, device: int) -> MoreMemory:
    """The plan with a GiB more on a device."""
    limits = {**problem.limits, device: problem.limits[device] + _GIB}
    more = problem.search.best(problem.free(limits)) or plan
    counts: dict[str, int] = {}
    for part, old, new in zip(problem.search.parts, plan.devices, more.devices, strict=True):
        counts[part.name] = counts.get(part.name, 0) + (new == device) - (old == device)
    return MoreMemory(problem.names[device], 1 / more.seconds, {name: count for name, count in counts.items() if count})


def _curve(problem: LayerProblem, device: int) -> list[tuple[int, float | None]]:
    """Tokens per second by the limit of a device, from none of the model to all."""
    whole = bytes_on(problem.search.parts, device)
    sizes = [whole * point / (_CURVE_POINTS - 1) for point in range(_CURVE_POINTS)]
    seconds = problem.search.fastest_by_limit(device, sizes, problem.free())
    working = problem.working[device]
    return [
        (round(size) + working, 1 / time if math.isfinite(time) else None)
        for size, time in zip(sizes, seconds, strict=True)
    ]


def _streams(
    problem: LayerProblem, plan: LayerPlan, vdevices: Sequence[tvm.relax.VDevice]
) -> list[tuple[Part, int, int]]:
    """Experts that are on a CPU, with it and the GPU of their layer's attention."""
    parts = problem.search.parts
    at = {(part.name, part.layer): device for part, device in zip(parts, plan.devices, strict=True)}
    experts = [(part, at[part.name, part.layer]) for part in parts if part.name == "experts"]
    return [
        (part, source, target)
        for part, source in experts
        if is_cpu(vdevices[source])
        and not is_cpu(vdevices[target := at["attn", part.layer]])
        and (source, target) in problem.search.costs.links
    ]


def _streaming(problem: LayerProblem, streams: Sequence[tuple[Part, int, int]]) -> Streaming | None:
    """Copies of a layer's experts to a GPU."""
    if not streams:
        return None
    _, source, target = streams[0]
    args = *streams[0], problem.search.costs, problem.search.row_bytes
    seconds = {rows: streamed_seconds(*args, rows) for rows in PROMPTS}
    return Streaming(problem.names[source], problem.names[target], first_streamed_rows(*args), seconds)
