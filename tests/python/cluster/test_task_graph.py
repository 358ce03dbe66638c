"""Loops of hosts and the caller's end, as threads of this process instead of Ray actors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import relax_hetero as rh
from relax_hetero.cluster import CALL, CallPlan, HostStep, Source, connections
from relax_hetero.cluster.connections import CALLER, Listener, connect, new_token
from relax_hetero.cluster.route import routes_of
from relax_hetero.cluster.task_graph import TaskGraph, TaskLoop
from relax_hetero.cluster.wire import Message

LIMIT = 60.0

A_B = CallPlan(
    (HostStep("a", "f", (Source(CALL, 0),), 1), HostStep("b", "f", (Source(0, 0),), 1)), Source(1, 0), ("x",)
)
A_B_A = CallPlan(
    (*A_B.steps, HostStep("a", "f", (Source(0, 0), Source(1, 0)), 1)), (Source(2, 0), Source(1, 0)), ("x",)
)
LARGE = CallPlan((*A_B.steps, HostStep("a", "f", (Source(1, 0),), 1)), Source(2, 0), ("x",))


class Hosts:
    """Hosts in threads: each task adds 1 to the sum of its messages, and notes that it ran."""

    def __init__(self, plans: dict[str, CallPlan], in_order: Sequence[int] = ()) -> None:
        self.routes = routes_of(plans)
        self.names = sorted({task.host for route in self.routes for task in route.tasks})
        self.ran: list[tuple[int, int, int]] = []
        self.before: Callable[[int, int, int], None] = lambda route, task, call: None
        self._pool, self._token = ThreadPoolExecutor(len(self.names)), new_token()
        listeners = {host: Listener("node", None, self._token) for host in self.names}
        addresses = {host: listener.address for host, listener in listeners.items()}
        actors = {
            host: SimpleNamespace(run_tasks=SimpleNamespace(remote=lambda *args, host=host: self._start(host, *args)))
            for host in self.names
        }
        self._listeners, self.loops = listeners, dict[str, TaskLoop]()
        ray = SimpleNamespace(
            get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node"),
            wait=lambda futures, timeout, num_returns=1: ([f for f in futures if f.done()], []),
            get=lambda future: future.result(),
        )
        self.graph = TaskGraph(ray, actors, addresses, self._token, self.routes, in_order)

    def _start(self, host: str, token: bytes, addresses: Any, in_order: Sequence[int]) -> Any:
        def run() -> str:
            index, names = self.names.index(host), [*self.names, CALLER]
            peers = {name: connect(addresses[name], "node", token, index, name) for name in names[:index]}
            peers |= self._listeners[host].accept(dict(list(enumerate(names))[index + 1 :]))
            self.loops[host] = TaskLoop(host, self.routes, peers, self._run, in_order)
            try:
                self.loops[host].run()
            except Exception as error:
                return f"host {host!r}: {error}"
            raise AssertionError("a loop ends with an error")

        return self._pool.submit(run)

    def _run(self, route: int, number: int, *messages: Message) -> list[Message]:
        task, call = self.routes[route].tasks[number], messages[0].call
        self.before(route, number, call)
        self.ran.append((route, number, call))
        assert len(messages) == len(task.inputs)
        total = sum(np.asarray(value) for message in messages for value in message.values) + 1
        work = task.work[messages[0].function]
        return [
            Message(number, target, messages[0].function, call, (total,) * len(sends))
            for target, sends in zip(task.targets, work.sends, strict=True)
        ]

    def send(self, function: str, *values: Any) -> tuple[int, int]:
        """Send a call."""
        key = self.graph.new_key(function)
        self.graph.send(key, function, values)
        return key

    def results(self, count: int) -> dict[tuple[int, int], list[Any]]:
        """The next results: values of the first message of each call."""
        results: dict[tuple[int, int], list[Any]] = {}
        while len(results) < count:
            results |= {key: [m.values[0] for m in messages if m.values] for key, messages in self.graph.receive()}
        return results

    def close(self) -> None:
        """End all threads."""
        self.graph.close()
        self._pool.shutdown()


@pytest.fixture
def start() -> Iterator[Callable[..., Hosts]]:
    """Function that starts hosts, which end with the test."""
    started: list[Hosts] = []

    def make(*args: Any) -> Hosts:
        started.append(Hosts(*args))
        return started[-1]

    yield make
    for hosts in started:
        hosts.close()


@pytest.mark.parametrize("in_order", [(), (0, 1)])
def test_calls_of_all_routes_run_at_the_same_time(start: Callable[..., Hosts], in_order: Sequence[int]) -> None:
    hosts = start({"main": A_B, "round": A_B_A}, in_order)
    expected = {}
    for number in range(20):
        expected[hosts.send("main", np.float32(number))] = [number + 2]
        expected[hosts.send("round", np.float32(number))] = [number + 2, number + 3]
    assert hosts.results(40) == expected
    for route, tasks in ((0, 2), (1, 3)):  # the same task of all calls, in order
        for task in range(tasks):
            assert [call for *which, call in hosts.ran if which == [route, task]] == list(range(20))


def test_hosts_that_may_not_share_memory_use_sockets(
    start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refuse)
    hosts, array = start({"round": A_B_A}), np.arange(5000, dtype="float32")
    reasons = hosts.graph.socket_reasons
    assert {host: sorted(others) for host, others in reasons.items()} == {"a": ["b", "caller"], "b": ["a", "caller"]}
    assert reasons["b"]["a"] == "[Errno 1] Operation not permitted"
    key = hosts.send("round", array)
    np.testing.assert_array_equal(hosts.results(1)[key], [array + 2, array + 3])


def test_hosts_that_send_large_messages_to_each_other_do_not_wait_forever(
    start: Callable[..., Hosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """a sends the next call's values while b sends those of the call before."""
    monkeypatch.setattr(connections, "_BUFFER_BYTES", 1 << 16)
    hosts = start({"main": LARGE})
    x = np.zeros(500_000, "float32")
    for _ in range(6):
        hosts.send("main", x)
    assert [float(value[0]) for (value,) in hosts.results(6).values()] == [3] * 6


