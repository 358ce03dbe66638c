"""Tensors that go over links from GPU to GPU, and how hosts announce, send and receive them."""

from __future__ import annotations

import pickle
import queue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from cluster.two_hosts import First, Second, program
from relax_hetero.cluster import CALL, CallPlan, HostStep, Source, host_links
from relax_hetero.cluster.host_links import HostLinks
from relax_hetero.cluster.host_machine import HostMachine
from relax_hetero.cluster.links import GpuInfo, Link, LinkTensor, LinkTexts, abort_links, connect_links, plan_links
from relax_hetero.cluster.route import END, Route, routes_of
from relax_hetero.cluster.wire import Failure, Message, encode
from relax_hetero.vm.device.tensors import from_numpy

HOST = tvm.runtime.device("cpu", 0)


def _route(*steps: HostStep, result: Any) -> Route:
    (route,) = routes_of({"main": CallPlan(steps, result, ("x",))})
    return route


CHAIN = _route(
    HostStep("a", "f", (Source(CALL, 0),), 3),
    HostStep("b", "g", (Source(0, 0), Source(0, 2), Source(0, 1)), 1),
    result=Source(1, 0),
)
"""a makes three values, of which b takes the first, the third and the second."""


def _facts(outputs: tuple[int | None, ...], inputs: tuple[int | None, ...], **options: Any) -> dict[str, GpuInfo]:
    gpus = {0: "here 0", 1: "here 1"}
    sender = GpuInfo(gpus=gpus, inputs={"f": (None,)}, outputs={"f": outputs})
    receiver = {"gpus": {0: "there 0", 1: "there 1"}, "inputs": {"g": inputs}, "outputs": {"g": (0,)}, **options}
    return {"a": sender, "b": GpuInfo(**receiver)}


def test_tensors_on_gpus_of_both_hosts_go_by_links() -> None:
    links, roads = plan_links(CHAIN, _facts((0, None, 0), (0, 0, 0)))
    message = CHAIN.tasks[0].work["main"].sends[0]
    places = tuple(place for place, index in enumerate(message) if index in (0, 2))
    assert links == [Link(0, (0, 1), ("a", "b"), (0, 0), {"main": places})]
    assert roads == {"a": {"b": "NCCL"}}


def test_each_two_gpus_have_a_link() -> None:
    links, _ = plan_links(CHAIN, _facts((0, 1, 1), (1, 0, 1)))
    assert [link.gpus for link in links] == [(0, 1), (1, 0), (1, 1)]
    assert sorted(place for link in links for place in link.values["main"]) == [0, 1, 2]


@pytest.mark.parametrize(("outputs", "inputs"), [((None,) * 3, (0,) * 3), ((0,) * 3, (None,) * 3)])
def test_tensors_with_a_cpu_at_one_end_go_through_host_memory(outputs: Any, inputs: Any) -> None:
    assert plan_links(CHAIN, _facts(outputs, inputs)) == ([], {})


def test_hosts_without_gpus_have_no_links() -> None:
    assert plan_links(CHAIN, {"a": GpuInfo(), "b": GpuInfo()}) == ([], {})
    facts = _facts((0, 0, 0), (0, 0, 0))
    assert plan_links(CHAIN, {**facts, "a": GpuInfo()}) == plan_links(CHAIN, {**facts, "b": GpuInfo()}) == ([], {})


def test_readers_on_several_devices_get_a_tensor_through_host_memory() -> None:
    route = _route(HostStep("a", "f", (Source(CALL, 0),), 1), HostStep("b", "g", (Source(0, 0), Source(0, 0)), 1),
                   result=Source(1, 0))  # fmt: skip
    assert plan_links(route, _facts((0,), (0, 1)))[0] == []
    assert plan_links(route, _facts((0,), (0, None)))[0] == []
    assert plan_links(route, _facts((0,), (1, 1)))[0][0].gpus == (0, 1)


