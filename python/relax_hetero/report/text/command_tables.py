"""Tables about command buffers: regions, their slots and commands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...artifact.commands import (
    ARENA,
    DIRECT,
    READ,
    Command,
    Copy,
    Dispatch,
    Fill,
    KernelSpec,
    Reference,
    RegionSpec,
    SingleCall,
)
from ...artifact.signature import Dim
from ...artifact.typed_data import to_data
from ...display.console import Shown, table
from ...display.text import bytes_text, plural


@dataclass(frozen=True)
class CommandBuffers:
    """The command buffers of a model."""

    devices: Sequence[str]  # names of devices in manifest order
    regions: Sequence[RegionSpec]  # recorded regions
    kernels: Mapping[str, KernelSpec]  # at least the kernels that the regions call
    single_calls: Sequence[SingleCall] = ()  # kernel calls outside of regions

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data, with names of devices."""
        used = dict.fromkeys(name for region in self.regions for name in region.kernels)
        return {
            "regions": [
                {
                    **to_data(region),
                    "device": self.devices[region.device],
                    "counts": _counts(region),
                    "constant_bytes": _constant_bytes(region),
                }
                for region in self.regions
            ],
            "kernels": [to_data(self.kernels[name]) for name in used],
            "single_calls": [dict(vars(call)) for call in self.single_calls],
        }

    def tables(self) -> Iterator[Shown]:
        """Tables of regions, of the slots and commands of each, and of kernel calls outside of them."""
        if self.regions:
            counts = [*_KINDS, "slots"]
            columns = ["command buffer", "device", "runs as", *counts, "numbers", "constants", "arena", "until"]
            yield table("Command buffers", columns, map(self._region_row, self.regions), right=[*counts, "arena"])
        for region in self.regions:
            yield from self._region_tables(region)
        if self.single_calls:
            rows = [[call.variable, call.kernel, call.function, call.why] for call in self.single_calls]
            yield table("Outside of command buffers", ["variable", "kernel", "function", "why"], rows)
        yield self.line()

    def line(self) -> str:
        """Numbers of command buffers, and of kernel calls in them and outside."""
        calls = sum(_counts(region)["kernels"] for region in self.regions)
        return (
            f"{plural(len(self.regions), 'command buffer')} of {plural(calls, 'kernel call')} in all, "
            f"{plural(len(self.single_calls), 'kernel call')} outside."
        )

    def _region_row(self, region: RegionSpec) -> list[str]:
        counts = _counts(region)
        constants = f"{len(region.directs)} ({bytes_text(_constant_bytes(region))})" if region.directs else "-"
        return [
            region.name,
            self.devices[region.device],
            region.runs,
            *(str(counts[kind]) for kind in _KINDS),
            str(len(region.slots)),
            ", ".join(region.parameters) or "-",
            constants,
            _size(region.arena),
            region.ended_by,
        ]

    def _region_tables(self, region: RegionSpec) -> Iterator[Shown]:
        rows = [
            [
                str(index),
                slot.name,
                slot.access,
                _size(slot.nbytes),
                str(slot.alignment),
                f"{slot.dtype}[{', '.join(map(str, slot.shape or ()))}]",
                self.devices[slot.device],
            ]
            for index, slot in enumerate(region.slots)
        ]
        columns = ["slot", "name", "access", "bytes", "aligned to", "type", "device"]
        yield table(f"Slots of {region.name}", columns, rows, right=["slot", "bytes", "aligned to"])
        commands = [[str(index), *self._command_row(command)] for index, command in enumerate(region.commands)]
        yield table(f"Commands of {region.name}", ["", "command", "reads", "writes", "numbers", "result"], commands)

    def _command_row(self, command: Command) -> list[str]:
        if isinstance(command, Copy):
            return ["copy", _memory(command.source), _memory(command.target), "", ""]
        if isinstance(command, Fill):
            return ["fill", "", _memory(command.target), command.pattern, ""]
        if not isinstance(command, Dispatch):
            return ["barrier", "", "", "", ""]
        tensors = self.kernels[command.kernel].tensors
        operands = list(zip(command.operands, (tensor.access for tensor in tensors), strict=True))
        reads = [reference for reference, access in operands if access == READ]
        writes = [reference for reference, access in operands if access != READ]
        conditions = [("count", command.count), ("when", command.when), ("unless", command.unless)]
        condition_reads = [f"{word} {_memory(reference)}" for word, reference in conditions if reference is not None]
        return [
            command.kernel,
            ", ".join([*map(_memory, reads), *condition_reads]),
            ", ".join(map(_memory, writes)),
            ", ".join(map(str, command.scalars)),
            command.variable,
        ]


_KINDS = ("kernels", "copies", "fills")


def _counts(region: RegionSpec) -> dict[str, int]:
    kinds = (Dispatch, Copy, Fill)
    return {
        name: sum(isinstance(command, kind) for command in region.commands)
        for name, kind in zip(_KINDS, kinds, strict=True)
    }


def _constant_bytes(region: RegionSpec) -> int:
    """Bytes of the constants, without duplicates, up to the last byte that commands use."""
    sizes: dict[int, int] = {}
    for reference in _references(region.commands):
        if reference.space == DIRECT:
            end = int(reference.offset) + int(reference.length)
            sizes[reference.index] = max(end, sizes.get(reference.index, 0))
    return sum(sizes.values())


def _references(commands: Iterable[Command]) -> Iterable[Reference]:
    for command in commands:
        if isinstance(command, Dispatch):
            yield from command.operands
        elif isinstance(command, Copy):
            yield from (command.source, command.target)
        elif isinstance(command, Fill):
            yield command.target


def _memory(reference: Reference) -> str:
    """Format a reference to memory, such as ``slot 0``, ``direct 3`` or ``arena +128``."""
    base = "arena" if reference.space == ARENA else f"{reference.space} {reference.index}"
    return f"{base} +{reference.offset}" if reference.offset != 0 or reference.space == ARENA else base


def _size(nbytes: Dim) -> str:
    return nbytes if isinstance(nbytes, str) else bytes_text(nbytes)
