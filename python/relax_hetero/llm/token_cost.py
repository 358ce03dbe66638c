"""Cost of a token: bytes that a decode step reads and transfers, and its time, by device and part of the model.

Bytes come from an executable's metadata: command buffers name the constants and the pages of the cache that each kernel
reads. Times come from a profile (`CompiledModel.token_cost`), or from a cost model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from ..artifact.commands import DIRECT, SLOT, Dispatch, KernelSpec, Reference, RegionSpec, SingleCall
from ..display.text import text_table
from ..encoding.pages import PAGE, TABLES
from ..encoding.problem import EXPERT_SUM
from ..target.element_types import bytes_of
from ..vm.profile import TO_DEVICE, Profile

EMBEDDING, ATTENTION, FEED_FORWARD, LOGITS, OTHER = "embedding", "attention", "feed-forward", "logits", "other"
TRANSFERS, WAITING = "transfers", "waiting"

_DECODE = re.compile(r"decode_(\d+)")
# Part of the model of a variable, by the first pattern that matches its name (names of GGUF and of ONNX files).
_PARTS = (
    (EMBEDDING, re.compile(r"token_embd|embed_tokens")),
    (LOGITS, re.compile(r"^output|lm_head")),
    (ATTENTION, re.compile(r"attn|attention|rope|rotary|^lv\d*$")),
    (FEED_FORWARD, re.compile(r"ffn|ffw|mlp|moe|experts")),
)
_EXPERTS = re.compile(r"_exps|moe|experts")
_SUMS = "calls", "weights", "cache", "transferred"
_GATHERS = {"block_rows", "take"}  # ops that read some rows of a table


@dataclass(frozen=True)
class PartCost:
    """Cost of one part of the model on one device."""

    # "embedding", "attention", "feed-forward", "logits", "other", "transfers" to the device, or "waiting" in its
    # command buffer for values of another device (`transform.FormMailboxes`).
    part: str
    device: str  # name of the device
    calls: int = 0  # number of calls of kernels, or of transfers
    # Bytes of weights and of the cache that are read, and bytes that are transferred from other devices.
    weights: int = 0
    cache: int = 0
    transferred: int = 0
    seconds: float | None = None  # measured or estimated time; None if it is not known for this part


@dataclass(frozen=True)
class StepTime:
    """A measured decode step."""

    seconds: float  # median time of a step, from tokens to logits
    kernels: float  # median time in command buffers, other kernels and transfers

    @property
    def outside(self) -> float:
        """Fraction of the step outside of kernels and transfers."""
        return max(0.0, 1.0 - self.kernels / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class TokenCost:
    """Cost of a decode step, by parts of the model."""

    function: str  # decode function with the fewest rows, such as ``decode_1``
    rows: int  # number of sequences of the step
    cached: int  # cached tokens of each sequence
    parts: tuple[PartCost, ...]  # costs in the order of devices, then of the forward pass
    # Command buffers of the step by device, in order.
    buffers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outside: int = 0  # number of kernel calls outside of command buffers
    step: StepTime | None = None  # measured time, if any
    is_estimate: bool = False  # whether times of parts come from a cost model

    def of_device(self, device: str) -> PartCost:
        """Sum of a device's parts; its time is None if that of a part is."""
        parts = [part for part in self.parts if part.device == device]
        times = [part.seconds for part in parts]
        seconds = None if None in times else sum(time for time in times if time is not None)
        return PartCost(
            "all", device, seconds=seconds, **{name: sum(getattr(p, name) for p in parts) for name in _SUMS}
        )

    @property
    def head(self) -> tuple[str, ...]:
        """Header of `body`."""
        return "part", "device", "calls", "weights", "cache", "transferred", "estimated" if self.is_estimate else "time"

    def body(self) -> list[tuple[str, ...]]:
        """Table of parts, with the sum of each device after its parts."""
        rows = []
        for device in dict.fromkeys(part.device for part in self.parts):
            parts = [part for part in self.parts if part.device == device]
            rows += [_row(part) for part in ([*parts, self.of_device(device)] if len(parts) > 1 else parts)]
        return rows

    def lines(self) -> list[str]:
        """Sentences about the command buffers and the time of the step."""
        buffers = [
            f"{len(names)} command buffer{'s' if len(names) > 1 else ''} on {device} ({', '.join(names)})"
            for device, names in self.buffers.items()
        ]
        outside = f"; {self.outside} kernel calls outside" if self.outside else ", and no kernel call outside"
        read = sum(part.weights + part.cache for part in self.parts)
        lines = [
            f"A decode step of {self.rows} text{'s' if self.rows > 1 else ''} after {self.cached:,} tokens reads "
            f"{_size(read)}. It is {' and '.join(buffers)}{outside}."
        ]
        if self.step is not None:
            lines.append(
                f"Measured: a step takes {self.step.seconds * 1e3:.3g} ms, {1 - self.step.outside:.1%} inside of "
                f"command buffers and transfers, and {self.step.outside:.1%} outside."
            )
            lines += [self._overlap(part) for part in self.parts if part.part == WAITING and part.seconds is not None]
        return lines

    def _overlap(self, waiting: PartCost) -> str:
        """Sentence about a device that waits in its command buffer while another one works."""
        total, seconds = self.of_device(waiting.device).seconds or 0.0, waiting.seconds or 0.0
        others = [name for name in self.buffers if name != waiting.device]
        bound = waiting.device if seconds < total / 2 else " and ".join(others)
        return (
            f"{' and '.join([waiting.device, *others])} work at once: {waiting.device} waits {seconds * 1e3:.3g} of "
            f"{total * 1e3:.3g} ms for values, so that {bound} bounds the step."
        )

    def __str__(self) -> str:
        return "\n".join([text_table(self.head, self.body(), left=2), *self.lines()])

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data."""
        data = asdict(self)
        if self.step is not None:
            data["step"]["outside"] = self.step.outside
        return data


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a language model that are not in command buffers."""

    # Number of latest positions that each layer sees, 0 for all; () if unknown, which means as many as its pages hold.
    windows: tuple[int, ...] = ()
    expert_share: float = 1.0  # fraction of the experts that a row uses; 1 for a dense model
    vocabulary: int = 0  # rows of the embedding table; 0 if unknown, which means the number of its packed panels


