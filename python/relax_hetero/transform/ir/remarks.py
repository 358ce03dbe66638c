"""Findings of the passes about a module besides its text: one typed record, which travels with the module.

Each field of the record is a module attribute, as JSON text, written when it is found and read once. A global info
would be the natural home, but TVMScript writes one that Python defines as a reference to metadata, and a module's text
would not read back.

Passes add to the record of a module that keeps one (`RecordRemarks`). Other modules are not touched, so that programs
before and after a pass can be compared; there `collect_placement`, `collect_encodings` and `collect_fusions` listen.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

import tvm

from ...artifact.checks import CheckSpec
from ...artifact.commands import SingleCall
from ...artifact.model_graph import ModelGraph
from ...artifact.schedule import Schedule
from ...target.vdevice import device_name, vdevices_of
from .kernel_nodes import kernel_nodes
from .kernels import call_vdevice, called_prim_func, ops_of, precision_of
from .module_attrs import COMMANDS
from .reports import DispatchEntry, EncodingReport, FusionReport, MissedFusion, PlacementReport
from .rewriting import relax_functions, walk_bindings

Aliases: TypeAlias = "dict[str, dict[str, list[str]]]"


@dataclass(frozen=True)
class Remarks:
    """Findings about a module besides its text; None for what no pass has found.

    Attributes
    ----------
    placement : PlacementReport, optional
        Why each value is where it is, by the import or the first RealizeVDevice.
    placement_estimate : object
        Estimate by the cost model that placed the module, as JSON data.
    encodings : EncodingReport, optional
        Layouts of encodings on each device, by SpecializeEncodings.
    fusions : FusionReport, optional
        Which kernel computes what, by FormDispatches, and what stayed out of a kernel and why, by any pass.
    single_calls : tuple of SingleCall, optional
        The kernel calls that no command buffer makes, by FormCommandBuffers.
    schedules : tuple of Schedule, optional
        Steps in which functions go through queues, by FormSchedules.
    checks : tuple of CheckSpec, optional
        Checks of values that kernels make, by number, by CheckValues.
    origins : dict of str to str, optional
        Variable to the name of the node in the model's file that it is a result of, by the import.
    graph : ModelGraph, optional
        The ops of the placed model and what each reads, by AnnotateGraph.
    aliases : dict, optional
        Function to variable to the variables whose value it is, or holds side by side; of function "" where any may
        have them. By AnnotateGraph, and by passes that make one product of several.
    """

    placement: PlacementReport | None = None
    placement_estimate: Any = None
    encodings: EncodingReport | None = None
    fusions: FusionReport | None = None
    single_calls: tuple[SingleCall, ...] | None = None
    schedules: tuple[Schedule, ...] | None = None
    checks: tuple[CheckSpec, ...] | None = None
    origins: dict[str, str] | None = None
    graph: ModelGraph | None = None
    aliases: Aliases | None = None

    def to_data(self) -> dict[str, Any]:
        """As JSON data, by field."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: None if value is None else _FORMATS[name].write(value) for name, value in found.items()}


@dataclass(frozen=True)
class _Format:
    """How a field of the record is written as JSON data, and read."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]


_FORMATS = {
    "placement": _Format(lambda report: report.to_data(), PlacementReport.from_data),
    "placement_estimate": _Format(lambda data: data, lambda data: data),
    "encodings": _Format(lambda report: report.to_data(), EncodingReport.from_data),
    "fusions": _Format(lambda report: report.to_data(), FusionReport.from_data),
    "single_calls": _Format(
        lambda calls: [vars(call) for call in calls], lambda data: tuple(SingleCall(**d) for d in data)
    ),
    "schedules": _Format(lambda all_: [s.to_json() for s in all_], lambda data: tuple(map(Schedule.from_json, data))),
    "checks": _Format(
        lambda checks: [vars(check) for check in checks], lambda data: tuple(CheckSpec(**d) for d in data)
    ),
    "origins": _Format(lambda names: names, lambda data: data),
    "graph": _Format(lambda graph: graph.to_json(), ModelGraph.from_json),
    "aliases": _Format(lambda names: names, lambda data: data),
}


def _attribute(name: str) -> str:
    return f"relax_hetero.{name}"


@functools.lru_cache(maxsize=64)
def _read(name: str, text: str) -> Any:
    return _FORMATS[name].read(json.loads(text))


def remarks_of(mod: tvm.IRModule) -> Remarks:
    """Findings about a module. Each text is parsed once; the reports are shared, so they are not to be changed."""
    attrs = mod.attrs or {}
    names = [each.name for each in fields(Remarks)]
    return Remarks(**{name: _read(name, str(attrs[_attribute(name)])) for name in names if _attribute(name) in attrs})


def with_remarks(mod: tvm.IRModule, **remarks: Any) -> tvm.IRModule:
    """The module with some fields of its record set, or taken off where they are None."""
    for name, value in remarks.items():
        if value is not None:
            mod = mod.with_attr(_attribute(name), json.dumps(_FORMATS[name].write(value)))
        elif mod.attrs and _attribute(name) in mod.attrs:
            mod = mod.without_attr(_attribute(name))
    return mod


def records_remarks(mod: tvm.IRModule) -> bool:
    """Return whether passes add to the module's record."""
    return bool(mod.attrs and _attribute("fusions") in mod.attrs)


