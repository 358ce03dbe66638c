"""Replicas: complete sets of hosts, with the graph over them, their calls in flight, and recovery."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ..errors import HeteroError, HostError
from ..vm.queue.fence import thread_state
from .actors import Actors, first_line
from .call_plan import CALL
from .calls import ClusterCall, run_on_all_hosts
from .cluster_graph import Graph
from .links import LinkTexts, abort_links, connect_links
from .route import END, Route
from .wire import CHANNEL_BYTES, HEAD_BYTES, Message, channel_bytes_for, fit

_MAX_INTERVALS = 8
"""Number of recent intervals between results that `Backoff` considers."""
_SLEEP_FRACTION = 0.9
"""Fraction of the shortest interval to sleep, so that it can adapt if calls become shorter."""
_MIN_SLEEP_SECONDS = 0.0005
"""Shortest sleep while other calls are in flight."""
_MIN_LONE_SLEEP_SECONDS = 0.01
"""Shortest sleep while one call is in flight: after a core has slept, a call of 1 ms takes 2 ms."""
_POLL_SECONDS = 0.5
"""Interval of checks of an idle graph, and of attempts to start hosts."""
_MAX_CHANNELS_BYTES = 512 << 20
"""Limit of the memory of all channels that a replica has had, beyond which messages go through the object store: Ray
2.60 does not free a channel's memory before the processes end that used it."""
_MIN_CHANNEL_BYTES = 4 * HEAD_BYTES

WITH_MAILBOXES = -1
"""Index of the route of functions whose hosts exchange messages while they run."""


class Backoff:
    """Sleeps until the next result of a graph is expected; not thread-safe.

    Ray polls channels, so that a waiting thread takes a core from the hosts: on two cores, BERT over two hosts has half
    of the throughput. So a thread sleeps first, for most of the recent interval between results.

    Parameters
    ----------
    pause : callable
        Sleeps for a number of seconds, or less if the cluster is closed.
    """

    def __init__(self, pause: Callable[[float], object]) -> None:
        self._pause = pause
        self._intervals: dict[str, deque[float]] = {}
        self._last = 0.0

    def sleep(self, name: str, sent_at: float, is_alone: bool) -> None:
        """Sleep for most of the time until the next result is expected.

        Parameters
        ----------
        name : str
            Name of the function.
        sent_at : float
            Time at which its call was sent (``time.monotonic``).
        is_alone : bool
            Whether no other call is in flight, so that only latency matters.
        """
        intervals = self._intervals.get(name)
        if intervals:
            seconds = max(sent_at, self._last) + _SLEEP_FRACTION * min(intervals) - time.monotonic()
            if seconds > (_MIN_LONE_SLEEP_SECONDS if is_alone else _MIN_SLEEP_SECONDS):
                self._pause(seconds)

    def record(self, name: str, sent_at: float) -> None:
        """Record the arrival of a result."""
        now = time.monotonic()
        self._intervals.setdefault(name, deque(maxlen=_MAX_INTERVALS)).append(now - max(sent_at, self._last))
        self._last = now


class ActorCalls:
    """Attempts of calls that use actor calls instead of a graph; each attempt ends once. Thread-safe.

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

    def discard(self, call: ClusterCall) -> None:
        """Remove a call that could not be sent."""
        with self._lock:
            self._numbers.pop(call, None)

    def finish_all(self) -> list[ClusterCall]:
        """End all attempts, and return their calls."""
        with self._lock:
            calls = list(self._numbers)
            self._numbers.clear()
            return calls


class ClosedError(HeteroError):
    """The cluster has been closed."""


@dataclass(frozen=True)
class Listener:
    """Callbacks of a replica: a call has ended, calls are lost, the replica is ready, or it is still waiting."""

    on_end: Callable[[Any, ClusterCall, Sequence[Message]], None]
    on_lost: Callable[[Any, Sequence[ClusterCall], HostError], None]
    on_ready: Callable[[Any], None]
    on_wait: Callable[[], None]


class _FailedRead:
    """A reference whose reading has failed in another thread."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def get(self, timeout: float) -> None:
        """Raise the error."""
        raise self._error


