"""``placement="auto"`` of a language model: assignment of layers, or parts of layers, to devices.

The time of a token is the sum of reading weights and cache, launching kernels, and transferring a row of activations
between devices, which work one after the other. So a model that fits into the memory of the fastest device is placed
there. Otherwise the faster of two splits is chosen: consecutive layers on each device, as in llama.cpp, or attention
and cache of all layers on one device and the feed-forward networks of the last layers on another. The latter is faster
if these are experts, of which a token reads a few (KTransformers).

The bytes of a tensor differ by device (`resident_bytes`). A CPU keeps all weights in the file's format. A GPU stores
the 6-bit scales of K formats in bytes, and keeps unquantized matrices as 16-bit floats. Matrices of heads
(`attn_k_b`, `attn_v_b`) are no experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

COPIED_EXPERTS = 3
"""Number of times that a chosen expert's matrix is read or written on a device that copies it for each row."""


def layouts_of(vdevices: Sequence[tvm.relax.VDevice]) -> list[BlockLayout | None]:
    """Layout of block-quantized weights on each device; None if it lacks kernels for them."""
    return [resolver_or_default(vdevice.target).block_layout(vdevice.target) for vdevice in vdevices]


def resident_bytes(tensor: FileTensor, layout: BlockLayout | None) -> float:
    """Bytes of a tensor on a device with a layout."""
    shape, form = tensor.shape, _kept_format(tensor, layout)
    if form is None or layout is None:
        return 4.0 * prod(shape)
    if isinstance(layout, Panels):
        return float(prod(layout.shapes(shape[-2], form, shape[-1], prod(shape[:-2]))[0]))
    if form.is_plain and (len(shape) == 2 or _is_of_heads(tensor)):
        return 2.0 * prod(shape)
    return float(layout.packed_bytes(shape[-2], form, shape[-1], prod(shape[:-2])))


def _is_of_heads(tensor: FileTensor) -> bool:
    return ".attn_" in tensor.name and len(tensor.shape) == 3


def _kept_format(tensor: FileTensor, layout: BlockLayout | None) -> BlockFormat | None:
    """Format of a tensor on a device; None for float32, as rows of embeddings are gathered, and in routers."""
    is_float32 = tensor.name.endswith(("token_embd.weight", "ffn_gate_inp.weight"))
    is_half = isinstance(layout, Fragments) and tensor.type == "F32" and not is_float32
    form, shape = FILE_FORMATS.get("f16" if is_half else tensor.type.lower()), tensor.shape
    if form is None or len(shape) < 2 or layout is None or not layout.fits(form, shape[-1]):
        return None
    return form if len(shape) == 2 or layout.fits_matrices(shape[-2]) else None


def bytes_read(tensor: FileTensor, layout: BlockLayout | None, share: float) -> float:
    """Bytes of a tensor that a token reads; `share` is the fraction of chosen experts, 1 for other tensors."""
    is_copied = len(tensor.shape) > 2 and _kept_format(tensor, layout) is None and not _is_of_heads(tensor)
    return (COPIED_EXPERTS if is_copied else 1) * share * resident_bytes(tensor, layout)


_KERNELS_PER_PART = {"attn": 5, "ffn": 4, "embd": 1, "output": 2}
"""Approximate number of kernels of a part."""

_MAX_ORDERED = 5
"""All orders of at most this number of devices are tried; for more devices, the given order and its reverse."""


