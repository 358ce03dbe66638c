"""Experts of a mixture over several devices, for ``placement="auto"``: the most frequent ones on the fastest device.

All else is on one device, the home. Pairs of a token and an expert are counted in use (``relax-hetero serve
--count-experts``); without counts, all experts are taken to be equally frequent. Experts are dealt in the order of the
time that they save for each byte, so that equal ones fill layer after layer: a layer whose experts are all at home
needs no transfers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import Any, TypeAlias

import numpy as np

from ...artifact.messages import AUTO
from ...artifact.regular_files import read_regular
from ...errors import FrontendError
from ..auto.cost_model import CostModel
from ..auto.placement_reasons import memory_limited
from .expert_rules import ranges
from .hyperparameters import Hyperparameters
from .part_costs import KERNELS, crossing_seconds

ExpertCountsSource: TypeAlias = "str | os.PathLike[str] | Mapping[Any, Sequence[float] | np.ndarray]"
"""File of ``relax-hetero serve --count-experts``, or number of a layer -> tokens that chose each expert."""

_MAX_COUNTS_BYTES = 1 << 26


@dataclass(frozen=True)
class ExpertLayer:
    """Experts of a layer, which have equal sizes."""

    layer: int
    # Bytes of an expert in the memory of each device, and the time of a token's product with it there.
    resident_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    pairs: tuple[float, ...]  # expected number of a token's pairs with each expert, 0 to 1


@dataclass(frozen=True)
class ExpertPlan:
    """Devices of all experts, and the time of a decoded token."""

    layers: Sequence[ExpertLayer]
    home: int  # index of the device of all else
    devices: Mapping[int, tuple[int, ...]]  # layer -> device of each expert
    order: tuple[int, ...]  # devices, the fastest first
    seconds: float  # time per token
    # Time of each device, and bytes in its memory.
    busy_seconds: tuple[float, ...]
    resident_bytes: tuple[float, ...]
    limits: Mapping[int, float]  # maximum of these bytes on some devices
    dense: Sequence[tuple[float, float]]  # bytes and seconds of all but the experts on each device

    @property
    def has_split_layers(self) -> bool:
        """True if experts of a layer are on several devices."""
        return any(len(set(owners)) > 1 for owners in self.devices.values())

    def rules(self, names: Sequence[str], memory: Mapping[int, int]) -> list[tuple[str, str, str]]:
        """Patterns, the names of their devices, and the reasons; `memory` has the limits that a user knows."""
        rules = []
        for layer in self.layers:
            owners = self.devices[layer.layer]
            for device in sorted(set(owners) - {self.home}):
                own = [expert for expert, owner in enumerate(owners) if owner == device]
                pattern = f"blk.{layer.layer}.ffn_*_exps[{','.join(ranges(own))}]"
                share = sum(layer.pairs[expert] for expert in own) / sum(layer.pairs)
                what = f"{len(own)} of {len(owners)} experts with {share:.0%} of the expected choices"
                faster = [other for other in self.order[: self.order.index(device)] if other in self.limits]
                reason = self._reason(what, faster, layer.resident_bytes, names, memory)
                rules.append((pattern, names[device], reason))
        needed, seconds = ([cost[i] for cost in self.dense] for i in (0, 1))
        faster = [other for other in self.limits if seconds[other] < seconds[self.home]]
        reason = self._reason("all but the experts", faster, needed, names, memory)
        return [*rules, ("*", names[self.home], reason)]

    def _reason(
        self, what: str, faster: Sequence[int], needed: Sequence[float], names: Sequence[str], memory: Mapping[int, int]
    ) -> str:
        """The reason why something is on none of the faster devices, where it needs so many bytes."""
        if not faster:
            return f"{AUTO}no device is faster: {what}"
        device = faster[-1]
        free = self.limits[device] - self.resident_bytes[device]
        limit = memory_limited(names[device], memory[device], free, needed[device])
        return f"{AUTO}the memory of {names[device]} is too small: {what}{limit}"


def place_experts(
    layers: Sequence[ExpertLayer],
    costs: CostModel,
    limits: Mapping[int, float],
    dense: Sequence[tuple[float, float]],
    row_bytes: float,
) -> ExpertPlan | None:
    """Find the home and the devices of experts with the least time per token, or None if nothing fits.

    `limits`: index of a device -> maximum of resident bytes, if it has one; `dense`: bytes and seconds of all but the
    experts on each device; `row_bytes`: bytes of a row of activations.
    """
    count = range(len(dense))
    order = sorted(count, key=lambda device: sum(layer.seconds[device] for layer in layers))
    plans = []
    for (home, (home_bytes, home_seconds)), by_layer in product(enumerate(dense), (True, False)):
        free = [limits.get(device, inf) - home_bytes * (device == home) for device in count]
        devices = _deal(layers, free, order, by_layer)
        if devices is None or free[home] < 0 or home_seconds == inf:
            continue
        plan = ExpertPlan(layers, home, devices, tuple(order), 0.0, (), (), limits, dense)
        plans.append(_with_costs(plan, costs, row_bytes))
    return min(plans, key=lambda plan: plan.seconds, default=None)


def _with_costs(plan: ExpertPlan, costs: CostModel, row_bytes: float) -> ExpertPlan:
    """The plan with its times and bytes."""
    busy, resident = [0.0] * len(costs.devices), [0.0] * len(costs.devices)
    transfers = crossing_seconds(costs, costs.host, plan.home, row_bytes)
    resident[plan.home], busy[plan.home] = plan.dense[plan.home]
    for layer in plan.layers:
        owners = plan.devices[layer.layer]
        for device in set(owners):
            own = [layer.pairs[expert] for expert, owner in enumerate(owners) if owner == device]
            busy[device] += sum(own) * layer.seconds[device] + KERNELS["experts"] * costs.devices[device].launch
            resident[device] += len(own) * layer.resident_bytes[device]
            for ends in ((plan.home, device), (device, plan.home)):
                transfers += crossing_seconds(costs, *ends, row_bytes)
    seconds = sum(busy) + transfers
    return replace(plan, seconds=seconds, busy_seconds=tuple(busy), resident_bytes=tuple(resident))


def _deal(
    layers: Sequence[ExpertLayer], free: Sequence[float], order: Sequence[int], by_layer: bool
) -> dict[int, tuple[int, ...]] | None:
    """Deal experts over devices; return the device of each expert, by layer, or None if memory is too small.

    `free`: bytes for experts on each device; `order`: devices, the fastest first; `by_layer`: whether experts of a
    layer are taken to be equally frequent, so that few layers are on several devices.
    """
    owners = {layer.layer: [-1] * len(layer.pairs) for layer in layers}
    for device, slower in zip(order, [*order[1:], order[-1]], strict=True):
        left, free_bytes = [], free[device]
        for layer in layers:
            # By a pair, for each byte.
            saved = (layer.seconds[slower] - layer.seconds[device]) / layer.resident_bytes[device]
            mean = sum(layer.pairs) / len(layer.pairs)
            for expert, pairs in enumerate(layer.pairs):
                if owners[layer.layer][expert] < 0:
                    left.append((saved * (mean if by_layer else pairs), layer, expert))
        for _, layer, expert in sorted(left, key=lambda item: -item[0]):
            if layer.resident_bytes[device] <= free_bytes:
                free_bytes -= layer.resident_bytes[device]
                owners[layer.layer][expert] = device
    if any(-1 in devices for devices in owners.values()):
        return None
    return {layer: tuple(devices) for layer, devices in owners.items()}


def expert_pairs(model: Hyperparameters, counts: Sequence[float] | None) -> tuple[float, ...]:
    """Expected number of a token's pairs with each expert of a layer; equal ones without counts."""
    counts = counts if counts and sum(counts) else (1.0,) * model.experts
    return tuple(min(1.0, model.experts_used * count / sum(counts)) for count in counts)


