"""A replica: a complete set of hosts, the graph over them, and the calls that are under way there."""

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
from .graph import Graph
from .links import LinkTexts, connect_links, cut_links
from .route import END, Route
from .wire import CHANNEL_BYTES, HEAD_BYTES, Message, channel_bytes_for, fit

# Waiting for results of a compiled graph without taking a core all the time.
#
# Ray reads a channel by looking at it again and again: a thread that waits there takes a core, on a small machine one
# that a host computes on. On two cores, BERT over two hosts then has half of the throughput.
# So whoever waits sleeps first, for most of the time that this function's results have been apart lately.

_MAX_INTERVALS = 8
_SLEEP_FRACTION = 0.9
"""Fraction of the shortest time between recent results to sleep. Where calls become shorter, one comes a tenth earlier
than expected, and the next sleep is as much shorter."""
_MIN_SLEEP_SECONDS = 0.0005
"""Seconds that are worth a sleep, where other calls are under way."""
_MIN_LONE_SLEEP_SECONDS = 0.01
"""Seconds that are worth a sleep to a caller who waits for one call: on a core that slept, a call of 1 ms takes 2."""


class Backoff:
    """When results of each function are to be expected. One thread uses it at a time.

    Parameters
    ----------
    pause : callable
        Sleeps for some seconds, or less where nobody waits any more.
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
            The function.
        sent_at : float
            When its call was sent (``time.monotonic``).
        is_alone : bool
            Whether no other call is under way, so that nothing but this call's time matters.
        """
        intervals = self._intervals.get(name)
        if intervals:
            left = max(sent_at, self._last) + _SLEEP_FRACTION * min(intervals) - time.monotonic()
            if left > (_MIN_LONE_SLEEP_SECONDS if is_alone else _MIN_SLEEP_SECONDS):
                self._pause(left)

    def note(self, name: str, sent_at: float) -> None:
        """A result has come."""
        now = time.monotonic()
        self._intervals.setdefault(name, deque(maxlen=_MAX_INTERVALS)).append(now - max(sent_at, self._last))
        self._last = now


# Calls that go by actor calls and not by a graph: each attempt of one ends once, with a result or lost.


class ActorCalls:
    """Attempts under way.

    A call that begins again has a new number, so that what is left of an earlier attempt is not taken for it.
    """

    def __init__(self) -> None:
        self._numbers: dict[ClusterCall, int] = {}
        self._lock = threading.Lock()

    def add(self, call: ClusterCall, number: int) -> None:
        """An attempt begins."""
        with self._lock:
            self._numbers[call] = number

    def has(self, call: ClusterCall, number: int) -> bool:
        """Return whether the attempt has not ended."""
        return self._numbers.get(call) == number

    def take(self, call: ClusterCall, number: int) -> bool:
        """Return whether the attempt had not ended before; it has now."""
        with self._lock:
            found = self.has(call, number)
            if found:
                del self._numbers[call]
            return found

    def drop(self, call: ClusterCall) -> None:
        """A call has not begun after all."""
        with self._lock:
            self._numbers.pop(call, None)

    def take_all(self) -> list[ClusterCall]:
        """The calls under way, all of which end now."""
        with self._lock:
            found = list(self._numbers)
            self._numbers.clear()
            return found


# Seconds between looks at a graph that has no calls, and between tries to start hosts.
_POLL_SECONDS = 0.5
# Bytes of a node's object store. Ray 2.60 keeps the memory of a channel for as long as a process that had it lives, so
# that every graph costs the memory of its channels. Beyond this much, a replica's messages go through the store.
_MAX_CHANNELS_BYTES = 512 << 20
_MIN_CHANNEL_BYTES = 4 * HEAD_BYTES


WITH_MAILBOXES = -1
"""Number of the route of a function whose hosts exchange messages while it runs."""


class ClosedError(HeteroError):
    """The cluster was closed meanwhile."""


