"""Explanations of a model: placement and its reasons, encodings, fusions, command buffers, schedules and memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ...artifact.memory_plan import MemoryPlan
from ...artifact.messages import AUTO, unknown_name
from ...artifact.metadata import CacheUse, device_names
from ...display.console import Shown, console, show, table
from ...display.text import bytes_text, plural
from ...errors import HeteroError
from .call_tables import Schedules, memory_lines, memory_tables
from .command_tables import CommandBuffers
from .kernel_tables import encoding_tables, encoding_totals, encodings_line, fusion_tables, fusions_line
from .target_text import target_text

if TYPE_CHECKING:
    from ...artifact.collectives import CollectiveSpec
    from ...llm.token_cost import TokenCost
    from ...vm import Executable

SECTIONS = ("ops", "transfers", "collectives", "encodings", "kernels", "commands", "steps", "memory", "token")
"""Sections of an explanation, with a row for every op, transfer, collective, kernel call or step."""

ALL = "all"

_NO_COLLECTIVES = 'No collectives over GPUs. Values cross between other devices by copies, which "transfers" lists.'
_PART_NUMBER = re.compile(r"@[0-9]+$")  # of a value on a further device of a mesh
_MAX_OVERVIEW_ROWS = 12
_MAX_LISTED_KINDS = 5
FIELDS = ("function", "variable", "op", "device", "kind", "bytes", "reason")
"""Fields of entries in JSON: those of `relax_hetero.transform.PlacementEntry`."""


@dataclass(frozen=True)
class DeviceTotal:
    """Numbers of ops and transfers of one device, and bytes of its results, parameters and constants."""

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
        """Convert to JSON data; `unknown_bytes` counts values of symbolic size."""
        return dict(vars(self))


@dataclass(frozen=True)
class Explanation:
    """Explanation of a model; parts that are unknown are None."""

    model: str  # name of the file
    targets: Mapping[str, str]  # targets by device name (``llvm:0``), in manifest order
    entries: Sequence[Mapping[str, Any]]  # entries of the placement report as JSON data
    encodings: Mapping[str, Any] | None = None  # report of encodings as JSON data
    fusions: Mapping[str, Any] | None = None  # report of fusions as JSON data
    commands: CommandBuffers | None = None
    # Estimate of the cost model as JSON data; None without automatic placement.
    estimate: Mapping[str, Any] | None = None
    memory: MemoryPlan | None = None
    schedules: Schedules | None = None  # schedules of functions
    cache: CacheUse | None = None  # use of the compile cache
    optional: Sequence[str] = ()  # names of optional devices
    # LLVM's names of CPU features by device name, if the executable has them.
    features: Mapping[str, Sequence[str]] = field(default_factory=dict)
    token: TokenCost | None = None  # cost of a token; None if it is not a language model
    huge_pages: str = ""  # weights on huge pages; empty if none were tried, or no machine was made yet
    collectives: Sequence[CollectiveSpec] = ()  # collectives over GPUs

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Entries of one kind: ``op``, ``transfer``, ``param`` or ``constant``."""
        return [entry for entry in self.entries if entry["kind"] == kind]

    def totals(self) -> list[DeviceTotal]:
        """Totals of devices in manifest order, then of devices that only entries name (the implicit host)."""
        names = list(dict.fromkeys([*self.targets, *(entry["device"] for entry in self.entries)]))
        return [self._total(name) for name in names]

    def _total(self, name: str) -> DeviceTotal:
        entries = [entry for entry in self.entries if entry["device"] == name]

        def size(kind: str) -> int:
            return sum(entry["bytes"] or 0 for entry in entries if entry["kind"] == kind)

        def count(kind: str) -> int:
            return sum(entry["kind"] == kind for entry in entries)

        return DeviceTotal(
            name=name,
            target=self.targets.get(name, ""),
            ops=count("op"),
            op_bytes=size("op"),
            param_bytes=size("param"),
            constant_bytes=size("constant"),
            transfers_in=count("transfer"),
            transfer_bytes=size("transfer"),
            unknown_bytes=sum(entry["bytes"] is None for entry in entries),
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON data, with all entries of all sections."""
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
            "optional": list(self.optional),
            "token": None if self.token is None else self.token.to_json(),
            "huge_pages": self.huge_pages,
            "collectives": [asdict(each) for each in self.collectives],
        }

    def _encodings_json(self) -> dict[str, Any] | None:
        if self.encodings is None:
            return None
        return {"devices": [dict(vars(total)) for total in encoding_totals(self.encodings)], **self.encodings}

    def tables(self, *sections: str) -> Iterator[Shown]:
        """Iterate over the tables of `SECTIONS`; without any, an overview that is short for any model.

        Raises BindingError if a name is not a section or "all".
        """
        for name in sections:
            if name not in (*SECTIONS, ALL):
                raise unknown_name("section", name, [*SECTIONS, ALL], "an explanation")
        if not sections:
            yield from self._overview()
        elif ALL in sections:
            yield self._device_table()
            yield from self._tables_of(SECTIONS)
            yield from self._closing_lines()
        else:
            for name in sections:
                yield from list(self._tables_of([name])) or [f"{name}: nothing to show for this model."]

    def _tables_of(self, sections: Iterable[str]) -> Iterator[Shown]:
        for name in sections:
            if name == "ops":
                yield self._op_table()
                yield self._placement_line()
            elif name == "transfers" and self.of_kind("transfer"):
                columns = ["transfer", "to", "bytes", "why"]
                yield table("Transfers", columns, _rows(self.of_kind("transfer"), "variable", "device"), ["bytes"])
            elif name == "collectives" and (self.collectives or self.of_kind("transfer")):
                yield self._collective_table() if self.collectives else _NO_COLLECTIVES
            elif name == "encodings" and self.encodings is not None:
                yield from encoding_tables(self.encodings)
            elif name == "kernels" and self.fusions is not None:
                yield from fusion_tables(self.fusions)
            elif name == "commands" and self.commands is not None:
                yield from self.commands.tables()
            elif name == "steps" and self.schedules is not None:
                yield from self.schedules.tables()
            elif name == "memory" and self.memory is not None:
                yield from memory_tables(self.memory)
            elif name == "token" and self.token is not None:
                yield from _token_tables(self.token)

    def _overview(self) -> Iterator[Shown]:
        yield self._device_table()
        if len(self._ops()) <= _MAX_OVERVIEW_ROWS:
            yield self._op_table()
        else:
            yield table("Placement", ["device", "ops", "kinds", "why"], self._placement_rows(), right=["ops"])
        if missed := self._missed_rows():
            yield table("Missed", ["missed", "times", "why"], missed, right=["times"])
        yield self._placement_line()
        if line := idle_line(list(self.targets), self.entries):
            yield line
        if self.collectives:
            yield self._collectives_line()
        if self.encodings is not None:
            yield encodings_line(self.encodings)
        if self.fusions is not None:
            yield fusions_line(self.fusions)
        if self.commands is not None:
            yield self.commands.line()
        if self.schedules is not None:
            yield from self.schedules.lines()
        if self.memory is not None:
            yield from memory_lines(self.memory)
        if self.token is not None:
            yield from _token_tables(self.token)
        yield from self._closing_lines()
        yield f"More sections: {', '.join(SECTIONS)}, or {ALL}."

    def _device_table(self) -> Shown:
        columns = ["device", "ops", "results", "parameters", "constants", "transfers in", "target"]
        rows = [
            [
                f"{total.name} (optional)" if total.name in self.optional else total.name,
                f"{total.ops:,}",
                bytes_text(total.op_bytes),
                bytes_text(total.param_bytes),
                bytes_text(total.constant_bytes),
                f"{total.transfers_in:,} ({bytes_text(total.transfer_bytes)})",
                target_text(total.target, self.features.get(total.name)),
            ]
            for total in self.totals()
        ]
        return table("Devices", columns, rows, right=columns[1:6])

    def _op_table(self) -> Shown:
        columns = ["variable", "op", "device", "bytes", "why"]
        rows = [{**parts[0], "device": _device_text(parts)} for parts in self._ops()]
        return table("Ops", columns, _rows(rows, "variable", "op", "device"), ["bytes"])

    def _ops(self) -> list[list[Mapping[str, Any]]]:
        """Ops, each with its entries on all devices that compute a part of it: those of ``x``, ``x@1``, and so on."""
        ops: defaultdict[tuple[str, str, str], list[list[Mapping[str, Any]]]] = defaultdict(list)
        ordered = []
        for entry in self.of_kind("op"):
            name = _PART_NUMBER.sub("", entry["variable"])
            same = ops[entry["function"], name, entry["op"]]
            if not same or name == entry["variable"] or any(entry["device"] == part["device"] for part in same[-1]):
                same.append([])
                ordered.append(same[-1])
            same[-1].append(entry)
        return ordered

    def _placement_rows(self) -> list[list[str]]:
        """Ops grouped by device and reason, largest groups first."""
        groups: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for parts in self._ops():
            op, reason = parts[0]["op"], parts[0]["reason"]
            # Figures of automatic placement differ for each op; the table of ops has them.
            general = reason.partition(": ")[0] if reason.startswith(AUTO) else reason
            groups[_device_text(parts), general][op.removeprefix("relax.").removeprefix("nn.")] += 1
        rows = [
            [device, f"{kinds.total():,}", _list_kinds(kinds), reason]
            for (device, reason), kinds in sorted(groups.items(), key=lambda group: -group[1].total())
        ]
        return _shorten(rows, "reasons")

    def _missed_rows(self) -> list[list[str]]:
        """Reasons of missed encodings, fusions and command buffers, most frequent first."""
        reasons: Counter[tuple[str, str]] = Counter()
        if self.encodings is not None:
            reasons.update(("encoding", entry["reason"]) for entry in self.encodings["cancelled"])
        if self.fusions is not None:
            reasons.update(("fusion", entry["reason"]) for entry in self.fusions["missed"])
        if self.commands is not None:
            reasons.update(("command buffer", call.why) for call in self.commands.single_calls)
        return _shorten([[kind, f"{count:,}", reason] for (kind, reason), count in reasons.most_common()], "reasons")

    def _placement_line(self) -> str:
        transfers, ops = self.of_kind("transfer"), self.of_kind("op")
        moved = sum(entry["bytes"] or 0 for entry in transfers)
        devices = sum(total.ops > 0 for total in self.totals())
        return (
            f"{plural(len(ops), 'op')} on {plural(devices, 'device')}, "
            f"{plural(len(transfers), 'transfer')} of {bytes_text(moved)} in all."
        )

    def _collective_table(self) -> Shown:
        names = list(self.targets)
        columns = ["collective", "result", "function", "devices", "bytes", "with", "by", "why"]
        rows = [
            [
                each.op,
                each.variable,
                each.function,
                ", ".join(names[device] for device in each.devices),
                bytes_text(each.bytes),
                ", ".join(each.joined),
                each.algorithm,
                each.why,
            ]
            for each in self.collectives
        ]
        return table("Collectives", columns, rows, right=["bytes"])

    def _collectives_line(self) -> str:
        kinds = Counter((each.op, each.algorithm, each.why) for each in self.collectives)
        parts = (f"{plural(count, op)} by {algorithm} ({why})" for (op, algorithm, why), count in kinds.items())
        return f"Between GPUs: {'; '.join(parts)}."

    def _closing_lines(self) -> Iterator[Shown]:
        if self.estimate is not None:
            yield _estimate_line(self.estimate)
        if self.huge_pages:
            yield f"Memory: {self.huge_pages}."
        if self.cache is not None:
            yield f"Compile cache: {self.cache}."


def idle_line(
    devices: Sequence[str],  # names of all devices
    entries: Sequence[Mapping[str, Any]],  # entries of the placement report as JSON data
) -> str:
    """Sentence about devices that run no op, with the longest reason of an op's device; empty if all run some."""
    ops = [entry for entry in entries if entry["kind"] == "op"]
    idle = [name for name in devices if all(entry["device"] != name for entry in ops)]
    if not ops or not idle:
        return ""
    example = max(ops, key=lambda entry: len(entry["reason"]))
    return (
        f"{', '.join(idle)} {'runs' if len(idle) == 1 else 'run'} no op; for example, {example['variable']!r} is on "
        f"{example['device']}: {example['reason']}."
    )


def print_idle_devices(executable: Executable) -> None:
    """Print `idle_line` of an executable that has a placement report."""
    metadata = executable.metadata
    if line := idle_line(device_names(metadata.devices), metadata.placement or ()):
        console().print(line, markup=False)


def explain(executable: Executable, sections: Sequence[str], file: TextIO | None = None) -> None:
    """Print the explanation of an executable; provider of ``Executable.explain``."""
    show(explanation_of(executable).tables(*sections), file)


def explanation_of(executable: Executable, model: str = "") -> Explanation:
    """Read the explanation of an executable; needs neither its devices nor the compiler.

    Raises HeteroError if the executable has no placement report.
    """
    metadata = executable.metadata
    if metadata.placement is None:
        raise HeteroError(
            f"{model or executable} holds no placement report; it was not made by this library's compiler"
        )
    from ...llm.token_cost import token_cost  # imports TVM, which --help does not need

    names = device_names(metadata.devices)
    return Explanation(
        model,
        {name: device.target for name, device in zip(names, metadata.devices, strict=True)},
        metadata.placement,
        metadata.encodings,
        metadata.fusions,
        CommandBuffers(names, metadata.regions, metadata.kernels, metadata.single_calls),
        metadata.placement_estimate,
        executable.memory_plan,
        Schedules(names, metadata.schedules),
        metadata.cache,
        [names[index] for index in metadata.optional],
        {n: d.cpu_features for n, d in zip(names, metadata.devices, strict=True) if d.cpu_features is not None},
        token_cost(metadata.regions, metadata.kernels, names, metadata.placement, metadata.single_calls),
        str(executable.huge_pages or ""),
        metadata.collectives,
    )


def _token_tables(token: TokenCost) -> Iterator[Shown]:
    yield table("A token", list(token.head), [list(row) for row in token.body()], right=list(token.head[2:]))
    yield from token.lines()


def _estimate_line(estimate: Mapping[str, Any]) -> str:
    time = "one call takes" if estimate["objective"] == "latency" else "time between calls"
    busy = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in estimate["busy_seconds"].items())
    lines = [f"busy for one call: {busy}"]
    if single := estimate.get("single_device_seconds"):
        lines.append("on one device: " + ", ".join(f"{name} {secs * 1e3:.3g} ms" for name, secs in single.items()))
    if estimate.get("figures"):
        lines.append(f"figures: {estimate['figures']}")
    if sizes := estimate.get("assumed_sizes"):
        lines.append("symbolic sizes assumed as " + ", ".join(f"{name} = {size}" for name, size in sizes.items()))
    return (
        f"Placed for {estimate['objective']} by the cost model: {time} {estimate['seconds'] * 1e3:.3g} ms; "
        f"{'; '.join(lines)}."
    )


