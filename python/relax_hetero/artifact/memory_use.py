"""Memory of calls on each device: of one call whose sizes are known, or of several under way at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import TypeAlias, TypeVar

from .commands import ARENA as IN_ARENA
from .commands import DIRECT, GRAPH, SLOT, WRITE, Dispatch, KernelSpec, RegionSpec
from .dims import parse_dim
from .memory_spec import ARENA, RESULT, FunctionMemory, RegionStep
from .metadata import CPU, Metadata
from .schedule import Schedule, Step
from .signature import Dim

PAGE = 4096
"""Bytes to which TVM's pool rounds a buffer up; it serves a request from freed buffers of exactly that size."""

# When: steps of a call, of a call in it, commands. A begin is shorter than anything within it; an end is closed by
# infinity, so that it comes after all of it.
_When: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class Allocation:
    """A storage of a call, or of a call in it."""

    device: int
    nbytes: int
    begin: _When
    end: _When
    use: str
    name: str


@dataclass(frozen=True)
class Use:
    """Bytes that are in use from `begin` to `end`."""

    device: int
    nbytes: int
    begin: _When
    end: _When


class UnknownSizeError(Exception):
    """A size that depends on names whose values are not given; `names` are these."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


def evaluate(size: Dim, sizes: Mapping[str, int]) -> int:
    """A number of bytes; UnknownSizeError where a name in it has no value."""
    if isinstance(size, int):
        return size
    expression = parse_dim(size)
    if not expression.names <= sizes.keys():
        raise UnknownSizeError(expression.names - sizes.keys())
    return sizes[size] if expression.evaluate is None else expression.evaluate(sizes)


class Walk:
    """Goes through what a function allocates, and what the functions that it calls allocate.

    Parameters
    ----------
    metadata : Metadata
        Metadata of an executable.

    Attributes
    ----------
    tensors : list of Use
        Tensors in transient storages; those in arenas are counted one by one.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._functions = {memory.name: memory for memory in metadata.memory}
        self._regions = {region.name: region for region in metadata.regions}
        self._kernels = metadata.kernels
        self._inside: list[str] = []
        self.allocations: list[Allocation] = []
        self.tensors: list[Use] = []

    def function(self, name: str, sizes: Mapping[str, int], now: _When = ()) -> None:
        """Count a call of a function. One that calls itself is counted once: nobody knows how often it does."""
        memory = self._functions.get(name)
        if memory is None or name in self._inside:
            return
        self._inside.append(name)
        self._storages(memory, sizes, now)
        moments = [(_at(now, tensor.begin), _until(now, tensor.end)) for tensor in memory.tensors]
        for step in memory.regions:
            self._region(step, sizes, now, moments)
        for tensor, (begin, end) in zip(memory.tensors, moments, strict=True):
            place = memory.storages[tensor.storage]
            if place.use != RESULT and tensor.begin >= 0:
                self.tensors.append(Use(place.device, evaluate(tensor.nbytes, sizes), begin, end))
        for call in memory.calls:
            given = {name: evaluate(size, sizes) for name, size in call.sizes.items()}
            self.function(call.function, given, _at(now, call.step))
        self._inside.pop()

    def _storages(self, memory: FunctionMemory, sizes: Mapping[str, int], now: _When) -> None:
        for place in memory.storages:
            end = (*now, inf) if place.end < 0 else _until(now, place.end)
            # What a function that is called here gives belongs to its caller, who has counted it.
            if not (now and place.use == RESULT):
                nbytes = evaluate(place.nbytes, sizes)
                self.allocations.append(
                    Allocation(place.device, nbytes, _at(now, place.begin), end, place.use, place.name)
                )

    def _region(
        self, step: RegionStep, sizes: Mapping[str, int], now: _When, moments: list[tuple[_When, _When]]
    ) -> None:
        """Count what lies in a command buffer's arena, and find when in it its slots are first and last used."""
        region, when = self._regions[step.region], _at(now, step.step)
        is_owned = region.runs == GRAPH and isinstance(region.arena, int)  # by the machine, which counts it
        if region.runs == GRAPH and not is_owned:
            name = f"the arena of {region.name}"
            nbytes = evaluate(region.arena, sizes)
            self.allocations.append(Allocation(region.device, nbytes, when, (*when, inf), ARENA, name))
        for tensor in _in_commands(region, self._kernels):
            begin, end = (*when, tensor.first), (*when, tensor.last, inf)
            if tensor.slot is None:
                if not is_owned:
                    self.tensors.append(Use(region.device, evaluate(tensor.nbytes, sizes), begin, end))
            elif (number := step.slots[tensor.slot]) >= 0:
                from_step, to_step = moments[number]
                moments[number] = begin if from_step == when else from_step, end if to_step == (*when, inf) else to_step


