"""Explanations: where each op of a model runs and why, how it is stored, fused and scheduled, and what that takes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ...artifact.memory_plan import MemoryPlan
from ...artifact.messages import AUTO, unknown_name
from ...artifact.metadata import CacheUse, device_names
from ...display.console import Shown, show, table
from ...display.text import bytes_text, plural
from ...errors import HeteroError
from .call_tables import Schedules, memory_lines, memory_tables
from .command_tables import CommandBuffers
from .kernel_tables import encoding_tables, encoding_totals, encodings_line, fusion_tables, fusions_line
from .target_text import target_text

if TYPE_CHECKING:
    from ...llm.token_cost import TokenCost
    from ...vm import Executable

SECTIONS = ("ops", "transfers", "encodings", "kernels", "commands", "steps", "memory", "token")
"""The parts of an explanation that have a line for every op, transfer, kernel call or step."""

ALL = "all"

# An overview lists so many ops, or reasons, one by one; more are counted.
_MAX_ROWS = 12
_KINDS_SHOWN = 5

# The fields of an entry that programs get: those of `relax_hetero.transform.PlacementEntry`.
FIELDS = ("function", "variable", "op", "device", "kind", "bytes", "reason")


@dataclass(frozen=True)
class DeviceTotal:
    """Contents and work of one device; bytes are of results, parameters and constants on it."""

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
    model : str
        The file's name.
    targets : mapping of str to str
        Device name (``llvm:0``) to its target, in manifest order.
    entries : sequence of mapping of str to object
        The placement report's entries as JSON objects.
    encodings : mapping of str to object or None
        The report of encodings as JSON data, None where there is none.
    fusions : mapping of str to object or None
        The report of fusions as JSON data, None where there is none.
    commands : CommandBuffers or None
        The command buffers, None where nobody looked for any.
    memory : MemoryPlan or None
        The memory plan, None where there is none.
    schedules : Schedules or None
        The steps of functions that use several devices, None where nobody looked for any.
    estimate : mapping of str to object or None
        Estimate of the placement by the cost model as JSON data, None where it did not place.
    cache : CacheUse or None
        Whether the compile cache has it compiled, or had where it was compiled; None where nobody looked.
    optional : sequence of str
        Names of the devices that a machine may lack.
    features : mapping of str to sequence of str
        Device name to LLVM's names of a CPU's features, where the executable knows them.
    token : TokenCost or None
        Cost of a token of a language model, None for any other model.
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
    optional: Sequence[str] = ()
    features: Mapping[str, Sequence[str]] = field(default_factory=dict)
    token: TokenCost | None = None

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
        """As JSON data, all sections with all their entries."""
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
        }

    def _encodings_json(self) -> dict[str, Any] | None:
        if self.encodings is None:
            return None
        return {"devices": [dict(vars(total)) for total in encoding_totals(self.encodings)], **self.encodings}

    def tables(self, *sections: str) -> Iterator[Shown]:
        """The tables of `SECTIONS`, in order; without any, an overview that is short however large the model is.

        Raises
        ------
        BindingError
            A name that is neither of a section nor "all".
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
            yield from self._tables_of(sections)

    def _tables_of(self, sections: Iterable[str]) -> Iterator[Shown]:
        for name in sections:
            if name == "ops":
                yield self._op_table()
                yield self._placement_line()
            elif name == "transfers" and self.of_kind("transfer"):
                columns = ["transfer", "to", "bytes", "why"]
                yield table("Transfers", columns, _rows(self.of_kind("transfer"), "variable", "device"), ["bytes"])
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
        if len(self.of_kind("op")) <= _MAX_ROWS:
            yield self._op_table()
        else:
            yield table("Placement", ["device", "ops", "which", "why"], self._placement_rows(), right=["ops"])
        if missed := self._missed_rows():
            yield table("Missed", ["missed", "times", "why"], missed, right=["times"])
        yield self._placement_line()
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
        yield f"Ask for more: {', '.join(SECTIONS)}, or {ALL}."

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
        return table("Ops", columns, _rows(self.of_kind("op"), "variable", "op", "device"), ["bytes"])

    def _placement_rows(self) -> list[list[str]]:
        """The ops that are on one device for one reason, most ops first."""
        groups: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        for entry in self.of_kind("op"):
            reason = entry["reason"]
            # Of automatic placement the figures of each op are left to the table of ops.
            decided = reason.partition(": ")[0] if reason.startswith(AUTO) else reason
            groups[entry["device"], decided][entry["op"].removeprefix("relax.").removeprefix("nn.")] += 1
        rows = [
            [device, f"{kinds.total():,}", _counted(kinds), decided]
            for (device, decided), kinds in sorted(groups.items(), key=lambda group: -group[1].total())
        ]
        return _shortened(rows, "reasons")

    def _missed_rows(self) -> list[list[str]]:
        """Why ops are not encoded, not fused and not in a command buffer, the most frequent reasons first."""
        found: Counter[tuple[str, str]] = Counter()
        if self.encodings is not None:
            found.update(("encoding", entry["reason"]) for entry in self.encodings["cancelled"])
        if self.fusions is not None:
            found.update(("fusion", entry["reason"]) for entry in self.fusions["missed"])
        if self.commands is not None:
            found.update(("command buffer", call.why) for call in self.commands.single_calls)
        return _shortened([[what, f"{count:,}", why] for (what, why), count in found.most_common()], "reasons")

    def _placement_line(self) -> str:
        transfers, ops = self.of_kind("transfer"), self.of_kind("op")
        moved = sum(entry["bytes"] or 0 for entry in transfers)
        devices = sum(total.ops > 0 for total in self.totals())
        return (
            f"{plural(len(ops), 'op')} on {plural(devices, 'device')}, "
            f"{plural(len(transfers), 'transfer')} of {bytes_text(moved)} in all."
        )

    def _closing_lines(self) -> Iterator[Shown]:
        if self.estimate is not None:
            yield _estimate_line(self.estimate)
        if self.cache is not None:
            yield f"Compile cache: {self.cache}."


