"""Assignment of a device to every connected component of the placement graph.

Round one: a component with one fixed device gets it; several are an error, or `propagate` decides where copies are
allowed. Round two: a component without a fixed device gets the device that is hinted for one of its values. A component
of parameters or results without a fixed device stays open: each caller places it.
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
# Forward, in program order: a site (an op) takes its result's fixed device, else that of its first placed operand, and
# places its results there. Then backward: a free value takes the device of its first placed use, and so does its
# producer. Both alternate to a fixpoint. The targets of a site are its results, the targets of a value its users.


def propagate(graph: Graph, component: list[int], fixed: dict[int, int]) -> dict[int, int]:
    """The device of every node of a connected component.

    Parameters
    ----------
    component : list of int
        All nodes of the component.
    fixed : dict
        Fixed device (index) by node; at least one.

    Returns
    -------
    devices : dict
        Device by node, for all nodes of `component`.
    """
    return _Propagation(graph, fixed).run()


class _Propagation:
    def __init__(self, graph: Graph, fixed: dict[int, int]) -> None:
        self.graph = graph
        self.devices: dict[int, int] = {}
        # Sites to visit forward, earliest first; values to visit backward, latest first (negated).
        self.forward: list[int] = []
        self.backward: list[int] = []
        for node, device in sorted(fixed.items()):
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


Seeds: TypeAlias = "dict[int, tuple[int, Origin]]"  # fixed or hinted device (index) of each node, and its origin

_CONFLICT_ADVICE = (
    "All tensors of one op share a device; put a relax.to_vdevice between them, or let "
    "RealizeVDevice(insert_copies=True) do so"
)


@dataclass(slots=True)
class Solution:
    """Devices of all nodes of a graph that do not depend on callers."""

    devices: list[int]  # device (index) of every node, or -1 if its component is open
    open_component_of: dict[int, int] = field(default_factory=dict)  # index of the open component of each node in one
    open_components: list[list[int]] = field(default_factory=list)  # nodes of every open component


def solve(graph: Graph, device_names: list[str], host: int, insert_copies: bool) -> Solution:
    """Place every node that can be placed without knowing the callers.

    Parameters
    ----------
    graph : Graph
    device_names : list of str
        Names of the devices by index; the first is the default device.
    host : int
        Index of the host device; negative if there is none.
    insert_copies : bool
        Whether transfers are inserted where two devices meet.

    Raises
    ------
    PlacementError
        If a component has two fixed devices, or two hints and no fixed device, and copies are not allowed.
    """
    solution = Solution([-1] * len(graph.locations))
    for component in _connected_components(graph):
        fixed = {node: graph.fixed[node] for node in component if node in graph.fixed}
        if not fixed and not graph.signature_nodes.isdisjoint(component):
            for node in component:
                solution.open_component_of[node] = len(solution.open_components)
            solution.open_components.append(component)
            continue
        for node, device in place_component(graph, component, fixed, device_names, host, insert_copies).items():
            solution.devices[node] = device
    check_untransferable(graph, solution.devices, device_names)
    return solution


def place_component(
    graph: Graph, component: list[int], fixed: Seeds, device_names: list[str], host: int, insert_copies: bool
) -> dict[int, int]:
    """The device of every node of a connected component: by its fixed devices, else its hints, else the default."""
    seeds = fixed or _hint_seeds(graph, component, device_names, insert_copies)
    devices = {device for device, _ in seeds.values()}
    if not devices:
        is_only_read_by_host = host >= 0 and len(component) == 1 and component[0] in graph.host_values
        return dict.fromkeys(component, host if is_only_read_by_host else 0)
    if len(devices) == 1:
        return dict.fromkeys(component, devices.pop())
    if not insert_copies:
        raise PlacementError(_conflict_message(graph, seeds, device_names, are_hints=not fixed))
    return propagate(graph, component, {node: device for node, (device, _) in seeds.items()})


def _hint_seeds(graph: Graph, component: Iterable[int], device_names: list[str], insert_copies: bool) -> Seeds:
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
                    _hint_conflict(
                        graph.locations[node], device_names[device], origin, device_names[second_device], second_origin
                    )
                )
    return seeds


def _hint_conflict(location: Location, first: str, first_origin: Origin, second: str, second_origin: Origin) -> str:
    return (
        f"{location_text('relax.hint_on_device', second_origin.name, location.function)}: two devices meet: "
        f"'{location.variable}' is hinted for {first} (from {first_origin}), but also for {second} "
        f"(from {second_origin}), and nothing else places it. {_CONFLICT_ADVICE}"
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
        for node in component:  # grows during the loop
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
    """Shortest path from a fixed or hinted node (`start`) to a node, whose neighbour on it is `predecessor` (or -1)."""

    device: int
    origin: Origin
    start: int
    predecessor: int


def shortest_paths(graph: Graph, seeds: Seeds) -> tuple[dict[int, Path], tuple[int, int] | None]:
    """The path to each node from the nearest seed, and the first edge at which two devices meet."""
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
    """The origin of the nearest fixed node, for messages that say why a node is on its device."""
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


def _conflict_message(graph: Graph, seeds: Seeds, device_names: list[str], are_hints: bool) -> str:
    """The message for a component whose seeds differ: where they meet, both devices and their origins."""
    paths, meeting = shortest_paths(graph, seeds)
    assert meeting is not None, "a connected component with two devices has an edge where they meet"
    site, value = meeting if graph.is_site(meeting[0]) else (meeting[1], meeting[0])
    location = graph.locations[site]
    texts = []
    for node in (site, value):
        path = paths[node]
        named_node = node if not graph.is_site(node) else path.predecessor
        name = f"'{graph.locations[named_node].variable}'" if named_node >= 0 else f"the {location.op}"
        verb = "is hinted for" if are_hints else "is on"
        texts.append(f"{name} {verb} {device_names[path.device]} (from {_root_origin(graph, path)})")
    return f"{location.where}: two devices meet: {texts[0]}, but {texts[1]}. {_CONFLICT_ADVICE}"


def _root_origin(graph: Graph, path: Path) -> Origin:
    """The origin at the start of a path, or the earlier annotation that TVM's type inference copied to it."""
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


def check_untransferable(graph: Graph, devices: list[int], device_names: list[str]) -> None:
    """Raise if a function value or an ``R.Object`` is needed on another device: neither can be transferred."""
    for source, target, site in graph.untransferable:
        if devices[source] != devices[target] and devices[source] >= 0 and devices[target] >= 0:
            location, name = graph.locations[site], graph.locations[source].variable
            found, expected = device_names[devices[source]], device_names[devices[target]]
            raise PlacementError(
                f"{location.where}: '{name}' is on {found} but is needed on {expected}, "
                "and an object or a function value cannot be transferred"
            )


def needs_transfers(graph: Graph, devices: list[int]) -> bool:
    """Return whether an edge connects two devices, so that a value is used on a device other than its own."""
    return any(
        devices[node] != devices[neighbour] for node, targets in enumerate(graph.targets) for neighbour in targets
    )