def test_the_reason_for_a_missing_link_is_reported() -> None:
    facts = _facts((0, 0, 0), (0, 0, 0), problem="NCCL's library is not found")
    assert plan_links(CHAIN, facts) == ([], {"a": {"b": "host memory: host 'b': NCCL's library is not found"}})
    facts = _facts((0, 0, 0), (0, 0, 0), gpus={0: "here 0"})
    links, roads = plan_links(CHAIN, facts)
    assert not links
    assert "the same GPU" in roads["a"]["b"]


def test_no_link_over_other_work_of_its_sender() -> None:
    """b receives the result of a's first step only after a's second one: a may have to wait until b has received it."""
    route = _route(
        HostStep("a", "f", (Source(CALL, 0),), 2),
        HostStep("c", "h", (Source(0, 1),), 1),
        HostStep("a", "f2", (Source(1, 0),), 1),
        HostStep("b", "g", (Source(0, 0), Source(2, 0)), 1),
        result=Source(3, 0),
    )
    on_gpu = GpuInfo(
        gpus={0: "here 0"}, inputs={"f": (0,), "f2": (0,)}, outputs={"f": (0, 0), "f2": (0,)}
    )  # fmt: skip
    cpu_hosts = {
        name: GpuInfo(gpus={0: name}, inputs={"g": (0, 0), "h": (0,)}, outputs={"g": (0,), "h": (0,)}) for name in "bc"
    }
    links, roads = plan_links(route, {"a": on_gpu, **cpu_hosts})
    assert [link.tasks for link in links] == [(0, 1), (1, 2), (2, 3)]
    assert "other work" in roads["a"]["b"]
    assert roads["c"]["a"] == roads["a"]["c"] == "NCCL"


class Wires:
    """The ends of links over queues, with tensors on CPUs."""

    def __init__(self) -> None:
        self.queues: dict[int, queue.SimpleQueue[Any]] = {}
        self.ids = iter(range(100, 200))
        self.refused: set[str] = set()

    def end(self, host: str) -> End:
        return End(self, host)