class Replica:
    """One of several complete sets of hosts.

    Parameters
    ----------
    ray : object
        The module ``ray``.
    number : int
        Index of the replica.
    actors : callable
        Makes the actors, from a function that sleeps.
    routes : sequence of Route
        Routes of the program. The first one has the graph; all others use actor calls.
    in_flight : int
        Maximum number of calls in flight.
    listener : Listener
        Callbacks.

    Attributes
    ----------
    in_flight : int
        Number of calls in flight, which the cluster counts.
    limit : int
        Maximum number of calls in flight.
    problem : HeteroError or None
        Reason why it is not ready; None if it is, or if the reason is unknown.
    """

    def __init__(
        self,
        ray: Any,
        number: int,
        actors: Callable[[Callable[[float], None]], Actors],
        routes: Sequence[Route],
        in_flight: int,
        listener: Listener,
    ) -> None:
        self.number, self.in_flight, self.limit = number, 0, in_flight
        self.problem: HeteroError | None = None
        self.is_ready = False
        self._ray, self._routes, self._in_flight, self._listener = ray, tuple(routes), in_flight, listener
        self._route_indices = {name: index for index, route in enumerate(routes) for name in route.sent}
        self._closing = threading.Event()
        self._sending, self._exchanging, self._reading = threading.Lock(), threading.Lock(), threading.Lock()
        self._calls = self._mailbox_calls = 0
        self._backoff = Backoff(self._closing.wait)
        self._graph: Graph | None = None
        self._channel_bytes = 0
        self._link_texts: LinkTexts = {}
        self._allocated_bytes = 0
        self._may_be_broken = False
        self._results: queue.SimpleQueue[tuple[ClusterCall, list[Any]] | None] = queue.SimpleQueue()
        self._actor_calls = ActorCalls()
        self._waiters = ThreadPoolExecutor(in_flight, f"calls of replica {number}")
        self._actors = actors(self._pause)
        self._collector = threading.Thread(target=self._collect, name=f"results of replica {number}", daemon=True)

    def start(self) -> None:
        """Start all hosts and compile the graph; raises errors as `Actors.start` does."""
        self._connect()
        self._collector.start()

    @property
    def has_capacity(self) -> bool:
        """True if it can take another call."""
        return self.is_ready and self.in_flight < self.limit

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """State of each host, as data."""
        names = ("address", "node", "pid", "cores", "threads")
        return {
            host: {"state": state.state, "starts": state.starts}
            | {name: state.info[name] for name in names if name in state.info}
            | ({"to_gpus": self._link_texts[host]} if host in self._link_texts else {})
            for host, state in self._actors.states.items()
        }

    def submit(self, call: ClusterCall, waits: bool = False) -> bool:
        """Send a call's inputs; False if the replica is not ready, so that the call has not begun.

        If the caller `waits` for the result and no other call is in flight, its own thread reads it: that saves two
        thread switches, half of a call's overhead besides Ray.
        """
        route, reads = self._route_indices.get(call.name, WITH_MAILBOXES), False
        references: list[Any] = []
        try:
            with self._sending:
                graph = self._graph
                if not self.is_ready or (graph is None and route != WITH_MAILBOXES):
                    return False
                self._calls += 1
                if graph is None or route == WITH_MAILBOXES:
                    self._actor_calls.add(call, self._calls)
                    self._waiters.submit(self._await_mailbox_call, call, self._calls)
                    return True
                messages = self._messages(call, route)
                if route == 0:
                    call.sent_at = time.monotonic()
                    references = graph.execute(messages)
                    reads = waits and self.in_flight == 1 and self._reading.acquire(blocking=False)
                    if not reads:
                        self._results.put((call, references))
                else:
                    self._actor_calls.add(call, self._calls)
                    self._waiters.submit(self._await, call, self._calls, self._call_actors(route, messages))
        except Exception:  # the graph was closed after an actor died
            self._actor_calls.discard(call)
            self._results.put(None)
            return False
        if reads:
            self._read_now(call, references)
        return True

    def _read(self, call: ClusterCall, references: list[Any]) -> list[Message]:
        """Wait for the messages of a call; the caller holds `_reading`."""
        self._backoff.sleep(call.name, call.sent_at, is_alone=self.in_flight <= 1)
        messages = [reference.get(timeout=-1) for reference in references]
        self._backoff.record(call.name, call.sent_at)
        return messages

    def _read_now(self, call: ClusterCall, references: list[Any]) -> None:
        """Read a call's result in the caller's thread, which holds `_reading`; the collector handles errors."""
        try:
            messages = self._read(call, references)
        except BaseException as error:
            self._results.put((call, [_FailedRead(error)]))
            if not isinstance(error, Exception):  # Ctrl-C
                raise
            return
        finally:
            self._reading.release()
        self._listener.on_end(self, call, messages)

    def close(self) -> None:
        """End all processes; calls in flight are lost."""
        self._closing.set()
        self.is_ready = False
        self._close_graph()
        self._actors.kill()
        self._results.put(None)
        if self._collector.ident is not None and self._collector is not threading.current_thread():
            self._collector.join(10)
        self._close_graph()
        self._actors.kill()  # the collector may have started some
        self._waiters.shutdown(wait=False)

    def _messages(self, call: ClusterCall, route: int) -> dict[int, Message]:
        messages = {}
        for task, inputs in self._routes[route].sent[call.name].items():
            values: Sequence[Any] = [call.values[index] for index in inputs]
            if route == 0:
                values, references = fit(values, self._channel_bytes, self._ray.put)
                call.sent.extend(references)
            messages[task] = Message(call.name, self._calls, tuple(values))
        return messages

    def _call_actors(self, route_index: int, inputs: Mapping[int, Message]) -> list[Any]:
        """Run a route by actor calls, which Ray runs after those whose messages they take; returns the exits."""
        route, handles = self._routes[route_index], self._actors.handles
        messages: dict[tuple[int, int], Any] = {(CALL, task): message for task, message in inputs.items()}
        for index, task in enumerate(route.tasks):
            step = handles[task.host].step.options(num_returns=len(task.targets))
            # A task also waits for any message of the earlier tasks of its host whose values it reads.
            after = [next(messages[key] for key in messages if key[0] == earlier) for earlier in task.follows]
            sent = step.remote(route_index, index, *(messages[source, index] for source in task.inputs), *after)
            results = sent if len(task.targets) > 1 else [sent]
            messages.update(zip(((index, target) for target in task.targets), results, strict=True))
        return [messages[index, END] for index in route.exits]

    def _await(self, call: ClusterCall, number: int, references: list[Any]) -> None:
        """Wait for actor calls, in a thread of the pool."""
        thread_state.is_worker = True
        try:
            messages = self._ray.get(references)
        except Exception:
            self._report_failure(call, number)
        else:
            if self._actor_calls.finish(call, number):
                self._listener.on_end(self, call, messages)

    def _await_mailbox_call(self, call: ClusterCall, number: int) -> None:
        """Run all hosts' parts of a function, in a thread of the pool; such calls run one after the other."""
        thread_state.is_worker = True
        try:
            with self._exchanging:
                if not self._actor_calls.is_running(call, number):
                    return  # it was lost while it waited
                self._mailbox_calls += 1
                results = run_on_all_hosts(
                    self._ray, self._actors.handles, call.plan.runs, self._mailbox_calls, call.values
                )
        except Exception:
            self._report_failure(call, number)
        else:
            if self._actor_calls.finish(call, number):
                self._listener.on_end(self, call, results)

    def _report_failure(self, call: ClusterCall, number: int) -> None:
        """Make the collector look for dead hosts, unless the attempt has already ended as lost."""
        if self._actor_calls.is_running(call, number):
            self._may_be_broken = True
            self._results.put(None)

    def _collect(self) -> None:
        """Main function of the collector thread: hand over results in order, and recover from failures."""
        thread_state.is_worker = True
        while not self._closing.is_set():
            try:
                item = self._results.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                item = None
            if item is None:
                if not self._closing.is_set() and self._is_broken():
                    self._recover([])
                continue
            call, references = item
            try:
                with self._reading:
                    messages = self._read(call, references)
            except BaseException as error:
                if not self._closing.is_set():
                    self._recover([item], error)
                else:
                    self._listener.on_lost(self, [call], HostError("the cluster was closed"))
                continue
            self._listener.on_end(self, call, messages)
            del item, call, references, messages  # which may be memory of channels

    def _is_broken(self) -> bool:
        if self._graph is None:
            return self._may_be_broken or bool(self._routes) or not self.is_ready
        return self._may_be_broken or self._graph.is_broken()

    def _recover(self, lost: list[tuple[ClusterCall, list[Any]]], error: BaseException | None = None) -> None:
        """Report the lost calls, restart dead hosts, and compile the graph again."""
        self.is_ready = self._may_be_broken = False
        dead = self._actors.find_dead()
        if self._link_texts:
            abort_links(self._ray, self._actors.handles)
        self._close_graph()  # before taking the lock, whose holder may wait for a full channel
        with self._sending:
            while not self._results.empty():
                item = self._results.get()
                if item is not None:
                    lost.append(item)
            attempts = self._actor_calls.finish_all()
            self._may_be_broken = False  # failures since then have the same cause
        names = " and ".join(f"host {host!r}" for host in dead) or "a host of replica " + str(self.number)
        reason = "" if error is None else f": {first_line(error)}"
        self.problem = HostError(f"{names} died while calls were in flight{reason}")
        self._listener.on_lost(self, [*(call for call, _ in lost), *attempts], self.problem)
        while not self._closing.is_set():
            try:
                self._connect()
            except ClosedError:
                return
            except Exception as raised:
                self.problem = raised if isinstance(raised, HeteroError) else HostError(first_line(raised))
                self._listener.on_wait()
                self._actors.find_dead()
                self._closing.wait(_POLL_SECONDS)
            else:
                self._listener.on_ready(self)
                return

    def _connect(self) -> None:
        """Start the hosts that are not ready, and compile the graph."""
        self._actors.start()
        handles = self._actors.handles
        self._ray.get([actor.set_peers.remote(handles) for actor in handles.values()])
        if not self._routes:
            self.problem, self.is_ready = None, True
            return
        self._channel_bytes = self._allocate_channels(self._routes[0])
        channel_bytes = (self._channel_bytes, *(0 for _ in self._routes[1:]))
        replies = [actor.connect.remote(self._routes, channel_bytes, self._in_flight) for actor in handles.values()]
        infos = dict(zip(handles, self._ray.get(replies), strict=True))
        self._link_texts = connect_links(self._ray, handles, infos, self._routes[0])
        own_node = self._ray.get_runtime_context().get_node_id()
        if any(state.info["node"] != own_node for state in self._actors.states.values()):
            # A channel to another node holds one message, and a waiting writer holds the GIL. This many calls fit into
            # channels and hosts even if nobody reads the results.
            self.limit = min(self._in_flight, 2 * len(self._routes[0].tasks) + 1)
        self._graph = Graph(self._ray, handles, self._routes[0], 0, self._channel_bytes, self._in_flight)
        self.problem, self.is_ready = None, True

    def _close_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None and not graph.close():
            self._actors.find_dead()

    def _allocate_channels(self, route: Route) -> int:
        """Choose the size of channels: that of messages, or the minimum if earlier graphs have used too much memory."""
        channels = sum(len(task.targets) for task in route.tasks) + len(route.entries)
        channel_bytes = self._message_bytes(route)
        if self._allocated_bytes + channels * self._in_flight * channel_bytes > _MAX_CHANNELS_BYTES:
            channel_bytes = _MIN_CHANNEL_BYTES
        self._allocated_bytes += channels * self._in_flight * channel_bytes
        return channel_bytes

    def _message_bytes(self, route: Route) -> int:
        """Size of the largest message; `CHANNEL_BYTES` for symbolic ones."""
        sizes = [HEAD_BYTES]
        states = self._actors.states
        for task in route.tasks:
            for work in task.work.values():
                inputs, outputs = states[task.host].sizes.get(work.function, ((), ()))
                if None in (*inputs, *outputs):
                    sizes.append(CHANNEL_BYTES)
                sizes.append(channel_bytes_for(size or 0 for size in inputs))
                sizes += [channel_bytes_for(outputs[index] or 0 for index in sent) for sent in work.sends]
        return max(sizes)

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise ClosedError("the cluster was closed")
        self._listener.on_wait()
