"""Search for the assignment of a language model's parts to devices that takes the least time per decoded token.

Parts run one after the other, so that the best plans up to a part follow from those up to the part before: for each
device that holds the activations, the plans that no other beats in time and in bytes on the devices with limits. Their
number is bounded: of many plans with nearly the same bytes, only the fastest is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from ..auto.cost_model import CostModel
from .part_costs import Part, Step, crossing_seconds, resident_bytes_of, step_seconds

_MAX_LABELS = 4096
"""Maximum number of unfinished plans that are kept for a device."""


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


@dataclass(frozen=True)
class PlanSearch:
    """Plans of a model on some devices.

    Attributes
    ----------
    parts : sequence of Part
        Parts in execution order: embeddings, layers, output.
    costs : CostModel
    row_bytes : float
        Bytes of a row of activations.
    step : Step
        The decode step whose time is minimized.
    """

    parts: Sequence[Part]
    costs: CostModel
    row_bytes: float
    step: Step

    def plan(self, devices: Sequence[int]) -> LayerPlan:
        """The plan with these devices."""
        seconds = step_seconds(self.parts, devices, self.costs, self.row_bytes, self.step)
        return LayerPlan(tuple(devices), seconds, resident_bytes_of(self.parts, devices))

    def best(self, limits: Mapping[int, float]) -> LayerPlan | None:
        """The fastest plan with at most these bytes on devices, or None if nothing fits."""
        fronts = [_Front(self, first, limits) for first in range(len(self.costs.devices))]
        front = min(fronts, key=lambda front: front.fastest)
        if not math.isfinite(front.fastest):
            return None
        plan = self.plan(front.devices())
        grouped = self.plan(self._grouped(plan.devices))
        fits = all(grouped.resident_bytes.get(device, 0.0) <= limit for device, limit in limits.items())
        return grouped if fits and grouped.seconds <= plan.seconds * (1 + 1e-9) else plan

    def fastest_by_limit(self, device: int, sizes: Sequence[float], limits: Mapping[int, float]) -> list[float]:
        """Seconds of the fastest plan for each limit of one device, with those of the others; infinite if none fits."""
        limits = {**limits, device: max(sizes)}
        fronts = [_Front(self, first, limits) for first in range(len(self.costs.devices))]
        return [min(front.fastest_within(device, size) for front in fronts) for size in sizes]

    @cached_property
    def seconds(self) -> np.ndarray:
        """Time of each part on each device."""
        devices = range(len(self.costs.devices))
        return np.array([[part.seconds(device, self.costs, self.step) for device in devices] for part in self.parts])

    @cached_property
    def transfer_seconds(self) -> np.ndarray:
        """Time of a transfer from each device, the last row being the host, to each device."""
        devices = range(len(self.costs.devices))
        return np.array(
            [
                [crossing_seconds(self.costs, source, target, self.row_bytes) for target in devices]
                for source in (*devices, self.costs.host)
            ]
        )

    def _grouped(self, devices: Sequence[int]) -> list[int]:
        """The same devices with equal layers sorted, so that those on the same device follow each other."""
        layers = [list(group) for _, group in groupby(range(1, len(self.parts) - 1), lambda i: self.parts[i].layer)]
        by_kind: dict[tuple[object, ...], list[list[int]]] = {}
        for layer in layers:
            kind = tuple((self.parts[i].name, self.parts[i].resident_bytes, self.parts[i].window) for i in layer)
            by_kind.setdefault(kind, []).append(layer)
        result = list(devices)
        for same in by_kind.values():
            choices = sorted([[devices[i] for i in layer] for layer in same])
            for layer, choice in zip(same, choices, strict=True):
                for index, device in zip(layer, choice, strict=True):
                    result[index] = device
        return result


@dataclass(frozen=True)
class _Labels:
    """Unfinished plans that end on one device.

    Attributes
    ----------
    seconds : array
        Times, ascending.
    sizes : array
        Bytes on each limited device, (plans, devices).
    origins : array
        Device on which the plan before ended, its index there, and the device of the last part, (plans, 3).
    """

    seconds: np.ndarray
    sizes: np.ndarray
    origins: np.ndarray


class _Front:
    """The best plans whose embeddings are on one device."""

    def __init__(self, search: PlanSearch, first: int, limits: Mapping[int, float]) -> None:
        self._limited = sorted(limits)
        self._limits = np.array([float(limits[device]) for device in self._limited])
        self._parts, self._first = search.parts, first
        count = len(search.costs.devices)
        start = search.seconds[0, first] + search.transfer_seconds[search.costs.host, first]
        size = self._sizes(search.parts[0], first)
        states = [_empty(len(self._limits)) for _ in range(count)]
        states[first] = self._thinned([_Labels(np.array([start]), size[None], np.array([[0, 0, first]]))])
        self._history = [states]
        for part, seconds in zip(search.parts[1:], search.seconds[1:], strict=True):
            states = self._extended(states, part, seconds, search.transfer_seconds)
            self._history.append(states)

    @property
    def fastest(self) -> float:
        """Time of the fastest plan; infinite if none fits."""
        return min((float(labels.seconds[0]) for labels in self._history[-1] if len(labels.seconds)), default=math.inf)

    def fastest_within(self, device: int, size: float) -> float:
        """Time of the fastest plan with at most `size` bytes on a limited device."""
        column = self._limited.index(device)
        times = [labels.seconds[labels.sizes[:, column] <= size] for labels in self._history[-1]]
        return min((float(found[0]) for found in times if len(found)), default=math.inf)

    def devices(self) -> list[int]:
        """Devices of the parts of the fastest plan."""
        last = self._history[-1]
        state = min((s for s, labels in enumerate(last) if len(labels.seconds)), key=lambda s: last[s].seconds[0])
        index, devices = 0, []
        for states in reversed(self._history):
            state, index, device = (int(number) for number in states[state].origins[index])
            devices.append(device)
        return devices[::-1]

    def _sizes(self, part: Part, device: int) -> np.ndarray:
        """Bytes of a part on each limited device."""
        size = part.resident_bytes[device]
        table = self._parts[0]
        if part.name == "output" and table.shared and table.shared[device] and device == self._first:
            size -= table.resident_bytes[device]
        return np.array([size if limited == device else 0.0 for limited in self._limited])

    def _extended(
        self, states: Sequence[_Labels], part: Part, seconds: np.ndarray, transfers: np.ndarray
    ) -> list[_Labels]:
        """The plans with one part more."""
        found: list[list[_Labels]] = [[] for _ in states]
        for source, labels in enumerate(states):
            for device in range(len(states)):
                time = seconds[device] + transfers[source, device]
                if part.name == "experts":
                    time += transfers[device, source]
                count = len(labels.seconds)
                origins = np.column_stack([np.full(count, source), np.arange(count), np.full(count, device)])
                more = _Labels(labels.seconds + time, labels.sizes + self._sizes(part, device), origins)
                found[source if part.name == "experts" else device].append(more)
        return [self._thinned(several) for several in found]

    def _thinned(self, several: Iterable[_Labels]) -> _Labels:
        """Plans that fit and that no other beats, ascending by time."""
        seconds = np.concatenate([labels.seconds for labels in several])
        sizes = np.concatenate([labels.sizes for labels in several])
        origins = np.concatenate([labels.origins for labels in several])
        kept = np.flatnonzero(np.isfinite(seconds) & (sizes <= self._limits).all(axis=1))
        kept = kept[np.argsort(seconds[kept], kind="stable")]
        if not len(self._limits):
            kept = kept[:1]
        elif len(self._limits) == 1:
            smallest = np.minimum.accumulate(np.concatenate([[np.inf], sizes[kept, 0]]))
            kept = kept[sizes[kept, 0] < smallest[:-1]]
        if len(kept) > _MAX_LABELS:
            cells = (sizes[kept] / np.maximum(self._limits, 1.0) * _MAX_LABELS ** (1 / len(self._limits))).astype(int)
            kept = kept[np.sort(np.unique(cells, axis=0, return_index=True)[1])]
        return _Labels(seconds[kept], sizes[kept], origins[kept])


def _empty(limits: int) -> _Labels:
    return _Labels(np.empty(0), np.empty((0, limits)), np.empty((0, 3), int))
