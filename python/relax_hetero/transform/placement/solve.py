"""Give every connected part of the graph its device.

Round one: a part with fixed devices has that one device; two that meet are an error, or go to `propagate` where
copies are allowed. Round two: a part without gets the device that is hinted for one of its values. A part that callers
can still place stays open, as a numbered class.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ...errors import PlacementError
from .graph import Graph, Location, Origin, location_text

# Devices of a part of the graph in which several fixed devices meet, and copies may be inserted.
#
# Forward, in program order: an op takes its result's fixed device, else that of its first placed operand, and makes its
# results there. Then backward: a free value goes with its first placed use, and so does the op that makes it. Both, in
# turn, until nothing changes. What is placed is never moved, so the work is linear in the edges but for the queues.


def propagate(graph: Graph, part: list[int], seeds: dict[int, int]) -> dict[int, int]:
    """The device of every node of a connected part.

    Parameters
    ----------
    graph : Graph
    part : list of int
        All nodes of the part.
    seeds : dict
        Node to its fixed device; at least one.

    Returns
    -------
    devices : dict
        Node to device, for all of `part`.
    """
    return _Flow(graph, seeds).run()


class _Flow:
    def __init__(self, graph: Graph, seeds: dict[int, int]) -> None:
        self.graph = graph
        self.devices: dict[int, int] = {}
        # Sites to visit forward, earliest first; values to visit backward, latest first (negated).
        self.forward: list[int] = []
        self.backward: list[int] = []
        for node, device in sorted(seeds.items()):
            self._place(node, device)

    def run(self) -> dict[int, int]:
        """Forward and backward until nothing is left."""
        while self.forward or self.backward:
            while self.forward:
                self._visit_site(heapq.heappop(self.forward))
            while self.backward:
                self._visit_value(-heapq.heappop(self.backward))
        return self.devices

    def _place(self, node: int, device: int) -> None:
        self.devices[node] = device
        if self.graph.is_site(node):
            for value in self.graph.targets[node]:
                if value not in self.devices:
                    self._place(value, device)
            for value in self.graph.sources[node]:
                if value not in self.devices:
                    heapq.heappush(self.backward, -value)
        else:
            for site in (*self.graph.targets[node], *self.graph.sources[node]):
                if site not in self.devices:
                    heapq.heappush(self.forward, site)

    def _visit_site(self, site: int) -> None:
        if site in self.devices:
            return
        for value in (*self.graph.targets[site], *self.graph.sources[site]):
            if value in self.devices:
                self._place(site, self.devices[value])
                return

    def _visit_value(self, value: int) -> None:
        if value in self.devices:
            return
        for site in self.graph.targets[value]:
            if site in self.devices:
                self._place(value, self.devices[site])
                break
        for site in self.graph.sources[value]:
            if site not in self.devices:
                self._visit_site(site)


# Node to its fixed device (index), and where that comes from.
Seeds: TypeAlias = "dict[int, tuple[int, Origin]]"

ADVICE = (
    "All tensors of one op share a device; put a relax.to_vdevice between them, or let "
    "RealizeVDevice(insert_copies=True) do so"
)


@dataclass(slots=True)
class Solution:
    """Where everything in a graph is that does not depend on callers.

    Attributes
    ----------
    devices : list of int
        Device (index) of every node, or -1 where its class is open.
    class_of : dict
        Classes of the open nodes.
    classes : list of list of int
        The nodes of every open class.
    """

    devices: list[int]
    class_of: dict[int, int] = field(default_factory=dict)
    classes: list[list[int]] = field(default_factory=list)


def solve(graph: Graph, names: list[str], host: int, insert_copies: bool) -> Solution:
    """Place every node that can be placed without knowing the callers.

    Parameters
    ----------
    graph : Graph
    names : list of str
        Device names by index; the first is the default device.
    host : int
        Index of the host device; negative if there is none.
    insert_copies : bool
        Whether devices may meet.

    Raises
    ------
    PlacementError
        If two fixed devices, or two hints where nothing is fixed, meet and copies are not allowed.
    """
    solution = Solution([-1] * len(graph.locations))
    for part in _connected_parts(graph):
        fixed = {node: graph.fixed[node] for node in part if node in graph.fixed}
        if not fixed and not graph.interface.isdisjoint(part):
            for node in part:
                solution.class_of[node] = len(solution.classes)
            solution.classes.append(part)
            continue
        for node, device in place_part(graph, part, fixed, names, host, insert_copies).items():
            solution.devices[node] = device
    check_rigid(graph, solution.devices, names)
    return solution


def place_part(
    graph: Graph, part: list[int], fixed: Seeds, names: list[str], host: int, insert_copies: bool
) -> dict[int, int]:
    """Device of every node of a connected part, given what is fixed in it: rounds one and two, and the default."""
    seeds = fixed or _hinted(graph, part, names, insert_copies)
    devices = {device for device, _ in seeds.values()}
    if not devices:
        alone_on_host = host >= 0 and len(part) == 1 and part[0] in graph.made_on_host
        return dict.fromkeys(part, host if alone_on_host else 0)
    if len(devices) == 1:
        return dict.fromkeys(part, devices.pop())
    if not insert_copies:
        raise PlacementError(explain_conflict(graph, seeds, names, hinted=not fixed))
    return propagate(graph, part, {node: device for node, (device, _) in seeds.items()})


def _hinted(graph: Graph, part: Iterable[int], names: list[str], insert_copies: bool) -> Seeds:
    """Seeds of round two: the first hint of every hinted node."""
    seeds: Seeds = {}
    for node in part:
        hints = graph.hints.get(node, ())
        if not hints:
            continue
        device, origin = seeds[node] = hints[0]
        for other, other_origin in hints:
            if other != device and not insert_copies:
                raise PlacementError(
                    _two_hints(graph.locations[node], names[device], origin, names[other], other_origin)
                )
    return seeds


def _two_hints(location: Location, first: str, first_origin: Origin, second: str, second_origin: Origin) -> str:
    return (
        f"{location_text('relax.hint_on_device', second_origin.name, location.function)}: two devices meet: "
        f"'{location.variable}' is hinted for {first} (from {first_origin}), but also for {second} "
        f"(from {second_origin}), and nothing else places it. {ADVICE}"
    )


def _connected_parts(graph: Graph) -> Iterable[list[int]]:
    """The nodes of every connected part, ascending; parts in order of their first node."""
    seen = bytearray(len(graph.locations))
    sources, targets = graph.sources, graph.targets
    for start in range(len(seen)):
        if seen[start]:
            continue
        seen[start] = 1
        part = [start]
        for node in part:  # grows while it is read
            for near in sources[node]:
                if not seen[near]:
                    seen[near] = 1
                    part.append(near)
            for near in targets[node]:
                if not seen[near]:
                    seen[near] = 1
                    part.append(near)
        part.sort()
        yield part


@dataclass(frozen=True, slots=True)
class Path:
    """How a device reaches a node: the fixed node it starts from, and the node before this one."""

    device: int
    origin: Origin
    start: int
    before: int


def shortest_paths(graph: Graph, seeds: Seeds) -> tuple[dict[int, Path], tuple[int, int] | None]:
    """From all fixed nodes at once, breadth first; also the first edge at which two devices meet."""
    paths = {node: Path(device, origin, node, -1) for node, (device, origin) in sorted(seeds.items())}
    queue = deque(paths)
    meeting: tuple[int, int] | None = None
    while queue:
        node = queue.popleft()
        path = paths[node]
        for near in graph.neighbours(node):
            other = paths.get(near)
            if other is None:
                paths[near] = Path(path.device, path.origin, path.start, node)
                queue.append(near)
            elif other.device != path.device and meeting is None:
                meeting = node, near
    return paths, meeting


def nearest_origin(graph: Graph, node: int) -> Origin | None:
    """Origin of the nearest fixed node, which fixes a placed node."""
    seen = {node}
    queue = deque(seen)
    while queue:
        here = queue.popleft()
        if here in graph.fixed:
            return graph.fixed[here][1]
        for near in graph.neighbours(here):
            if near not in seen:
                seen.add(near)
                queue.append(near)
    return None


def explain_conflict(graph: Graph, seeds: Seeds, names: list[str], hinted: bool) -> str:
    """The message for a part whose seeds disagree: where they meet, both devices, where each comes from."""
    paths, meeting = shortest_paths(graph, seeds)
    assert meeting is not None, "a connected part with two devices has an edge where they meet"
    site, value = meeting if graph.is_site(meeting[0]) else (meeting[1], meeting[0])
    spot = graph.locations[site]
    sides = []
    for here in (site, value):
        path = paths[here]
        shown = here if not graph.is_site(here) else path.before
        name = f"'{graph.locations[shown].variable}'" if shown >= 0 else f"the {spot.op}"
        needs = "is hinted for" if hinted else "is on"
        sides.append(f"{name} {needs} {names[path.device]} (from {_root(graph, path)})")
    return f"{spot.where}: two devices meet: {sides[0]}, but {sides[1]}. {ADVICE}"


def _root(graph: Graph, path: Path) -> Origin:
    """The first of the annotations that a fixed value repeats: TVM's inference copies them from operand to result."""
    node, origin = path.start, path.origin
    seen = {node}
    while origin.kind in ("variable", "return"):
        operands = [before for site in graph.sources[node] for before in graph.sources[site]]
        same = [at for at in operands if at not in seen and graph.fixed.get(at, (-1,))[0] == path.device]
        if not same:
            break
        node = same[0]
        seen.add(node)
        origin = graph.fixed[node][1]
    return origin


def check_rigid(graph: Graph, devices: list[int], names: list[str]) -> None:
    """Refuse function values and ``R.Object`` whose two ends are apart: no transfer can join them."""
    for left, right, site in graph.rigid:
        if devices[left] != devices[right] and devices[left] >= 0 and devices[right] >= 0:
            spot, name = graph.locations[site], graph.locations[left].variable
            raise PlacementError(
                f"{spot.where}: '{name}' is on {names[devices[left]]} but is needed on {names[devices[right]]}, "
                "and an object or a function value cannot be transferred"
            )


def is_mixed(graph: Graph, devices: list[int]) -> bool:
    """Return whether an edge joins two devices, so that a value is used on another device than its own."""
    return any(devices[node] != devices[near] for node, targets in enumerate(graph.targets) for near in targets)