def decode_function(regions: Iterable[RegionSpec]) -> str | None:
    """Find the decode function with the fewest rows; None if the command buffers are not of a language model."""
    rows = {}
    for region in regions:
        match = _DECODE.fullmatch(region.function)
        if match and any(slot.name.startswith("pages_") for slot in region.slots):
            rows[region.function] = int(match[1])
    return min(rows, key=lambda name: rows[name], default=None)


def token_cost(
    regions: Sequence[RegionSpec],
    kernels: Mapping[str, KernelSpec],
    devices: Sequence[str],
    entries: Iterable[Mapping[str, Any]],
    single_calls: Iterable[SingleCall] = (),
    cached: int = 512,
    info: ModelInfo | None = None,
) -> TokenCost | None:
    """Compute the cost of a decode step, without times.

    Parameters
    ----------
    regions, kernels, single_calls
        Fields of an executable's metadata.
    devices : sequence of str
        Names of devices in the order of the manifest.
    entries : iterable of mapping
        Entries of the placement report, which has the transfers.
    cached : int
        Cached tokens of each sequence.
    info : ModelInfo, optional
        Facts about the model.

    Returns
    -------
    TokenCost or None
        None if the model is not a language model with a paged cache.

    Examples
    --------
    >>> token_cost([], {}, [], []) is None
    True
    """
    function = decode_function(regions)
    if function is None:
        return None
    rows = int(function.removeprefix("decode_"))
    own_regions = [region for region in regions if region.function == function]
    reader = _Reader(kernels, rows, cached, info or ModelInfo())
    parts: dict[tuple[str, str], PartCost] = {}
    for region in own_regions:
        device = devices[region.device]
        for part, cost in reader.costs(region):
            _add(parts, replace(cost, part=part, device=device))
    for entry in entries:
        if entry["kind"] == "transfer" and entry["function"] == function:
            _add(parts, PartCost(TRANSFERS, str(entry["device"]), 1, transferred=int(entry["bytes"] or 0)))
    names = list(dict.fromkeys([*devices, *(device for device, _ in parts)]))
    order = (EMBEDDING, ATTENTION, FEED_FORWARD, LOGITS, OTHER, WAITING, TRANSFERS)
    in_order = sorted(parts.values(), key=lambda cost: (names.index(cost.device), order.index(cost.part)))
    buffers = {name: tuple(r.name for r in own_regions if devices[r.device] == name) for name in devices}
    outside = sum(call.function == function for call in single_calls)
    return TokenCost(function, rows, cached, tuple(in_order), {n: b for n, b in buffers.items() if b}, outside)


def with_estimate(cost: TokenCost, seconds_of: Callable[[PartCost], float]) -> TokenCost:
    """Add estimated times of parts."""
    parts = tuple(replace(part, seconds=seconds_of(part)) for part in cost.parts)
    return replace(cost, parts=parts, is_estimate=True)


