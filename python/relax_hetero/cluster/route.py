"""Routes: tasks of hosts and messages between them, as plain data.

Functions whose steps are on the same hosts in the same order (such as prefill and decode of a language model) share a
route: task i runs step i of each function, and a message goes between two tasks if any function sends a value there. A
function without values for it sends an empty message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from .call_plan import CALL, CallPlan, Source, sources_of

END = 1 << 30  # index of the caller as a target: messages to it are results of the call


@dataclass(frozen=True)
class TaskWork:
    """Work of a task for one function."""

    function: str  # function of the host's executable
    # Task that sends each argument (`CALL` for the caller) and the index in its message; for an earlier task of the
    # same host, the index in its kept results.
    arguments: tuple[tuple[int, int], ...]
    keeps: tuple[int, ...]  # indices of results that later tasks of this host read
    sends: tuple[tuple[int, ...], ...]  # indices of results that are sent to each target of the task


@dataclass(frozen=True)
class Task:
    """Part of a route on one host."""

    host: str  # logical name of the host
    inputs: tuple[int, ...]  # tasks whose messages it receives, in order; `CALL` for the caller
    targets: tuple[int, ...]  # tasks that it sends a message to, in order; `END` for the caller
    follows: tuple[int, ...]  # earlier tasks of this host whose kept results it reads
    is_last: bool  # whether it is the host's last task, so that nothing of a call needs to be kept
    work: Mapping[str, TaskWork]  # work by function


@dataclass(frozen=True)
class Route:
    """Tasks of functions, and messages of the caller."""

    tasks: tuple[Task, ...]  # tasks in topological order
    # Indices of inputs in each message of the caller, by function and task.
    sent: Mapping[str, Mapping[int, tuple[int, ...]]]
    # Task and index in its message of each result, by function and source; `CALL` for inputs that are returned.
    results: Mapping[str, Mapping[Source, tuple[int, int]]]

    @cached_property
    def exits(self) -> list[int]:
        """Tasks that send a message to the caller."""
        return [index for index, task in enumerate(self.tasks) if END in task.targets]


def routes_of(plans: Mapping[str, CallPlan]) -> list[Route]:
    """Make the routes of all functions with steps; that of ``main``, or of the first function, comes first."""
    groups: dict[tuple[str, ...], dict[str, CallPlan]] = {}
    for name in sorted((name for name in plans if plans[name].steps), key=lambda name: name != "main"):
        groups.setdefault(plans[name].hosts, {})[name] = plans[name]
    return [_make_route(hosts, group) for hosts, group in groups.items()]


def _make_route(hosts: Sequence[str], plans: Mapping[str, CallPlan]) -> Route:
    messages = {name: _messages(plan) for name, plan in plans.items()}
    edges = {edge for by_edge in messages.values() for edge in by_edge}
    for number, host in enumerate(hosts):  # every task needs a message that starts it, and one that shows its end
        if not any(target == number and (source == CALL or hosts[source] != host) for source, target in edges):
            edges.add((CALL, number))
        if not any(source == number and (target == END or hosts[target] != host) for source, target in edges):
            edges.add((number, END))
    tasks = tuple(_make_task(number, hosts, edges, plans, messages) for number in range(len(hosts)))
    sent = {
        name: {task: by_edge.get((CALL, task), ()) for source, task in sorted(edges) if source == CALL}
        for name, by_edge in messages.items()
    }
    return Route(tasks, sent, {name: _locate_results(plan, messages[name]) for name, plan in plans.items()})


def _messages(plan: CallPlan) -> dict[tuple[int, int], tuple[int, ...]]:
    """Indices of the values of each message, by source and target."""
    messages: dict[tuple[int, int], dict[int, None]] = {}
    for number, step in enumerate(plan.steps):
        for source in step.arguments:
            messages.setdefault((source.step, number), {})[source.index] = None
    for source in sources_of(plan.result):
        if source.step != CALL:
            messages.setdefault((source.step, END), {})[source.index] = None
    return {edge: tuple(indices) for edge, indices in messages.items()}


def _make_task(
    number: int,
    hosts: Sequence[str],
    edges: set[tuple[int, int]],
    plans: Mapping[str, CallPlan],
    messages: Mapping[str, Mapping[tuple[int, int], tuple[int, ...]]],
) -> Task:
    host = hosts[number]

    def is_own(other: int) -> bool:
        return 0 <= other < len(hosts) and hosts[other] == host

    inputs = tuple(sorted(source for source, target in edges if target == number and not is_own(source)))
    targets = tuple(sorted(target for source, target in edges if source == number and not is_own(target)))
    follows = tuple(sorted(source for source, target in edges if target == number and is_own(source)))
    work = {}
    for name, plan in plans.items():
        step, values = plan.steps[number], messages[name]
        arguments = tuple(
            (source.step, source.index if is_own(source.step) else values[source.step, number].index(source.index))
            for source in step.arguments
        )
        keeps = {
            index
            for (source, target), indices in values.items()
            if source == number and is_own(target)
            for index in indices
        }
        sends = tuple(values.get((number, target), ()) for target in targets)
        work[name] = TaskWork(step.function, arguments, tuple(sorted(keeps)), sends)
    return Task(host, inputs, targets, follows, host not in hosts[number + 1 :], work)


def _locate_results(
    plan: CallPlan, messages: Mapping[tuple[int, int], tuple[int, ...]]
) -> dict[Source, tuple[int, int]]:
    return {
        source: (CALL, source.index)
        if source.step == CALL
        else (source.step, messages[source.step, END].index(source.index))
        for source in sources_of(plan.result)
    }