@dataclass
class PendingRemarks:
    """Findings of passes while this was open."""

    placements: list[PlacementReport] = field(default_factory=list)
    encodings: list[EncodingReport] = field(default_factory=list)
    fusions: FusionReport = field(default_factory=FusionReport)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def add_to(self, mod: tvm.IRModule) -> tvm.IRModule:
        """The module with its record brought up to date; the very module where nothing is new."""
        fused = self.fusions.dispatches or self.fusions.missed
        if not (self.placements or self.encodings or fused or self.aliases):
            return mod
        before = remarks_of(mod)
        new: dict[str, Any] = {}
        if self.placements and before.placement is None:  # later ones see the transfers that the first one wrote
            new["placement"] = self.placements[0]
        if self.encodings:
            new["encodings"] = _joined(before.encodings, self.encodings[-1])
        if self.aliases:
            known = before.aliases or {}
            new["aliases"] = {**known, "": {**known.get("", {}), **self.aliases}}
        fusions = before.fusions or FusionReport()
        is_recorded = any(COMMANDS in func.attrs for func in mod.functions.values())
        dispatches = fusions.dispatches if is_recorded and fusions.dispatches else self.fusions.dispatches
        declined = [*fusions.missed, *(entry for entry in self.fusions.missed if entry not in fusions.missed)]
        new["fusions"] = FusionReport(dispatches or fusions.dispatches, declined)
        return with_remarks(mod, **{name: value for name, value in new.items() if value != getattr(before, name)})


def _joined(before: EncodingReport | None, now: EncodingReport) -> EncodingReport:
    """A report of a module that was specialized before: what was cancelled then is not in the module any more."""
    if before is None:
        return now
    is_empty = not (now.ops or now.transfers)
    cancelled = [*before.cancelled, *(entry for entry in now.cancelled if entry not in before.cancelled)]
    latest = before if is_empty else now
    return EncodingReport(latest.ops, latest.transfers, cancelled)


_OPEN: ContextVar[tuple[PendingRemarks, ...]] = ContextVar("relax_hetero_notes", default=())


@contextlib.contextmanager
def _open() -> Iterator[PendingRemarks]:
    notes = PendingRemarks()
    token = _OPEN.set((*_OPEN.get(), notes))
    try:
        yield notes
    finally:
        _OPEN.reset(token)


def recording(work: Callable[[tvm.IRModule], tvm.IRModule], mod: tvm.IRModule) -> tvm.IRModule:
    """Run a pass, and add its findings to the record of a module that keeps one."""
    if not records_remarks(mod):
        return work(mod)
    with _open() as notes:
        result = work(mod)
    return notes.add_to(result)


@contextlib.contextmanager
def collect_placement() -> Iterator[list[PlacementReport]]:
    """A list to which every `RealizeVDevice` that runs inside the ``with`` block adds its report."""
    with _open() as notes:
        yield notes.placements


@contextlib.contextmanager
def collect_encodings() -> Iterator[list[EncodingReport]]:
    """A list to which every `SpecializeEncodings` that runs inside the ``with`` block adds its report."""
    with _open() as notes:
        yield notes.encodings


@contextlib.contextmanager
def collect_fusions() -> Iterator[FusionReport]:
    """A report that the passes which run inside the ``with`` block fill."""
    with _open() as notes:
        yield notes.fusions


def is_collecting() -> bool:
    """Return whether anyone wants to know what passes find: a pass skips what only a report needs."""
    return bool(_OPEN.get())


def publish(report: PlacementReport | EncodingReport) -> None:
    """Give a report to all who collect."""
    for notes in _OPEN.get():
        if isinstance(report, PlacementReport):
            notes.placements.append(report)
        else:
            notes.encodings.append(report)


def record_missed(function: str, variable: str, op: str, reason: str) -> None:
    """Say why something was not fused; each reason is kept once, and costs nothing where nobody listens."""
    entry = MissedFusion(function, variable, op, reason)
    for notes in _OPEN.get():
        if entry not in notes.fusions.missed:
            notes.fusions.missed.append(entry)


def record_merged(variable: str, members: Sequence[str]) -> None:
    """Say that a variable holds the values of others side by side, for those who listen."""
    for notes in _OPEN.get():
        notes.aliases[variable] = list(members)


def record_dispatches(mod: tvm.IRModule, inside: Mapping[tuple[str, str], Sequence[str]]) -> None:
    """Note the kernel calls of a module whose dispatches are formed, for those who listen.

    Parameters
    ----------
    mod : tvm.IRModule
    inside : mapping
        Function and variable to the names of the values that a fused kernel computes on its way.
    """
    if not is_collecting():
        return
    vdevices = vdevices_of(mod)
    found = remarks_of(mod)
    aliases = found.aliases or {}
    entries = []
    for gv, func in relax_functions(mod):
        within = {variable: names for (function, variable), names in inside.items() if function == gv.name_hint}
        known = {**aliases.get("", {}), **aliases.get(gv.name_hint, {})}
        nodes = kernel_nodes(mod, (gv.name_hint, func), found.graph, known, within)
        for binding in walk_bindings(func):
            kernel = called_prim_func(mod, binding.value)
            if kernel is None:
                continue
            vdevice = call_vdevice(binding.value)
            device = device_name(vdevice, vdevices) if vdevice is not None else ""
            code = mod.functions[kernel]
            names = (gv.name_hint, binding.var.name, kernel.name_hint, device)
            computed = nodes.get(binding.var, ())
            entries.append(DispatchEntry(*names, ops_of(code), precision_of(code), computed))
    for notes in _OPEN.get():
        notes.fusions.dispatches = entries
