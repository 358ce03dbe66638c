"""What callers see of a solved recursion group: devices where its own annotations place it, open classes elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .graph import FuncTree, Graph, Origin, Spot, Tree
from .program import CallRef, Unit
from .solve import Solution, nearest_origin


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


def mention(graph: Graph, callee: Unit, group: RecursionGroup, spot: Spot) -> tuple[Tree, CallRef]:
    """Nodes in the caller's graph for one call (or other mention) of a function.

    Every mention gets its own, so that a function may be called on several devices. A parameter or result that the
    callee places is a site fixed to that device; those that must share a device which is open share a site.

    Parameters
    ----------
    graph : Graph
        Of the caller; sites are added.
    callee : Unit
    group : RecursionGroup
        The group of the callee.
    spot : Spot
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
            site = graph.add(spot)
            graph.fixed[site] = (device, Origin("callee", callee.name, spot.function, _because(group, node)))
            if node in group.graph.hearsay:
                graph.hearsay[site] = group.graph.hearsay[node]
        else:
            class_index = group.solution.class_of[node]
            known = sites.get(class_index)
            if known is None:
                known = sites[class_index] = graph.add(spot)
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