def read_expert_counts(source: ExpertCountsSource | None, model: Hyperparameters) -> dict[int, tuple[float, ...]]:
    """Counts of each layer's experts, of a file or a mapping; empty for None.

    Raises FrontendError if the file cannot be read, or the counts are not of this model.
    """
    if source is None:
        return {}
    if not isinstance(source, (str, os.PathLike, Mapping)):
        raise FrontendError(
            f"expert_counts: found {type(source).__name__}, expected a file, or a mapping from layers to a number for "
            "each expert"
        )
    where = "expert_counts" if isinstance(source, Mapping) else os.fspath(source)
    counts = source if isinstance(source, Mapping) else _read_counts(source)
    layers = range(model.dense_layers, model.layers) if model.experts else range(0)
    rows = {}
    for key, numbers in counts.items():
        try:
            layer = int(key)
        except (TypeError, ValueError):
            raise FrontendError(f"{where}: found {key!r}, expected the number of a layer") from None
        if layer not in layers:
            raise FrontendError(f"{where}: has counts of layer {layer}, which has no experts in this model")
        try:
            row = np.asarray(numbers, "float64")
            is_valid = row.shape == (model.experts,) and bool(((row >= 0) & (row < inf)).all())
        except (TypeError, ValueError):
            is_valid = False
        if not is_valid:
            raise FrontendError(
                f"{where}: found {str(numbers)[:80]} for layer {layer}, expected a number of at least 0 for each of "
                f"{model.experts} experts"
            )
        rows[layer] = tuple(row.tolist())
    return rows


def _read_counts(path: str | os.PathLike[str]) -> Mapping[Any, Any]:
    """The counts in a file, by layer."""
    try:
        counts: Any = json.loads(read_regular(path, _MAX_COUNTS_BYTES))["expert_counts"]
        return {**counts}
    except OSError as error:
        raise FrontendError(f"{os.fspath(path)}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FrontendError(
            f"{os.fspath(path)}: is not a file of expert counts: {error!r}; expected one that relax-hetero serve "
            "--count-experts wrote"
        ) from error
