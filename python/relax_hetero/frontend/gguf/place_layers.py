"""``placement="auto"`` of a language model: which device has which layers, or which parts of them.

A token's time is that of reading weights and cache, of starting kernels, and of bringing a row of activations from one
device to the next; devices take turns. So a model that fits into the memory of its fastest device goes there as a
whole. What does not fit is placed in one of two ways, whichever is faster: layers in a row on each device, as llama.cpp
splits models, or attention and cache of all layers on one device and the feed-forward parts of the last ones on
another. The second is faster where feed-forward parts are experts, of which a token reads a few (KTransformers). What
a tensor takes differs by device: `held_bytes` counts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import Any

import tvm

from ...encoding.block_formats import FILE_FORMATS, BlockFormat
from ...encoding.block_panels import Panels
from ...encoding.block_weights import BlockLayout, Fragments
from ...encoding.pages import page_bytes
from ...encoding.resolver import resolver_or_default
from ...errors import PlacementError
from ...target.vdevice import device_name
from ..auto.cost_model import CostModel
from ..auto.placement_reasons import choice, memory_limited
from ..paged_cache import PagedCache
from .file import FileTensor, GgufFile
from .hyperparameters import Hyperparameters
from .weights import is_plain

# How many bytes of a device's memory the tensors of a GGUF file take, as its kernels read them.
#
# A CPU keeps all weights in the file's bits, and experts too. A GPU keeps 5 and 6 bits in bytes, has scales and
# minimums for blocks of its own, has matrices of plain numbers as 16-bit floats, and experts as numbers of float32.

COPIED_EXPERTS = 3
"""Times that an expert's numbers go to or from memory where they are copied for the rows that chose them."""


def layouts_of(vdevices: Sequence[tvm.relax.VDevice]) -> list[BlockLayout | None]:
    """How each device keeps weights in blocks; None where it takes numbers."""
    return [resolver_or_default(vdevice.target).block_layout(vdevice.target) for vdevice in vdevices]


def resident_bytes(tensor: FileTensor, layout: BlockLayout | None) -> float:
    """Bytes of a tensor on a device with a layout."""
    form = FILE_FORMATS.get(tensor.type.lower())
    shape = tensor.shape
    if isinstance(layout, Fragments) and len(shape) == 2 and (tensor.type == "F32" or is_plain(tensor.type)):
        return 2.0 * prod(shape)
    if form is None or len(shape) < 2 or layout is None or not layout.fits(form, shape[-1]):
        return 4.0 * prod(shape)
    matrices, columns = prod(shape[:-2]), shape[-2]
    if isinstance(layout, Panels):
        return float(sum(map(prod, layout.shapes(columns, form, shape[-1], matrices))))
    if matrices > 1:
        return 4.0 * prod(shape)
    return _bytes_of_fragments(layout, form, columns, shape[-1])


def _bytes_of_fragments(layout: Fragments, form: BlockFormat, columns: int, depth: int) -> float:
    words, *others = layout.shapes(columns, form, depth)
    # Scales of K types are products, which float16 cannot hold.
    size = 4 if form.scale == "int8" else 2
    return float(4 * prod(words) + size * sum(map(prod, others)))


def bytes_read(tensor: FileTensor, layout: BlockLayout | None, share: float) -> float:
    """Bytes that a token reads of a tensor of experts, `share` of which it chooses; of others, where it is 1."""
    copies = COPIED_EXPERTS if len(tensor.shape) > 2 and not isinstance(layout, Panels) else 1
    return copies * share * resident_bytes(tensor, layout)


_KERNELS = {"attn": 5, "ffn": 4, "embd": 1, "output": 2}
"""Kernels of a part, about."""

_MAX_ORDERED_DEVICES = 5
"""Devices whose orders are all tried; of more, the order of the list and its reverse."""


@dataclass(frozen=True)
class Part:
    """Work that is placed as one.

    Attributes
    ----------
    name : str
        "embd", "attn", "ffn" or "output".
    layer : int
    resident_bytes, read : tuple of float
        Bytes that it keeps in memory, and that it reads for a token, on each device.
    shared : tuple of bool
        Devices on which the output product reads the very bytes of a table of tokens; none where it is another.
    """

    name: str
    layer: int
    resident_bytes: tuple[float, ...]
    read: tuple[float, ...]
    shared: tuple[bool, ...] = ()

    def patterns(self, model: Hyperparameters, cache: PagedCache) -> list[str]:
        """Patterns of the names of its variables, each of which some variable has."""
        if self.name == "embd":
            return ["token_embd*"]
        if self.name == "output":
            return ["output*", *([] if cache.all_logits else ["last_row*"])]
        prefix = f"blk.{self.layer}."
        if self.name == "ffn":
            return [f"{prefix}*"]
        return [f"{prefix}attn*", *([f"{prefix}post_attention*"] if model.architecture.post_norms else [])]


