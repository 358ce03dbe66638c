"""The cost of a token: for each device and part of a model the bytes that a decode step reads, transfers, and times.

All of it is in the metadata of an executable: command buffers name the constants and the pages of the cache that each
kernel reads. Times come from a profile (`CompiledModel.token_cost`), or from a cost model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..artifact.commands import DIRECT, SLOT, Dispatch, KernelSpec, Reference, RegionSpec, SingleCall
from ..display.text import text_table
from ..encoding.pages import PAGE, TABLES
from ..vm.profile import TO_DEVICE, Profile

EMBEDDING, ATTENTION, FEED_FORWARD, LOGITS, OTHER = "embedding", "attention", "feed-forward", "logits", "other"
TRANSFERS = "transfers"

_DECODE = re.compile(r"decode_(\d+)")
# The part of a variable, by what its name holds; the first that fits. Files in GGUF and in ONNX name layers apart.
_PARTS = (
    (EMBEDDING, re.compile(r"token_embd|embed_tokens")),
    (LOGITS, re.compile(r"^output|last_row|lm_head")),
    (ATTENTION, re.compile(r"attn|attention|rope|rotary|^lv\d*$")),
    (FEED_FORWARD, re.compile(r"ffn|ffw|mlp|moe|experts")),
)
_EXPERTS = re.compile(r"_exps|moe|experts")
# Kernels that read some rows of a table.
_GATHERS = {"block_rows", "take"}


@dataclass(frozen=True)
class PartCost:
    """One part of a decode step on one device.

    Attributes
    ----------
    part : str
        "embedding", "attention", "feed-forward", "logits", "other", or "transfers" to the device.
    device : str
    calls : int
        Number of calls of kernels, or of transfers.
    weights, cache, transferred : int
        Bytes of weights and of the cache that are read, and bytes that are brought from other devices.
    seconds : float or None
        Measured or estimated; None where that is not known of the part alone.
    """

    part: str
    device: str
    calls: int = 0
    weights: int = 0
    cache: int = 0
    transferred: int = 0
    seconds: float | None = None


@dataclass(frozen=True)
class StepTime:
    """A measured decode step.

    Attributes
    ----------
    seconds : float
        The median of whole steps, from tokens to logits.
    kernels : float
        The median inside of command buffers, other kernels and transfers.
    """

    seconds: float
    kernels: float

    @property
    def outside(self) -> float:
        """The share of the step that is spent outside of kernels and transfers, 0 to 1."""
        return max(0.0, 1.0 - self.kernels / self.seconds) if self.seconds else 0.0


@dataclass(frozen=True)
class TokenCost:
    """Cost of a decode step, by parts.

    Attributes
    ----------
    function : str
        The function that was looked at, ``decode_1`` where there is one.
    rows : int
        Texts that the step writes a token of.
    cached : int
        Tokens of each text that the cache holds.
    parts : tuple of PartCost
        In the order of devices, and of a token's way through the model.
    buffers : mapping of str to tuple of str
        Device to the command buffers that a step runs there, in order.
    outside : int
        Kernel calls of the step that are in no command buffer.
    step : StepTime or None
        Measured.
    is_estimate : bool
        Whether the parts' times are those of a cost model.
    """

    function: str
    rows: int
    cached: int
    parts: tuple[PartCost, ...]
    buffers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outside: int = 0
    step: StepTime | None = None
    is_estimate: bool = False

    def of_device(self, device: str) -> PartCost:
        """The sum of a device's parts; its time is None where that of a part is not known."""
        mine = [part for part in self.parts if part.device == device]
        times = [part.seconds for part in mine]
        known = None if None in times else sum(time for time in times if time is not None)
        sums = {
            name: sum(getattr(part, name) for part in mine) for name in ("calls", "weights", "cache", "transferred")
        }
        return PartCost("all", device, seconds=known, **sums)

    @property
    def head(self) -> tuple[str, ...]:
        """The columns of `body`."""
        return "part", "device", "calls", "weights", "cache", "transferred", "estimated" if self.is_estimate else "time"

    def body(self) -> list[tuple[str, ...]]:
        """The parts as a table, each device's sum behind its parts."""
        found = []
        for device in dict.fromkeys(part.device for part in self.parts):
            mine = [part for part in self.parts if part.device == device]
            found += [_row(part) for part in ([*mine, self.of_device(device)] if len(mine) > 1 else mine)]
        return found

    def lines(self) -> list[str]:
        """The command buffers of a step, and where its time goes."""
        buffers = [
            f"{len(names)} command buffer{'s' if len(names) > 1 else ''} on {device} ({', '.join(names)})"
            for device, names in self.buffers.items()
        ]
        outside = f"; {self.outside} kernel calls outside" if self.outside else ", and no kernel call outside"
        read = sum(part.weights + part.cache for part in self.parts)
        found = [
            f"A decode step of {self.rows} text{'s' if self.rows > 1 else ''} behind {self.cached:,} tokens reads "
            f"{_size(read)}. It is {' and '.join(buffers)}{outside}."
        ]
        if self.step is not None:
            inside, outside_share = 1 - self.step.outside, self.step.outside
            found.append(
                f"Measured: a step takes {self.step.seconds * 1e3:.3g} ms, of which {inside:.1%} inside of command "
                f"buffers and transfers, and {outside_share:.1%} outside."
            )
        return found

    def __str__(self) -> str:
        return "\n".join([text_table(self.head, self.body(), left=2), *self.lines()])

    def to_json(self) -> dict[str, Any]:
        """As JSON data."""
        found = asdict(self)
        if self.step is not None:
            found["step"]["outside"] = self.step.outside
        return found


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a language model that command buffers do not tell.

    Attributes
    ----------
    windows : tuple of int
        Positions that each layer sees, 0 for all; () where it is not known: then as many as its pages hold.
    expert_share : float
        The part of the experts that a row uses; 1 for a model that has none.
    vocabulary : int
        Rows of the table of embeddings; 0 where it is not known: then as many as the panels that the table is stored
        in.
    """

    windows: tuple[int, ...] = ()
    expert_share: float = 1.0
    vocabulary: int = 0


def decode_function(regions: Iterable[RegionSpec]) -> str | None:
    """The decode function with the fewest rows; None if the command buffers are no language model's."""
    found = {}
    for region in regions:
        match = _DECODE.fullmatch(region.function)
        if match and any(slot.name.startswith("pages_") for slot in region.slots):
            found[region.function] = int(match[1])
    return min(found, key=lambda name: found[name], default=None)


