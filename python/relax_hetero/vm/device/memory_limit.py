"""Memory limits of machines, which refuse calls that exceed them, and the emptying of TVM's growing buffer pool."""

from __future__ import annotations

import re
import threading
from collections import Counter
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

# Pools are emptied after calls with more different extents, or more bytes of arguments and results, than these.
MAX_SHAPES = 64
MAX_BYTES = 64 << 20

clear_pools = tvm_ffi.get_global_func("vm.builtin.memory_manager.clear")
"""Function of TVM that returns unused pool memory of all machines to the system."""


class MemoryLimits:
    """The maximum memory of a machine on each device, compared with the executable's memory plan.

    Raises BindingError for an unknown device, or an invalid number of bytes. Raises MemoryLimitError for weights, or a
    function of static sizes, that need more than the limit.
    """

    def __init__(
        self,
        metadata: Metadata,  # metadata of the executable
        # Bytes or text (`bytes_of_text`) for every device, or a mapping from devices (named as in
        # ``VirtualMachine(devices=)``) to these.
        limit: object,
        max_in_flight: int,  # maximum number of submitted calls in flight
    ) -> None:
        self._plan = MemoryPlan(metadata)
        self._names = device_names(metadata.devices)
        self._max_in_flight = max_in_flight
        self._limits = _limits(metadata, limit)
        self._last: Hashable = None
        for name in metadata.signatures:
            if not self._plan.symbolic_dims(name):
                self.check(name, {})

    def admit(self, function: str, sizes: Mapping[str, int]) -> None:
        """Check a call before it runs, and empty the pools if its extents differ from the last call's."""
        extents = (function, *sizes.items())
        if extents == self._last:
            return
        self.check(function, sizes)
        if sizes:
            clear_pools()
            release_pinned()
        self._last = extents

    def check(self, function: str, sizes: Mapping[str, int]) -> None:
        """MemoryLimitError if a call of `function` with these extents exceeds a limit.

        Data-dependent extents count as 0.
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
            extents = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            largest = ", ".join(f"{nbytes:,} for {what}" for what, nbytes in need.largest()[:3])
            raise MemoryLimitError(
                f"function {function!r}{f' with {extents}' if extents else ''} needs {need.total:,} bytes on "
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
    """Parse a number of bytes: a positive int, or text with a unit (``"512MB"``, ``"1.5 GiB"``)."""
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
    """Watch of one machine that keeps TVM's buffer pool from growing with every new shape.

    The pool serves a request only from freed buffers of exactly that size (rounded to pages), and returns none to the
    system. A model called with ever new extents would keep the buffers of all of them.
    """

    shapes: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    epoch: int = 0  # Number of times that the pool was emptied. Extents need to be noted only once per epoch.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, extents: Hashable, values: Sequence[Any]) -> None:
        """Note the extents of a call that has ended, and its arguments and results; perhaps empty the pool.

        Emptying frees unused buffers of all machines, which then allocate again, but are otherwise unaffected.
        """
        if extents in self.shapes:
            return
        with self.lock:
            self._add(extents, values)

    def _add(self, extents: Hashable, values: Sequence[Any]) -> None:
        self.shapes.add(extents)
        # Donated arguments are results, too: caches of a language model, which no pool has.
        uses = Counter(address_ranges(values))
        self.nbytes += sum(end - begin for (begin, end), count in uses.items() if count == 1)
        if len(self.shapes) > MAX_SHAPES or self.nbytes > MAX_BYTES:
            clear_pools()
            self.shapes.clear()
            self.nbytes = 0
            self.epoch += 1
