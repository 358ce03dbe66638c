"""Bounds on the memory of machines: calls that exceed a limit are refused, and TVM's pool is emptied when it grows."""

from __future__ import annotations

import re
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm_ffi

from ...artifact.memory_plan import MemoryPlan
from ...artifact.memory_use import UnknownSizeError
from ...artifact.metadata import Metadata, device_names
from ...errors import BindingError, MemoryLimitError
from .devices import find_entry
from .memory_pools import release_pinned
from .tensors import address_ranges

_UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**e for e, p in enumerate("KMGT", 1)}}
_UNITS |= {f"{p}IB": 1024**e for e, p in enumerate("KMGT", 1)}
_TEXT = re.compile(r"(\d+(?:\.\d+)?) *([a-zA-Z]*)")

# Pools are emptied after calls with this many different extents, or with this much in their arguments and results.
MANY_SHAPES = 64
MANY_BYTES = 64 << 20

clear_pools = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")
"""Returns to the system what no tensor uses, of all machines."""


class MemoryLimits:
    """The memory that a machine may take on each device, counted by the executable's memory plan.

    Parameters
    ----------
    metadata : Metadata
        The executable's.
    limit : object
        For every device, or from devices (as ``VirtualMachine(devices=)`` names them) to their own: bytes, or text as
        `bytes_of_text` reads it.
    max_in_flight : int
        How many submitted calls may be under way at once.

    Raises
    ------
    BindingError
        An unknown device, or no number of bytes.
    MemoryLimitError
        Weights, or a function whose sizes are known, that need more than the limit.
    """

    def __init__(self, metadata: Metadata, limit: object, max_in_flight: int) -> None:
        self._plan = MemoryPlan(metadata)
        self._names = device_names(metadata.devices)
        self._max_in_flight = max_in_flight
        self._limits = _limits(metadata, limit)
        self._last: Hashable = None
        for name in metadata.signatures:
            if not self._plan.names(name):
                self.check(name, {})

    def admit(self, function: str, sizes: Mapping[str, int]) -> None:
        """`check`, before a call runs. Pools keep no buffers of other extents than the last call's."""
        extents = (function, *sizes.items())
        if extents == self._last:
            return
        self.check(function, sizes)
        if sizes:
            clear_pools()
            release_pinned()
        self._last = extents

    def check(self, function: str, sizes: Mapping[str, int]) -> None:
        """MemoryLimitError if a call of `function` with these extents needs more than there is.

        Extents that only the call itself finds out are taken for nothing.
        """
        unknown: dict[str, int] = {}
        while True:
            try:
                needs = self._plan.needs(function, {**unknown, **sizes}, self._max_in_flight)
                break
            except UnknownSizeError as error:
                unknown.update(dict.fromkeys(error.names, 0))
        for device, need in needs.items():
            limit = self._limits.get(device)
            if limit is None or need.total <= limit:
                continue
            given = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            largest = ", ".join(f"{nbytes:,} for {what}" for what, nbytes in need.largest()[:3])
            raise MemoryLimitError(
                f"function {function!r}{f' with {given}' if given else ''} needs {need.total:,} bytes on "
                f"{self._names[device]}, found a limit of {limit:,}: {largest}"
            )


def _limits(metadata: Metadata, limit: object) -> dict[int, int]:
    if not isinstance(limit, Mapping):
        nbytes = bytes_of_text(limit, "memory_limit")
        return dict.fromkeys(range(len(metadata.devices)), nbytes)
    return {
        find_entry(key, metadata.devices): bytes_of_text(value, f"memory_limit[{key!r}]")
        for key, value in limit.items()
    }


def bytes_of_text(value: object, where: str) -> int:
    """A number of bytes: a positive int, or text with a unit (``"512MB"``, ``"1.5 GiB"``); BindingError for else."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = _TEXT.fullmatch(value.strip()) if isinstance(value, str) else None
    unit = _UNITS.get(match[2].upper()) if match else None
    nbytes = int(float(match[1]) * unit) if match and unit else 0
    if nbytes <= 0:
        raise BindingError(f"{where} is {value!r}, expected a positive number of bytes, or text like '512MB' or '2GiB'")
    return nbytes


@dataclass
class PoolWatch:
    """Keeps TVM's buffer pool from growing with every shape it meets: the extents that calls of one machine had.

    The pool serves a request only from freed buffers of exactly that size (rounded to pages), and returns none to the
    system. A model called with ever new extents would hold the buffers of all of them.

    Attributes
    ----------
    round : int
        How often it was emptied. Who noted extents in this round need not do so again.
    """

    shapes: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    round: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, extents: Hashable, values: Sequence[Any]) -> None:
        """A call has ended, with these extents of its symbolic dimensions and these arguments and results.

        Emptying frees buffers that nothing uses, of all machines: they allocate again, and are otherwise untouched.
        """
        if extents in self.shapes:
            return
        with self.lock:
            self._add(extents, values)

    def _add(self, extents: Hashable, values: Sequence[Any]) -> None:
        self.shapes.add(extents)
        self.nbytes += sum(end - begin for begin, end in address_ranges(values))
        if len(self.shapes) > MANY_SHAPES or self.nbytes > MANY_BYTES:
            clear_pools()
            self.shapes.clear()
            self.nbytes = 0
            self.round += 1
