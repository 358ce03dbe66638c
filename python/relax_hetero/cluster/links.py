"""Plans of links (`host_links`), by which tensors go from GPU to GPU; other tensors go through host memory.

A tensor goes by a link if its sender has it on a GPU and all its readers need it on one other GPU. The message only
announces it. With links, hosts run the tasks of one call after the other, so that both ends agree on the order.

The sender's GPU may wait until a tensor is received. To avoid deadlocks, links connect only tasks without another task
of the sender's host between them: a task then waits only for earlier tasks, never for one whose host waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import HostError
from .route import Route, Task

CONNECT_SECONDS = 30.0  # timeout of a link's connection, after which its tensors go through host memory
_ABORT_SECONDS = 15.0  # time within which a living host aborts its links


@dataclass(frozen=True)
class GpuInfo:
    """GPUs of a host, for planning links."""

    problem: str = ""  # reason why the host cannot have links; empty if it can
    # Globally unique identifiers by index of the GPU in its process.
    gpus: Mapping[int, str] = field(default_factory=dict)
    # GPUs of each function's inputs and results; None for values that are not on a GPU. Empty if the host has no GPUs.
    inputs: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """A link between two tasks of a route."""

    number: int  # index among the links of the route
    tasks: tuple[int, int]  # sender and receiver
    hosts: tuple[str, str]  # logical names of the hosts of sender and receiver
    gpus: tuple[int, int]  # indices of the GPUs in their processes
    values: Mapping[str, tuple[int, ...]]  # indices in the message of values that go by the link, by function


@dataclass(frozen=True)
class LinkTensor:
    """Announcement in a message of a tensor that goes by a link."""

    link: int  # number of the link
    sequence: int  # number of tensors that went by the link before
    # Element type and extents.
    dtype: str
    shape: tuple[int, ...]


LinkTexts = dict[str, dict[str, str]]
"""Descriptions of how tensors go from GPU to GPU, by host of the sender and host of the receiver."""


def plan_links(route: Route, infos: Mapping[str, GpuInfo]) -> tuple[list[Link], LinkTexts]:
    """Plan the links of a route, and describe them. `infos`: GPUs of each host."""
    links: list[Link] = []
    texts: LinkTexts = {}
    for source, task in enumerate(route.tasks):
        for target in task.targets:
            if target >= len(route.tasks):
                continue
            values_by_gpus = _values_by_gpus(route, source, target, infos)
            if not values_by_gpus:
                continue
            hosts = task.host, route.tasks[target].host
            problem = _find_problem(route.tasks, source, target, values_by_gpus, infos)
            host_texts = texts.setdefault(hosts[0], {})
            if problem:
                host_texts[hosts[1]] = f"host memory: {problem}"
                continue
            host_texts.setdefault(hosts[1], "NCCL")
            for gpus, values in sorted(values_by_gpus.items()):
                links.append(Link(len(links), (source, target), hosts, gpus, values))
    return links, texts


def connect_links(
    ray: Any,  # the module ``ray``
    actors: Mapping[str, Any],  # actors by host
    infos: Mapping[str, GpuInfo],  # results of `HostMachine.connect` by host
    route: Route,  # route of the graph
) -> LinkTexts:
    """Connect the links of a route; tensors of links that fail go through host memory.

    Returns descriptions of how tensors go from GPU to GPU.
    """
    links, texts = plan_links(route, infos)
    if not links:
        return texts
    created = ray.get([actors[link.hosts[0]].call_links.remote("create_id", link) for link in links])
    ids, failures = {}, {}
    for link, (link_id, reason) in zip(links, created, strict=True):
        if reason:
            failures[link.number] = f"host {link.hosts[0]!r}: {reason}"
        else:
            ids[link.number] = link_id
    replies = {
        host: actor.call_links.remote(
            "connect", [(link, ids[link.number]) for link in links if host in link.hosts and link.number in ids]
        )
        for host, actor in actors.items()
    }
    for host, reference in replies.items():
        for number, reason in ray.get(reference).items():
            failures.setdefault(number, f"host {host!r}: {reason}")
    for link in links:
        if link.number in failures:
            texts[link.hosts[0]][link.hosts[1]] = f"host memory: {failures[link.number]}"
    connected = [link.number for link in links if link.number not in failures]
    ray.get([actor.call_links.remote("retain", connected) for actor in actors.values()])
    return texts


def abort_links(ray: Any, actors: Mapping[str, Any]) -> None:
    """Abort the links of all hosts after one of them has died, with a timeout.

    Aborted operations end with undefined data, which may already be on the way to further hosts. So all hosts first
    stop accepting results of steps. If one does not answer, nothing is aborted, and its process is killed.
    """
    alive = [actor for actor in actors.values() if actor is not None]
    for method in ("reject_results", "abort"):
        replies = [actor.call_links.remote(method) for actor in alive]
        ready, _ = ray.wait(replies, num_returns=len(replies), timeout=_ABORT_SECONDS) if replies else ([], [])
        if len(ready) < len(replies):
            return


def check_sequence(announced: LinkTensor, expected: int) -> None:
    """Check that a tensor is the next one of a link; raises HostError."""
    if announced.sequence != expected:
        raise HostError(
            f"link {announced.link} announces tensor {announced.sequence}, expected {expected}: some are missing"
        )


def _values_by_gpus(
    route: Route, source: int, target: int, infos: Mapping[str, GpuInfo]
) -> dict[tuple[int, int], dict[str, tuple[int, ...]]]:
    """Indices in the message of values that sender and receiver have on GPUs, by both GPUs and by function."""
    sender, receiver = route.tasks[source], route.tasks[target]
    if not infos[sender.host].outputs or not infos[receiver.host].inputs:
        return {}  # a host without GPUs
    values_by_gpus: dict[tuple[int, int], dict[str, tuple[int, ...]]] = {}
    for function, work in sender.work.items():
        outputs = infos[sender.host].outputs[work.function]
        reader = receiver.work[function]
        inputs = infos[receiver.host].inputs[reader.function]
        for index, result in enumerate(work.sends[sender.targets.index(target)]):
            reader_gpus = {inputs[i] for i, argument in enumerate(reader.arguments) if argument == (source, index)}
            gpus = outputs[result], next(iter(reader_gpus), None)
            if gpus[0] is not None and gpus[1] is not None and len(reader_gpus) == 1:
                values = values_by_gpus.setdefault((gpus[0], gpus[1]), {})
                values[function] = (*values.get(function, ()), index)
    return values_by_gpus


def _find_problem(
    tasks: Sequence[Task], source: int, target: int, gpu_pairs: Iterable[tuple[int, int]], infos: Mapping[str, GpuInfo]
) -> str:
    """Reason why there can be no link between two tasks; empty if there can."""
    hosts = tasks[source].host, tasks[target].host
    for host in hosts:
        if infos[host].problem:
            return f"host {host!r}: {infos[host].problem}"
    if any(task.host == hosts[0] for task in tasks[source + 1 : target]):
        return f"host {hosts[0]!r} has other work before host {hosts[1]!r} receives them"
    for gpus in gpu_pairs:
        if infos[hosts[0]].gpus[gpus[0]] == infos[hosts[1]].gpus[gpus[1]]:
            return "both use the same GPU, which NCCL does not connect with itself"
    return ""