class End:
    def __init__(self, wires: Wires, host: str) -> None:
        self.wires, self.host, self.state = wires, host, "new"

    def create_id(self) -> int:
        return next(self.wires.ids)

    def connect(self, rank: int, link_id: int) -> None:
        if self.host in self.wires.refused:
            raise rh.HostError("no way to the other GPU")
        self.queue = self.wires.queues.setdefault(link_id, queue.SimpleQueue())
        self.rank, self.state = rank, "connected"

    def send(self, *tensors: Any) -> None:
        assert self.rank == 0 and self.state == "connected"
        self.queue.put(tensors)

    def receive_all(self, kinds: Any) -> list[Any]:
        assert self.rank == 1
        tensors = self.queue.get_nowait()
        assert [(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors] == kinds
        return list(tensors)

    def abort(self) -> None:
        self.state = "over"


class _Ray:
    """Functions of Ray that `connect_links` uses; actors answer at once."""

    @staticmethod
    def get(refs: Any) -> Any:
        return list(refs) if isinstance(refs, list) else refs

    @staticmethod
    def wait(refs: Any, **options: Any) -> Any:
        return refs, []


def _actor(links: HostLinks) -> Any:
    def remote(request: str, *args: Any) -> Any:
        return pickle.loads(pickle.dumps(getattr(links, request)(*pickle.loads(pickle.dumps(args)))))

    return SimpleNamespace(call_links=SimpleNamespace(remote=remote))


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> tuple[Wires, dict[str, HostLinks]]:
    """The links of two hosts; all tensors except the second value count as on GPUs."""
    monkeypatch.setattr(host_links, "_is_on", lambda value, gpu: isinstance(value, tvm.runtime.Tensor))
    wires = Wires()
    machine = SimpleNamespace(executable=SimpleNamespace(metadata=SimpleNamespace(checks=())))
    links = {
        host: HostLinks(host, machine, lambda gpu, host=host: wires.end(host))  # type: ignore[arg-type, misc]
        for host in "ab"
    }
    return wires, links


def _connect(links: dict[str, HostLinks]) -> LinkTexts:
    """Both hosts' links for `CHAIN`."""
    facts = _facts((0, None, 0), (0, 0, 0))
    return connect_links(_Ray, {host: _actor(found) for host, found in links.items()}, facts, CHAIN)


def _tensors() -> list[tvm.runtime.Tensor]:
    return [from_numpy(np.full(shape, 1.5, "float32"), HOST) for shape in ((2, 3), (4,), ())]


def test_messages_announce_what_links_bring(hosts: Any) -> None:
    _, links = hosts
    assert _connect(links) == {"a": {"b": "NCCL"}}
    order = CHAIN.tasks[0].work["main"].sends[0]
    for call in range(3):
        values = [_tensors()[index] for index in order]
        leaving = links["a"].announce((0, 1), "main", values)
        announced = [value for value in leaving if isinstance(value, LinkTensor)]
        assert [value.sequence for value in announced] == [2 * call, 2 * call + 1]
        assert not isinstance(leaving[order.index(1)], LinkTensor)
        message = tuple(map(encode, leaving))
        links["a"].send_announced()
        arrived = links["b"].receive(pickle.loads(pickle.dumps(message)))
        for value, expected in zip(arrived, values, strict=True):
            np.testing.assert_array_equal(np.asarray(value), expected.numpy())
    assert links["a"].announce((0, 1), "other", values) == values  # of another function nothing goes by links


def test_a_tensor_that_was_left_out_is_noticed(hosts: Any) -> None:
    _, links = hosts
    _connect(links)
    order = CHAIN.tasks[0].work["main"].sends[0]
    sent = []
    for _ in range(2):
        sent.append(tuple(links["a"].announce((0, 1), "main", [_tensors()[index] for index in order])))
        links["a"].send_announced()
    with pytest.raises(rh.HostError, match="announces tensor 2, expected 0"):
        links["b"].receive(sent[1])


def test_failures_and_plain_values_arrive_as_they_are(hosts: Any) -> None:
    _, links = hosts
    failure, plain = Failure(rh.HeteroError, "no"), (1, np.ones(3))
    assert links["b"].receive(failure) is failure
    assert links["b"].receive(plain) is plain
    with pytest.raises(rh.HostError, match="which this host does not have"):
        links["b"].receive((LinkTensor(7, 0, "float32", (1,)),))


@pytest.mark.parametrize("refusing", ["a", "b"])
def test_where_one_end_cannot_connect_both_use_host_memory(hosts: Any, refusing: str) -> None:
    wires, links = hosts
    wires.refused = {refusing}
    roads = _connect(links)
    assert roads == {"a": {"b": f"host memory: host {refusing!r}: no way to the other GPU"}}
    values = _tensors()
    assert links["a"].announce((0, 1), "main", values) == values


def test_no_step_counts_while_links_are_cut(machines: Any) -> None:
    """Memory of an aborted link must not reach a caller: all hosts know before any link is cut."""
    _, by_host, _ = machines
    x = np.ones((2, 4), "float32")
    sent = by_host["a"].step(0, 0, _message(0, x))
    calls: list[str] = []

    class Actor:
        def __init__(self, machine: HostMachine) -> None:
            self.call_links = SimpleNamespace(
                remote=lambda request: calls.append(request) or machine.call_links(request)
            )

    abort_links(_Ray, {host: Actor(machine) for host, machine in by_host.items()})
    assert calls == ["reject_results", "reject_results", "abort", "abort"]
    with pytest.raises(rh.HostError, match="host 'b': another host died"):
        by_host["b"].step(0, 1, sent[0])
    for machine in by_host.values():
        machine.call_links("reset")
    np.testing.assert_array_equal(by_host["b"].step(0, 1, _message(1, x))[0].values[0], x)


def test_nothing_is_cut_where_a_host_does_not_answer() -> None:
    calls: list[str] = []
    actor = SimpleNamespace(call_links=SimpleNamespace(remote=calls.append))
    abort_links(SimpleNamespace(wait=lambda found, **options: ([], found)), {"a": actor, "b": None})
    assert calls == ["reject_results"]


def test_links_are_made_anew_after_a_host_died(hosts: Any) -> None:
    _, links = hosts
    actors = {host: _actor(found) for host, found in links.items()}
    _connect(links)
    links["a"].announce((0, 1), "main", _tensors())  # announced, and never sent
    ends = [end for found in links.values() for end in found._links.values()]
    abort_links(_Ray, {**actors, "c": None})
    assert [end.state for end in ends] == ["over", "over"]
    for end in links.values():
        end.reset()
    _connect(links)
    order = CHAIN.tasks[0].work["main"].sends[0]
    message = tuple(links["a"].announce((0, 1), "main", [_tensors()[index] for index in order]))
    links["a"].send_announced()
    assert len(links["b"].receive(message)) == 3


@pytest.fixture
def machines(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Wires, dict[str, HostMachine], Route]:
    """Two hosts that run the modules of `two_hosts`, whose tensors count as on GPUs."""
    ray = pytest.importorskip("ray")  # not started
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    wires, _ = hosts
    route = next(route for route in routes_of(program().functions) if "main" in route.sent)
    facts = {
        "a": GpuInfo(gpus={0: "here"}, inputs={"main_0": (0,)}, outputs={"main_0": (0, 0)}),
        "b": GpuInfo(gpus={0: "there"}, inputs={"main_1": (0,)}, outputs={"main_1": (0,)}),
    }
    by_host = {}
    for host, module in (("a", First), ("b", Second)):
        machine = by_host[host] = HostMachine(host, 0)
        machine._machine = rh.vm.VirtualMachine(rh.compile(module))
        machine._links = HostLinks(host, machine._machine, lambda gpu, host=host: wires.end(host))  # type: ignore[misc]
        machine.connect((route,), b"", False)
    actors = {host: _actor(machine._links) for host, machine in by_host.items()}
    assert connect_links(_Ray, actors, facts, route) == {"a": {"b": "NCCL"}}
    return wires, by_host, route


def _message(call: int, value: Any) -> Message:
    return Message(CALL, 0, "main", call, (value,))


def test_steps_announce_sent_tensors_and_receive_announced_ones(machines: Any) -> None:
    wires, by_host, route = machines
    for call in range(4):
        x = np.full((2, 4), call, "float32")
        sent = by_host["a"].step(0, 0, _message(call, x))
        along, to_caller = (sent[route.tasks[0].targets.index(target)] for target in (1, END))
        assert [type(value) for value in along.values] == [LinkTensor]
        assert along.values[0].sequence == call
        np.testing.assert_array_equal(to_caller.values[0], x + 1)  # the caller lacks a GPU
        (result,) = by_host["b"].step(0, 1, pickle.loads(pickle.dumps(along)))
        np.testing.assert_array_equal(result.values[0], 4 * x * x)
    assert all(sent.empty() for sent in wires.queues.values())


def test_a_failed_step_still_receives_announced_tensors(machines: Any, monkeypatch: Any) -> None:
    wires, by_host, _ = machines
    machine = by_host["b"]._machine
    call = machine.call
    monkeypatch.setattr(machine, "call", lambda *given: (_ for _ in ()).throw(rh.HeteroError("a kernel refuses")))
    x = np.ones((2, 4), "float32")
    (result,) = by_host["b"].step(0, 1, by_host["a"].step(0, 0, _message(0, x))[0])
    assert isinstance(result.values, Failure)
    assert "a kernel refuses" in result.values.message
    monkeypatch.setattr(machine, "call", call)
    (result,) = by_host["b"].step(0, 1, by_host["a"].step(0, 0, _message(1, x))[0])
    np.testing.assert_array_equal(result.values[0], 4 * x)
    assert all(sent.empty() for sent in wires.queues.values())


def test_only_the_first_route_uses_links(machines: Any) -> None:
    """Calls of different routes are not in an order on which both ends of a link agree."""
    _, by_host, route = machines
    by_host["a"]._routes = (route, route)
    sent = by_host["a"].step(1, 0, _message(0, np.ones((2, 4), "float32")))
    assert isinstance(sent[0].values[0], np.ndarray)
