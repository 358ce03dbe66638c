"""Replicas: complete sets of hosts, with the connections between them, their calls in flight, and recovery."""

from __future__ import annotations

import gc
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import HeteroError, HostError
from ..vm.queue.fence import thread_state
from .actors import Actors, first_line
from .calls import ClusterCall, run_on_all_hosts
from .connections import new_token
from .links import LinkTexts, abort_links, connect_links
from .route import Route
from .task_graph import TaskGraph
from .wire import Message

_POLL_SECONDS = 0.5  # interval of checks of idle hosts, and of attempts to start hosts


class MailboxCalls:
    """Attempts of calls whose hosts exchange messages while they run; each attempt ends once. Thread-safe.

    A retry has a new number, so that remains of an earlier attempt cannot end it.
    """

    def __init__(self) -> None:
        self._numbers: dict[ClusterCall, int] = {}
        self._lock = threading.Lock()

    def add(self, call: ClusterCall, number: int) -> None:
        """Add an attempt."""
        with self._lock:
            self._numbers[call] = number

    def is_running(self, call: ClusterCall, number: int) -> bool:
        """Return whether the attempt has not ended."""
        return self._numbers.get(call) == number

    def finish(self, call: ClusterCall, number: int) -> bool:
        """End an attempt; False if it has ended before."""
        with self._lock:
            was_running = self.is_running(call, number)
            if was_running:
                del self._numbers[call]
            return was_running

    def finish_all(self) -> list[ClusterCall]:
        """End all attempts, and return their calls."""
        with self._lock:
            calls = list(self._numbers)
            self._numbers.clear()
            return calls


@dataclass(frozen=True)
class _EndedCall:
    """A call that has ended: its key in the graph, and the messages of its results."""

    key: tuple[int, int]
    call: ClusterCall
    messages: Sequence[Message]


_Event: TypeAlias = _EndedCall | tuple[TaskGraph, tuple[int, int]] | BaseException | None
"""A call that has ended, a call to wait for, or a reason to look for dead hosts."""


class ClosedError(HeteroError):
    """The cluster has been closed."""


@dataclass(frozen=True)
class Callbacks:
    """Callbacks of a replica: a call has ended, calls are lost, the replica is ready, or it is still waiting."""

    on_end: Callable[[Any, ClusterCall, Sequence[Message]], None]
    on_lost: Callable[[Any, Sequence[ClusterCall], HostError], None]
    on_ready: Callable[[Any], None]
    on_wait: Callable[[], None]


