"""Which nodes of a model's graph each kernel call computes, and what that took: the groups of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..artifact.commands import Dispatch
from ..artifact.metadata import Metadata, device_names
from ..artifact.model_graph import ModelGraph
from .device_peaks import share_of_peak

if TYPE_CHECKING:
    from ..vm.profile import Profile, ProfileRow


def groups_of(
    metadata: Metadata, profiles: Sequence[Profile] = (), peaks: Mapping[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """A group for each kernel call of an executable, in program order.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the executable.
    profiles : sequence of Profile
        Times of kernels, a function each. A kernel that is called at several places, and that was not measured at each,
        has its time divided among them.
    peaks : mapping of str to mapping of str to object, optional
        Peaks of devices, by name, as `device_peaks.peaks_of` measures them.
    """
    entries = (metadata.fusions or {}).get("dispatches", [])
    missed = _missed_fusions(metadata.fusions or {})
    # In command buffers: kernels have other names where they write over what they read.
    inside = {
        (region.function, command.variable): (command.kernel, region.name)
        for region in metadata.regions
        for command in region.commands
        if isinstance(command, Dispatch)
    }
    kernels = [(*inside.get((e["function"], e["variable"]), (e["kernel"], None)), e["device"]) for e in entries]
    measured = {profile.function: profile for profile in profiles}
    # What no caller can name is called by the function that was measured.
    called = [entry["function"] if entry["function"] in metadata.signatures else "" for entry in entries]
    places = Counter((name, kernel, device) for name, (kernel, _, device) in zip(called, kernels, strict=True))
    rows = {(profile.function, row.symbol, row.device): row for profile in profiles for row in profile.rows}
    bases = _bases(metadata.graph)
    groups: list[dict[str, Any]] = []
    callers = _callers(metadata)
    for index, entry in enumerate(entries):
        (kernel, region, device), function = kernels[index], entry["function"]
        spec = metadata.dispatches.get(kernel)
        caller = called[index] or (profiles[0].function if profiles else "")
        steps = callers.get((function, region or kernel, device), [None])
        # The calls stand in the order of the steps; all kernels of a command buffer are called at once.
        step = steps.pop(0) if len(steps) > 1 else steps[0]
        row = rows.get((caller, kernel, device or "host"))
        groups.append(
            {
                "id": index,
                "function": function,
                "kernel": kernel,
                "device": device,
                "nodes": [bases[function] + node for node in entry.get("nodes", ()) if function in bases],
                "region": region,
                "step": step,
                "precision": entry["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **_times(measured.get(caller), row, region, entry["variable"], places[called[index], kernel, device]),
                "share_of_peak": None,
                "bound": None,
                "notes": missed.get((function, entry["variable"]), []),
            }
        )
        group = groups[-1]
        if group["calls"] and group["seconds"]:
            seconds = group["seconds"] / group["calls"]
            work = group["precision"], group["operations"], group["bytes"]
            group["share_of_peak"], group["bound"] = share_of_peak((peaks or {}).get(group["device"]), *work, seconds)
    return groups


def reached(row: ProfileRow, peak: Mapping[str, Any] | None) -> dict[str, Any]:
    """Share of its device's peak that a row of a profile reached, and what bounds it."""
    seconds = row.microseconds / 1e6 / max(row.calls, 1)
    share, bound = share_of_peak(peak, row.precision, row.operations, row.bytes, seconds)
    return {"share_of_peak": share, "bound": bound}


def _bases(graph: ModelGraph | None) -> dict[str, int]:
    """The number of the first node of each function, where nodes are numbered through all functions."""
    found, base = {}, 0
    for function in graph.functions if graph is not None else ():
        found[function.name] = base
        base += len(function.nodes)
    return found


def _missed_fusions(fusions: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for entry in fusions.get("missed", ()):
        text = f"not fused with {entry['op']}: {entry['reason']}"
        found.setdefault((entry["function"], entry["variable"]), []).append(text)
    return found


def _callers(metadata: Metadata) -> dict[tuple[str, str, str], list[str | None]]:
    """The steps that call a kernel or command buffer, as often as they do: by function, callee and device."""
    names = [*device_names(metadata.devices), ""]
    found: dict[tuple[str, str, str], list[str | None]] = {}
    for schedule in metadata.schedules:
        for step in schedule.steps:
            for name in step.calls:
                for index in step.devices:
                    found.setdefault((schedule.function, name, names[index]), []).append(step.function)
    return found


def _times(
    profile: Profile | None, row: ProfileRow | None, region: str | None, variable: str, places: int
) -> dict[str, Any]:
    """Calls, seconds and share of the call; all None where nobody measured."""
    if profile is None or row is None:
        return {"calls": None, "seconds": None, "share": None}
    call = (region, row.symbol, variable)
    here = [c.microseconds for c in profile.commands if (c.region, c.kernel, c.variable) == call]
    if here:
        seconds = sum(here) / 1e6
        return {"calls": len(here), "seconds": seconds, "share": seconds * 1e6 / profile.microseconds}
    calls = row.calls // places if row.calls % places == 0 else None
    return {"calls": calls, "seconds": row.microseconds / 1e6 / places, "share": row.share / places}
