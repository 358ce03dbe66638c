"""Ray actor of a host, which holds its machine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import HeteroError, HostError
from ..vm.machine import VirtualMachine
from .call_plan import HostRun, Source, flatten_value
from .connections import CALLER, Address, Listener, connect
from .host_links import HostLinks
from .links import GpuInfo
from .mailbox import CallMessages, Mailbox, register
from .node_info import check_memory, node_info
from .payloads import Payload, unpack
from .route import Route, Task, TaskWork
from .task_graph import TaskLoop
from .wire import Failure, Message, decode, decode_copy, encode

_END_SECONDS = 10.0  # time that a task of an earlier call may still run
_MAX_FAILURE_CHARACTERS = 1024


class Mailboxes:
    """Mailboxes of the calls of a host: one call runs at a time, but values of later calls may arrive before."""

    def __init__(self) -> None:
        register()
        self._peers: Mapping[str, Any] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._last_ended = -1
        self._lock = threading.Lock()

    def set_peers(self, peers: Mapping[str, Any]) -> None:
        """Set the actors of the other hosts, and end all calls."""
        with self._lock:
            self._peers, mailboxes, self._mailboxes = dict(peers), list(self._mailboxes.values()), {}
        for mailbox in mailboxes:
            mailbox.end("a host died, and the cluster restarts")

    def run(self, machine: VirtualMachine, call: int, run: HostRun, values: Sequence[Any]) -> list[Any]:
        """Run a host's part of a function; returns the encoded leaves of its result."""

        def argument(source: Any) -> Any:
            if isinstance(source, Source):
                return decode_copy(values[source.index])
            return () if source is None else tuple(map(argument, source))

        def deliver(host: str, channel: int, number: int, value: Any) -> None:
            self._peers[host].deliver.remote(call, channel, number, value)

        mailbox = self._mailbox(call)
        signature = machine.executable.signature(run.function)
        try:
            if mailbox is None:
                raise AssertionError("numbers of calls must increase")
            with CallMessages(mailbox, deliver, encode, decode_copy).open():
                result = machine.call(run.function, tuple(map(argument, run.arguments)))
        finally:
            with self._lock:
                self._last_ended = max(self._last_ended, call)
                self._mailboxes.pop(call, None)
        outputs = zip(result if signature.output_is_tuple else [result], signature.outputs, strict=True)
        return [encode(leaf) for output, spec in outputs for leaf in flatten_value(output, spec)]

    def deliver(self, call: int, channel: int, number: int, value: Any) -> None:
        """Add a value to a mailbox; dropped if the call has ended."""
        mailbox = self._mailbox(call)
        if mailbox is not None:
            mailbox.put(channel, number, value)

    def end(self, call: int, reason: str) -> None:
        """End a call that has ended on another host."""
        mailbox = self._mailbox(call)
        if mailbox is not None:
            mailbox.end(reason)

    def _mailbox(self, call: int) -> Mailbox | None:
        with self._lock:
            return None if call <= self._last_ended else self._mailboxes.setdefault(call, Mailbox())


