"""Tables of the plan of a language model that is not compiled yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from ...artifact.messages import AUTO
from ...display.console import Shown, table
from ...display.text import bytes_text, plural, time_text

if TYPE_CHECKING:
    from ...frontend.gguf.model_plan import ModelPlan, MoreMemory, PlacedPart, Speed, Streaming

_NAMES = {
    "embd": "embeddings",
    "inputs": "embeddings of layers",
    "attn": "attention",
    "ffn": "feed-forward",
    "router": "router, norms",
    "experts": "experts",
    "output": "output",
}


def plan_tables(plan: ModelPlan) -> Iterator[Shown]:
    """Tables and sentences about a plan."""
    columns = ["part", "layers", "device", "weights", "cache", "a token", "why"]
    rows = [_part_row(plan, group) for group in _groups(plan.parts)]
    yield table("Plan", columns, rows, columns[3:6])
    columns = ["device", "weights", "cache", "other", "limit", "left", "a token", "memory rate", "products"]
    rows = [
        [
            use.name,
            *(bytes_text(size) for size in (use.weights, use.cache, use.working)),
            "-" if use.limit is None else bytes_text(use.limit),
            "-" if use.left is None else bytes_text(use.left) if use.left >= 0 else f"-{bytes_text(-use.left)}",
            time_text(use.seconds),
            f"{use.bandwidth / 1e9:,.0f} GB/s",
            f"{use.products / 1e12:,.3g} TFLOP/s",
        ]
        for use in plan.devices
    ]
    yield table("Devices", columns, rows, columns[1:])
    columns = ["work", "tokens/s", "time"]
    yield table("Expected speed", columns, [_speed_row(plan, speed) for speed in plan.speeds], columns[1:])
    yield from lines(plan)


def lines(plan: ModelPlan) -> Iterator[str]:
    """Sentences about the model, more memory, copies of experts, and where the figures come from."""
    experts = f", {plan.experts_used} of {plan.experts} experts for a token" if plan.experts else ""
    yield (
        f"{plan.model}: {plan.architecture} of {plural(plan.layers, 'layer')}{experts}; the cache has "
        f"{plural(plan.slots, 'sequence')} of {plan.context:,} tokens. Nothing was compiled."
    )
    if any("[" in part.device for part in plan.parts):
        yield "Bytes of parts on a mesh are those of one of its devices."
    if plan.excluded:
        yield f"Not considered: {plan.excluded}."
    for more in plan.more:
        yield _more_line(plan, more)
    if plan.streaming is not None:
        yield _streaming_line(plan.streaming)
    for use in plan.devices:
        if use.left is not None and use.left < 0:
            yield f"The plan does not fit {use.name}: it exceeds the limit by {bytes_text(-use.left)}."
    source = "were measured on this machine" if plan.figures != "tables" else "are assumed (tables), not measured"
    yield (
        f"Rates of memory, products and transfers {source}. Estimated, too, is other memory: activations and, on GPUs, "
        "context and code."
    )


def _groups(parts: Sequence[PlacedPart]) -> list[list[PlacedPart]]:
    """Parts of the same name on the same device, and for the same general reason, in the order of the model."""
    groups: dict[tuple[str, str, str, bool], list[PlacedPart]] = {}
    for part in parts:
        groups.setdefault((part.name, part.device, _general(part.reason), bool(part.experts)), []).append(part)
    return sorted(groups.values(), key=lambda group: [*_NAMES].index(group[0].name))


def _part_row(plan: ModelPlan, group: Sequence[PlacedPart]) -> list[str]:
    first, name = group[0], _NAMES[group[0].name]
    if first.experts:
        least, most = (choose(len(part.experts) for part in group) for choose in (min, max))
        name = f"{least if least == most else f'{least} to {most}'} of {plan.experts} experts"
    cache = sum(part.cache for part in group)
    return [
        name,
        _ranges(sorted({part.layer for part in group if part.layer is not None})),
        first.device,
        bytes_text(sum(part.weights for part in group)),
        bytes_text(cache) if cache else "-",
        time_text(sum(part.seconds for part in group)),
        _general(first.reason),
    ]


def _general(reason: str) -> str:
    """A reason without the figures of a single part."""
    return reason.removeprefix(AUTO).partition(": ")[0] if reason.startswith(AUTO) else reason


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers, such as ``0-15, 20``."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _speed_row(plan: ModelPlan, speed: Speed) -> list[str]:
    if speed.work == "decode":
        name = f"decode, 1 text, after {plan.cached:,} tokens"
    else:
        name = f"prefill of {speed.tokens:,} tokens, in chunks of {speed.chunk:,}"
    return [name, _rate(speed.tokens_per_second), time_text(speed.seconds)]


def _rate(tokens_per_second: float) -> str:
    """Format tokens per second by three digits, or by all digits of large numbers."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second >= 1000 else f"{tokens_per_second:.3g}"


def _more_line(plan: ModelPlan, more: MoreMemory) -> str:
    before = plan.speeds[0].tokens_per_second
    if not more.parts or more.tokens_per_second <= before:
        return f"One GiB more on {more.device} brings nothing."
    moved = [f"{_NAMES[name]} of {_layers(count)}" for name, count in more.parts.items() if count > 0]
    return (
        f"One GiB more on {more.device}: {_rate(before)} -> {_rate(more.tokens_per_second)} tokens/s of decoding, with "
        f"{', '.join(moved)} more there."
    )


def _layers(count: float) -> str:
    """A number of layers, of which experts may be a fraction."""
    return plural(int(count), "layer") if count == int(count) else f"{count:.1f} layers"


def _streaming_line(streaming: Streaming) -> str:
    where = f"experts of a layer from {streaming.source} to {streaming.target}"
    if streaming.rows is None:
        return f"Copies of {where} would never be faster than products on {streaming.source}."
    times = ", ".join(
        f"{rows:,} tokens {time_text(copied)} instead of {time_text(here)}"
        for rows, (here, copied) in streaming.seconds.items()
    )
    return (
        f"Chunks of {streaming.rows:,} tokens or more copy {where}, instead of products on {streaming.source} "
        f"(estimate for a layer: {times})."
    )