def with_times(cost: TokenCost, seconds: Mapping[tuple[str, str], float], step: StepTime) -> TokenCost:
    """Add measured times, by device and part."""
    parts = tuple(replace(part, seconds=seconds.get((part.device, part.part))) for part in cost.parts)
    return replace(cost, parts=parts, step=step, is_estimate=False)


def times_of(
    profile: Profile, regions: Sequence[RegionSpec], kernels: Mapping[str, KernelSpec], devices: Sequence[str]
) -> dict[tuple[str, str], float]:
    """Seconds by device and part in a profile; parts of a CUDA graph are missing."""
    times: dict[tuple[str, str], float] = {}
    device_of = {region.name: region.device for region in regions}
    for command in profile.commands:
        # The region names the device: devices with equal targets share kernels.
        key = devices[device_of[command.region]], part_of(command.variable, kernels[command.kernel].ops)
        times[key] = times.get(key, 0.0) + command.microseconds * 1e-6
    for row in profile.rows:
        if row.symbol == TO_DEVICE:
            times[row.device, TRANSFERS] = row.microseconds * 1e-6
    return times


def _row(part: PartCost) -> tuple[str, ...]:
    sizes = (_size(size) if size else "-" for size in (part.weights, part.cache, part.transferred))
    seconds = "-" if part.seconds is None else f"{part.seconds * 1e3:.3g} ms"
    return part.part, part.device, str(part.calls), *sizes, seconds


def _size(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def part_of(variable: str, ops: Iterable[str] = ()) -> str:
    """Part of the model that a variable belongs to."""
    if "cos" in ops:
        return ATTENTION
    if "receive" in ops:
        return WAITING
    return next((part for part, pattern in _PARTS if pattern.search(variable)), OTHER)


def _add(parts: dict[tuple[str, str], PartCost], cost: PartCost) -> None:
    key = cost.device, cost.part
    old = parts.get(key)
    if old is not None:
        cost = replace(cost, **{name: getattr(old, name) + getattr(cost, name) for name in _SUMS})
    parts[key] = cost


class _Reader:
    """Counts the bytes that kernels of a region read."""

    def __init__(self, kernels: Mapping[str, KernelSpec], rows: int, cached: int, info: ModelInfo) -> None:
        self._kernels, self._rows, self._cached, self._info = kernels, rows, cached, info

    def costs(self, region: RegionSpec) -> Iterable[tuple[str, PartCost]]:
        """Part and bytes of each kernel call."""
        for command in region.commands:
            if isinstance(command, Dispatch):
                kernel = self._kernels[command.kernel]
                weights = sum(
                    self._weights(command, kernel, index)
                    for index, reference in enumerate(command.operands)
                    if reference.space == DIRECT
                )
                part = part_of(command.variable, kernel.ops)
                yield part, PartCost("", "", 1, weights, self._pages(region, command.operands))

    def _weights(self, command: Dispatch, kernel: KernelSpec, index: int) -> int:
        size, shape = int(command.operands[index].length), kernel.tensors[index].shape
        if _EXPERTS.search(command.variable) or EXPERT_SUM in kernel.ops:
            return int(size * min(1.0, self._rows * self._info.expert_share))
        if _GATHERS & set(kernel.ops) and shape and isinstance(shape[0], int) and shape[0] > self._rows:
            return size * self._rows // (self._info.vocabulary or shape[0])
        return size

    def _pages(self, region: RegionSpec, operands: Iterable[Reference]) -> int:
        """Bytes of the keys and values that attention reads, and of states."""
        slots = [region.slots[each.index] for each in operands if each.space == SLOT]
        is_window = any(slot.name == TABLES[True] for slot in slots)
        tables = [slot for slot in slots if slot.name in TABLES.values()]
        total = 0
        for slot in slots:
            if slot.name.startswith("pages_") and slot.shape:
                count, *sizes = slot.shape
                if len(sizes) == 1:  # states, which are read and written
                    total += 2 * int(sizes[0]) * bytes_of(slot.dtype) * self._rows
                    continue
                sequences = int(tables[0].shape[0]) if tables and tables[0].shape else self._rows
                tokens = count // sequences * PAGE if isinstance(count, int) else self._cached + 1
                positions = min(self._cached + 1, self._window(slot.name, is_window, tokens))
                total += prod(map(int, sizes)) * bytes_of(slot.dtype) // PAGE * positions * self._rows
        return total

    def _window(self, pages: str, is_window: bool, tokens: int) -> int:
        """Maximum number of positions that a layer sees."""
        layer = int(pages.removeprefix("pages_"))
        windows = self._info.windows
        if layer < len(windows):
            return windows[layer] or self._cached + 1
        return tokens if is_window else self._cached + 1