@dataclass(frozen=True)
class LayerPlan:
    """Where each part goes, and what that is estimated to cost.

    Attributes
    ----------
    devices : tuple of int
        For each part its position in the list of vdevices.
    seconds : float
        Time of a decoded token.
    resident_bytes : mapping from int to float
        Bytes on each device.
    """

    devices: tuple[int, ...]
    seconds: float
    resident_bytes: Mapping[int, float]


def place_layers(
    file: GgufFile,
    model: Hyperparameters,
    cache: PagedCache,
    vdevices: Sequence[tvm.relax.VDevice],
    costs: CostModel,
    limits: Mapping[int, int],
) -> tuple[list[tuple[str, str]], dict[str, str], dict[str, Any]]:
    """Placement rules of the plan with the least time for a token, the reason of each, and the plan's estimate.

    Parameters
    ----------
    file, model, cache : GgufFile, Hyperparameters, PagedCache
    vdevices : list of VDevice
    costs : CostModel
        Cost model of these devices.
    limits : mapping from int to int
        Bytes that a device may hold, by its position; others may hold any.

    Returns
    -------
    tuple of list, dict and dict
        Pairs of a pattern and a device; pattern -> what decided; what `AutoPlacement.to_json` gives for other models,
        of a decoded token.

    Raises
    ------
    PlacementError
        If the model does not fit; says what it needs.
    """
    parts = parts_of(file, model, cache, layouts_of(vdevices))
    plan = best_plan(parts, costs, limits, model.width * 4)
    if plan is None:
        has = ", ".join(
            f"{bytes_on(parts, index):,.0f} bytes on {device_name(vdevices[index], vdevices)}, where the limit is "
            f"{limit:,}"
            for index, limit in limits.items()
        )
        raise PlacementError(
            f"{file.path}: no split by layers or by parts fits the limits of the devices; all weights and the cache "
            f"would take {has}. Raise memory_limit, or take a smaller context or fewer slots"
        )
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    # Patterns of attention come before those of what is left of their layer.
    order = sorted(zip(parts, plan.devices, strict=True), key=lambda pair: pair[0].name == "ffn")
    rules, reasons = [], {}
    for part, device in order:
        reason = _reason(part, device, plan, costs, limits, names)
        for pattern in part.patterns(model, cache):
            rules.append((pattern, names[device]))
            reasons[pattern] = reason
    return rules, reasons, _estimate(parts, plan, costs, names, model.width * 4)


def _reason(
    part: Part, device: int, plan: LayerPlan, costs: CostModel, limits: Mapping[int, int], names: Sequence[str]
) -> str:
    """The reason why a part is on its device."""
    seconds = [_seconds(part, index, costs) for index in range(len(names))]
    faster = sorted((index for index in range(len(names)) if seconds[index] < seconds[device]), key=seconds.__getitem__)
    if not faster:
        return choice("no device is faster", seconds, device, names)
    for other in faster:
        free = limits.get(other, math.inf) - plan.resident_bytes.get(other, 0.0)
        if part.resident_bytes[other] > free:
            limit = memory_limited(names[other], limits[other], free, part.resident_bytes[other])
            return choice(f"the memory of {names[other]} is too small", seconds, device, names, limit)
    return choice("staying saves transfers of activations", seconds, device, names)


def _estimate(
    parts: Sequence[Part], plan: LayerPlan, costs: CostModel, names: Sequence[str], row_bytes: int
) -> dict[str, Any]:
    alone = {name: _plan(parts, (index,) * len(parts), costs, row_bytes).seconds for index, name in enumerate(names)}
    busy = dict.fromkeys(names, 0.0)
    for part, device in zip(parts, plan.devices, strict=True):
        busy[names[device]] += _seconds(part, device, costs)
    return {
        "objective": "latency",
        "seconds": plan.seconds,
        "busy_seconds": busy,
        "single_device_seconds": alone,
        "assumed_sizes": {},
        "figures": costs.figures,
    }


