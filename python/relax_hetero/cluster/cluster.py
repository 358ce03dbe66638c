"""Clusters: the machine of a program over several hosts, with replicas, calls in flight and recovery."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from asyncio import events
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

from ..artifact.messages import unknown_name
from ..driver.link.parallel_codegen import Progress
from ..errors import BindingError, HeteroError, HostError
from ..vm.args.argument_copies import copy_arguments
from ..vm.queue.fence import Fence, thread_state, when_all_done
from ..vm.queue.queued_calls import CallsInFlight
from .actors import Actors
from .bindings import bind_hosts
from .calls import ClusterCall, bind, named_only, result_of, result_of_runs
from .cut.compiled_program import load
from .cut.program import hosts_needed, program_of
from .payloads import pack
from .replica import Listener, Replica
from .route import routes_of
from .wire import Message

# Ray, where it is installed: imported when a cluster is made, and never by importing this library.


def connected_ray() -> Any:
    """The module ``ray``; HeteroError that says what to install where there is none."""
    try:
        import ray
    except ImportError as error:
        raise HeteroError(
            "clusters of hosts run on Ray, which is not installed here: pip install 'relax-hetero[cluster]'"
        ) from error
    return ray


IN_FLIGHT_PER_HOST = 2
"""Calls under way for each host of a replica, so that no stage waits for its next call."""

TIMEOUT = 60.0
"""Seconds that a host may take to be started, before calls that wait for it fail."""


class Cluster:
    """A program over several hosts, ready to run.

    A process of its own holds the machine of each host, started by Ray where the host is bound. Calls are those of a
    `VirtualMachine`: ``cluster["main"](x)``, or ``cluster.submit("main", x)`` for a fence. Where a process or a node
    dies, calls under way fail with a `HostError`, or begin again, and what died is started again.

    Parameters
    ----------
    program : tvm.IRModule or Program
        A module whose vdevices are on hosts (``vdevices=["a/llvm", "b/cuda:0"]``), at any stage before it is lowered;
        each host compiles its part. Or the folder of a program that `rh.cluster.compile` wrote, or a program.
    hosts : mapping
        For each host of the program where it runs, by options of Ray's actors: ``resources`` (``{"gpu_box": 1}``),
        ``label_selector``, ``node`` (an address or a node's id), ``num_cpus`` (also the threads of its kernels),
        ``num_gpus``, ``memory`` (bytes). ``{}`` is any node.
    replicas : int
        Complete sets of hosts; a call goes to the one with the fewest calls under way.
    in_flight : int, optional
        How many calls may be under way in each replica; `submit` waits for room. By default two for each host.
    retries : int
        How often a call begins again after a host died; results are those of a call that never failed.
    timeout : float
        Seconds that Ray may take to start a host, and that calls wait for one that died.
    params, accuracy, progress
        As `rh.compile` takes them, for a module.

    Raises
    ------
    HeteroError
        Without Ray; a program whose plans do not fit; a part that cannot be loaded.
    HostError
        Hosts that are missing, unknown options, a host that nothing can take within `timeout`, or that has other
        versions than this process. Nothing is left running.
    """

    def __init__(
        self,
        program: object,
        hosts: Mapping[str, Mapping[str, Any]],
        *,
        replicas: int = 1,
        in_flight: int | None = None,
        retries: int = 0,
        timeout: float = TIMEOUT,
        params: Mapping[str, Any] | None = None,
        accuracy: str | Mapping[str, str] = "default",
        progress: Progress | None = None,
    ) -> None:
        self._replicas: list[Replica] = []
        self._is_closed = False
        if isinstance(program, str | os.PathLike):
            program = load(program)
        bindings = bind_hosts(hosts, hosts_needed(program))
        limit = _positive("in_flight", IN_FLIGHT_PER_HOST * len(bindings) if in_flight is None else in_flight)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise BindingError(f"retries is {retries!r}, expected an integer from 0 on")
        count = _positive("replicas", replicas)
        self._ray = ray = connected_ray()
        if not ray.is_initialized():
            ray.init()
        self._program = program_of(program, ray, bindings, timeout, params, accuracy, progress)
        bindings = {host: bindings[host] for host in self._program.parts}  # others have nothing to do
        self._timeout, self._retries, self._limit = timeout, retries, limit
        self._calls = CallsInFlight(limit * count)
        self._lock = threading.Lock()
        self._waiting: deque[ClusterCall] = deque()
        self._sender = ThreadPoolExecutor(1, "calls of a cluster", initializer=_mark_worker)
        self._routes = routes_of(self._program.functions)
        self._route_of = {name: route for route in self._routes for name in route.sent}
        parts = {host: pack(part, host, ray.put) for host, part in self._program.parts.items()}
        me = weakref.ref(self)  # threads of replicas do not keep a cluster that was dropped
        listener = Listener(partial(_on_end, me), partial(_on_lost, me), partial(_on_ready, me), partial(_on_wait, me))

        def actors(pause: Callable[[float], None]) -> Actors:
            return Actors(ray, bindings, parts, timeout, pause)

        self._replicas = [Replica(ray, number, actors, self._routes, limit, listener) for number in range(count)]
        self._finalizer = weakref.finalize(self, _close, self._replicas, self._sender)
        atexit.register(self._finalizer)  # before Ray's own, which would wait for loops of graphs
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{sum(r.is_ready for r in self._replicas)} ready"
        return f"<Cluster of {', '.join(self._program.parts)}, {len(self._replicas)} replicas: {state}>"

    @property
    def hosts(self) -> list[dict[str, dict[str, Any]]]:
        """For each replica the state of each host: ``state``, ``starts``, ``address``, ``node``, ``pid``, ``cores``."""
        return [replica.hosts for replica in self._replicas]

    @property
    def function_names(self) -> list[str]:
        """The functions that can be called."""
        return list(self._program.functions)

    def __getitem__(self, name: str) -> ClusterFunction:
        """The function `name`, to be called with inputs by position or by name, as a function of a machine.

        Arguments are numpy arrays, tvm tensors, objects with ``__dlpack__``, Python scalars and, for shapes, tuples.
        Results are tvm tensors on the host ``cpu(0)``, a tuple for a Relax tuple.
        """
        if name not in self._program.functions:
            raise unknown_name("function", name, self.function_names, "the cluster")
        return ClusterFunction(self, name)

    def submit(self, name: str, /, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """Have function `name` run, without waiting for it.

        Arguments are checked now. A `Fence` among them stands for its result. Where as many calls are under way as may
        be, this waits; in a thread that runs an event loop it never does, and the call stands in line.

        Parameters
        ----------
        name : str
            Function of the program.
        copy : bool
            Whether arrays that are not sent at once are copied, so that they may be changed. With False they must not
            change until the fence is done.
        *args, **kwargs : object
            Arguments of the function, by position and by name.

        Returns
        -------
        Fence
            As `VirtualMachine.submit` returns it. Its `result` raises `HostError` where a host died and no retry is
            left, and what a step raised, with the host's name before the message.
        """
        return self._submit(name, args, kwargs, copy)

    def _submit(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], copy: bool, waits: bool = False
    ) -> Fence:
        """`submit`, by a caller that perhaps waits for the result at once."""
        plan = self._plan(name)
        fence = self._calls.enter()
        is_admitted = fence is not None
        fence = fence or Fence(self._calls.leave)
        try:
            awaited = [value for value in (*args, *kwargs.values()) if isinstance(value, Fence)]
            if not awaited:
                call = ClusterCall(name, plan, bind(name, plan, args, kwargs), fence, self._retries)
                is_sent_now = is_admitted and events._get_running_loop() is None
                if copy and (self._retries or not is_sent_now or plan.reads_inputs_late):
                    call.copy_values()
                    copy = False
                if is_sent_now:
                    self._dispatch(call, copy, waits)
                    return fence
                start = partial(self._start_after, partial(self._dispatch, call, False), fence)
            else:
                if copy:
                    signature = plan.signature or named_only(name, plan.input_names)
                    args, kwargs = copy_arguments(signature, (), args, kwargs, is_late=True)
                start = partial(self._start_after, partial(self._start_late, name, plan, args, kwargs, fence), fence)
            then = start if is_admitted else partial(self._calls.enqueue, fence, start)
            when_all_done(awaited, then)
        except BaseException:
            self._calls.leave(fence)
            raise
        return fence

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait until all calls that were submitted have ended; False if they have not after `timeout` seconds.

        Parameters
        ----------
        timeout : float, optional
            Maximum wait in seconds; None: without limit.
        """
        return self._calls.wait(timeout)

    def close(self) -> None:
        """End all processes of the cluster; calls under way fail. Again, it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        finalizer = getattr(self, "_finalizer", None)
        if finalizer is None:
            return
        finalizer()
        atexit.unregister(finalizer)
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for fence in {*self._calls.fences, *(call.fence for call in waiting)}:
            fence.settle(None, HostError("the cluster was closed"))

    def _plan(self, name: str) -> Any:
        if self._is_closed:
            raise HostError("the cluster was closed")
        plan = self._program.functions.get(name)
        if plan is None:
            raise unknown_name("function", name, self.function_names, "the cluster")
        return plan

    def _start(self) -> None:
        """Start all replicas at once."""
        with ThreadPoolExecutor(len(self._replicas), "start of replicas") as pool:
            started = [pool.submit(replica.start) for replica in self._replicas]
        for one in started:
            one.result()

    def _start_late(self, name: str, plan: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fence: Fence) -> None:
        """Begin a call whose arguments were results of calls that have ended."""
        given = tuple(_settled(value, name) for value in args)
        named = {key: _settled(value, name) for key, value in kwargs.items()}
        self._dispatch(ClusterCall(name, plan, bind(name, plan, given, named), fence, self._retries), False)

    def _start_after(self, begin: Callable[[], None], fence: Fence) -> None:
        """Begin a call in the thread that sends; what goes wrong goes to the fence."""

        def run() -> None:
            try:
                begin()
            except Exception as error:
                fence.settle(None, error if isinstance(error, HeteroError) else HeteroError(str(error)))

        try:
            self._sender.submit(run)
        except RuntimeError:  # the cluster was closed
            fence.settle(None, HostError("the cluster was closed"))

    def _dispatch(self, call: ClusterCall, copy: bool, waits: bool = False) -> None:
        """Send a call to the replica with the fewest calls under way; it waits where none has room."""
        while True:
            replica = self._reserve()
            if replica is None:
                break
            if not call.fence.begin():  # cancelled
                self._release(replica)
                self._pump()  # its room is for the next one
                return
            if replica.submit(call, waits):
                return
            self._release(replica)
        if copy:
            call.copy_values()
        call.since = time.monotonic()
        with self._lock:
            self._waiting.append(call)
        if self._is_closed:
            call.fence.settle(None, HostError("the cluster was closed"))
        self._pump()  # a replica may have become ready meanwhile

    def _reserve(self) -> Replica | None:
        with self._lock:
            free = [one for one in self._replicas if one.has_capacity]
            replica = min(free, key=lambda one: one.in_flight, default=None)
            if replica is not None:
                replica.in_flight += 1
            return replica

    def _release(self, replica: Replica) -> None:
        with self._lock:
            replica.in_flight -= 1

    def _pump(self) -> None:
        """Have calls that wait sent, in the thread for it, as a channel may have no room for a while."""
        with self._lock:
            has_room = not self._is_closed and any(replica.has_capacity for replica in self._replicas)
            call = self._waiting.popleft() if has_room and self._waiting else None
        if call is not None:
            self._start_after(partial(self._dispatch, call, False), call.fence)

    def _ended(self, replica: Replica, call: ClusterCall, messages: Sequence[Message]) -> None:
        result, error = None, None
        try:
            if call.plan.runs:
                result = result_of_runs(call.plan, messages)
            else:
                result = result_of(call, self._route_of[call.name], messages, self._ray.get)
        except HeteroError as raised:
            error = raised
        except Exception as raised:  # an object that was lost with its node
            self._lost(replica, [call], HostError(f"a result of {call.name!r} was lost: {raised}"))
            return
        call.sent.clear()
        self._release(replica)
        call.fence.settle(result, error)
        self._pump()

    def _lost(self, replica: Replica, calls: Sequence[ClusterCall], error: HostError) -> None:
        for call in calls:
            self._release(replica)
            call.sent.clear()
            if call.retries > 0 and not self._is_closed:
                call.retries -= 1
                self._start_after(partial(self._dispatch, call, False), call.fence)
            else:
                call.fence.settle(None, error)

    def _expire(self) -> None:
        """Fail the calls that have waited too long while no replica is ready."""
        if any(replica.is_ready for replica in self._replicas):
            self._pump()
            return
        end = time.monotonic() - self._timeout
        with self._lock:
            late = [call for call in self._waiting if call.since < end]
            for call in late:
                self._waiting.remove(call)
        problem = next((replica.problem for replica in self._replicas if replica.problem), None)
        for call in late:
            why = f"no host could take the call within {self._timeout:g} s"
            call.fence.settle(None, problem or HostError(why))


class ClusterFunction:
    """A function of a cluster, as ``cluster["main"]`` gives it."""

    __slots__ = ("cluster", "name")

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return its result."""
        return self.cluster._submit(self.name, args, kwargs, copy=False, waits=True).result()

    def submit(self, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """Have the function run, without waiting for it; see `Cluster.submit`."""
        return self.cluster.submit(self.name, *args, copy=copy, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.name!r} of {self.cluster!r}>"


def _positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BindingError(f"{name} is {value!r}, expected a positive integer")
    return value


def _settled(value: Any, name: str) -> Any:
    if not isinstance(value, Fence):
        return value
    if value.cancelled():
        raise HeteroError(f"an argument of {name!r} is the result of a call that was cancelled")
    error = value.exception()
    if error is not None:
        raise HeteroError(f"an argument of {name!r} is the result of a call that failed: {error}")
    return value.result()


def _mark_worker() -> None:
    thread_state.is_worker = True


def _close(replicas: list[Replica], sender: ThreadPoolExecutor) -> None:
    sender.shutdown(wait=False, cancel_futures=True)
    for replica in replicas:
        replica.close()


# What replicas tell a cluster, which may be gone.


def _on_end(me: Callable[[], Cluster | None], replica: Replica, call: ClusterCall, messages: Sequence[Message]) -> None:
    cluster = me()
    if cluster is not None:
        cluster._ended(replica, call, messages)


def _on_lost(
    me: Callable[[], Cluster | None], replica: Replica, calls: Sequence[ClusterCall], error: HostError
) -> None:
    cluster = me()
    if cluster is not None:
        cluster._lost(replica, calls, error)
        return
    for call in calls:
        call.fence.settle(None, error)


def _on_ready(me: Callable[[], Cluster | None], replica: Replica) -> None:
    cluster = me()
    if cluster is not None:
        for _ in range(cluster._limit):
            cluster._pump()


def _on_wait(me: Callable[[], Cluster | None]) -> None:
    cluster = me()
    if cluster is not None:
        cluster._expire()