class HostMachine:
    """Ray actor with the machine of one host.

    `host`: logical name of the host; `threads`: number of threads of its kernels, 0 for as many as they were compiled
    for.
    """

    def __init__(self, host: str, threads: int) -> None:
        if threads:
            os.environ["TVM_NUM_THREADS"] = str(threads)
        self._host = host
        self._machine: Any = None
        self._links: HostLinks | None = None
        self._routes: tuple[Route, ...] = ()
        # Values that later tasks of this host read, by route and call, and by task.
        self._later_values: dict[tuple[int, int], dict[int, Any]] = {}
        self._effects: dict[str, tuple[bool, bool]] = {}  # results of `_effects_of`, by function
        self._mailboxes = Mailboxes()
        self._listener: Listener | None = None
        self._loop: TaskLoop | None = None
        self._running_tasks = threading.Lock()

    def info(self) -> dict[str, Any]:
        """Describe this process (`node_info`)."""
        return node_info()

    def alive(self) -> bool:
        """Return True, which shows that the process lives."""
        return True

    def load(self, part: Payload) -> Any:
        """Load or compile this host's code, and make the machine; returns None or a `Failure`."""
        import ray

        try:
            executable = unpack(part, ray.get)
            check_memory(executable)
            self._machine = VirtualMachine(executable)
            self._links = HostLinks(self._host, self._machine)
        except Exception as error:
            return self._make_failure(error)
        return None

    def connect(self, routes: tuple[Route, ...], token: bytes, has_other_nodes: bool) -> tuple[GpuInfo, Address]:
        """Set the routes, forget all calls, and listen for the other processes.

        Parameters
        ----------
        routes : tuple of Route
            Routes of the program.
        token : bytes
            Token of the connections.
        has_other_nodes : bool
            Whether processes of other nodes will connect.

        Returns
        -------
        GpuInfo
            GPUs of this host.
        Address
            Where it listens, for `run_tasks`.

        Raises
        ------
        HostError
            If a task of an earlier call is still running.
        """
        import ray

        if self._listener is not None:
            self._listener.is_cancelled = True
        if self._loop is not None:
            self._loop.close()
        if not self._running_tasks.acquire(timeout=_END_SECONDS):
            raise HostError(f"host {self._host!r} still runs a task of an earlier call")
        self._running_tasks.release()
        self._routes = routes
        self._later_values.clear()
        self.call_links("reset")
        node, ip_address = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        self._listener = Listener(node, ip_address if has_other_nodes else None, token)
        return self.call_links("info"), self._listener.address

    def run_tasks(self, token: bytes, addresses: Mapping[str, Address], in_order: Sequence[int]) -> str:
        """Connect with the other processes, and run tasks until a connection ends.

        `token`: token of the connections; `addresses`: addresses of all hosts; `in_order`: routes whose calls run one
        after the other. Returns the reason of the end.
        """
        if self._listener is None or self._listener.token != token:
            return "the replica has been connected again"
        listener, names = self._listener, [*addresses, CALLER]
        own_index, node = names.index(self._host), listener.address.node
        with self._running_tasks:
            try:
                connections = {
                    name: connect(addresses[name], node, token, own_index, name) for name in names[:own_index]
                }
                connections |= listener.accept(dict(enumerate(names[own_index + 1 :], own_index + 1)))
                self._loop = TaskLoop(self._host, self._routes, connections, self.step, in_order)
                del connections
                self._loop.run()
            except Exception as error:
                return str(self._make_failure(error).message)
            finally:
                self._loop = None

    def call_links(self, method: str, *args: Any) -> Any:
        """Call a method of `HostLinks`; does nothing before the code is loaded."""
        return None if self._links is None else getattr(self._links, method)(*args)

    def step(self, route: int, number: int, *messages: Message) -> list[Message]:
        """Run a task of a route for one call. Returns the message for each target of the task."""
        function, call = messages[0].function, messages[0].call
        task = self._routes[route].tasks[number]
        work = task.work[function]
        links = self._links if self._links and self._links.are_used else None
        received: Sequence[Any] = [message.values for message in messages]
        if links:
            received = [links.receive(values) for values in received]
        results: list[Any] | Failure
        try:
            results = self._run_task(task, work, received, self._later_values.get((route, call), {}))
            if links:
                links.check()
        except Exception as error:
            results = self._make_failure(error)
        if self._later_values or not task.is_last:
            self._keep(task, number, (route, call), work, results)
        sent = []
        for target, indices in zip(task.targets, work.sends, strict=True):
            values: Any = results
            if not isinstance(results, Failure):
                values = [results[index] for index in indices]
                if links and route == 0:  # only the first route has links
                    values = links.announce((number, target), function, values)
                values = tuple([encode(value) for value in values])
            sent.append(Message(number, target, function, call, values))
        if links:
            links.send_announced()
        return sent

    def set_peers(self, peers: dict[str, Any]) -> bool:
        """Set the actors of the other hosts, for functions whose hosts exchange messages; end all calls."""
        self._mailboxes.set_peers(peers)
        return True

    def run(self, call: int, run: HostRun, values: Sequence[Any]) -> Any:
        """Run this host's part of a function whose hosts exchange messages; return the encoded leaves of its result."""
        try:
            return self._mailboxes.run(self._machine, call, run, values)
        except Exception as error:
            return self._make_failure(error)

    def deliver(self, call: int, channel: int, number: int, value: Any) -> None:
        """Receive a value from another host."""
        self._mailboxes.deliver(call, channel, number, value)

    def end(self, call: int, reason: str) -> None:
        """End a call that has ended on another host."""
        self._mailboxes.end(call, reason)

    def _run_task(self, task: Task, work: TaskWork, messages: Sequence[Any], earlier: dict[int, Any]) -> Any:
        """Results of the task's function, or the failure of an earlier task that it depends on."""
        received: dict[int, Any] = {}
        for source, values in zip(task.inputs, messages, strict=True):
            if isinstance(values, Failure):
                return values
            received[source] = values
        for source in task.follows:
            values = earlier.get(source)  # None if this function reads nothing from that task
            if isinstance(values, Failure):
                return values
        writes_arguments, output_is_tuple = self._effects.get(work.function) or self._effects_of(work.function)
        decode_argument = decode_copy if writes_arguments else decode
        arguments = [
            decode_argument(received[source][index]) if source in received else earlier[source][index]
            for source, index in work.arguments
        ]
        if writes_arguments:
            self.call_links("finish")
        result = self._machine.call(work.function, tuple(arguments))
        return list(result) if output_is_tuple else [result]

    def _effects_of(self, function: str) -> tuple[bool, bool]:
        """Return whether a function writes to arguments, and whether it returns a tuple."""
        executable = self._machine.executable
        signature = executable.signature(function)
        writes_arguments = executable.metadata.writes_arguments or bool(signature.donated)
        self._effects[function] = effects = writes_arguments, signature.output_is_tuple
        return effects

    def _keep(self, task: Task, number: int, call: tuple[int, int], work: TaskWork, results: Any) -> None:
        if task.is_last:
            self._later_values.pop(call, None)
        elif isinstance(results, Failure):
            self._later_values.setdefault(call, {})[number] = results
        elif work.keeps:
            self._later_values.setdefault(call, {})[number] = {index: results[index] for index in work.keeps}

    def _make_failure(self, error: Exception) -> Failure:
        message = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        kind = type(error) if isinstance(error, HeteroError) else HeteroError
        return Failure(kind, f"host {self._host!r}: {message}"[:_MAX_FAILURE_CHARACTERS])
