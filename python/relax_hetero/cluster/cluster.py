"""`rh.cluster.Cluster`: runs a program over several hosts, with replicas, calls in flight and recovery."""

from __future__ import annotations

import atexit
import os
import sys
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
from ..errors import BindingError, HeteroError, HostError, pip_install
from ..vm.args.argument_copies import copy_arguments
from ..vm.queue.fence import Fence, thread_state, when_all_done
from ..vm.queue.queued_calls import CallsInFlight
from .actors import Actors
from .bindings import HostBinding, bind_hosts
from .calls import ClusterCall, bind, result_of, result_of_runs, untyped_signature
from .cut.cluster_program import hosts_needed, load, program_of
from .payloads import pack
from .replica import Callbacks, Replica
from .route import routes_of
from .wire import Message

IN_FLIGHT_PER_HOST = 2  # calls in flight per host of a replica: one runs while the next one is ready
TIMEOUT = 60.0  # default of `Cluster.timeout` in seconds


def _import_ray() -> Any:
    if sys.platform != "linux":  # parts travel as files in memory
        raise HeteroError(f"clusters need Linux on each host, found {sys.platform}")
    try:
        import ray
    except ImportError as error:
        raise HeteroError(
            f"clusters of hosts run on Ray, which is not installed here: {pip_install('cluster')}"
        ) from error
    return ray


