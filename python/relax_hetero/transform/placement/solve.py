"""Assignment of a device to every connected component of the graph.

Round one: a component with one fixed device gets it; two fixed devices that meet are an error, or are resolved by
`propagate` where copies are allowed. Round two: a component without a fixed device gets the device that is hinted for
one of its values. A component that callers can still place stays open, as a numbered class.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from ...errors import PlacementError
from .graph import Graph, Location, Origin, location_text

# Propagation in a component in which several fixed devices meet, where copies may be inserted.
#
# Forward, in program order: an op takes its result's fixed device, else that of its first placed operand, and places
# its results there. Then backward: a free value takes the device of its first placed use, and so does its producer.
# Both alternate to a fixpoint. Placed nodes do not change, so the time is linear in the edges except for the queues.


def propagate(graph: Graph, component: list[int], seeds: dict[int, int]) -> dict[int, int]:
    """The device of every node of a connected component.

    Parameters
    ----------
    graph : Graph
    component : list of int
        All nodes of the component.
    seeds : dict
        Fixed devices by node; at least one.

    Returns
    -------
    devices : dict
        Device by node, for all nodes of `component`.
    """
    return _Propagation(graph, seeds).run()


class _Propagation:
    def __init__(self, graph: Graph, seeds: dict[int, int]) -> None:
        self.graph = graph
        self.devices: dict[int, int] = {}
        # Sites to visit forward, earliest first; values to visit backward, latest first (negated).
        self.forward: list[int] = []
        self.backward: list[int] = []
        for node, device in sorted(seeds.items()):
            self._place(node, device)

    def run(self) -> dict[int, int]:
        """Propagate forward and backward to a fixpoint."""
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


# Fixed device (index) of a node, and its origin.
Seeds: TypeAlias = "dict[int, tuple[int, Origin]]"

ADVICE = (
    "All tensors of one op share a device; put a relax.to_vdevice between them, or let "
    "RealizeVDevice(insert_copies=True) do so"
)


@dataclass(slots=True)
class Solution:
    """Devices of all nodes of a graph that do not depend on callers.

    Attributes
    ----------
    devices : list of int
        Device (index) of every node, or -1 if its class is open.
    class_of : dict
        Class of each open node.
    classes : list of list of int
        Nodes of every open class.
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
        Whether two devices may meet.

    Raises
    ------
    PlacementError
        If two fixed devices, or two hints where nothing is fixed, meet and copies are not allowed.
    """
    solution = Solution([-1] * len(graph.locations))
    for component in _connected_components(graph):
        fixed = {node: graph.fixed[node] for node in component if node in graph.fixed}
        if not fixed and not graph.interface.isdisjoint(component):
            for node in component:
                solution.class_of[node] = len(solution.classes)
            solution.classes.append(component)
            continue
        for node, device in place_component(graph, component, fixed, names, host, insert_copies).items():
            solution.devices[node] = device
    check_rigid(graph, solution.devices, names)
    return solution


def place_component(
    graph: Graph, component: list[int], fixed: Seeds, names: list[str], host: int, insert_copies: bool
) -> dict[int, int]:
    """Device of every node of a connected component with its fixed devices: rounds one and two, and the default."""
    seeds = fixed or _hinted(graph, component, names, insert_copies)
    devices = {device for device, _ in seeds.values()}
    if not devices:
        is_single_host_value = host >= 0 and len(component) == 1 and component[0] in graph.made_on_host
        return dict.fromkeys(component, host if is_single_host_value else 0)
    if len(devices) == 1:
        return dict.fromkeys(component, devices.pop())
    if not insert_copies:
        raise PlacementError(explain_conflict(graph, seeds, names, hinted=not fixed))
    return propagate(graph, component, {node: device for node, (device, _) in seeds.items()})


def _hinted(graph: Graph, component: Iterable[int], names: list[str], insert_copies: bool) -> Seeds:
    """Seeds of round two: the first hint of every hinted node."""
    seeds: Seeds = {}
    for node in component:
        hints = graph.hints.get(node, ())
        if not hints:
            continue
        device, origin = seeds[node] = hints[0]
        for second_device, second_origin in hints:
            if second_device != device and not insert_copies:
                raise PlacementError(
                    _two_hints(graph.locations[node], names[device], origin, names[second_device], second_origin)
                )
    return seeds


def _two_hints(location: Location, first: str, first_origin: Origin, second: str, second_origin: Origin) -> str:
    return (
        f"{location_text('relax.hint_on_device', second_origin.name, location.function)}: two devices meet: "
        f"'{location.variable}' is hinted for {first} (from {first_origin}), but also for {second} "
        f"(from {second_origin}), and nothing else places it. {ADVICE}"
    )


def _connected_components(graph: Graph) -> Iterable[list[int]]:
    """Nodes of every connected component, ascending; components in order of their first node."""
    visited = bytearray(len(graph.locations))
    sources, targets = graph.sources, graph.targets
    for start in range(len(visited)):
        if visited[start]:
            continue
        visited[start] = 1
        component = [start]
        for node in component:  # grows while it is read
            for neighbour in sources[node]:
                if not visited[neighbour]:
                    visited[neighbour] = 1
                    component.append(neighbour)
            for neighbour in targets[node]:
                if not visited[neighbour]:
                    visited[neighbour] = 1
                    component.append(neighbour)
        component.sort()
        yield component


@dataclass(frozen=True, slots=True)
class Path:
    """Path of a device to a node: the fixed node at its start, and the node before this one."""

    device: int
    origin: Origin
    start: int
    before: int


def shortest_paths(graph: Graph, seeds: Seeds) -> tuple[dict[int, Path], tuple[int, int] | None]:
    """Paths from all fixed nodes, breadth first, and the first edge at which two devices meet."""
    paths = {node: Path(device, origin, node, -1) for node, (device, origin) in sorted(seeds.items())}
    queue = deque(paths)
    meeting: tuple[int, int] | None = None
    while queue:
        node = queue.popleft()
        path = paths[node]
        for neighbour in graph.neighbours(node):
            existing = paths.get(neighbour)
            if existing is None:
                paths[neighbour] = Path(path.device, path.origin, path.start, node)
                queue.append(neighbour)
            elif existing.device != path.device and meeting is None:
                meeting = node, neighbour
    return paths, meeting


def nearest_origin(graph: Graph, node: int) -> Origin | None:
    """The origin of the nearest fixed node, which determines the device of a placed node."""
    visited = {node}
    queue = deque(visited)
    while queue:
        current = queue.popleft()
        if current in graph.fixed:
            return graph.fixed[current][1]
        for neighbour in graph.neighbours(current):
            if neighbour not in visited:
                visited.add(neighbour)
                queue.append(neighbour)
    return None


def explain_conflict(graph: Graph, seeds: Seeds, names: list[str], hinted: bool) -> str:
    """The message for a component with different seeds: where they meet, both devices and their origins."""
    paths, meeting = shortest_paths(graph, seeds)
    assert meeting is not None, "a connected part with two devices has an edge where they meet"
    site, value = meeting if graph.is_site(meeting[0]) else (meeting[1], meeting[0])
    location = graph.locations[site]
    texts = []
    for node in (site, value):
        path = paths[node]
        named_node = node if not graph.is_site(node) else path.before
        name = f"'{graph.locations[named_node].variable}'" if named_node >= 0 else f"the {location.op}"
        verb = "is hinted for" if hinted else "is on"
        texts.append(f"{name} {verb} {names[path.device]} (from {_root_origin(graph, path)})")
    return f"{location.where}: two devices meet: {texts[0]}, but {texts[1]}. {ADVICE}"


def _root_origin(graph: Graph, path: Path) -> Origin:
    """The original annotation of a fixed value: TVM's inference copies annotations from operand to result."""
    node, origin = path.start, path.origin
    visited = {node}
    while origin.kind in ("variable", "return"):
        operands = [operand for site in graph.sources[node] for operand in graph.sources[site]]
        sources = [x for x in operands if x not in visited and graph.fixed.get(x, (-1,))[0] == path.device]
        if not sources:
            break
        node = sources[0]
        visited.add(node)
        origin = graph.fixed[node][1]
    return origin


def check_rigid(graph: Graph, devices: list[int], names: list[str]) -> None:
    """Refuse function values and ``R.Object`` that are needed on another device: they cannot be transferred."""
    for source, target, site in graph.rigid:
        if devices[source] != devices[target] and devices[source] >= 0 and devices[target] >= 0:
            location, name = graph.locations[site], graph.locations[source].variable
            raise PlacementError(
                f"{location.where}: '{name}' is on {names[devices[source]]} but is needed on {names[devices[target]]}, "
                "and an object or a function value cannot be transferred"
            )


def is_mixed(graph: Graph, devices: list[int]) -> bool:
    """Return whether an edge connects two devices, so that a value is used on a device other than its own."""
    return any(
        devices[node] != devices[neighbour] for node, targets in enumerate(graph.targets) for neighbour in targets
    )
