"""A placement report, added up per device and printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..artifact.cache_use import CacheUse
from ..artifact.memory_plan import MemoryPlan
from .command_tables import CommandBuffers
from .console import bytes_text, console, plural, print_table, target_text
from .encoding_tables import encoding_totals, print_encodings
from .fusion_tables import print_fusions
from .memory_tables import print_memory
from .schedule_tables import Schedules

# The fields of an entry that programs get: those of `relax_hetero.transform.PlacementEntry`.
FIELDS = ("function", "variable", "op", "device", "kind", "bytes", "reason")


@dataclass(frozen=True)
class DeviceTotal:
    """What one device holds and does; bytes are of results, parameters and constants on it."""

    name: str
    target: str
    ops: int
    op_bytes: int
    param_bytes: int
    constant_bytes: int
    transfers_in: int
    transfer_bytes: int
    unknown_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As JSON data; `unknown_bytes` counts values whose size depends on a symbolic shape."""
        return dict(vars(self))


@dataclass(frozen=True)
class Explanation:
    """Where everything of a model is.

    Attributes
    ----------
    model
        The file's name.
    targets
        Device name (``llvm:0``) to its target, in manifest order.
    entries
        The placement report's entries as JSON objects.
    encodings
        The report of encodings as JSON data, None where there is none.
    fusions
        The report of fusions as JSON data, None where there is none.
    commands
        The command buffers, None where nobody looked for any.
    memory
        The memory plan, None where there is none.
    schedules
        The steps of functions that use several devices, None where nobody looked for any.
    estimate
        What the cost model expects of the placement as JSON data, None where it did not place.
    cache
        Whether the compile cache has it compiled, or had where it was compiled; None where nobody looked.
    """

    model: str
    targets: Mapping[str, str]
    entries: Sequence[Mapping[str, Any]]
    encodings: Mapping[str, Any] | None = None
    fusions: Mapping[str, Any] | None = None
    commands: CommandBuffers | None = None
    estimate: Mapping[str, Any] | None = None
    memory: MemoryPlan | None = None
    schedules: Schedules | None = None
    cache: CacheUse | None = None

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """The entries of one kind: ``op``, ``transfer``, ``param`` or ``constant``."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def totals(self) -> list[DeviceTotal]:
        """One total per device, in manifest order; then devices only entries name (the implicit host)."""
        names = list(dict.fromkeys([*self.targets, *(entry["device"] for entry in self.entries)]))
        return [self._total(name) for name in names]

    def _total(self, name: str) -> DeviceTotal:
        mine = [entry for entry in self.entries if entry["device"] == name]

        def size(kind: str) -> int:
            return sum(entry["bytes"] or 0 for entry in mine if entry["kind"] == kind)

        def count(kind: str) -> int:
            return sum(entry["kind"] == kind for entry in mine)

        return DeviceTotal(
            name=name,
            target=self.targets.get(name, ""),
            ops=count("op"),
            op_bytes=size("op"),
            param_bytes=size("param"),
            constant_bytes=size("constant"),
            transfers_in=count("transfer"),
            transfer_bytes=size("transfer"),
            unknown_bytes=sum(entry["bytes"] is None for entry in mine),
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON data: totals per device, every entry, what is encoded and fused, and the command buffers."""
        return {
            "model": self.model,
            "devices": [total.to_json() for total in self.totals()],
            "placement_estimate": self.estimate,
            "entries": [{field: entry[field] for field in FIELDS} for entry in self.entries],
            "encodings": self._encodings_json(),
            "fusions": self.fusions,
            "command_buffers": None if self.commands is None else self.commands.to_json(),
            "schedules": None if self.schedules is None else self.schedules.to_json(),
            "memory": None if self.memory is None else self.memory.to_json(),
            "cache": None if self.cache is None else asdict(self.cache),
        }

    def _encodings_json(self) -> dict[str, Any] | None:
        if self.encodings is None:
            return None
        return {"devices": [dict(vars(total)) for total in encoding_totals(self.encodings)], **self.encodings}

    def print(self, every_op: bool) -> None:
        """Print tables: the devices, the transfers and, if asked for, every op with its reason."""
        transfers, ops = self.of_kind("transfer"), self.of_kind("op")
        columns = ["device", "ops", "results", "parameters", "constants", "transfers in", "target"]
        rows = [
            [
                total.name,
                f"{total.ops:,}",
                bytes_text(total.op_bytes),
                bytes_text(total.param_bytes),
                bytes_text(total.constant_bytes),
                f"{total.transfers_in:,} ({bytes_text(total.transfer_bytes)})",
                target_text(total.target),
            ]
            for total in self.totals()
        ]
        print_table(self.model, columns, rows, right=columns[1:6])
        if transfers:
            columns = ["transfer", "to", "bytes", "why"]
            print_table("Transfers", columns, _rows(transfers, "variable", "device"), right=["bytes"])
        if every_op:
            columns = ["variable", "op", "device", "bytes", "why"]
            print_table("Ops", columns, _rows(ops, "variable", "op", "device"), right=["bytes"])
        moved = sum(entry["bytes"] or 0 for entry in transfers)
        devices = sum(total.ops > 0 for total in self.totals())
        console().print(
            f"{plural(len(ops), 'op')} on {plural(devices, 'device')}, "
            f"{plural(len(transfers), 'transfer')} of {bytes_text(moved)} in all.",
            markup=False,
        )
        if self.estimate is not None:
            console().print(_estimate_text(self.estimate), markup=False)
        if self.encodings is not None:
            print_encodings(self.encodings, every_op)
        if self.fusions is not None:
            print_fusions(self.fusions, every_op)
        if self.commands is not None:
            self.commands.print(every_op)
        if self.schedules is not None:
            self.schedules.print()
        if self.memory is not None:
            print_memory(self.memory)
        if self.cache is not None:
            console().print(f"Compile cache: {self.cache}.", markup=False)


def _estimate_text(estimate: Mapping[str, Any]) -> str:
    time = "one call takes" if estimate["objective"] == "latency" else "time between calls"
    busy = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in estimate["busy_seconds"].items())
    return (
        f"Placed for {estimate['objective']} by the cost model: {time} {estimate['seconds'] * 1e3:.3g} ms; "
        f"busy for one call: {busy}."
    )


def _rows(entries: Sequence[Mapping[str, Any]], *fields: str) -> list[list[str]]:
    return [[*(entry[field] for field in fields), bytes_text(entry["bytes"]), entry["reason"]] for entry in entries]
