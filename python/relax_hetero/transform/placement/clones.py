"""Clones of functions, determined callers first: one for each distinct assignment of devices that callers need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...target.vdevice import device_identifier
from ..ir.rewriting import fresh_name
from .graph import FuncTree, Graph, Location, Origin, Tree
from .program import CallRef, Program, Unit
from .solve import Solution, check_untransferable, nearest_origin, needs_transfers, place_component


@dataclass(slots=True, eq=False)
class Clone:
    """One recursion group on given devices."""

    group: RecursionGroup
    devices: list[int]  # devices of every node of the group's graph
    names: dict[str, str]  # names of its functions in the result, by name in the source module
    first: bool  # whether it keeps the names; the other clones are private
    caller: str  # function whose call placed it, for reports; empty without a caller
    needs_transfers: bool  # whether values are used on devices other than their own


def make_clones(program: Program, groups: Sequence[RecursionGroup], insert_copies: bool) -> list[list[Clone]]:
    """The clones of every group.

    A group without callers outside gets one clone, whose open components are placed by hints (round two) or by default.
    Other groups get one for each distinct set of devices that their callers need; the first call in module order keeps
    the names. Returns the clones by group index. Raises PlacementError if two hints meet in a component of a function
    without fixed devices.
    """
    clones: list[list[Clone]] = [[] for _ in groups]
    used_names = {str(gvar.name_hint) for gvar in program.mod.functions.keys()}
    callers = _callers(groups)
    for group in reversed(groups):
        requests: dict[tuple[int, ...], str] = {}
        for unit, refs in callers[group.index]:
            for caller in clones[unit.group]:
                for ref in refs:
                    component_devices = [-1] * len(group.solution.open_components)
                    for component_index, site in ref.sites.items():
                        component_devices[component_index] = caller.devices[site]
                    requests.setdefault(tuple(component_devices), caller.names[unit.name])
        if not requests:
            requests[tuple([-1] * len(group.solution.open_components))] = ""
        by_devices: dict[tuple[int, ...], Clone] = {}
        for key, caller_name in requests.items():
            devices = _devices(program, group, key, insert_copies)
            if tuple(devices) in by_devices:
                continue
            names = {unit.name: unit.name for unit in group.units}
            if by_devices:
                suffix = _suffix(program, group, devices)
                names = {name: fresh_name(f"{name}_{suffix}", used_names) for name in names}
            is_crossing = insert_copies and needs_transfers(group.graph, devices)
            by_devices[tuple(devices)] = Clone(group, devices, names, not by_devices, caller_name, is_crossing)
        clones[group.index] = list(by_devices.values())
    return clones


def clone_for(clones: Sequence[Clone], caller: Clone, sites: dict[int, int]) -> Clone:
    """The clone that a call in `caller` needs; `sites` are those of its `CallRef`."""
    for clone in clones:
        components = clone.group.solution.open_components
        if all(clone.devices[components[index][0]] == caller.devices[site] for index, site in sites.items()):
            return clone
    raise AssertionError("make_clones makes a clone for every call")


def _callers(groups: Sequence[RecursionGroup]) -> list[list[tuple[Unit, list[CallRef]]]]:
    """Units of other groups that refer to each group, in module order, with their references in program order."""
    callers: list[dict[int, tuple[Unit, list[CallRef]]]] = [{} for _ in groups]
    for group in groups:
        for unit in group.units:
            for ref in unit.calls:
                callers[ref.callee.group].setdefault(unit.index, (unit, []))[1].append(ref)
    return [[by_unit[index] for index in sorted(by_unit)] for by_unit in callers]


def _devices(
    program: Program, group: RecursionGroup, component_devices: tuple[int, ...], insert_copies: bool
) -> list[int]:
    """Devices of all nodes, given the devices that callers need for the open components (-1: any)."""
    solution: Solution = group.solution
    devices = list(solution.devices)
    for component, device in zip(solution.open_components, component_devices, strict=True):
        if device >= 0:
            for node in component:
                devices[node] = device
        else:
            placed = place_component(group.graph, component, {}, program.names, program.host, insert_copies)
            for node, node_device in placed.items():
                devices[node] = node_device
    check_untransferable(group.graph, devices, program.names)
    return devices


def _suffix(program: Program, group: RecursionGroup, devices: list[int]) -> str:
    """The devices of a clone's parameters and results, as the suffix of a name."""
    used = dict.fromkeys(devices[component[0]] for component in group.solution.open_components)
    return "_".join(device_identifier(program.vdevices[device], program.vdevices) for device in used)


@dataclass(slots=True, eq=False)
class RecursionGroup:
    """Functions that call each other, or a single function."""

    index: int  # index of the group; callees come before their callers
    units: list[Unit]  # functions in module order
    graph: Graph
    solution: Solution


def add_reference(graph: Graph, callee: Unit, group: RecursionGroup, location: Location) -> tuple[Tree, CallRef]:
    """Nodes in the caller's graph for one reference (usually a call) to a function.

    Every reference gets its own nodes, so that a function may be called on several devices. A parameter or result that
    the callee places is a site fixed to that device; parameters and results of one open component share a site.

    Parameters
    ----------
    graph : Graph
        Graph of the caller, which gets the sites.
    group : RecursionGroup
        Group of the callee.
    location : Location
        Location of the call.

    Returns
    -------
    tree : FuncTree
        Tree whose nodes are sites.
    ref : CallRef
        Site that determines each open component.
    """
    sites: dict[int, int] = {}

    def visit(tree: Tree) -> Tree:
        if isinstance(tree, tuple):
            return tuple(visit(sub) for sub in tree)
        if isinstance(tree, FuncTree):
            return FuncTree(tuple(visit(sub) for sub in tree.params), visit(tree.ret))
        return _site(tree) if isinstance(tree, int) else None

    def _site(node: int) -> int:
        device = group.solution.devices[node]
        if device >= 0:
            site = graph.add(location)
            graph.fixed[site] = (device, Origin("callee", callee.name, location.function, _lazy_origin(group, node)))
            if node in group.graph.inferred:
                graph.inferred[site] = group.graph.inferred[node]
        else:
            component_index = group.solution.open_component_of[node]
            if component_index not in sites:
                sites[component_index] = graph.add(location)
                _pass_hints(graph, sites[component_index], group, component_index)
            site = sites[component_index]
        if node in group.graph.opaque:
            graph.opaque.add(site)
        return site

    return visit(callee.tree), CallRef(callee, sites)


def _lazy_origin(group: RecursionGroup, node: int) -> Callable[[], str]:
    return lambda: str(nearest_origin(group.graph, node))


def _pass_hints(graph: Graph, site: int, group: RecursionGroup, component_index: int) -> None:
    """Pass hints inside the callee to round two of the caller, the first of each device."""
    hints: dict[int, Origin] = {}
    for node in group.solution.open_components[component_index]:
        for device, origin in group.graph.hints.get(node, ()):
            hints.setdefault(device, origin)
    if hints:
        graph.hints[site] = list(hints.items())