def parts_of(
    file: GgufFile, model: Hyperparameters, cache: PagedCache, layouts: Sequence[BlockLayout | None]
) -> list[Part]:
    """The parts of a model in the order of a token's way; a layout for each device."""

    def of_each(tensors: Sequence[FileTensor], plus: float = 0.0) -> tuple[float, ...]:
        return tuple(plus + sum(resident_bytes(tensor, layout) for tensor in tensors) for layout in layouts)

    def read(tensors: Sequence[FileTensor], plus: float = 0.0) -> tuple[float, ...]:
        share = model.experts_used / model.experts if model.experts else 1.0
        return tuple(
            plus + sum(bytes_read(tensor, layout, share if len(tensor.shape) > 2 else 1.0) for tensor in tensors)
            for layout in layouts
        )

    table, is_tied = file.tensors["token_embd.weight"], "output.weight" not in file.tensors
    in_panels = tuple(is_tied and isinstance(layout, Panels) for layout in layouts)
    parts = [Part("embd", 0, of_each([table]), (0.0,) * len(layouts), in_panels)]
    for layer in range(model.layers):
        own = [tensor for name, tensor in file.tensors.items() if name.startswith(f"blk.{layer}.")]
        attention = [one for one in own if one.name.split(".")[2].startswith(("attn", "post_attention"))]
        rest = [one for one in own if one not in attention]
        pages = cache.pages(model.window_of(layer))
        kept = float(pages * page_bytes(model.kv_heads, model.size, cache.page_type))
        parts.append(Part("attn", layer, of_each(attention, kept), read(attention, kept / cache.sequences / 2)))
        parts.append(Part("ffn", layer, of_each(rest), read(rest)))
    output = [table if is_tied else file.tensors["output.weight"]]
    return [*parts, Part("output", 0, of_each(output), read(output))]


def bytes_on(parts: Sequence[Part], device: int) -> float:
    """Bytes of all parts that a device would hold."""
    return _plan_bytes(parts, (device,) * len(parts))[device]


def _plan_bytes(parts: Sequence[Part], devices: tuple[int, ...]) -> dict[int, float]:
    """Bytes that each device holds under a plan; a table that it shares with the output product counts once."""
    held = dict.fromkeys(devices, 0.0)
    for part, device in zip(parts, devices, strict=True):
        if not (part.shared and part.shared[device] and devices[-1] == device):
            held[device] += part.resident_bytes[device]
    return held


def best_plan(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int], row_bytes: int) -> LayerPlan | None:
    """The plan with the least time among those that fit; None where none does."""
    found = None
    for devices in _candidates(parts, costs, limits):
        plan = _plan(parts, devices, costs, row_bytes)
        if all(plan.resident_bytes.get(index, 0.0) <= limit for index, limit in limits.items()) and (
            found is None or plan.seconds < found.seconds
        ):
            found = plan
    return found


def _candidates(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Devices of all parts: layers in a row on each device, and feed-forward parts apart from attention."""
    count = len(costs.devices)
    every = range(count)
    orders = list(permutations(every)) if count <= _MAX_ORDERED_DEVICES else [tuple(every), tuple(reversed(every))]
    for order in orders:
        for used in range(1, count + 1):
            yield from _contiguous_plans(parts, order[:used], limits)
    layers = [part for part in parts if part.name == "ffn"]
    for first, second in permutations(every, 2):
        for kept in range(len(layers)):
            yield tuple(second if part.name == "ffn" and part.layer >= kept else first for part in parts)


def _contiguous_plans(
    parts: Sequence[Part], order: Sequence[int], limits: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Each device but the last takes as many whole layers as fit; of two devices, every cut."""
    if len(order) == 2:
        cuts = [index for index, part in enumerate(parts) if part.name in ("attn", "output")]
        for cut in cuts:
            yield tuple(order[index >= cut] for index in range(len(parts)))
        return
    devices, place, held = [], 0, 0.0
    for index, part in enumerate(parts):
        device = order[place]
        whole = part.resident_bytes[device] + (parts[index + 1].resident_bytes[device] if part.name == "attn" else 0.0)
        if part.name != "ffn" and held + whole > limits.get(device, math.inf) and place + 1 < len(order):
            place, held = place + 1, 0.0
        held += part.resident_bytes[order[place]]
        devices.append(order[place])
    yield tuple(devices)


def _plan(parts: Sequence[Part], devices: tuple[int, ...], costs: CostModel, row_bytes: int) -> LayerPlan:
    seconds, before = 0.0, costs.host
    for part, device in zip(parts, devices, strict=True):
        seconds += _seconds(part, device, costs)
        if device != before and (before, device) in costs.links:
            link = costs.links[before, device]
            seconds += link.latency + row_bytes / link.bandwidth
        before = device
    return LayerPlan(devices, seconds, _plan_bytes(parts, devices))


def _seconds(part: Part, device: int, costs: CostModel) -> float:
    """The time of a part for a token."""
    cost = costs.devices[device]
    return part.read[device] / cost.bandwidth + _KERNELS[part.name] * cost.launch
