"""Computation of the memory of calls on each device: of one call with given sizes, or of several in flight."""

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

PAGE = 4096  # bytes to a multiple of which TVM's pool rounds buffers; it reuses only freed buffers of exactly that size

# Time: the step of a call, of a nested call, ..., the command. Tuples compare lexicographically, so the beginning
# of a step precedes everything within it, and its end, which has infinity appended, follows everything.
_When: TypeAlias = tuple[float, ...]


@dataclass(frozen=True)
class Allocation:
    """A storage of a call or a nested call."""

    device: int
    nbytes: int
    begin: _When
    end: _When
    use: str
    name: str


@dataclass(frozen=True)
class Use:
    """Bytes of memory that are in use from `begin` to `end`."""

    device: int
    nbytes: int
    begin: _When
    end: _When


class UnknownSizeError(Exception):
    """A size that depends on names without values (`names`)."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


def evaluate(size: Dim, sizes: Mapping[str, int]) -> int:
    """Evaluate a number of bytes; UnknownSizeError if a name lacks a value."""
    if isinstance(size, int):
        return size
    expression = parse_dim(size)
    if not expression.names <= sizes.keys():
        raise UnknownSizeError(expression.names - sizes.keys())
    return sizes[size] if expression.evaluate is None else expression.evaluate(sizes)


class AllocationWalk:
    """Walk over the allocations of a function and its callees. `metadata`: metadata of an executable."""

    def __init__(self, metadata: Metadata) -> None:
        self._functions = {memory.name: memory for memory in metadata.memory}
        self._regions = {region.name: region for region in metadata.regions}
        self._kernels = metadata.kernels
        self._inside: list[str] = []
        self.allocations: list[Allocation] = []
        self.tensors: list[Use] = []  # tensors in transient storages, including single tensors in arenas

    def visit(self, name: str, sizes: Mapping[str, int], now: _When = ()) -> None:
        """Count a call of a function; recursive calls count once, because their number is unknown."""
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
            self.visit(call.function, given, _at(now, call.step))
        self._inside.pop()

    def _storages(self, memory: FunctionMemory, sizes: Mapping[str, int], now: _When) -> None:
        for place in memory.storages:
            end = (*now, inf) if place.end < 0 else _until(now, place.end)
            # Results of nested calls are already counted in the caller.
            if not (now and place.use == RESULT):
                nbytes = evaluate(place.nbytes, sizes)
                self.allocations.append(
                    Allocation(place.device, nbytes, _at(now, place.begin), end, place.use, place.name)
                )

    def _region(
        self, step: RegionStep, sizes: Mapping[str, int], now: _When, moments: list[tuple[_When, _When]]
    ) -> None:
        """Count the tensors in a command buffer's arena, and refine the lifetimes of tensors in its slots."""
        region, when = self._regions[step.region], _at(now, step.step)
        is_owned = region.runs == GRAPH and isinstance(region.arena, int)  # counted by the machine
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
    uses: list[_InRegion] = []
    slots: dict[int, _InRegion] = {}
    arena_tensors: dict[Dim, _InRegion] = {}
    for now, command in enumerate(region.commands):
        if not isinstance(command, Dispatch):
            continue
        for reference, parameter in zip(command.operands, kernels[command.kernel].tensors, strict=True):
            use: _InRegion | None = None
            if reference.space == SLOT:
                use = slots.get(reference.index)
            elif reference.space == IN_ARENA and parameter.access != WRITE:
                use = arena_tensors.get(reference.offset)
            elif reference.space == DIRECT:
                continue
            if use is None:
                slot = reference.index if reference.space == SLOT else None
                uses.append(use := _InRegion(slot, reference.length, now, now))
                if slot is None:
                    arena_tensors[reference.offset] = use
                else:
                    slots[slot] = use
            use.last = now
    return uses


def max_alive(uses: Iterable[Use], device: int) -> int:
    """The maximum bytes in use at one time on a device."""
    now = peak = 0
    for use, begins in _in_order(use for use in uses if use.device == device):
        now += use.nbytes if begins else -use.nbytes
        peak = max(peak, now)
    return peak


def pool_bytes(allocations: Iterable[Allocation], device: int) -> list[tuple[str, int]]:
    """The buffers that TVM's pool allocates, with the name of the first tensor and the bytes of each.

    The pool reuses a freed buffer for requests of the same number of pages, and never frees it.
    """
    buffers: list[tuple[str, int]] = []
    free: dict[int, list[int]] = {}
    in_use: dict[int, int] = {}
    for use, begins in _in_order(use for use in allocations if use.device == device):
        ready = free.setdefault(-(-use.nbytes // PAGE), [])
        if not begins:
            ready.append(in_use.pop(id(use)))
            continue
        if not ready:
            buffers.append((use.name, 0))
            ready.append(len(buffers) - 1)
        index = in_use[id(use)] = ready.pop()
        name, nbytes = buffers[index]
        buffers[index] = name, max(nbytes, use.nbytes)
    return buffers


_Timed = TypeVar("_Timed", Use, Allocation)


def _in_order(uses: Iterable[_Timed]) -> Iterator[tuple[_Timed, bool]]:
    """All begins (True) and ends (False) in order of time."""
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
    """Memory needed on one device, in bytes."""

    weights: int  # constants and bound parameters
    results: int  # bytes of results of steps and calls, over all calls in flight
    # Bytes of the running step's buffers, by the name of their first tensor; one step runs at a time.
    transient: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """Total bytes."""
        return self.weights + self.results + sum(nbytes for _, nbytes in self.transient)

    def largest(self) -> list[tuple[str, int]]:
        """The parts with their bytes, largest first."""
        parts = [("weights", self.weights), ("results of steps and calls", self.results), *self.transient]
        return sorted((part for part in parts if part[1]), key=lambda part: -part[1])


def call_needs(metadata: Metadata, function: str, sizes: Mapping[str, int], device: int) -> Need:
    """Memory of one plain call, without weights."""
    walk = AllocationWalk(metadata)
    walk.visit(function, sizes)
    results = sum(a.nbytes for a in walk.allocations if a.use == RESULT and a.device == device)
    transient = pool_bytes((a for a in walk.allocations if a.use != RESULT), device)
    return Need(0, results, tuple(transient))


def queued_needs(metadata: Metadata, schedule: Schedule, sizes: Mapping[str, int], device: int, calls: int) -> Need:
    """Memory of `calls` calls in flight, without weights.

    In the worst case each call holds the results of all its steps. One step runs at a time on a device.
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
        result_sizes = memory[step.function].results if step.function in memory else ()
        nbytes.update((value, evaluate(size, sizes)) for value, size in zip(step.makes, result_sizes, strict=False))
        need = call_needs(metadata, step.function, sizes, device)
        results += need.results
        transient = max(transient, need.transient, key=lambda buffers: sum(size for _, size in buffers))
    return Need(0, calls * results, transient)


def _is_alias(metadata: Metadata, step: Step) -> bool:
    """Return whether a transfer is an alias between CPU devices."""
    specs = [metadata.devices[entry] for entry in (step.device, step.source) if entry >= 0]
    return all(spec.device_type == CPU and spec.memory_scope == "global" for spec in specs)