@pytest.mark.parametrize("in_order", [(), (0,)])
def test_a_host_runs_other_calls_while_one_waits_elsewhere(start: Callable[..., Hosts], in_order: Any) -> None:
    hosts = start({"main": A_B_A}, in_order)
    second_began = threading.Event()

    def before(route: int, task: int, call: int) -> None:
        if (task, call) == (0, 1):
            second_began.set()
        if (task, call) == (1, 0):  # b, while a has the next call
            assert second_began.wait(0.2 if in_order else LIMIT) != bool(in_order)

    hosts.before = before
    hosts.send("main", np.float32(0))
    hosts.send("main", np.float32(10))
    assert hosts.results(2) == {(0, 0): [2, 3], (0, 1): [12, 13]}
    if in_order:  # all of a call before the next one
        assert [(call, task) for _, task, call in hosts.ran if task != 1] == [(0, 0), (0, 2), (1, 0), (1, 2)]


def test_the_end_of_a_loop_ends_all_of_them_and_is_an_error_of_the_caller(start: Callable[..., Hosts]) -> None:
    hosts = start({"main": A_B})

    def fail(route: int, task: int, call: int) -> None:
        if task == 1:
            raise rh.HostError("a link has failed")

    hosts.before = fail
    hosts.send("main", np.float32(0))
    with pytest.raises(rh.HostError, match=r"host 'b': a link has failed|the connection with host '[ab]' has ended"):
        hosts.results(1)
    with pytest.raises(rh.HostError, match="has ended|has failed"):
        while True:
            hosts.results(1)
    assert hosts.graph.is_broken()
