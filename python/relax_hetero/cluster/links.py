"""Which tensors go from GPU to GPU, and which through the memory of hosts; and how the links for the former are made.

A tensor goes by a link (`gpu_link`) where its sender has it on a GPU and every reader wants it on one other GPU. In
the message along Ray's channel stands only its announcement: as channels keep order, so do the operations of a link.

A sender's GPU may have to wait until a tensor is taken (see `gpu_link`). Therefore links are only between two tasks
without another task of the sender's between them. What a task waits for is made by tasks before it then, and never by
one whose host waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import HostError
from .route import Route, Task

CONNECT_SECONDS = 30.0
"""For one link; hosts that do not find each other within them exchange tensors through host memory."""

# Seconds within which a living host ends its links.
_CUT_SECONDS = 15.0


@dataclass(frozen=True)
class GpuInfo:
    """Description of a host that is needed before links are planned.

    Attributes
    ----------
    problem : str
        Why it can have none; empty where it can.
    gpus : mapping of int to str
        Identity among all machines, by number of the GPU in its process.
    inputs, outputs : mapping of str to tuple of int or None
        Numbers of the GPUs of each function's inputs and results; None for values on no GPU. Empty where the host has
        no GPUs.
    """

    problem: str = ""
    gpus: Mapping[int, str] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link between two slots of a route.

    Attributes
    ----------
    number : int
        Among the links of the route.
    tasks : (int, int)
        The one that sends, and the one that receives.
    hosts : (str, str)
        Logical names of both hosts.
    gpus : (int, int)
        Numbers of both GPUs in their processes.
    values : mapping of str to tuple of int
        Places in the message of the values that go along, by function.
    """

    number: int
    tasks: tuple[int, int]
    hosts: tuple[str, str]
    gpus: tuple[int, int]
    values: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class LinkTensor:
    """A tensor that arrives by a link; what a message holds in its place.

    Attributes
    ----------
    link : int
        Its number.
    sequence : int
        How many tensors went along before.
    dtype, shape
        TVM's name of the element type, and the extents.
    """

    link: int
    sequence: int
    dtype: str
    shape: tuple[int, ...]


LinkTexts = dict[str, dict[str, str]]
"""Description in words of how tensors go, by host that has them on GPUs to send and by host whose GPUs take them."""


def plan_links(route: Route, infos: Mapping[str, GpuInfo]) -> tuple[list[Link], LinkTexts]:
    """The links of a route, and what is to be said of each two hosts.

    Parameters
    ----------
    infos : mapping of str to GpuInfo
        Descriptions by host.
    """
    links: list[Link] = []
    roads: LinkTexts = {}
    for source, slot in enumerate(route.tasks):
        for target in slot.targets:
            if target >= len(route.tasks):
                continue
            between = _between(route, source, target, infos)
            if not between:
                continue
            hosts = slot.host, route.tasks[target].host
            problem = _problem(route.tasks, source, target, between, infos)
            said = roads.setdefault(hosts[0], {})
            if problem:
                said[hosts[1]] = f"host memory: {problem}"
                continue
            said.setdefault(hosts[1], "NCCL")
            for gpus, values in sorted(between.items()):
                links.append(Link(len(links), (source, target), hosts, gpus, values))
    return links, roads


def connect_links(ray: Any, actors: Mapping[str, Any], infos: Mapping[str, GpuInfo], route: Route) -> LinkTexts:
    """Have hosts connect the links of a route; what cannot be connected goes through host memory.

    Parameters
    ----------
    actors : mapping of str to object
        Actors by host; see `HostMachine.on_links`.
    infos : mapping of str to GpuInfo
        Results of `HostMachine.connect` by host.

    Returns
    -------
    Roads
        How tensors go from GPU to GPU.
    """
    links, roads = plan_links(route, infos)
    if not links:
        return roads
    made = ray.get([actors[link.hosts[0]].on_links.remote("create_id", link) for link in links])
    ids = {link.number: found for link, (found, why) in zip(links, made, strict=True) if not why}
    failures = {
        link.number: f"host {link.hosts[0]!r}: {why}" for link, (_, why) in zip(links, made, strict=True) if why
    }
    replies = {
        host: actor.on_links.remote(
            "connect", [(link, ids[link.number]) for link in links if host in link.hosts and link.number in ids]
        )
        for host, actor in actors.items()
    }
    for host, reference in replies.items():
        for number, reason in ray.get(reference).items():
            failures.setdefault(number, f"host {host!r}: {reason}")
    for link in links:
        if link.number in failures:
            roads[link.hosts[0]][link.hosts[1]] = f"host memory: {failures[link.number]}"
    good = [link.number for link in links if link.number not in failures]
    ray.get([actor.on_links.remote("keep", good) for actor in actors.values()])
    return roads


def cut_links(ray: Any, actors: Mapping[str, Any]) -> None:
    """Have hosts give up what they wait for from each other, as one of them has died; bounded.

    Operations that are cut end with any numbers, which may already be on their way to further hosts. So all hosts first
    learn that no step of theirs counts any more. Where one does not answer nothing is cut: its process is killed.
    """
    living = [actor for actor in actors.values() if actor is not None]
    for request in ("doubt", "cut"):
        replies = [actor.on_links.remote(request) for actor in living]
        ready, _ = ray.wait(replies, num_returns=len(replies), timeout=_CUT_SECONDS) if replies else ([], [])
        if len(ready) < len(replies):
            return


def check_sequence(announced: LinkTensor, expected: int) -> None:
    """Require the next tensor of a link; HostError names both."""
    if announced.sequence != expected:
        raise HostError(
            f"link {announced.link} announces tensor {announced.sequence}, expected {expected}: some were left out"
        )


def _between(
    route: Route, source: int, target: int, infos: Mapping[str, GpuInfo]
) -> dict[tuple[int, int], dict[str, tuple[int, ...]]]:
    """Places in the message, by GPUs of both ends and function, of values that both have on these GPUs."""
    sender, receiver = route.tasks[source], route.tasks[target]
    if not infos[sender.host].outputs or not infos[receiver.host].inputs:
        return {}  # a host without GPUs has nothing to say
    found: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for function, visit in sender.work.items():
        outputs = infos[sender.host].outputs[visit.function]
        taken = receiver.work[function]
        inputs = infos[receiver.host].inputs[taken.function]
        for place, index in enumerate(visit.sends[sender.targets.index(target)]):
            readers = {inputs[i] for i, wanted in enumerate(taken.arguments) if wanted == (source, place)}
            gpus = outputs[index], next(iter(readers), None)
            if gpus[0] is not None and gpus[1] is not None and len(readers) == 1:
                values = found.setdefault((gpus[0], gpus[1]), {})
                values[function] = (*values.get(function, ()), place)
    return found


def _problem(
    slots: Sequence[Task],
    source: int,
    target: int,
    between: Mapping[tuple[int, int], Any],
    infos: Mapping[str, GpuInfo],
) -> str:
    """Why a link cannot be; empty where it can."""
    hosts = slots[source].host, slots[target].host
    for host in hosts:
        if infos[host].problem:
            return f"host {host!r}: {infos[host].problem}"
    if any(slot.host == hosts[0] for slot in slots[source + 1 : target]):
        return f"host {hosts[0]!r} has other work before host {hosts[1]!r} takes them"
    for gpus in between:
        if infos[hosts[0]].gpus[gpus[0]] == infos[hosts[1]].gpus[gpus[1]]:
            return "both use the same GPU, which NCCL does not connect with itself"
    return ""
