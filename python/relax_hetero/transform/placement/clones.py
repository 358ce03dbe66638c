"""Decide, callers first, on which devices each function is needed: one clone per distinct answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...target.vdevice import device_identifier
from ..ir.rewriting import fresh_name
from .graph import FuncTree, Graph, Location, Origin, Tree
from .program import CallRef, Program, Unit
from .solve import Solution, check_rigid, is_mixed, nearest_origin, place_part


@dataclass(slots=True, eq=False)
class Clone:
    """One recursion group on given devices.

    Attributes
    ----------
    group : RecursionGroup
    devices : list of int
        Devices of every node of the group's graph.
    names : dict
        Names of its functions: name in the source module -> name in the result.
    first : bool
        Whether it keeps the names; others are private clones.
    caller : str
        The function and variable whose call placed it, for reports; empty where nobody calls it.
    mixed : bool
        Whether values are used on other devices than their own.
    """

    group: RecursionGroup
    devices: list[int]
    names: dict[str, str]
    first: bool
    caller: str
    mixed: bool


def make_clones(program: Program, groups: Sequence[RecursionGroup], insert_copies: bool) -> list[list[Clone]]:
    """The clones of every group.

    A group that nobody outside calls gets one clone, its open classes placed by hints (round two) or by default.
    The others get one per distinct set of devices that their callers ask for; the first call in module order keeps
    the names.

    Returns
    -------
    clones : list of list of Clone
        Clones by group index.

    Raises
    ------
    PlacementError
        If two hints meet in a part of a function that nothing else places.
    """
    made: list[list[Clone]] = [[] for _ in groups]
    taken = {str(gvar.name_hint) for gvar in program.mod.functions.keys()}
    callers = _callers(groups)
    for group in reversed(groups):
        requests: dict[tuple[int, ...], str] = {}
        for unit, refs in callers[group.index]:
            for caller in made[unit.group]:
                for ref in refs:
                    asked = [-1] * len(group.solution.classes)
                    for class_index, site in ref.classes.items():
                        asked[class_index] = caller.devices[site]
                    requests.setdefault(tuple(asked), caller.names[unit.name])
        if not requests:
            requests[tuple([-1] * len(group.solution.classes))] = ""
        by_devices: dict[tuple[int, ...], Clone] = {}
        for key, caller_name in requests.items():
            devices = _devices(program, group, key, insert_copies)
            if tuple(devices) in by_devices:
                continue
            names = {unit.name: unit.name for unit in group.units}
            if by_devices:
                suffix = _suffix(program, group, devices)
                names = {name: fresh_name(f"{name}_{suffix}", taken) for name in names}
            mixed = insert_copies and is_mixed(group.graph, devices)
            by_devices[tuple(devices)] = Clone(group, devices, names, not by_devices, caller_name, mixed)
        made[group.index] = list(by_devices.values())
    return made


def clone_for(clones: Sequence[Clone], caller: Clone, classes: dict[int, int]) -> Clone:
    """The clone that a call of `caller` needs."""
    for clone in clones:
        class_of = clone.group.solution.classes
        if all(clone.devices[class_of[index][0]] == caller.devices[site] for index, site in classes.items()):
            return clone
    raise AssertionError("every call was asked for when clones were made")


def _callers(groups: Sequence[RecursionGroup]) -> list[list[tuple[Unit, list[CallRef]]]]:
    """Units of other groups that mention each group, in module order, with their mentions in program order."""
    found: list[dict[int, tuple[Unit, list[CallRef]]]] = [{} for _ in groups]
    for group in groups:
        for unit in group.units:
            for ref in unit.calls:
                found[ref.callee.group].setdefault(unit.index, (unit, []))[1].append(ref)
    return [[by_unit[index] for index in sorted(by_unit)] for by_unit in found]


def _devices(program: Program, group: RecursionGroup, asked: tuple[int, ...], insert_copies: bool) -> list[int]:
    """All nodes' devices where the callers ask for these devices of the open classes (-1: none asked)."""
    solution: Solution = group.solution
    devices = list(solution.devices)
    for part, device in zip(solution.classes, asked, strict=True):
        if device >= 0:
            for node in part:
                devices[node] = device
        else:
            placed = place_part(group.graph, part, {}, program.names, program.host, insert_copies)
            for node, own in placed.items():
                devices[node] = own
    check_rigid(group.graph, devices, program.names)
    return devices


def _suffix(program: Program, group: RecursionGroup, devices: list[int]) -> str:
    """The devices of a clone's interface, as part of a name."""
    used = dict.fromkeys(devices[part[0]] for part in group.solution.classes)
    return "_".join(device_identifier(program.vdevices[device], program.vdevices) for device in used)


@dataclass(slots=True, eq=False)
class RecursionGroup:
    """Functions that call each other, or one function alone.

    Attributes
    ----------
    index : int
        Callees come before their callers.
    units : list of Unit
        In module order.
    """

    index: int
    units: list[Unit]
    graph: Graph
    solution: Solution


def mention(graph: Graph, callee: Unit, group: RecursionGroup, location: Location) -> tuple[Tree, CallRef]:
    """Nodes in the caller's graph for one call (or other mention) of a function.

    Every mention gets its own, so that a function may be called on several devices. A parameter or result that the
    callee places is a site fixed to that device; those that must share a device which is open share a site.

    Parameters
    ----------
    graph : Graph
        Graph of the caller; sites are added.
    callee : Unit
    group : RecursionGroup
        The group of the callee.
    location : Location
        The call.

    Returns
    -------
    tree : FuncTree
        Its nodes are sites.
    ref : CallRef
        Which site decides which class.
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
            graph.fixed[site] = (device, Origin("callee", callee.name, location.function, _because(group, node)))
            if node in group.graph.inferred:
                graph.inferred[site] = group.graph.inferred[node]
        else:
            class_index = group.solution.class_of[node]
            known = sites.get(class_index)
            if known is None:
                known = sites[class_index] = graph.add(location)
                _pass_hints(graph, known, group, class_index)
            site = known
        if node in group.graph.opaque:
            graph.opaque.add(site)
        return site

    return visit(callee.tree), CallRef(callee, sites)


def _because(group: RecursionGroup, node: int) -> Callable[[], str]:
    return lambda: str(nearest_origin(group.graph, node))


def _pass_hints(graph: Graph, site: int, group: RecursionGroup, class_index: int) -> None:
    """Hints inside the callee count in round two of the caller: the first of each device."""
    found: dict[int, Origin] = {}
    for node in group.solution.classes[class_index]:
        for device, origin in group.graph.hints.get(node, ()):
            found.setdefault(device, origin)
    if found:
        graph.hints[site] = list(found.items())
