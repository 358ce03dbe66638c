"""Search for the assignment of a language model's parts to devices that takes the least time per decoded token.

Parts run one after the other, so that the best plans up to a part follow from those up to the part before: for each
device that holds the activations, the plans that no other beats in time and in bytes on the devices with limits. Their
number is bounded: of many plans with nearly the same bytes, only the fastest and the smallest are kept.

With limits on several GPUs, plans with consecutive parts on each are searched, too: the bytes of one GPU at a time
decide, so that a plan that fits is not missed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, permutations

import numpy as np

from ..auto.cost_model import CostModel
from .part_costs import Part, Step, crossing_seconds, resident_bytes_of, step_seconds

_MAX_LABELS, _MIN_LABELS = 8192, 256
"""Number of unfinished plans that are kept: for all devices at most, and for each device at least."""

_MAX_ORDERED = 4
"""All orders of at most this number of devices are tried; for more devices, the given order and its reverse."""


@dataclass(frozen=True)
class LayerPlan:
    """Devices of all parts, and the estimated cost."""

    devices: tuple[int, ...]  # index of each part's vdevice
    seconds: float  # time per decoded token
    resident_bytes: Mapping[int, float]  # bytes on each device


@dataclass(frozen=True)
class PlanSearch:
    """Plans of a model on some devices."""

    parts: Sequence[Part]  # parts in execution order: embeddings, layers, output
    costs: CostModel
    row_bytes: float  # bytes of a row of activations
    step: Step  # the decode step whose time is minimized

    def plan(self, devices: Sequence[int]) -> LayerPlan:
        """The plan with these devices."""
        seconds = step_seconds(self.parts, devices, self.costs, self.row_bytes, self.step)
        return LayerPlan(tuple(devices), seconds, resident_bytes_of(self.parts, devices))

    def best(self, limits: Mapping[int, float]) -> LayerPlan | None:
        """The fastest plan with at most these bytes on devices, or None if nothing fits."""
        fronts = [front for order in self._orders(limits) for front in self._fronts(limits, order)]
        front = min(fronts, key=lambda front: front.fastest)
        if not math.isfinite(front.fastest):
            return None
        plan = self.plan(front.devices())
        grouped = self.plan(self._grouped(plan.devices))
        fits = all(grouped.resident_bytes.get(device, 0.0) <= limit for device, limit in limits.items())
        return grouped if fits and grouped.seconds <= plan.seconds * (1 + 1e-9) else plan

    def fastest_by_limit(self, device: int, sizes: Sequence[float], limits: Mapping[int, float]) -> list[float]:
        """Seconds of the fastest plan for each limit of one device, with those of the others; infinite if none fits."""
        fronts = list(self._fronts({**limits, device: max(sizes)}, ()))
        return [min(front.fastest_within(device, size) for front in fronts) for size in sizes]

    def _orders(self, limits: Mapping[int, float]) -> list[tuple[int, ...]]:
        """Orders of devices with limits besides the host; the first, without any, allows all plans."""
        several = [device for device in sorted(limits) if device != self.costs.host]
        if len(several) < 2:
            return [()]
        orders = permutations(several) if len(several) <= _MAX_ORDERED else [tuple(several), tuple(several[::-1])]
        # Devices that cost the same have the same plans.
        kinds = {device: (repr(self.costs.devices[device]), limits[device]) for device in several}
        return [(), *{tuple(kinds[device] for device in order): order for order in orders}.values()]

    def _fronts(self, limits: Mapping[int, float], order: tuple[int, ...]) -> Iterator[_Front]:
        """The best plans with any embeddings, and those with embeddings whose bytes the output may share."""
        yield _Front(self, limits, order, None)
        for device, is_shared in enumerate(self.parts[0].shared):
            if is_shared:
                yield _Front(self, limits, order, device)

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
    """Unfinished plans that end on one device."""

    seconds: np.ndarray  # times, ascending
    sizes: np.ndarray  # bytes on each limited device, (plans, devices)
    # Device on which the plan before ended, its index there, and the device of the last part, (plans, 3).
    origins: np.ndarray


class _Front:
    """The best plans with some limits."""

    def __init__(
        self,
        search: PlanSearch,
        limits: Mapping[int, float],  # device -> maximum of its bytes
        # Devices that are used one after the other; a plan does not return to one. Their bytes share a column of sizes.
        order: tuple[int, ...],
        # Device of the embeddings, with which the output may share their bytes; None: any device, without sharing.
        table: int | None,
    ) -> None:
        self._parts, self._order, self._table, self._all_limits = search.parts, order, table, limits
        self._limited = [device for device in sorted(limits) if device not in order]
        devices = range(len(search.costs.devices))
        # The device that holds the activations, and the position in the order.
        self._states = [
            (device, position)
            for position in range(max(1, len(order)))
            for device in devices
            if device not in order or order[position] == device
        ]
        self._max_labels = max(_MIN_LABELS, _MAX_LABELS // len(self._states))
        found: dict[tuple[int, int], list[_Labels]] = {}
        for device in devices if table is None else (table,):
            state = device, order.index(device) if device in order else 0
            time = search.seconds[0, device] + search.transfer_seconds[search.costs.host, device]
            size = self._sizes(search.parts[0], device)
            found[state] = [_Labels(np.array([time]), size[None], np.array([[0, 0, device]]))]
        self._history = [[self._thinned(found.get(state, []), state[1]) for state in self._states]]
        for part, seconds in zip(search.parts[1:], search.seconds[1:], strict=True):
            self._history.append(self._extended(self._history[-1], part, seconds, search.transfer_seconds))

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
        """Bytes of a part on each limited device, and on that of the order."""
        size = part.resident_bytes[device]
        if part.name == "output" and device == self._table:
            size -= self._parts[0].resident_bytes[device]
        sizes = [size if limited == device else 0.0 for limited in self._limited]
        return np.array([*sizes, *([size if device in self._order else 0.0] if self._order else [])])

    def _extended(
        self, labels_before: Sequence[_Labels], part: Part, seconds: np.ndarray, transfers: np.ndarray
    ) -> list[_Labels]:
        """The plans with one part more."""
        found: dict[tuple[int, int], list[_Labels]] = {state: [] for state in self._states}
        for index, ((source, position), labels) in enumerate(zip(self._states, labels_before, strict=True)):
            count = len(labels.seconds)
            for device in range(len(seconds)) if count else ():
                time, state, sizes = seconds[device] + transfers[source, device], (device, position), labels.sizes
                if part.name == "experts":
                    time, state = time + transfers[device, source], (source, position)
                if device in self._order and device != self._order[position]:
                    next_position = self._order.index(device)
                    # Activations on a device of the order have to leave it for good.
                    if next_position < position or state[0] == self._order[position]:
                        continue
                    state, sizes = (state[0], next_position), sizes * [*[1.0] * len(self._limited), 0.0]
                origins = np.column_stack([np.full(count, index), np.arange(count), np.full(count, device)])
                found[state].append(_Labels(labels.seconds + time, sizes + self._sizes(part, device), origins))
        return [self._thinned(found[state], state[1]) for state in self._states]

    def _thinned(self, several: Sequence[_Labels], position: int) -> _Labels:
        """Plans that fit and that no other beats, ascending by time."""
        limits = [float(self._all_limits[device]) for device in self._limited]
        limits += [float(self._all_limits[self._order[position]])] if self._order else []
        if not several:
            return _Labels(np.empty(0), np.empty((0, len(limits))), np.empty((0, 3), int))
        seconds = np.concatenate([labels.seconds for labels in several])
        sizes = np.concatenate([labels.sizes for labels in several])
        origins = np.concatenate([labels.origins for labels in several])
        kept = np.flatnonzero(np.isfinite(seconds) & (sizes <= limits).all(axis=1))
        kept = kept[np.argsort(seconds[kept], kind="stable")]
        if not limits:
            kept = kept[:1]
        elif len(limits) == 1:
            smallest = np.minimum.accumulate(np.concatenate([[np.inf], sizes[kept, 0]]))
            kept = kept[sizes[kept, 0] < smallest[:-1]]
        if len(kept) > self._max_labels:
            kept = kept[self._spread(sizes[kept] / np.maximum(limits, 1.0))]
        return _Labels(seconds[kept], sizes[kept], origins[kept])

    def _spread(self, fractions: np.ndarray) -> np.ndarray:
        """Indices of the first and of the smallest plan of each cell of a grid of sizes."""
        count = fractions.shape[1]
        edge = max(2, int((self._max_labels / 2) ** (1 / count)))
        cells = np.minimum((fractions * edge).astype(int), edge) @ (edge + 1) ** np.arange(count)
        by_size = np.argsort(fractions.sum(axis=1), kind="stable")
        smallest = by_size[np.unique(cells[by_size], return_index=True)[1]]
        return np.union1d(np.unique(cells, return_index=True)[1], smallest)