@dataclass(frozen=True)
class Part:
    """Unit of placement: embeddings, the output, or the attention or feed-forward network of a layer.

    Attributes
    ----------
    name : str
        "embd", "attn", "ffn" or "output".
    layer : int
    resident_bytes, read : tuple of float
        Bytes in memory, and bytes that a token reads, on each device.
    shared : tuple of bool
        For the embeddings, True for each device on which the output product reads the same bytes.
    """

    name: str
    layer: int
    resident_bytes: tuple[float, ...]
    read: tuple[float, ...]
    shared: tuple[bool, ...] = ()

    def patterns(self, model: Hyperparameters, cache: PagedCache) -> list[str]:
        """Patterns that match the names of its variables; none is unused."""
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
    """Devices of all parts, and the estimated cost.

    Attributes
    ----------
    devices : tuple of int
        Index of each part's vdevice.
    seconds : float
        Time per decoded token.
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
    """Find the plan with the least time per token; return its rules, their reasons and the estimate.

    Parameters
    ----------
    file, model, cache : GgufFile, Hyperparameters, PagedCache
    vdevices : list of VDevice
    costs : CostModel
        Cost model of these devices.
    limits : mapping from int to int
        Index of a device -> maximum of resident bytes; other devices have no limit.

    Returns
    -------
    tuple of list, dict and dict
        Pairs of a pattern and a device; pattern -> reason; estimate of a decoded token in the form of
        `AutoPlacement.to_json`.

    Raises
    ------
    PlacementError
        If the model does not fit; the text has the required bytes.
    """
    parts = parts_of(file, model, cache, layouts_of(vdevices))
    plan = best_plan(parts, costs, limits, model.hidden_size * 4)
    if plan is None:
        needs = ", ".join(
            f"{bytes_on(parts, index):,.0f} bytes on {device_name(vdevices[index], vdevices)}, where the limit is "
            f"{limit:,}"
            for index, limit in limits.items()
        )
        raise PlacementError(
            f"{file.path}: no split by layers or by parts fits the limits of the devices; all weights and the cache "
            f"would take {needs}. Raise memory_limit, or take a smaller context or fewer slots"
        )
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    # The first match decides: patterns of attention precede those of the rest of a layer.
    order = sorted(zip(parts, plan.devices, strict=True), key=lambda pair: pair[0].name == "ffn")
    rules, reasons = [], {}
    for part, device in order:
        reason = _placement_reason(part, device, plan, costs, limits, names)
        for pattern in part.patterns(model, cache):
            rules.append((pattern, names[device]))
            reasons[pattern] = reason
    return rules, reasons, _estimate(parts, plan, costs, names, model.hidden_size * 4)


def _placement_reason(
    part: Part, device: int, plan: LayerPlan, costs: CostModel, limits: Mapping[int, int], names: Sequence[str]
) -> str:
    """The reason why a part is on its device."""
    seconds = [_part_seconds(part, index, costs) for index in range(len(names))]
    faster = sorted((i for i in range(len(names)) if seconds[i] < seconds[device]), key=seconds.__getitem__)
    if not faster:
        return choice("no device is faster", seconds, device, names)
    for candidate in faster:
        free = limits.get(candidate, math.inf) - plan.resident_bytes.get(candidate, 0.0)
        if part.resident_bytes[candidate] > free:
            limit = memory_limited(names[candidate], limits[candidate], free, part.resident_bytes[candidate])
            return choice(f"the memory of {names[candidate]} is too small", seconds, device, names, limit)
    return choice("staying saves transfers of activations", seconds, device, names)


def _estimate(
    parts: Sequence[Part], plan: LayerPlan, costs: CostModel, names: Sequence[str], row_bytes: int
) -> dict[str, Any]:
    alone = {name: _plan(parts, (i,) * len(parts), costs, row_bytes).seconds for i, name in enumerate(names)}
    busy_seconds = dict.fromkeys(names, 0.0)
    for part, device in zip(parts, plan.devices, strict=True):
        busy_seconds[names[device]] += _part_seconds(part, device, costs)
    return {
        "objective": "latency",
        "seconds": plan.seconds,
        "busy_seconds": busy_seconds,
        "single_device_seconds": alone,
        "assumed_sizes": {},
        "figures": costs.figures,
    }


def parts_of(
    file: GgufFile, model: Hyperparameters, cache: PagedCache, layouts: Sequence[BlockLayout | None]
) -> list[Part]:
    """The parts of a model in execution order; `layouts` has an entry for each device."""

    def bytes_per_device(tensors: Sequence[FileTensor], extra_bytes: float = 0.0) -> tuple[float, ...]:
        return tuple(extra_bytes + sum(resident_bytes(tensor, layout) for tensor in tensors) for layout in layouts)

    def read_bytes(tensors: Sequence[FileTensor], extra_bytes: float = 0.0) -> tuple[float, ...]:
        share = model.experts_used / model.experts if model.experts else 1.0
        return tuple(
            extra_bytes
            + sum(bytes_read(tensor, layout, share if "_exps." in tensor.name else 1.0) for tensor in tensors)
            for layout in layouts
        )

    table, is_tied = file.tensors["token_embd.weight"], "output.weight" not in file.tensors
    is_plain_table = table.type == "F32" or is_plain(table.type)  # which GPUs multiply in a layout of its own
    is_shared = tuple(
        is_tied and (isinstance(layout, Panels) or (layout is not None and not is_plain_table)) for layout in layouts
    )
    parts = [Part("embd", 0, bytes_per_device([table]), (0.0,) * len(layouts), is_shared)]
    for layer in range(model.layers):
        tensors = [tensor for name, tensor in file.tensors.items() if name.startswith(f"blk.{layer}.")]
        prefixes = ("attn", *(["post_attention"] if model.architecture.post_norms else []))
        attention = [tensor for tensor in tensors if tensor.name.split(".")[2].startswith(prefixes)]
        rest = [tensor for tensor in tensors if tensor not in attention]
        pages = cache.pages(model.window_of(layer))
        kv_bytes = float(pages * page_bytes(model.kv_heads, model.head_size, cache.page_type, model.has_shared_values))
        read = read_bytes(attention, kv_bytes / cache.sequences / 2)
        parts.append(Part("attn", layer, bytes_per_device(attention, kv_bytes), read))
        parts.append(Part("ffn", layer, bytes_per_device(rest), read_bytes(rest)))
    output = [replace(table, name="output.weight") if is_tied else file.tensors["output.weight"]]
    return [*parts, Part("output", 0, bytes_per_device(output), read_bytes(output))]


def bytes_on(parts: Sequence[Part], device: int) -> float:
    """Bytes of all parts on one device."""
    return _plan_bytes(parts, (device,) * len(parts))[device]


def _plan_bytes(parts: Sequence[Part], devices: tuple[int, ...]) -> dict[int, float]:
    """Resident bytes of each device; a table that embeddings and output share counts once."""
    resident = dict.fromkeys(devices, 0.0)
    for part, device in zip(parts, devices, strict=True):
        if not (part.shared and part.shared[device] and devices[-1] == device):
            resident[device] += part.resident_bytes[device]
    return resident


def best_plan(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int], row_bytes: int) -> LayerPlan | None:
    """The fastest plan among those that fit, or None."""
    best = None
    for devices in _candidates(parts, costs, limits):
        plan = _plan(parts, devices, costs, row_bytes)
        if all(plan.resident_bytes.get(index, 0.0) <= limit for index, limit in limits.items()) and (
            best is None or plan.seconds < best.seconds
        ):
            best = plan
    return best


def _candidates(parts: Sequence[Part], costs: CostModel, limits: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
    """Candidate plans: consecutive layers on each device, or feed-forward networks separate from attention."""
    count = len(costs.devices)
    devices = range(count)
    orders = list(permutations(devices)) if count <= _MAX_ORDERED else [tuple(devices), tuple(reversed(devices))]
    for order in orders:
        for num_devices in range(1, count + 1):
            yield from _contiguous_plans(parts, order[:num_devices], limits)
    layers = [part for part in parts if part.name == "ffn"]
    for first, second in permutations(devices, 2):
        for first_on_second in range(len(layers)):
            yield tuple(second if part.name == "ffn" and part.layer >= first_on_second else first for part in parts)


def _contiguous_plans(
    parts: Sequence[Part], order: Sequence[int], limits: Mapping[int, int]
) -> Iterator[tuple[int, ...]]:
    """Plans with consecutive layers: every cut for two devices; for more, each device takes the layers that fit."""
    if len(order) == 2:
        cuts = [index for index, part in enumerate(parts) if part.name in ("attn", "output")]
        for cut in cuts:
            yield tuple(order[index >= cut] for index in range(len(parts)))
        return
    devices, position, resident = [], 0, 0.0
    for index, part in enumerate(parts):
        device = order[position]
        layer_parts = parts[index : index + 2] if part.name == "attn" else [part]
        needed = sum(layer_part.resident_bytes[device] for layer_part in layer_parts)
        if part.name != "ffn" and resident + needed > limits.get(device, math.inf) and position + 1 < len(order):
            position, resident = position + 1, 0.0
        resident += part.resident_bytes[order[position]]
        devices.append(order[position])
    yield tuple(devices)


def _plan(parts: Sequence[Part], devices: tuple[int, ...], costs: CostModel, row_bytes: int) -> LayerPlan:
    seconds, previous = 0.0, costs.host
    for part, device in zip(parts, devices, strict=True):
        seconds += _part_seconds(part, device, costs)
        if device != previous and (previous, device) in costs.links:
            link = costs.links[previous, device]
            seconds += link.latency + row_bytes / link.bandwidth
        previous = device
    return LayerPlan(devices, seconds, _plan_bytes(parts, devices))


def _part_seconds(part: Part, device: int, costs: CostModel) -> float:
    """Time of a part for a token."""
    cost = costs.devices[device]
    return part.read[device] / cost.bandwidth + _KERNELS_PER_PART[part.name] * cost.launch