def explain(executable: Executable, sections: Sequence[str], file: TextIO | None = None) -> None:
    """Print the explanation of an executable; the provider of ``Executable.explain``."""
    show(explanation_of(executable).tables(*sections), file)


def explanation_of(executable: Executable, model: str = "") -> Explanation:
    """The explanation that an executable carries; neither its devices nor the compiler are needed.

    Raises
    ------
    HeteroError
        The executable has no placement report.
    """
    about = executable.metadata
    if about.placement is None:
        raise HeteroError(
            f"{model or executable} holds no placement report; it was not made by this library's compiler"
        )
    from ...llm.token_cost import token_cost  # imports TVM, which the help of commands does without

    names = device_names(about.devices)
    return Explanation(
        model,
        {name: device.target for name, device in zip(names, about.devices, strict=True)},
        about.placement,
        about.encodings,
        about.fusions,
        CommandBuffers(names, about.regions, about.kernels, about.single_calls),
        about.placement_estimate,
        executable.memory_plan,
        Schedules(names, about.schedules),
        about.cache,
        [names[index] for index in about.optional],
        {n: d.cpu_features for n, d in zip(names, about.devices, strict=True) if d.cpu_features is not None},
        token_cost(about.regions, about.kernels, names, about.placement, about.single_calls),
    )


def _token_tables(token: TokenCost) -> Iterator[Shown]:
    yield table("A token", list(token.head), [list(row) for row in token.body()], right=list(token.head[2:]))
    yield from token.lines()


def _estimate_line(estimate: Mapping[str, Any]) -> str:
    time = "one call takes" if estimate["objective"] == "latency" else "time between calls"
    busy = ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in estimate["busy_seconds"].items())
    lines = [f"busy for one call: {busy}"]
    if alone := estimate.get("single_device_seconds"):
        lines.append("on one device: " + ", ".join(f"{name} {seconds * 1e3:.3g} ms" for name, seconds in alone.items()))
    if estimate.get("figures"):
        lines.append(f"figures: {estimate['figures']}")
    if sizes := estimate.get("assumed_sizes"):
        lines.append("open sizes taken as " + ", ".join(f"{name} = {size}" for name, size in sizes.items()))
    return (
        f"Placed for {estimate['objective']} by the cost model: {time} {estimate['seconds'] * 1e3:.3g} ms; "
        f"{'; '.join(lines)}."
    )


def _counted(kinds: Counter[str]) -> str:
    """``26 conv2d, 26 add, 2 others``."""
    shown = [f"{count:,} {kind}" for kind, count in kinds.most_common(_KINDS_SHOWN)]
    others = kinds.total() - sum(count for _, count in kinds.most_common(_KINDS_SHOWN))
    return ", ".join([*shown, f"{others:,} others"] if others else shown)


def _shortened(rows: list[list[str]], noun: str) -> list[list[str]]:
    """The first rows, and how many more there are."""
    if len(rows) <= _MAX_ROWS:
        return rows
    return [*rows[: _MAX_ROWS - 1], [*[""] * (len(rows[0]) - 1), f"and {len(rows) - _MAX_ROWS + 1:,} more {noun}"]]


def _rows(entries: Sequence[Mapping[str, Any]], *fields: str) -> list[list[str]]:
    return [[*(entry[field] for field in fields), bytes_text(entry["bytes"]), entry["reason"]] for entry in entries]
