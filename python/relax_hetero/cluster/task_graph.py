"""Tasks of calls: hosts run them when their messages have come, and send the results straight to the next ones.

The caller sends a call's inputs to its first tasks and receives the results from its last ones; no process is between
two hosts. A host runs the tasks of one call in order, and of several calls in flight those whose messages have come,
older calls first.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ..errors import HostError
from .call_plan import CALL
from .connections import CALLER, Address, Connection, Peers, connect
from .route import END, Route
from .wire import Message

_CHECK_SECONDS = 1.0
"""Interval at which a waiting caller asks Ray whether hosts live, since connections to vanished machines end late."""
_REASON_SECONDS = 0.5  # time to wait for the reason why a connection has ended
_END_SECONDS = 3.0  # time within which hosts end their loops


class TaskGraph:
    """The caller's end of a replica's connections. Raises HostError if the processes cannot connect."""

    def __init__(
        self,
        ray: Any,  # the module ``ray``
        actors: Mapping[str, Any],  # actors by host
        addresses: Mapping[str, Address],  # where the hosts listen
        token: bytes,  # token of the connections
        routes: Sequence[Route],  # routes of the program
        in_order: Sequence[int],  # routes whose calls run one after the other on each host
    ) -> None:
        self.calls: dict[tuple[int, int], Any] = {}  # calls in flight by their keys, which the replica adds and removes
        # For hosts that share no memory with others of their node, the reasons by the other process.
        self.socket_reasons: dict[str, dict[str, str]] = {}
        self._ray, self._routes = ray, tuple(routes)
        self._route_of = route_indices(routes)
        self._keys = [0] * len(routes)
        self._arrived: dict[tuple[int, int], dict[int, Message]] = {}
        self._checked_at, self._has_failed = time.monotonic(), False
        self._loops = [actor.run_tasks.remote(token, dict(addresses), tuple(in_order)) for actor in actors.values()]
        node, caller = ray.get_runtime_context().get_node_id(), len(addresses)
        connections = {
            host: connect(address, node, token, caller, host, copies=True) for host, address in addresses.items()
        }
        self._peers = Peers(connections, receives_while_sending=False)
        waiting = len(addresses)
        while waiting:  # for the first messages of `TaskLoop.run`
            for message in self._receive():
                host, reasons = message.values
                if reasons:
                    self.socket_reasons[host] = reasons
                waiting -= 1

    def new_key(self, function: str) -> tuple[int, int]:
        """Make the key of the next call: the index of its route, and its number among the route's calls."""
        index = self._route_of[function]
        self._keys[index] += 1
        return index, self._keys[index] - 1

    def send(self, key: tuple[int, int], function: str, values: Sequence[Any]) -> None:
        """Send a call's inputs, from one thread at a time.

        `key`: result of `new_key`; `function`: function of the program; `values`: encoded inputs of the call. Raises
        HostError if a host has died.
        """
        route = self._routes[key[0]]
        for task, inputs in route.sent[function].items():
            message = Message(CALL, task, function, key[1], tuple([values[index] for index in inputs]))
            self._peers.send(route.tasks[task].host, message)

    def receive(self) -> list[tuple[tuple[int, int], list[Message]]]:
        """Wait for results, in one thread at a time.

        Returns the calls that have ended: key, and messages of the route's exits in order; maybe none. Raises HostError
        if a host has died.
        """
        return [ended for message in self._receive() for ended in self._complete(message)]

    def _receive(self) -> list[Message]:
        try:
            messages = self._peers.receive(_CHECK_SECONDS)
        except HostError:
            self._has_failed = True
            self._check_loops(_REASON_SECONDS)
            raise
        if not messages and time.monotonic() > self._checked_at + _CHECK_SECONDS:
            self._check_loops(0)
            self._checked_at = time.monotonic()
        return messages

    def is_broken(self) -> bool:
        """Return whether a connection or the loop of a host has ended, so that no call can run."""
        if self._has_failed:
            return True
        ended, _ = self._ray.wait(self._loops, timeout=0)
        return bool(ended)

    def close(self) -> None:
        """End the connections and, unless a task runs for long, the loops of the hosts."""
        self._peers.close()
        self._ray.wait(self._loops, num_returns=len(self._loops), timeout=_END_SECONDS)

    def _check_loops(self, seconds: float) -> None:
        """Raise the reason why the loop of a host has ended, if one has, or does within some seconds."""
        ended, _ = self._ray.wait(self._loops, timeout=seconds)
        for loop in ended:
            raise HostError(self._ray.get(loop))  # the reason, or Ray's error of a dead actor

    def _complete(self, message: Message) -> Iterator[tuple[tuple[int, int], list[Message]]]:
        """Add a message; yields its call if that has ended."""
        route = self._route_of[message.function]
        key, exits = (route, message.call), self._routes[route].exits
        arrived = self._arrived.setdefault(key, {})
        arrived[message.source] = message
        if len(arrived) == len(exits):
            del self._arrived[key]
            yield key, [arrived[task] for task in exits]


