"""`Sharding`: the part of a tensor that each device along an axis of a mesh has, in GSPMD's terms (arXiv:2105.04663).

A value has a sharding for each axis of its mesh, `Shardings`. Those of later axes are within the parts of earlier ones:
along an axis of the mesh, rules and exchanges see a tensor of a *local shape*, which earlier axes have made smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import tirx


@dataclass(frozen=True)
class Sharding:
    """How the devices along an axis of a mesh share a tensor."""

    # Axis that is split evenly, in the order of the devices; None: each device has all elements.
    axis: int | None = None
    # Extents of consecutive parts of the axis, of which each device has its share of every one, such as queries, keys
    # and values that one product computes; () if the axis is one segment.
    segments: tuple[int, ...] = ()
    is_partial: bool = False  # True if the tensor is the sum of what the devices have

    def __str__(self) -> str:
        if self.is_partial:
            return "P"
        return "R" if self.axis is None else f"S[{self.axis}]"

    @property
    def is_split(self) -> bool:
        """True if each device has a part of the elements."""
        return self.axis is not None

    def moved_to(self, axis: int | None) -> Sharding:
        """The same split of another axis; replicated for None."""
        return REPLICATED if axis is None else Sharding(axis, self.segments)

    def divides(self, shape: Sequence[Any], count: int) -> bool:
        """Return whether `count` devices can have equal parts of a shape."""
        if self.axis is None:
            return True
        extent = known(shape[self.axis])
        if extent is None or (self.segments and sum(self.segments) != extent):
            return False
        return all(part > 0 and part % count == 0 for part in self.segments or (extent,))

    def local_shape(self, shape: Sequence[Any], count: int) -> list[Any]:
        """Shape of a device's part."""
        return [
            int(extent) // count if axis == self.axis else (extent if known(extent) is None else int(extent))
            for axis, extent in enumerate(shape)
        ]

    def ranges(self, extent: int, index: int, count: int) -> list[tuple[int, int]]:
        """Begin and end of the elements along the axis that a device has.

        `extent`: extent of the axis. `index`, `count`: number of the device, and of devices.
        """
        ranges, begin = [], 0
        for size in self.segments or (extent,):
            share = size // count
            ranges.append((begin + index * share, begin + (index + 1) * share))
            begin += size
        return ranges

    def part(self, array: np.ndarray, index: int, count: int) -> np.ndarray:
        """A device's part of an array: a view if it is contiguous."""
        if self.axis is None:
            return array
        before: tuple[slice, ...] = (slice(None),) * self.axis
        ranges = self.ranges(array.shape[self.axis], index, count)
        parts = [array[before + (slice(begin, end),)] for begin, end in ranges]  # noqa: RUF005
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis=self.axis)


Shardings: TypeAlias = "tuple[Sharding, ...]"  # sharding of a value along each axis of its mesh

REPLICATED, PARTIAL = Sharding(), Sharding(is_partial=True)


def known(extent: Any) -> int | None:
    """An extent as an int; None if it is symbolic."""
    return int(extent) if isinstance(extent, (int, tirx.IntImm)) else None


def extended(shardings: Sequence[Shardings], along: Sequence[Sharding]) -> list[Shardings]:
    """Shardings of several values with those along one more axis of their mesh."""
    return [(*earlier, each) for earlier, each in zip(shardings, along, strict=True)]


def divide(shardings: Sequence[Sharding], shape: Sequence[Any], counts: Sequence[int]) -> bool:
    """Return whether the devices of a mesh, `counts` along its axes, can have equal parts of a shape."""
    for sharding, count in zip(shardings, counts, strict=True):
        if not sharding.divides(shape, count):
            return False
        shape = sharding.local_shape(shape, count)
    return True


def local_shape(shardings: Sequence[Sharding], shape: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Shape of a device's part, of a mesh with `counts` devices along its axes."""
    for sharding, count in zip(shardings, counts, strict=True):
        shape = sharding.local_shape(shape, count)
    return list(shape)