@dataclass(frozen=True)
class Listener:
    """Whom a replica tells: of a call that ended, of lost calls, that it is ready, and that it still waits."""

    on_end: Callable[[Any, ClusterCall, Sequence[Message]], None]
    on_lost: Callable[[Any, Sequence[ClusterCall], HostError], None]
    on_ready: Callable[[Any], None]
    on_wait: Callable[[], None]


class _FailedRead:
    """In the place of a reference whose reading failed in another thread."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def get(self, timeout: float) -> None:
        """Raise what was raised."""
        raise self._error


class Replica:
    """One of several complete sets of hosts.

    Parameters
    ----------
    ray : object
        The module.
    actors : callable
        Makes its actors of a function that waits.
    routes : sequence of Route
        Routes of the program. The first has the graph; calls of others are actor calls.
    in_flight : int
        How many calls are under way at most.
    listener : Listener
        Whom to tell.

    Attributes
    ----------
    in_flight : int
        Calls, counted by whoever hands them out.
    limit : int
        How many it takes at once.
    problem : HeteroError or None
        Why it is not ready; None where it is, or nothing is known.
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
        self._number_of = {name: index for index, route in enumerate(routes) for name in route.sent}
        self._closing = threading.Event()
        self._sending, self._exchanging, self._reading = threading.Lock(), threading.Lock(), threading.Lock()
        self._calls = self._mailbox_calls = 0
        self._backoff = Backoff(self._closing.wait)
        self._graph: Graph | None = None
        self._channel_bytes = 0
        self._link_texts: LinkTexts = {}
        self._allocated_bytes = 0
        self._is_suspect = False
        self._results: queue.SimpleQueue[tuple[ClusterCall, list[Any]] | None] = queue.SimpleQueue()
        self._actor_calls = ActorCalls()
        self._waiters = ThreadPoolExecutor(in_flight, f"calls of replica {number}")
        self._actors = actors(self._pause)
        self._collector = threading.Thread(target=self._collect, name=f"results of replica {number}", daemon=True)

    def start(self) -> None:
        """Start all hosts and compile the graph; raises what stands in the way, as `Actors.start`."""
        self._connect()
        self._collector.start()

    @property
    def has_capacity(self) -> bool:
        """True if it can take another call now."""
        return self.is_ready and self.in_flight < self.limit

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """The state of each host, as data."""
        names = ("address", "node", "pid", "cores", "threads")
        return {
            host: {"state": state.state, "starts": state.starts}
            | {name: state.info[name] for name in names if name in state.info}
            | ({"to_gpus": self._link_texts[host]} if host in self._link_texts else {})
            for host, state in self._actors.states.items()
        }

    def submit(self, call: ClusterCall, waits: bool = False) -> bool:
        """Send a call's inputs; False where the replica turns out not to be ready, and the call has not begun.

        Where the caller waits for the result anyway and no other call is under way, its thread reads it: that saves two
        changes of threads, half of what a call costs besides Ray.
        """
        number, reads = self._number_of.get(call.name, WITH_MAILBOXES), False
        references: list[Any] = []
        try:
            with self._sending:
                graph = self._graph
                if not self.is_ready or (graph is None and number != WITH_MAILBOXES):
                    return False
                self._calls += 1
                if graph is None or number == WITH_MAILBOXES:
                    self._actor_calls.add(call, self._calls)
                    self._waiters.submit(self._await_mailbox_call, call, self._calls)
                    return True
                messages = self._messages(call, number)
                if number == 0:
                    call.sent_at = time.monotonic()
                    references = graph.execute(messages)
                    reads = waits and self.in_flight == 1 and self._reading.acquire(blocking=False)
                    if not reads:
                        self._results.put((call, references))
                else:
                    self._actor_calls.add(call, self._calls)
                    self._waiters.submit(self._await, call, self._calls, self._step_by_step(number, messages))
        except Exception:  # the graph was closed, as an actor died
            self._actor_calls.drop(call)
            self._results.put(None)
            return False
        if reads:
            self._read_now(call, references)
        return True

    def _read(self, call: ClusterCall, references: list[Any]) -> list[Message]:
        """The messages of a call, once they have come; whoever reads holds the lock for it."""
        self._backoff.sleep(call.name, call.sent_at, is_alone=self.in_flight <= 1)
        messages = [reference.get(timeout=-1) for reference in references]
        self._backoff.note(call.name, call.sent_at)
        return messages

    def _read_now(self, call: ClusterCall, references: list[Any]) -> None:
        """Read a call's result, holding the lock for it; what goes wrong is for the collector."""
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
        """End all processes; calls under way are lost."""
        self._closing.set()
        self.is_ready = False
        self._close_graph()
        self._actors.kill()
        self._results.put(None)
        if self._collector.ident is not None and self._collector is not threading.current_thread():
            self._collector.join(10)
        self._close_graph()
        self._actors.kill()  # one may have been begun meanwhile
        self._waiters.shutdown(wait=False)

    def _messages(self, call: ClusterCall, number: int) -> dict[int, Message]:
        found = {}
        for slot, inputs in self._routes[number].sent[call.name].items():
            values: Sequence[Any] = [call.values[index] for index in inputs]
            if number == 0:
                values, references = fit(values, self._channel_bytes, self._ray.put)
                call.sent.extend(references)
            found[slot] = Message(call.name, self._calls, tuple(values))
        return found

    def _step_by_step(self, number: int, messages: Mapping[int, Message]) -> list[Any]:
        """Begin a call as actor calls; Ray hands each the messages of those before it. The references of the ends."""
        route, handles = self._routes[number], self._actors.handles
        made: dict[tuple[int, int], Any] = {(CALL, slot): message for slot, message in messages.items()}
        for index, slot in enumerate(route.tasks):
            step = handles[slot.host].step.options(num_returns=len(slot.targets))
            # Slots of one host run in order: each also waits for a message of those whose values it reads.
            after = [next(made[key] for key in made if key[0] == before) for before in slot.follows]
            sent = step.remote(number, index, *(made[source, index] for source in slot.inputs), *after)
            made.update(zip(((index, t) for t in slot.targets), sent if len(slot.targets) > 1 else [sent], strict=True))
        return [made[index, END] for index in route.exits]

    def _await(self, call: ClusterCall, number: int, references: list[Any]) -> None:
        """Wait for actor calls, in a thread of their own."""
        thread_state.is_worker = True
        try:
            messages = self._ray.get(references)
        except Exception:
            self._suspect(call, number)
        else:
            if self._actor_calls.take(call, number):
                self._listener.on_end(self, call, messages)

    def _await_mailbox_call(self, call: ClusterCall, number: int) -> None:
        """Have all hosts run their parts of a function, and wait, in a thread for it; such calls take turns."""
        thread_state.is_worker = True
        try:
            with self._exchanging:
                if not self._actor_calls.has(call, number):
                    return  # it was lost while another had its turn
                self._mailbox_calls += 1
                found = run_on_all_hosts(
                    self._ray, self._actors.handles, call.plan.runs, self._mailbox_calls, call.values
                )
        except Exception:
            self._suspect(call, number)
        else:
            if self._actor_calls.take(call, number):
                self._listener.on_end(self, call, found)

    def _suspect(self, call: ClusterCall, number: int) -> None:
        """Have the collector find out who died, and this call among those that are lost; nothing if it was told."""
        if self._actor_calls.has(call, number):
            self._is_suspect = True
            self._results.put(None)

    def _collect(self) -> None:
        """Give results to their fences, in order; and repair what died."""
        thread_state.is_worker = True
        while not self._closing.is_set():
            try:
                item = self._results.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                item = None
            if item is None:
                if not self._closing.is_set() and self._is_broken():
                    self._repair([])
                continue
            call, references = item
            try:
                with self._reading:
                    messages = self._read(call, references)
            except BaseException as error:
                if not self._closing.is_set():
                    self._repair([item], error)
                else:
                    self._listener.on_lost(self, [call], HostError("the cluster was closed"))
                continue
            self._listener.on_end(self, call, messages)
            del item, call, references, messages  # what lies in channels

    def _is_broken(self) -> bool:
        if self._graph is None:
            return self._is_suspect or bool(self._routes) or not self.is_ready
        return self._is_suspect or self._graph.is_broken()

    def _repair(self, lost: list[tuple[ClusterCall, list[Any]]], error: BaseException | None = None) -> None:
        """Tell of the calls that were under way, start what died again, and compile the graph anew."""
        self.is_ready = self._is_suspect = False
        dead = self._actors.find_dead()
        if self._link_texts:
            cut_links(self._ray, self._actors.handles)
        self._close_graph()  # before the lock: a thread that sends may wait for room in a channel
        with self._sending:
            while not self._results.empty():
                item = self._results.get()
                if item is not None:
                    lost.append(item)
            others = self._actor_calls.take_all()
            self._is_suspect = False  # what failed meanwhile did so because of this
        names = " and ".join(f"host {host!r}" for host in dead) or "a host of replica " + str(self.number)
        why = "" if error is None else f": {first_line(error)}"
        self.problem = HostError(f"{names} died while calls were under way{why}")
        self._listener.on_lost(self, [*(call for call, _ in lost), *others], self.problem)
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
        """Start the hosts that are not ready, and compile the graph over all of them."""
        self._actors.start()
        handles = self._actors.handles
        self._ray.get([actor.set_peers.remote(handles) for actor in handles.values()])
        if not self._routes:
            self.problem, self.is_ready = None, True
            return
        self._channel_bytes = self._affordable(self._routes[0])
        channel_bytes = (self._channel_bytes, *(0 for _ in self._routes[1:]))
        replies = [actor.connect.remote(self._routes, channel_bytes, self._in_flight) for actor in handles.values()]
        infos = dict(zip(handles, self._ray.get(replies), strict=True))
        self._link_texts = connect_links(self._ray, handles, infos, self._routes[0])
        here = self._ray.get_runtime_context().get_node_id()
        if any(state.info["node"] != here for state in self._actors.states.values()):
            # A channel to another node holds one message, and a thread that waits to write holds Python's lock. So many
            # find room in channels and hosts though nobody reads the results.
            self.limit = min(self._in_flight, 2 * len(self._routes[0].tasks) + 1)
        self._graph = Graph(self._ray, handles, self._routes[0], 0, self._channel_bytes, self._in_flight)
        self.problem, self.is_ready = None, True

    def _close_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None and not graph.close():
            self._actors.find_dead()

    def _affordable(self, route: Route) -> int:
        """The room of channels: what messages need, or little, where earlier graphs have taken much."""
        channels = sum(len(slot.targets) for slot in route.tasks) + len(route.entries)
        channel_bytes = self._channel_bytes_of(route)
        if self._allocated_bytes + channels * self._in_flight * channel_bytes > _MAX_CHANNELS_BYTES:
            channel_bytes = _MIN_CHANNEL_BYTES
        self._allocated_bytes += channels * self._in_flight * channel_bytes
        return channel_bytes

    def _channel_bytes_of(self, route: Route) -> int:
        """Room for the largest message between slots, where all sizes are known."""
        found = [HEAD_BYTES]
        states = self._actors.states
        for slot in route.tasks:
            for visit in slot.work.values():
                inputs, outputs = states[slot.host].sizes.get(visit.function, ((), ()))
                if None in (*inputs, *outputs):
                    found.append(CHANNEL_BYTES)
                found.append(channel_bytes_for(size or 0 for size in inputs))
                found += [channel_bytes_for(outputs[index] or 0 for index in sent) for sent in visit.sends]
        return max(found)

    def _pause(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise ClosedError("the cluster was closed")
        self._listener.on_wait()
