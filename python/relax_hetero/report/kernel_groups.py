"""Which nodes of a model's graph each kernel call computes, and what that took: the groups of a report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..artifact.commands import Dispatch
from ..artifact.metadata import Metadata
from ..artifact.model_graph import INPUT, KINDS, OP, FunctionGraph, ModelGraph

if TYPE_CHECKING:
    from ..vm.profile import Profile

# Names that lowering gives where it has none; the model may have the same ones for something else.
_FRESH = re.compile(r"(lv|gv)\d*")
# What kernels call an op, and what the model calls it.
_SAME = {"cast": "astype", "concatenate": "concat", "transpose": "permute_dims"}
_SAME.update({"block_matmul": "matmul", "block_rows": "take"})
# What takes no kernel: another shape for the same memory.
_VIEWS = ("reshape", "flatten", "squeeze", "expand_dims")


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
    places = Counter(entry["kernel"] for entry in entries)
    nodes = _nodes_of(about.graph, entries)
    groups: list[dict[str, Any]] = []
    for index, entry in enumerate(entries):
        kernel, function = entry["kernel"], entry["function"]
        spec = about.dispatches.get(kernel)
        groups.append(
            {
                "id": index,
                "function": function,
                "kernel": kernel,
                "device": entry["device"],
                "nodes": nodes[index],
                "region": regions.get(kernel),
                "step": _step(about, kernel, regions.get(kernel)),
                "precision": entry["precision"] or None,
                "operations": spec.operations or None if spec is not None else None,
                "bytes": spec.bytes or None if spec is not None else None,
                **_times(profile, kernel, entry["variable"], places[kernel]),
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


def _nodes_of(graph: ModelGraph | None, entries: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The nodes of each kernel call, numbered through all functions."""
    found: list[list[int]] = [[] for _ in entries]
    base = 0
    for function in graph.functions if graph is not None else ():
        assert graph is not None
        mine = [(number, entry) for number, entry in enumerate(entries) if entry["function"] == function.name]
        for index, owner in _Finder(graph, function).owners([entry for _, entry in mine]).items():
            found[mine[owner][0]].append(base + index)
        base += len(function.nodes)
    return [sorted(nodes) for nodes in found]


class _Finder:
    """Finds the nodes of a function that each of its kernels computes; a node belongs to one kernel at most."""

    def __init__(self, graph: ModelGraph, function: FunctionGraph) -> None:
        self._nodes = function.nodes
        self._ops = [_short(graph.texts[node.op]) if KINDS[node.kind] == OP else "" for node in function.nodes]
        self._devices = [graph.texts[node.device] for node in function.nodes]
        self._by_name = {graph.texts[n.name]: i for i, n in enumerate(function.nodes) if KINDS[n.kind] == OP}
        self._owners: dict[int, int] = {}

    def owners(self, entries: Sequence[Mapping[str, Any]]) -> dict[int, int]:
        """Node to kernel call: by the variables of the calls, then by what they compute, in program order."""
        unnamed: list[int] = []
        for owner, entry in enumerate(entries):
            variable, last = entry["variable"], self._named(entry["variable"])
            is_said = variable in self._by_name and not _FRESH.fullmatch(variable)
            if last is not None and (is_said or self._ops[last] in map(_short, entry["ops"])):
                self._take(last, owner, entry)
            else:
                unnamed.append(owner)
        for owner in unnamed:
            entry = entries[owner]
            if _FRESH.fullmatch(entry["variable"]) and entry["ops"]:
                last = self._first(_short(entry["ops"][-1]), entry["device"])
            else:
                last = self._named(entry["variable"])
            if last is not None:
                self._take(last, owner, entry)
        self._take_rewritten()
        return self._owners

    def _take(self, last: int, owner: int, entry: Mapping[str, Any]) -> None:
        """Give a kernel its last node, and the nodes before it that compute what the kernel does."""
        wanted = Counter(map(_short, entry["ops"]))
        waiting = [last]
        while waiting:
            index = waiting.pop(0)
            if index in self._owners or not (index == last or wanted[self._ops[index]]):
                continue
            if self._devices[index] not in ("", entry["device"]):
                continue
            wanted[self._ops[index]] -= 1
            self._owners[index] = owner
            waiting += [read for read, _ in self._nodes[index].pairs()]

    def _take_rewritten(self) -> None:
        """Ops that no kernel names became others, as batch_norm does: they belong to the one kernel that reads them."""
        readers: dict[int, set[int | None]] = {}
        varying: set[int] = set()
        for index, node in enumerate(self._nodes):
            reads = [read for read, _ in node.pairs()]
            is_unpacked = self._ops[index] == "dequantize_blocks"  # by the kernel that reads it
            if KINDS[node.kind] == INPUT or is_unpacked or not varying.isdisjoint(reads):
                varying.add(index)
        for index in reversed(range(len(self._nodes))):
            owner = self._owners.get(index)
            found = readers.get(index, set())
            is_open = self._ops[index] and owner is None and self._ops[index] not in _VIEWS and index in varying
            if is_open and len(found) == 1 and (only := next(iter(found))) is not None:
                owner = self._owners[index] = only
            for read, _ in self._nodes[index].pairs():
                readers.setdefault(read, set()).add(owner)

    def _first(self, op: str, device: str) -> int | None:
        """The first node that no kernel has, of an op on a device."""
        free = (i for i, found in enumerate(self._ops) if found == op and i not in self._owners)
        return next((i for i in free if self._devices[i] in ("", device)), None)

    def _named(self, variable: str) -> int | None:
        """The node of a variable; lowering adds endings to names (``lv_encoded``)."""
        name = variable
        while name not in self._by_name and "_" in name:
            name = name.rpartition("_")[0]
        index = self._by_name.get(name)
        return None if index in self._owners else index


def _short(op: str) -> str:
    """``softmax`` of ``relax.nn.softmax``; names that kernels have for ops become those of the ops."""
    name = op.rpartition(".")[2]
    return _SAME.get(name, name)
