"""What calls of a machine take together: one that runs alone, or several that are under way at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .memory_spec import RESULT
from .memory_use import Walk, evaluate, pool_bytes
from .metadata import CPU, Metadata
from .schedule import Schedule, Step


@dataclass(frozen=True)
class Need:
    """Bytes on one device.

    Attributes
    ----------
    weights : int
        Constants and bound parameters.
    results : int
        What steps give and calls return, of all calls under way.
    transient : tuple of (str, int)
        What a step takes while it runs, by what it holds first: one step runs at a time.
    """

    weights: int
    results: int
    transient: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.results + sum(nbytes for _, nbytes in self.transient)

    def largest(self) -> list[tuple[str, int]]:
        """What takes most, largest first."""
        parts = [("weights", self.weights), ("results of steps and calls", self.results), *self.transient]
        return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def call_needs(metadata: Metadata, function: str, sizes: Mapping[str, int], device: int) -> Need:
    """Of one call that runs alone, without weights."""
    walk = Walk(metadata)
    walk.function(function, sizes)
    results = sum(a.nbytes for a in walk.allocations if a.use == RESULT and a.device == device)
    transient = pool_bytes((a for a in walk.allocations if a.use != RESULT), device)
    return Need(0, results, tuple(transient))


def queued_needs(metadata: Metadata, schedule: Schedule, sizes: Mapping[str, int], device: int, calls: int) -> Need:
    """Of `calls` calls under way at once, without weights.

    Each holds what its steps give, at worst all of it; of the steps, one runs at a time on a device.
    """
    memory = {memory.name: memory for memory in metadata.memory}
    nbytes: dict[int, int] = {}
    results = 0
    transient: tuple[tuple[str, int], ...] = ()
    for step in schedule.steps:
        if step.is_transfer:
            size = nbytes.get(step.reads[0], 0)
            nbytes.update(dict.fromkeys(step.makes, size))
            results += size if step.device == device and not _is_alias(metadata, step) else 0
            continue
        given = memory[step.function].results if step.function in memory else ()
        nbytes.update((value, evaluate(size, sizes)) for value, size in zip(step.makes, given, strict=False))
        alone = call_needs(metadata, step.function, sizes, device)
        results += alone.results
        transient = max(transient, alone.transient, key=lambda buffers: sum(size for _, size in buffers))
    return Need(0, calls * results, transient)


def _is_alias(metadata: Metadata, step: Step) -> bool:
    """Whether a transfer gives memory of the CPU another device's name."""
    specs = [metadata.devices[entry] for entry in (step.device, step.source) if entry >= 0]
    return all(spec.device_type == CPU and spec.memory_scope == "global" for spec in specs)
