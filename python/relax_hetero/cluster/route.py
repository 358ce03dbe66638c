"""Routes: the messages between hosts that functions need, as plain data.

Ray compiles one graph for an actor at a time. Functions whose steps are on the same hosts in the same order (such as
the prefill and decode of a language model) share one: its *slots* are their steps by number, and there is a channel
wherever one of them has a value to send. A function that has nothing for a channel sends an empty message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .call_plan import CALL, CallPlan, Source, sources_of

END = 1 << 30
"""The slot that is the caller: its messages are the call's results."""


@dataclass(frozen=True)
class TaskWork:
    """Work of a slot for one function.

    Attributes
    ----------
    function : str
        Function of the host's executable.
    arguments : tuple of (int, int)
        For each, the slot whose message brings it (`CALL` for the caller; the slot's own host's values are those of an
        earlier slot that it kept) and its place there.
    keeps : tuple of int
        The results that a later slot of this host reads, by index.
    sends : tuple of tuple of int
        For each target of the slot, the results that go there, by index.
    """

    function: str
    arguments: tuple[tuple[int, int], ...]
    keeps: tuple[int, ...]
    sends: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Task:
    """A place in a graph: a task of one host.

    Attributes
    ----------
    host : str
        Its logical name.
    inputs : tuple of int
        The slots whose messages it takes, in order; `CALL` for the caller.
    targets : tuple of int
        The slots that it sends a message to, in order; `END` for the caller.
    follows : tuple of int
        The slots of this host whose kept values it reads. They come before it.
    is_last : bool
        Whether no later slot of a route is on this host, so that nothing of a call needs to be kept.
    work : mapping of str to TaskWork
        Visits by function.
    """

    host: str
    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    follows: tuple[int, ...]
    is_last: bool
    work: Mapping[str, TaskWork]


@dataclass(frozen=True)
class Route:
    """The slots of functions that share a graph, and what the caller sends and gets.

    Attributes
    ----------
    sent : mapping of str to mapping of int to tuple of int
        Inputs in each message of the caller, by function and by slot that takes it.
    gets : mapping of str to mapping of Source to (int, int)
        Sources of each function's results: slot and place in that slot's message, in the order of the plan's result;
        `CALL` for an input that is returned as it is.
    """

    tasks: tuple[Task, ...]
    sent: Mapping[str, Mapping[int, tuple[int, ...]]]
    gets: Mapping[str, Mapping[Source, tuple[int, int]]]

    @property
    def is_chain(self) -> bool:
        """True if no host is visited twice: calls in flight then overlap in a graph."""
        hosts = [slot.host for slot in self.tasks]
        return len(set(hosts)) == len(hosts)

    @property
    def entries(self) -> list[int]:
        """The slots that take a message of the caller."""
        return [number for number, slot in enumerate(self.tasks) if CALL in slot.inputs]

    @property
    def exits(self) -> list[int]:
        """The slots that send a message to the caller."""
        return [number for number, slot in enumerate(self.tasks) if END in slot.targets]


def routes_of(plans: Mapping[str, CallPlan]) -> list[Route]:
    """The routes of all functions that have steps, that of ``main``, else of the first function, in front."""
    groups: dict[tuple[str, ...], dict[str, CallPlan]] = {}
    for name in sorted((name for name in plans if plans[name].steps), key=lambda name: name != "main"):
        groups.setdefault(plans[name].hosts, {})[name] = plans[name]
    return [_route(hosts, group) for hosts, group in groups.items()]


def _route(hosts: Sequence[str], plans: Mapping[str, CallPlan]) -> Route:
    wanted = {name: _messages(plan) for name, plan in plans.items()}
    edges = {edge for of_function in wanted.values() for edge in of_function}
    for number, host in enumerate(hosts):  # a task needs a message to begin by, and one that shows its end
        if not any(target == number and (source == CALL or hosts[source] != host) for source, target in edges):
            edges.add((CALL, number))
        if not any(source == number and (target == END or hosts[target] != host) for source, target in edges):
            edges.add((number, END))
    slots = tuple(_task(number, hosts, edges, plans, wanted) for number in range(len(hosts)))
    sent = {
        name: {slot: values.get((CALL, slot), ()) for source, slot in sorted(edges) if source == CALL}
        for name, values in wanted.items()
    }
    return Route(slots, sent, {name: _gets(plan, wanted[name]) for name, plan in plans.items()})


def _messages(plan: CallPlan) -> dict[tuple[int, int], tuple[int, ...]]:
    """Indices of the values that go along each edge of the plan, from slot to slot."""
    found: dict[tuple[int, int], dict[int, None]] = {}
    for number, step in enumerate(plan.steps):
        for source in step.arguments:
            found.setdefault((source.step, number), {})[source.index] = None
    for source in sources_of(plan.result):
        if source.step != CALL:
            found.setdefault((source.step, END), {})[source.index] = None
    return {edge: tuple(indices) for edge, indices in found.items()}


def _task(
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
    visits = {}
    for name, plan in plans.items():
        step, values = plan.steps[number], messages[name]
        arguments = tuple(
            (source.step, source.index if is_own(source.step) else values[source.step, number].index(source.index))
            for source in step.arguments
        )
        kept = {
            index
            for (source, target), found in values.items()
            if source == number and is_own(target)
            for index in found
        }
        sends = tuple(values.get((number, target), ()) for target in targets)
        visits[name] = TaskWork(step.function, arguments, tuple(sorted(kept)), sends)
    return Task(host, inputs, targets, follows, host not in hosts[number + 1 :], visits)


def _gets(plan: CallPlan, messages: Mapping[tuple[int, int], tuple[int, ...]]) -> dict[Source, tuple[int, int]]:
    return {
        source: (CALL, source.index)
        if source.step == CALL
        else (source.step, messages[source.step, END].index(source.index))
        for source in sources_of(plan.result)
    }