class Cluster:
    """A running program over several hosts.

    Each host is a Ray actor with a `VirtualMachine`, scheduled by the host's options. Calls are those of a
    `VirtualMachine`: ``cluster["main"](x)``, or ``cluster.submit("main", x)`` for a fence. If a process or a node dies,
    calls in flight fail with a `HostError` or are retried, and the host is restarted.

    Parameters
    ----------
    program : tvm.IRModule or Program
        Module whose vdevices are on hosts (``vdevices=["a/llvm", "b/cuda:0"]``), at any stage before lowering; each
        host compiles its part. Or the folder of a program that `rh.cluster.compile` wrote, or a program.
    hosts : mapping
        Options of each host's Ray actor: ``resources`` (``{"gpu_box": 1}``), ``label_selector``, ``node`` (an address
        or a node's id), ``num_cpus`` (also the threads of kernels), ``num_gpus``, ``memory`` (bytes). ``{}``: any node.
    replicas : int
        Number of complete sets of hosts; a call goes to the one with the fewest calls in flight.
    in_flight : int, optional
        Maximum number of calls in flight in each replica, beyond which `submit` waits; by default two for each host.
    retries : int
        Number of retries of a call after a host died; results are the same as without a failure.
    timeout : float
        Seconds that Ray may take to start a host, and that calls wait for a dead host.
    params, accuracy, progress
        As for `rh.compile`, for a module.

    Raises
    ------
    HeteroError
        If Ray is not installed, the program is inconsistent, or code cannot be loaded.
    HostError
        If hosts are missing, options are unknown, a host is not started within `timeout`, or it has other versions than
        this process. No process is left running.
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
        limit = _check_positive("in_flight", IN_FLIGHT_PER_HOST * len(bindings) if in_flight is None else in_flight)
        if isinstance(retries, bool) or not isinstance(retries, int) or retries < 0:
            raise BindingError(f"retries is {retries!r}, expected an integer from 0 on")
        count = _check_positive("replicas", replicas)
        self._ray = ray = _import_ray()
        if not ray.is_initialized():
            ray.init()
        self._program = program_of(program, ray, bindings, timeout, params, accuracy, progress)
        bindings = {host: bindings[host] for host in self._program.parts}  # others have no code
        self._timeout, self._retries, self._limit = timeout, retries, limit
        self._calls = CallsInFlight(limit * count)
        self._lock = threading.Lock()
        self._waiting: deque[ClusterCall] = deque()
        self._sender = ThreadPoolExecutor(1, "calls of a cluster", initializer=_mark_worker)
        self._routes = routes_of(self._program.functions)
        self._route_by_function = {name: route for route in self._routes for name in route.sent}
        self._replicas = self._make_replicas(bindings, count)
        self._finalizer = weakref.finalize(self, _close, self._replicas, self._sender)
        atexit.register(self._finalizer)  # runs before Ray's, which would wait for loops of hosts
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
        """State of each host of each replica: ``state``, ``starts``, ``address``, ``node``, ``pid``, ``cores``."""
        return [replica.hosts for replica in self._replicas]

    @property
    def function_names(self) -> list[str]:
        """Names of the functions."""
        return list(self._program.functions)

    def __getitem__(self, name: str) -> ClusterFunction:
        """Get a function, which is called with inputs by position or by name, as that of a machine.

        Arguments are numpy arrays, tvm tensors, objects with ``__dlpack__``, Python scalars and, for shapes, tuples.
        Results are tvm tensors on the host ``cpu(0)``, a tuple for a Relax tuple.
        """
        if name not in self._program.functions:
            raise unknown_name("function", name, self.function_names, "the cluster")
        return ClusterFunction(self, name)

    def submit(self, name: str, /, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """Submit a call without waiting for it.

        Arguments are checked now. A `Fence` among them stands for its result. If `in_flight` calls are in flight, this
        waits; in a thread with a running event loop it queues the call instead.

        Parameters
        ----------
        name : str
            Name of the function.
        copy : bool
            Whether to copy arrays that are not sent at once; if False, they must not change until the fence is done.
        *args, **kwargs : object
            Arguments of the function, by position and by name.

        Returns
        -------
        Fence
            As for `VirtualMachine.submit`. Its `result` raises `HostError` if a host died and no retry is left, or a
            step's error, with the host's name before the message.
        """
        return self._submit(name, args, kwargs, copy)

    def _submit(
        self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], copy: bool, waits: bool = False
    ) -> Fence:
        """Submit a call; `waits` if the caller waits for the result at once."""
        plan = self._plan(name)
        fence = self._calls.enter()
        is_admitted = fence is not None
        fence = fence or Fence(self._calls.leave)
        try:
            fences = [value for value in (*args, *kwargs.values()) if isinstance(value, Fence)]
            if not fences:
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
                    signature = plan.signature or untyped_signature(name, plan.input_names)
                    args, kwargs = copy_arguments(signature, (), args, kwargs, is_late=True)
                start = partial(self._start_after, partial(self._start_late, name, plan, args, kwargs, fence), fence)
            when_all_done(fences, start if is_admitted else partial(self._calls.enqueue, fence, start))
        except BaseException:
            self._calls.leave(fence)
            raise
        return fence

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait for all submitted calls; False if they have not ended after `timeout` seconds.

        Parameters
        ----------
        timeout : float, optional
            Maximum number of seconds to wait; None for no limit.
        """
        return self._calls.wait(timeout)

    def close(self) -> None:
        """End all processes of the cluster; calls in flight fail. Calling it again does nothing."""
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

    def _make_replicas(self, bindings: Mapping[str, HostBinding], count: int) -> list[Replica]:
        ray = self._ray
        parts = {host: pack(part, host, ray.put) for host, part in self._program.parts.items()}
        ref = weakref.ref(self)  # threads of replicas must not keep the cluster alive
        callbacks = Callbacks(
            partial(_on_end, ref), partial(_on_lost, ref), partial(_on_ready, ref), partial(_on_wait, ref)
        )

        def actors(pause: Callable[[float], None]) -> Actors:
            return Actors(ray, bindings, parts, self._timeout, pause)

        return [Replica(ray, number, actors, self._routes, self._limit, callbacks) for number in range(count)]

    def _start(self) -> None:
        """Start all replicas at once."""
        with ThreadPoolExecutor(len(self._replicas), "start of replicas") as pool:
            futures = [pool.submit(replica.start) for replica in self._replicas]
        for future in futures:
            future.result()

    def _start_late(self, name: str, plan: Any, args: Sequence[Any], kwargs: Mapping[str, Any], fence: Fence) -> None:
        """Start a call whose arguments include results of calls that have ended."""
        args = tuple(_resolve_fence(value, name) for value in args)
        kwargs = {key: _resolve_fence(value, name) for key, value in kwargs.items()}
        self._dispatch(ClusterCall(name, plan, bind(name, plan, args, kwargs), fence, self._retries), False)

    def _start_after(self, begin: Callable[[], None], fence: Fence) -> None:
        """Run `begin` in the sender thread; errors go to the fence."""

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
        """Send a call to the replica with the fewest calls in flight; queue it if none has capacity."""
        while True:
            replica = self._reserve()
            if replica is None:
                break
            if not call.fence.begin():  # cancelled
                self._release(replica)
                self._send_next()  # the capacity is free for another call
                return
            taken: list[Replica] = []
            try:
                replica.submit(call, waits, taken)
            finally:  # also after Ctrl-C
                if not taken:
                    self._release(replica)
            if taken:
                return
        if copy:
            call.copy_values()
        call.waiting_since = time.monotonic()
        with self._lock:
            self._waiting.append(call)
        if self._is_closed:
            call.fence.settle(None, HostError("the cluster was closed"))
        self._send_next()  # a replica may have become ready in the meantime

    def _reserve(self) -> Replica | None:
        with self._lock:
            free = [replica for replica in self._replicas if replica.has_capacity]
            replica = min(free, key=lambda each: each.in_flight, default=None)
            if replica is not None:
                replica.in_flight += 1
            return replica

    def _release(self, replica: Replica) -> None:
        with self._lock:
            replica.in_flight -= 1

    def _send_next(self) -> None:
        """Send the next queued call, in the sender thread, since a host may be busy for a while."""
        with self._lock:
            if not self._waiting or self._is_closed or not any(replica.has_capacity for replica in self._replicas):
                return
            call = self._waiting.popleft()
        self._start_after(partial(self._dispatch, call, False), call.fence)

    def _finish_call(self, replica: Replica, call: ClusterCall, messages: Sequence[Message]) -> None:
        result, error = None, None
        try:
            if call.plan.runs:
                result = result_of_runs(call.plan, messages)
            else:
                result = result_of(call, self._route_by_function[call.name], messages)
        except HeteroError as raised:
            error = raised
        self._release(replica)
        call.fence.settle(result, error)
        self._send_next()

    def _fail_calls(self, replica: Replica, calls: Sequence[ClusterCall], error: HostError) -> None:
        for call in calls:
            self._release(replica)
            if call.retries > 0 and not self._is_closed:
                call.retries -= 1
                self._start_after(partial(self._dispatch, call, False), call.fence)
            else:
                call.fence.settle(None, error)

    def _expire(self) -> None:
        """Fail calls that have waited longer than the timeout while no replica is ready."""
        if any(replica.is_ready for replica in self._replicas):
            self._send_next()
            return
        end = time.monotonic() - self._timeout
        with self._lock:
            late = [call for call in self._waiting if call.waiting_since < end]
            for call in late:
                self._waiting.remove(call)
        problem = next((replica.problem for replica in self._replicas if replica.problem), None)
        reason = f": {problem}" if problem is not None else ""
        for call in late:
            call.fence.settle(None, HostError(f"no host could take the call within {self._timeout:g} s{reason}"))