def token_cost(
    regions: Sequence[RegionSpec],
    kernels: Mapping[str, KernelSpec],
    devices: Sequence[str],
    entries: Iterable[Mapping[str, Any]],
    single_calls: Iterable[SingleCall] = (),
    cached: int = 512,
    info: ModelInfo | None = None,
) -> TokenCost | None:
    """The cost of a decode step, without times.

    Parameters
    ----------
    regions, kernels, single_calls : as in the metadata of an executable
    devices : sequence of str
        Names, in the order of the manifest.
    entries : iterable of mapping
        The placement report's, of which transfers are read.
    cached : int
        Tokens of each text that the cache holds.
    info : ModelInfo, optional

    Returns
    -------
    TokenCost or None
        None if the model is no language model with a cache of pages.

    Examples
    --------
    >>> token_cost([], {}, [], []) is None
    True
    """
    function = decode_function(regions)
    if function is None:
        return None
    rows = int(function.removeprefix("decode_"))
    mine = [region for region in regions if region.function == function]
    reader = _Reader(kernels, rows, cached, info or ModelInfo())
    parts: dict[tuple[str, str], PartCost] = {}
    for region in mine:
        device = devices[region.device]
        for part, cost in reader.costs(region):
            _add(parts, replace(cost, part=part, device=device))
    for entry in entries:
        if entry["kind"] == "transfer" and entry["function"] == function:
            _add(parts, PartCost(TRANSFERS, str(entry["device"]), 1, transferred=int(entry["bytes"] or 0)))
    names = list(dict.fromkeys([*devices, *(device for device, _ in parts)]))
    order = (EMBEDDING, ATTENTION, FEED_FORWARD, LOGITS, OTHER, TRANSFERS)
    in_order = sorted(parts.values(), key=lambda cost: (names.index(cost.device), order.index(cost.part)))
    buffers = {name: tuple(r.name for r in mine if devices[r.device] == name) for name in devices}
    outside = sum(call.function == function for call in single_calls)
    return TokenCost(function, rows, cached, tuple(in_order), {n: b for n, b in buffers.items() if b}, outside)