@dataclass
class _HostCall:
    """A call on a host: index of the next task among the host's, and received messages by task and source."""

    next: int = 0
    received: dict[int, dict[int, Message]] = field(default_factory=dict)


class TaskLoop:
    """Runs the tasks of a host."""

    def __init__(
        self,
        host: str,  # logical name of the host
        routes: Sequence[Route],  # routes of the program
        connections: Mapping[str, Connection],  # connections with all other processes
        # Function of a route's index, a task's index, and the task's messages, that returns a message for each target.
        run: Callable[..., Sequence[Message]],
        in_order: Sequence[int],  # routes of which each call's tasks run before those of the next call
    ) -> None:
        self._host, self._routes, self._run = host, routes, run
        self._socket_reasons = {name or "caller": each.problem for name, each in connections.items() if each.problem}
        self._route_of = route_indices(routes)
        self._tasks = [[i for i, task in enumerate(route.tasks) if task.host == host] for route in routes]
        self._calls: dict[tuple[int, int], _HostCall] = {}  # by number and route
        self._ready: list[tuple[int, int]] = []  # a heap
        self._next_call = dict.fromkeys(in_order, 0)
        self._peers = Peers(connections, receives_while_sending=True)

    def run(self) -> NoReturn:
        """Run tasks until a connection ends; raises HostError then, and errors of links."""
        try:
            self._peers.send(CALLER, Message(0, END, "", 0, (self._host, self._socket_reasons)))  # all are connected
            while True:
                while not self._ready:
                    messages = self._peers.receive()
                    while messages:  # unlike a loop variable, this keeps no message and its memory
                        self._accept(messages.pop(0))
                self._run_next()
        finally:
            self._peers.close()

    def close(self) -> None:
        """End the loop after the current task; thread-safe."""
        self._peers.close()

    def _run_next(self) -> None:
        key = heapq.heappop(self._ready)
        number, index = key
        call, tasks, route = self._calls[key], self._tasks[index], self._routes[index]
        task_index = tasks[call.next]
        task, received = route.tasks[task_index], call.received.pop(task_index)
        call.next += 1
        if call.next == len(tasks):
            del self._calls[key]
        else:
            self._push_if_ready(key)
        sent = self._run(index, task_index, *[received[source] for source in task.inputs])
        del received  # memory of messages
        for message in sent:
            self._peers.send(CALLER if message.target == END else route.tasks[message.target].host, message)
        if call.next == len(tasks) and index in self._next_call:
            self._next_call[index] = number + 1
            self._push_if_ready((number + 1, index))

    def _accept(self, message: Message) -> None:
        key = (message.call, self._route_of[message.function])
        call = self._calls.setdefault(key, _HostCall())
        call.received.setdefault(message.target, {})[message.source] = message
        if message.target == self._tasks[key[1]][call.next]:
            self._push_if_ready(key)

    def _push_if_ready(self, key: tuple[int, int]) -> None:
        """Make a call ready if all messages of its next task have come."""
        number, index = key
        call = self._calls.get(key)
        if call is None or number != self._next_call.get(index, number):
            return
        task = self._tasks[index][call.next]
        if len(call.received.get(task, ())) == len(self._routes[index].tasks[task].inputs):
            heapq.heappush(self._ready, key)


def route_indices(routes: Sequence[Route]) -> dict[str, int]:
    """Index of each function's route."""
    return {name: index for index, route in enumerate(routes) for name in route.sent}
