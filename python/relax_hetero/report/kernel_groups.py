"""Which nodes of a model's graph each kernel call computes, and what that took: the groups of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..artifact.commands import Dispatch
from ..artifact.metadata import Metadata
from ..artifact.model_graph import KINDS, OP, FunctionGraph, ModelGraph

if TYPE_CHECKING:
    from ..vm.profile import Profile


def groups_of(about: Metadata, profile: Profile | None = None) -> list[dict[str, Any]]:
    """A group for each kernel call of an executable, in program order.

    Parameters
    ----------
    about: Of the executable.
    profile: Times of kernels. A kernel that is called at several places, and that was not measured at each, has its
        time divided among them.
    """
    entries = (about.fusions or {}).get("dispatches", [])
    declined = _declined(about.fusions or {})
    regions = {c.kernel: region.name for region in about.regions for c in region.commands if isinstance(c, Dispatch)}
    finders = _finders(about.graph)
    places = Counter(entry["kernel"] for entry in entries)
    groups: list[dict[str, Any]] = []
    for entry in entries:
        kernel, function = entry["kernel"], entry["function"]
        finder = finders.get(function)
        spec = about.dispatches.get(kernel)
        times = _times(profile, kernel, entry["variable"], places[kernel])
        nodes = [] if finder is None else finder.take(entry["variable"], entry["device"], entry["ops"])
        groups.append(
            {
                "id": len(groups),
                "function": function,
                "kernel": kernel,
                "device": entry["device"],
                "nodes": nodes,
                "region": regions.get(kernel),
                "step": _step(about, kernel, regions.get(kernel)),
                "precision": entry["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **times,
                "share_of_peak": None,
                "bound": None,
                "notes": declined.get((function, entry["variable"]), []),
            }
        )
    return groups


def _declined(fusions: Mapping[str, Any]) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for entry in fusions.get("declined", ()):
        text = f"not fused with {entry['op']}: {entry['reason']}"
        found.setdefault((entry["function"], entry["variable"]), []).append(text)
    return found


def _step(about: Metadata, kernel: str, region: str | None) -> str | None:
    """The step of a function's schedule that calls a kernel or its command buffer."""
    names = {kernel, region}
    steps = (step for schedule in about.schedules for step in schedule.steps)
    return next((step.function for step in steps if not names.isdisjoint(step.calls)), None)


def _times(profile: Profile | None, kernel: str, variable: str, places: int) -> dict[str, Any]:
    """Calls, seconds and share of the call; all None where nobody measured."""
    row = None if profile is None else next((row for row in profile.rows if row.symbol == kernel), None)
    if profile is None or row is None:
        return {"calls": None, "seconds": None, "share": None}
    here = [c.microseconds for c in profile.commands if c.kernel == kernel and c.variable == variable]
    if here:
        seconds = sum(here) / 1e6
        return {"calls": len(here), "seconds": seconds, "share": seconds * 1e6 / profile.microseconds}
    calls = row.calls // places if row.calls % places == 0 else None
    return {"calls": calls, "seconds": row.microseconds / 1e6 / places, "share": row.share / places}


def _finders(graph: ModelGraph | None) -> dict[str, _Finder]:
    found: dict[str, _Finder] = {}
    base = 0
    for function in graph.functions if graph is not None else ():
        assert graph is not None
        found[function.name] = _Finder(graph, function, base)
        base += len(function.nodes)
    return found


class _Finder:
    """Finds the nodes of a function that a kernel computes; each node belongs to one kernel."""

    def __init__(self, graph: ModelGraph, function: FunctionGraph, base: int) -> None:
        self._texts, self._nodes, self._base = graph.texts, function.nodes, base
        self._by_name = {graph.texts[n.name]: i for i, n in enumerate(function.nodes) if KINDS[n.kind] == OP}
        self._taken: set[int] = set()

    def take(self, variable: str, device: str, ops: list[str]) -> list[int]:
        """The nodes of a kernel, by the variable that holds its result and the ops that it computes, in order.

        The variable names the last of them; the others are found by walking back along what is read.
        """
        last = self._last(variable)
        wanted = Counter(_short(op) for op in ops)
        if last is None or not (variable in self._by_name or wanted[self._op(last)]):
            return []
        found: list[int] = []
        waiting = [last]
        while waiting:
            index = waiting.pop(0)
            if index in self._taken or KINDS[self._nodes[index].kind] != OP:
                continue
            op = self._op(index)
            if index != last and not (wanted[op] and self._texts[self._nodes[index].device] in ("", device)):
                continue
            wanted[op] -= 1
            self._taken.add(index)
            found.append(index)
            waiting += [read for read, _ in self._nodes[index].pairs()]
        return sorted(self._base + index for index in found)

    def _op(self, index: int) -> str:
        return _short(self._texts[self._nodes[index].op])

    def _last(self, variable: str) -> int | None:
        """The node of a variable; lowering adds endings to names (``lv_encoded``)."""
        name = variable
        while name not in self._by_name and "_" in name:
            name = name.rpartition("_")[0]
        return self._by_name.get(name)


def _short(op: str) -> str:
    """``softmax`` of ``relax.nn.softmax``."""
    return op.rpartition(".")[2]