def with_estimate(cost: TokenCost, seconds_of: Callable[[PartCost], float]) -> TokenCost:
    """With the times that a function expects of parts."""
    parts = tuple(replace(part, seconds=seconds_of(part)) for part in cost.parts)
    return replace(cost, parts=parts, is_estimate=True)


def with_times(cost: TokenCost, seconds: Mapping[tuple[str, str], float], step: StepTime) -> TokenCost:
    """With measured times of parts, by device and part."""
    parts = tuple(replace(part, seconds=seconds.get((part.device, part.part))) for part in cost.parts)
    return replace(cost, parts=parts, step=step, is_estimate=False)


def times_of(
    profile: Profile, regions: Sequence[RegionSpec], kernels: Mapping[str, KernelSpec], devices: Sequence[str]
) -> dict[tuple[str, str], float]:
    """Seconds of each device and part in a profile; a command buffer that ran as a whole has none."""
    found: dict[tuple[str, str], float] = {}
    device_of = {region.name: region.device for region in regions}
    for command in profile.commands:
        # Devices of equal targets share kernels, so that a kernel does not tell the device.
        key = devices[device_of[command.region]], part_of(command.variable, kernels[command.kernel].ops)
        found[key] = found.get(key, 0.0) + command.microseconds * 1e-6
    for row in profile.rows:
        if row.symbol == TO_DEVICE:
            found[row.device, TRANSFERS] = row.microseconds * 1e-6
    return found


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
    """The part of a model that a variable belongs to."""
    if "cos" in ops:
        return ATTENTION
    return next((part for part, pattern in _PARTS if pattern.search(variable)), OTHER)


def _add(parts: dict[tuple[str, str], PartCost], cost: PartCost) -> None:
    key = cost.device, cost.part
    old = parts.get(key)
    if old is not None:
        sums = {name: getattr(old, name) + getattr(cost, name) for name in ("calls", "weights", "cache", "transferred")}
        cost = replace(cost, **sums)
    parts[key] = cost


class _Reader:
    """Reads of weights and cache by the kernels of a region."""

    def __init__(self, kernels: Mapping[str, KernelSpec], rows: int, cached: int, info: ModelInfo) -> None:
        self._kernels, self._rows, self._cached, self._info = kernels, rows, cached, info

    def costs(self, region: RegionSpec) -> Iterable[tuple[str, PartCost]]:
        """The part and the bytes of each kernel call."""
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
        if _EXPERTS.search(command.variable):
            return int(size * min(1.0, self._rows * self._info.expert_share))
        if _GATHERS & set(kernel.ops) and shape and isinstance(shape[0], int) and shape[0] > self._rows:
            return size * self._rows // (self._info.vocabulary or shape[0])
        return size

    def _pages(self, region: RegionSpec, operands: Iterable[Reference]) -> int:
        """Bytes of the keys and values that are seen."""
        slots = [region.slots[each.index] for each in operands if each.space == SLOT]
        is_window = any(slot.name == TABLES[True] for slot in slots)
        tables = [slot for slot in slots if slot.name in TABLES.values()]
        total = 0
        for slot in slots:
            if slot.name.startswith("pages_") and slot.shape:
                count = int(slot.shape[0])
                texts = int(tables[0].shape[0]) if tables and tables[0].shape else self._rows
                seen = min(self._cached + 1, self._window(slot.name, is_window, count // texts * PAGE))
                total += int(slot.nbytes) // (count * PAGE) * seen * self._rows
        return total

    def _window(self, pages: str, is_window: bool, tokens: int) -> int:
        """The most tokens that a layer sees."""
        layer = int(pages.removeprefix("pages_"))
        windows = self._info.windows
        return windows[layer] or self._cached + 1 if layer < len(windows) else tokens if is_window else self._cached + 1