def _device_text(parts: Sequence[Mapping[str, Any]]) -> str:
    """The device of an op's only part, or the range of devices that compute a part each."""
    devices = [part["device"] for part in parts]
    if len(devices) == 1:
        return str(devices[0])
    kind, _, first = devices[0].rpartition(":")
    if kind and devices == [f"{kind}:{int(first) + number}" for number in range(len(devices))]:
        return f"each of {kind}[{first}:{int(first) + len(devices)}]"
    return f"each of {', '.join(devices)}"


def _list_kinds(kinds: Counter[str]) -> str:
    """List kinds by frequency, such as ``26 conv2d, 26 add, 2 others``."""
    texts = [f"{count:,} {kind}" for kind, count in kinds.most_common(_MAX_LISTED_KINDS)]
    rest = kinds.total() - sum(count for _, count in kinds.most_common(_MAX_LISTED_KINDS))
    return ", ".join([*texts, f"{rest:,} others"] if rest else texts)


def _shorten(rows: list[list[str]], noun: str) -> list[list[str]]:
    """Keep the first rows, and count the others."""
    if len(rows) <= _MAX_OVERVIEW_ROWS:
        return rows
    return [
        *rows[: _MAX_OVERVIEW_ROWS - 1],
        [*[""] * (len(rows[0]) - 1), f"and {len(rows) - _MAX_OVERVIEW_ROWS + 1:,} more {noun}"],
    ]


def _rows(entries: Sequence[Mapping[str, Any]], *fields: str) -> list[list[str]]:
    return [[*(entry[field] for field in fields), bytes_text(entry["bytes"]), entry["reason"]] for entry in entries]