@dataclass
class _InRegion:
    """Memory that commands use between `first` and `last`: a slot, or a tensor in the arena."""

    slot: int | None
    nbytes: Dim
    first: int
    last: int


def _in_commands(region: RegionSpec, kernels: Mapping[str, KernelSpec]) -> list[_InRegion]:
    found: list[_InRegion] = []
    slots: dict[int, _InRegion] = {}
    there: dict[Dim, _InRegion] = {}
    for now, command in enumerate(region.commands):
        if not isinstance(command, Dispatch):
            continue
        for reference, parameter in zip(command.operands, kernels[command.kernel].tensors, strict=True):
            used: _InRegion | None = None
            if reference.space == SLOT:
                used = slots.get(reference.index)
            elif reference.space == IN_ARENA and parameter.access != WRITE:
                used = there.get(reference.offset)
            elif reference.space == DIRECT:
                continue
            if used is None:
                slot = reference.index if reference.space == SLOT else None
                found.append(used := _InRegion(slot, reference.length, now, now))
                if slot is None:
                    there[reference.offset] = used
                else:
                    slots[slot] = used
            used.last = now
    return found


def max_alive(uses: Iterable[Use], device: int) -> int:
    """The most bytes that are there at one time on a device."""
    now = peak = 0
    for use, begins in _in_order(use for use in uses if use.device == device):
        now += use.nbytes if begins else -use.nbytes
        peak = max(peak, now)
    return peak


def pool_bytes(allocations: Iterable[Allocation], device: int) -> list[tuple[str, int]]:
    """The buffers that TVM's pool makes for these, by what each holds first, and their bytes.

    The pool hands a freed buffer to whoever asks for as many pages, and keeps it otherwise.
    """
    made: list[tuple[str, int]] = []
    free: dict[int, list[int]] = {}
    held: dict[int, int] = {}
    for use, begins in _in_order(use for use in allocations if use.device == device):
        ready = free.setdefault(-(-use.nbytes // PAGE), [])
        if not begins:
            ready.append(held.pop(id(use)))
            continue
        if not ready:
            made.append((use.name, 0))
            ready.append(len(made) - 1)
        number = held[id(use)] = ready.pop()
        name, nbytes = made[number]
        made[number] = name, max(nbytes, use.nbytes)
    return made


_Timed = TypeVar("_Timed", Use, Allocation)


def _in_order(uses: Iterable[_Timed]) -> Iterator[tuple[_Timed, bool]]:
    """Each when it begins and when it ends."""
    listed = list(uses)
    moments = [(use.begin, True, use) for use in listed] + [(use.end, False, use) for use in listed]
    for _, begins, use in sorted(moments, key=lambda moment: moment[0]):
        yield use, begins


def _at(now: _When, step: int) -> _When:
    return (*now, step)


def _until(now: _When, step: int) -> _When:
    return (*now, step, inf)


@dataclass(frozen=True)
class Need:
    """Bytes on one device.

    Attributes
    ----------
    weights : int
        Constants and bound parameters.
    results : int
        Bytes of values that steps give and calls return, of all calls under way.
    transient : tuple of (str, int)
        Bytes of a step while it runs, by the first tensor that it holds: one step runs at a time.
    """

    weights: int
    results: int
    transient: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.results + sum(nbytes for _, nbytes in self.transient)

    def largest(self) -> list[tuple[str, int]]:
        """The largest parts, largest first."""
        parts = [("weights", self.weights), ("results of steps and calls", self.results), *self.transient]
        return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def call_needs(metadata: Metadata, function: str, sizes: Mapping[str, int], device: int) -> Need:
    """The need of one call that runs alone, without weights."""
    walk = Walk(metadata)
    walk.function(function, sizes)
    results = sum(a.nbytes for a in walk.allocations if a.use == RESULT and a.device == device)
    transient = pool_bytes((a for a in walk.allocations if a.use != RESULT), device)
    return Need(0, results, tuple(transient))


def queued_needs(metadata: Metadata, schedule: Schedule, sizes: Mapping[str, int], device: int, calls: int) -> Need:
    """The need of `kernels` calls under way at once, without weights.

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
    """Return whether a transfer gives memory of the CPU another device's name."""
    specs = [metadata.devices[entry] for entry in (step.device, step.source) if entry >= 0]
    return all(spec.device_type == CPU and spec.memory_scope == "global" for spec in specs)
