"""``placement="auto"`` of a language model: which device has which layers, or which parts of them.

A token's time is that of reading weights and cache, of starting kernels, and of bringing a row of activations from one
device to the next; devices take turns. So a model that fits into the memory of its fastest device goes there as a
whole. What does not fit is placed in one of two ways, whichever is faster: layers in a row on each device, as llama.cpp
splits models, or attention and cache of all layers on one device and the feed-forward parts of the last ones on
another. The second is faster where feed-forward parts are experts, of which a token reads a few (KTransformers).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import tvm

from ...encoding.pages import page_bytes
from ...errors import PlacementError
from ...target.vdevice import device_name
from ..auto.cost_model import CostModel
from ..paged_cache import PagedCache
from .file import GgufFile
from .hyperparameters import Hyperparameters

_KERNELS = {"attn": 5, "ffn": 4, "embd": 1, "output": 2}
"""Kernels of a part, about."""

_MOST_ORDERED = 5
"""Devices whose orders are all tried; of more, the order of the list and its reverse."""


@dataclass(frozen=True)
class Part:
    """Work that is placed as one.

    Attributes
    ----------
    name : str
        "embd", "attn", "ffn" or "output".
    layer : int
    held, read : float
        Bytes that it keeps in memory, and that it reads for a token.
    """

    name: str
    layer: int
    held: float
    read: float

    @property
    def patterns(self) -> list[str]:
        """Of the names of its variables."""
        if self.name == "embd":
            return ["token_embd*"]
        if self.name == "output":
            return ["output*", "last_row*"]
        prefix = f"blk.{self.layer}."
        return [f"{prefix}attn*", f"{prefix}post_attention*"] if self.name == "attn" else [f"{prefix}*"]


@dataclass(frozen=True)
class LayerPlan:
    """Where each part goes, and what that is estimated to cost.

    Attributes
    ----------
    devices : tuple of int
        For each part its position in the list of vdevices.
    seconds : float
        Of a decoded token.
    held : mapping from int to float
        Bytes on each device.
    """

    devices: tuple[int, ...]
    seconds: float
    held: Mapping[int, float]


def place_layers(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevices: Sequence[tvm.relax.VDevice],
    costs: CostModel,
    limits: Mapping[int, int],
) -> list[tuple[str, str]]:
    """Placement rules of the plan with the least time for a token.

    Parameters
    ----------
    file, model, cache : GgufFile, Hyperparameters, PagedCache
    vdevices : list of VDevice
    costs : CostModel
        Of these devices.
    limits : mapping from int to int
        Bytes that a device may hold, by its position; others may hold any.

    Raises
    ------
    PlacementError
        If the model does not fit; says what it needs.
    """
    parts = parts_of(file, model, cache)
    plan = best_plan(parts, costs, limits, model.width * 4)
    if plan is None:
        held = sum(part.held for part in parts)
        has = ", ".join(f"{device_name(vdevices[index], vdevices)} {limit:,}" for index, limit in limits.items())
        raise PlacementError(
            f"{file.path}: weights and cache take {held:,.0f} bytes, and no split over the devices fits their limits: "
            f"{has}"
        )
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    # Patterns of attention come before those of what is left of their layer.
    order = sorted(zip(parts, plan.devices, strict=True), key=lambda pair: pair[0].name == "ffn")
    return [(pattern, names[device]) for part, device in order for pattern in part.patterns]


def parts_of(file: GgufFile, model: Hyperparameters, cache: PagedCache) -> list[Part]:
    """The parts of a model in the order of a token's way."""
    table = float(file.tensors["token_embd.weight"].data.nbytes)
    is_tied = "output.weight" not in file.tensors
    parts = [Part("embd", 0, 0.0 if is_tied else table, 0.0)]
    for layer in range(model.layers):
        bytes_of = {
            name.split(".")[2]: float(tensor.data.nbytes)
            for name, tensor in file.tensors.items()
            if name.startswith(f"blk.{layer}.")
        }
        attention = sum(size for name, size in bytes_of.items() if name.startswith(("attn", "post_attention")))
        pages = cache.pages(model.window_of(layer))
        kept = float(pages * page_bytes(model.kv_heads, model.size, cache.page_type))
        experts = sum(size for name, size in bytes_of.items() if name.endswith("_exps"))
        rest = sum(bytes_of.values()) - attention - experts
        used = experts * model.experts_used / model.experts if model.experts else 0.0
        parts.append(Part("attn", layer, attention + kept, attention + kept / cache.sequences / 2))
        parts.append(Part("ffn", layer, rest + experts, rest + used))
    output = table if is_tied else float(file.tensors["output.weight"].data.nbytes)
    return [*parts, Part("output", 0, output, output)]


def best_plan(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int], row_bytes: int) -> LayerPlan | None:
    """The plan with the least time among those that fit; None where none does."""
    found = None
    for devices in _candidates(parts, costs, limits):
        plan = _plan(parts, devices, costs, row_bytes)
        if all(plan.held.get(index, 0.0) <= limit for index, limit in limits.items()) and (
            found is None or plan.seconds < found.seconds
        ):
            found = plan
    return found


def _candidates(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Devices of all parts: layers in a row on each device, and feed-forward parts apart from attention."""
    count = len(costs.devices)
    every = range(count)
    orders = list(permutations(every)) if count <= _MOST_ORDERED else [tuple(every), tuple(reversed(every))]
    for order in orders:
        for used in range(1, count + 1):
            yield from _in_a_row(parts, order[:used], limits)
    layers = [part for part in parts if part.name == "ffn"]
    for first, second in permutations(every, 2):
        for kept in range(len(layers)):
            yield tuple(second if part.name == "ffn" and part.layer >= kept else first for part in parts)


def _in_a_row(parts: Sequence[Part], order: Sequence[int], limits: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Each device but the last takes as many whole layers as fit; of two devices, every cut."""
    if len(order) == 2:
        cuts = [index for index, part in enumerate(parts) if part.name in ("attn", "output")]
        for cut in cuts:
            yield tuple(order[index >= cut] for index in range(len(parts)))
        return
    devices, place, held = [], 0, 0.0
    for index, part in enumerate(parts):
        whole = part.held + (parts[index + 1].held if part.name == "attn" else 0.0)
        if part.name != "ffn" and held + whole > limits.get(order[place], math.inf) and place + 1 < len(order):
            place, held = place + 1, 0.0
        held += part.held
        devices.append(order[place])
    yield tuple(devices)


def _plan(parts: Sequence[Part], devices: tuple[int, ...], costs: CostModel, row_bytes: int) -> LayerPlan:
    seconds, held, before = 0.0, dict.fromkeys(devices, 0.0), costs.host
    for part, device in zip(parts, devices, strict=True):
        cost = costs.devices[device]
        seconds += part.read / cost.bandwidth + _KERNELS[part.name] * cost.launch
        if device != before and (before, device) in costs.links:
            link = costs.links[before, device]
            seconds += link.latency + row_bytes / link.bandwidth
        held[device] += part.held
        before = device
    return LayerPlan(devices, seconds, held)