class ClusterFunction:
    """A function of a cluster, such as ``cluster["main"]``."""

    __slots__ = ("cluster", "name")

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return its result."""
        return self.cluster._submit(self.name, args, kwargs, copy=False, waits=True).result()

    def submit(self, *args: Any, copy: bool = True, **kwargs: Any) -> Fence:
        """Submit a call without waiting for it; see `Cluster.submit`."""
        return self.cluster.submit(self.name, *args, copy=copy, **kwargs)

    def __repr__(self) -> str:
        return f"<function {self.name!r} of {self.cluster!r}>"


def _check_positive(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BindingError(f"{name} is {value!r}, expected a positive integer")
    return value


def _resolve_fence(value: Any, name: str) -> Any:
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


# Callbacks of replicas, which hold a weak reference to the cluster.


def _on_end(
    ref: Callable[[], Cluster | None], replica: Replica, call: ClusterCall, messages: Sequence[Message]
) -> None:
    cluster = ref()
    if cluster is not None:
        cluster._finish_call(replica, call, messages)


def _on_lost(
    ref: Callable[[], Cluster | None], replica: Replica, calls: Sequence[ClusterCall], error: HostError
) -> None:
    cluster = ref()
    if cluster is not None:
        cluster._fail_calls(replica, calls, error)
        return
    for call in calls:
        call.fence.settle(None, error)


def _on_ready(ref: Callable[[], Cluster | None], replica: Replica) -> None:
    cluster = ref()
    if cluster is not None:
        for _ in range(cluster._limit):
            cluster._send_next()


def _on_wait(ref: Callable[[], Cluster | None]) -> None:
    cluster = ref()
    if cluster is not None:
        cluster._expire()