class Replica:
    """One of several complete sets of hosts."""

    def __init__(
        self,
        ray: Any,  # the module ``ray``
        number: int,  # index of the replica
        actors: Callable[[Callable[[float], None]], Actors],  # makes the actors, from a function that sleeps
        routes: Sequence[Route],  # routes of the program
        in_flight: int,  # maximum number of calls in flight
        callbacks: Callbacks,  # called at ends of calls and changes of state
    ) -> None:
        self.number, self.limit = number, in_flight
        self.in_flight = 0  # number of calls in flight, which the cluster counts
        # Reason why it is not ready; None if it is, or if the reason is unknown.
        self.problem: HeteroError | None = None
        self.is_ready = False
        self._ray, self._routes, self._callbacks = ray, tuple(routes), callbacks
        self._closing = threading.Event()
        self._sending, self._exchanging, self._reading = threading.Lock(), threading.Lock(), threading.Lock()
        self._graph: TaskGraph | None = None
        self._link_texts: LinkTexts = {}
        self._may_be_broken = self._has_recovered = False
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._mailbox_calls, self._attempts, self._exchanges = MailboxCalls(), 0, 0
        self._waiters = ThreadPoolExecutor(in_flight, f"calls of replica {number}")
        self._actors = actors(self._pause)
        self._collector = threading.Thread(target=self._collect, name=f"results of replica {number}", daemon=True)

    def start(self) -> None:
        """Start all hosts and connect them; raises errors as `Actors.start` does."""
        self._connect()
        self._collector.start()

    @property
    def has_capacity(self) -> bool:
        """True if it can take another call."""
        return self.is_ready and self.in_flight < self.limit

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """State of each host, as data."""
        names, graph = ("address", "node", "pid", "cores", "threads"), self._graph
        sockets = graph.socket_reasons if graph is not None else {}
        return {
            host: {"state": state.state, "starts": state.starts}
            | {name: state.info[name] for name in names if name in state.info}
            | ({"to_gpus": self._link_texts[host]} if host in self._link_texts else {})
            | ({"through_sockets": sockets[host]} if host in sockets else {})
            for host, state in self._actors.states.items()
        }

    def submit(
        self,
        call: ClusterCall,
        # Whether the caller waits for the result. If no other call is in flight, its own thread then reads it, which
        # saves two thread switches.
        waits: bool,
        taken: list[Replica],  # gets this replica if it will report the call's end, even if Ctrl-C is raised
    ) -> None:
        """Take a call and send its inputs, if the replica is ready."""
        with self._sending:
            graph = self._graph
            if not self.is_ready:
                return
            if graph is None or call.plan.runs:
                self._attempts += 1
                self._mailbox_calls.add(call, self._attempts)
                try:
                    self._waiters.submit(self._await_mailbox_call, call, self._attempts)
                except RuntimeError:  # it has been closed
                    self._mailbox_calls.finish(call, self._attempts)
                else:
                    taken.append(self)
                return
            key = graph.new_key(call.name)
            graph.calls[key] = call
            try:
                graph.send(key, call.name, call.values)
            except BaseException as error:
                self._break(graph, error)
                # If it has been removed, it is already lost with the graph; after Ctrl-C, it will be.
                if not isinstance(error, Exception) or graph.calls.pop(key, None) is None:
                    taken.append(self)
                if not isinstance(error, Exception):
                    raise
                return
            taken.append(self)
            reads = waits and len(graph.calls) == 1 and self._reading.acquire(blocking=False)
            if not reads:
                self._events.put((graph, key))
        if reads:
            self._read_now(graph, key)

    def _read_now(self, graph: TaskGraph, key: tuple[int, int]) -> None:
        """Read a call's result in the caller's thread, which holds `_reading`; the collector does everything else."""
        own: _EndedCall | None = None
        try:
            while own is None:
                for ended in self._receive(graph):
                    if ended.key == key:
                        own = ended
                    else:
                        self._events.put(ended)
        except BaseException as error:
            self._break(graph, error)
            if not isinstance(error, Exception):  # Ctrl-C
                raise
        finally:
            self._reading.release()
        if own is not None:
            self._callbacks.on_end(self, own.call, own.messages)

    def _receive(self, graph: TaskGraph) -> list[_EndedCall]:
        """Wait for results; the caller holds `_reading`."""
        results = ((key, graph.calls.pop(key, None), messages) for key, messages in graph.receive())
        return [_EndedCall(key, call, messages) for key, call, messages in results if call is not None]

    def _break(self, graph: TaskGraph, error: BaseException) -> None:
        """Make the collector connect all hosts again, since a connection has ended or holds part of a message."""
        if graph is self._graph:
            self.is_ready, self._may_be_broken = False, True
            self._events.put(error)

    def close(self) -> None:
        """End all processes; calls in flight are lost."""
        self._closing.set()
        self.is_ready = False
        self._close_graph()
        self._actors.kill()
        self._events.put(None)
        if self._collector.ident is not None and self._collector is not threading.current_thread():
            self._collector.join(10)
        self._close_graph()
        self._actors.kill()  # the collector may have started some
        self._waiters.shutdown(wait=False)

    def _await_mailbox_call(self, call: ClusterCall, number: int) -> None:
        """Run all hosts' parts of a function, in a thread of the pool; such calls run one after the other."""
        thread_state.is_worker = True
        try:
            with self._exchanging:
                if not self._mailbox_calls.is_running(call, number):
                    return  # it was lost while it waited
                self._exchanges += 1
                results = run_on_all_hosts(
                    self._ray, self._actors.handles, call.plan.runs, self._exchanges, call.values
                )
        except Exception:
            if self._mailbox_calls.is_running(call, number):  # else it has already ended as lost
                self._may_be_broken = True
                self._events.put(None)
        else:
            if self._mailbox_calls.finish(call, number):
                self._callbacks.on_end(self, call, results)

    def _collect(self) -> None:
        """Main function of the collector thread: hand over results, and recover from failures."""
        thread_state.is_worker = True
        while not self._closing.is_set():
            event: _Event = None
            if self._has_recovered:
                self._has_recovered = False
                gc.collect()  # Ray's errors are in cycles with frames that refer to old connections and their memory
            with suppress(queue.Empty):
                event = self._events.get(timeout=_POLL_SECONDS)
            if isinstance(event, _EndedCall):
                self._callbacks.on_end(self, event.call, event.messages)
            elif isinstance(event, tuple):
                self._read_until(*event)
            elif not self._closing.is_set() and self._is_broken():
                self._recover(event)

    def _read_until(self, graph: TaskGraph, key: tuple[int, int]) -> None:
        """Hand over results until a call has ended."""
        while not self._closing.is_set():
            try:
                with self._reading:
                    if key not in graph.calls:
                        return
                    ended_calls = self._receive(graph)
            except Exception as error:
                if graph is self._graph and not self._closing.is_set():
                    self._recover(error)
                return
            for ended in ended_calls:
                self._callbacks.on_end(self, ended.call, ended.messages)

    def _is_broken(self) -> bool:
        if self._graph is None:
            return self._may_be_broken or bool(self._routes) or not self.is_ready
        return self._may_be_broken or self._graph.is_broken()

    def _recover(self, error: BaseException | None = None) -> None:
        """Report the lost calls, restart dead hosts, and connect all hosts again."""
        self.is_ready, self._has_recovered = False, True
        dead = self._actors.find_dead()
        if self._link_texts:
            abort_links(self._ray, self._actors.handles)
        graph = self._graph
        self._close_graph()  # before taking the lock, whose holder may wait for a full connection
        with self._sending:
            lost = self._mailbox_calls.finish_all()
            if graph is not None:
                lost += graph.calls.values()
                graph.calls.clear()
            self._may_be_broken = False  # failures since then have the same cause
        names = " and ".join(f"host {host!r}" for host in dead) or "a host of replica " + str(self.number)
        reason = "" if error is None else f": {first_line(error)}"
        self.problem = HostError(f"{names} died while calls were in flight{reason}")
        self._callbacks.on_lost(self, lost, self.problem)
        while not self._closing.is_set():
            try:
                self._connect()
            except ClosedError:
                return
            except Exception as raised:
                self.problem = raised if isinstance(raised, HeteroError) else HostError(first_line(raised))
                self._callbacks.on_wait()
                self._actors.find_dead()
                self._closing.wait(_POLL_SECONDS)
            else:
                self._callbacks.on_ready(self)
                return

    def _connect(self) -> None:
        """Start the hosts that are not ready, and connect all hosts."""
        self._actors.start()
        handles, states = self._actors.handles, self._actors.states
        self._ray.get([actor.set_peers.remote(handles) for actor in handles.values()])
        if self._routes:
            token, own_node = new_token(), self._ray.get_runtime_context().get_node_id()
            has_other_nodes = any(state.info["node"] != own_node for state in states.values())
            replies = [actor.connect.remote(self._routes, token, has_other_nodes) for actor in handles.values()]
            infos, addresses = zip(*self._ray.get(replies), strict=True)
            self._link_texts = connect_links(
                self._ray, handles, dict(zip(handles, infos, strict=True)), self._routes[0]
            )
            self._graph = TaskGraph(
                self._ray, handles, dict(zip(handles, addresses, strict=True)), token, self._routes,
                in_order=(0,) if self._link_texts else (),
            )  # fmt: skip
        self.problem, self.is_ready = None, True

    def _close_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.close()

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise ClosedError("the cluster was closed")
        self._callbacks.on_wait()
