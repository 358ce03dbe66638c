"""Ray actor of a host, which holds its machine.

The number of threads must be set before TVM is imported, so imports are inside of methods.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..vm.machine import VirtualMachine
from .call_plan import HostRun, Source, flatten_value
from .mailbox import CallMessages, Mailbox, register
from .wire import decode_copy, encode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .call_plan import HostRun
    from .host_links import HostLinks
    from .links import GpuInfo
    from .payloads import Payload
    from .route import Route, Task, TaskWork
    from .wire import Failure, Message


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

    Parameters
    ----------
    host : str
        Logical name of the host.
    threads : int
        Number of threads of its kernels; 0 for as many as they were compiled for.
    """

    def __init__(self, host: str, threads: int) -> None:
        if threads:
            os.environ["TVM_NUM_THREADS"] = str(threads)
        self._host = host
        self._machine: Any = None
        self._wire: Any = None
        self._get: Any = None
        self._store: Any = None
        self._links: HostLinks | None = None
        self._routes: tuple[Route, ...] = ()
        self._channel_bytes: tuple[int, ...] = ()
        self._in_flight = 1
        # Values that later tasks of this host read, by call and task.
        self._later_values: dict[int, dict[int, Any]] = {}
        self._mailboxes: Any = None
        # References to values in the object store, by call, kept until the receivers have read them.
        self._sent: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def info(self) -> dict[str, Any]:
        """Describe this process (`node_info`)."""
        from .node_info import node_info

        return node_info()

    def alive(self) -> bool:
        """Return True, which shows that the process lives."""
        return True

    def load(self, part: Payload) -> Any:
        """Load or compile this host's code, and make the machine.

        Returns
        -------
        dict or Failure
            Bytes of each function's inputs and results (`node_info.sizes_of`).
        """
        import ray

        try:
            from ..vm.machine import VirtualMachine
            from .host_links import HostLinks
            from .node_info import check_memory, sizes_of
            from .payloads import unpack

            self._mailboxes = Mailboxes()
            executable = unpack(part, ray.get)
            check_memory(executable)
            self._machine = VirtualMachine(executable)
            self._links = HostLinks(self._host, self._machine)
            return sizes_of(self._machine.executable)
        except Exception as error:
            return self._make_failure(error)

    def connect(self, routes: tuple[Route, ...], channel_bytes: tuple[int, ...], in_flight: int) -> GpuInfo:
        """Set the routes, and forget all calls.

        Parameters
        ----------
        routes : tuple of Route
            Routes of the program.
        channel_bytes : tuple of int
            Sizes of the channels of each route, in bytes; 0 if messages are arguments of actor calls.
        in_flight : int
            Maximum number of calls in flight.

        Returns
        -------
        GpuInfo
            GPUs of this host.
        """
        import ray

        from . import wire
        from .cluster_graph import set_channel_bytes

        # Cached, since an import inside of a function takes a microsecond each time.
        self._wire, self._get, self._store = wire, ray.get, ray.put
        with self._lock:
            self._routes, self._channel_bytes, self._in_flight = routes, channel_bytes, in_flight
            self._later_values.clear()
            self._sent.clear()
        self.call_links("reset")
        set_channel_bytes(max(channel_bytes))
        info: GpuInfo = self.call_links("info")
        return info

    def call_links(self, method: str, *args: Any) -> Any:
        """Call a method of `HostLinks`; does nothing before the code is loaded."""
        return None if self._links is None else getattr(self._links, method)(*args)

    def remove_semaphores(self) -> bool:
        """Remove the names of this process's semaphores, which all processes have opened by now."""
        from .cluster_graph import process_semaphores, remove_names

        remove_names(process_semaphores())
        return True

    def step(self, route: int, number: int, *messages: Message) -> Any:
        """Run a task of a route for one call.

        Values of messages must not be kept: the channel reuses their memory once they are released.

        Returns
        -------
        Message, or tuple of Message
            Message for each target of the task.
        """
        wire = self._wire
        function, call = messages[0].function, messages[0].call
        task = self._routes[route].tasks[number]
        if function == wire.PROBE:
            return messages[0] if len(task.targets) == 1 else (messages[0],) * len(task.targets)
        messages = tuple(message._replace(values=self.call_links("receive", message.values)) for message in messages)
        earlier = self._later_values.get(call, {})
        results: list[Any] | Failure
        try:
            results = self._run_task(task, task.work[function], messages, earlier)
        except Exception as error:
            results = self._make_failure(error)
        self._keep(task, number, call, task.work[function], results)
        if isinstance(results, wire.Failure):
            sent = [wire.Message(function, call, results)] * len(task.targets)
        else:
            sent = []
            for target, indices in zip(task.targets, task.work[function].sends, strict=True):
                values = self._announce(route, number, target, function, [results[index] for index in indices])
                sent.append(wire.Message(function, call, self._fit(route, call, values)))
        self.call_links("send_announced")
        return sent[0] if len(sent) == 1 else tuple(sent)

    def set_peers(self, peers: dict[str, Any]) -> bool:
        """Set the actors of the other hosts, for functions whose hosts exchange messages; end all calls."""
        self._mailboxes.set_peers(peers)
        return True

    def run(self, call: int, run: HostRun, values: Sequence[Any]) -> Any:
        """Run this host's part of a function whose hosts exchange messages.

        Returns
        -------
        list or Failure
            Encoded leaves of its result.
        """
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

    def _run_task(self, task: Task, work: TaskWork, messages: tuple[Message, ...], earlier: dict[int, Any]) -> Any:
        """Results of the task's function, or the failure of an earlier task that it depends on."""
        wire = self._wire
        received: dict[int, Any] = {}
        for source, message in zip(task.inputs, messages, strict=False):
            if isinstance(message.values, wire.Failure):
                return message.values
            received[source] = wire.fetch(message.values, self._get)
        for source in task.follows:
            values = earlier.get(source)  # None if this function reads nothing from that task
            if isinstance(values, wire.Failure):
                return values
        executable = self._machine.executable
        signature = executable.signature(work.function)
        writes_arguments = executable.metadata.writes_arguments or bool(signature.donated)
        decode = wire.decode_copy if writes_arguments else wire.decode
        arguments = [
            decode(received[source][index]) if source in received else earlier[source][index]
            for source, index in work.arguments
        ]
        if writes_arguments:
            self.call_links("finish")
        result = self._machine.call(work.function, tuple(arguments))
        self.call_links("check")
        return list(result) if signature.output_is_tuple else [result]

    def _keep(self, task: Task, number: int, call: int, work: TaskWork, results: Any) -> None:
        wire = self._wire
        if task.is_last:
            self._later_values.pop(call, None)
        elif isinstance(results, wire.Failure):
            self._later_values.setdefault(call, {})[number] = results
        elif work.keeps:
            self._later_values.setdefault(call, {})[number] = {index: results[index] for index in work.keeps}

    def _announce(self, route: int, number: int, target: int, function: str, values: list[Any]) -> list[Any]:
        """Results for a target, with tensors that go by links announced; only the first route, the graph, has links."""
        message: list[Any] = values if route else self.call_links("announce", (number, target), function, values)
        return message

    def _fit(self, route: int, call: int, values: list[Any]) -> tuple[Any, ...]:
        wire = self._wire
        encoded = [wire.encode(value) for value in values]
        channel_bytes = self._channel_bytes[route]
        if not channel_bytes:
            return tuple(encoded)
        fitting, references = wire.fit(encoded, channel_bytes, self._store)
        if references or self._sent:
            with self._lock:
                self._sent.setdefault(call, []).extend(references)
                # Not by numbers of calls: they are not consecutive, as actor calls are counted, too.
                while len(self._sent) > self._in_flight:
                    del self._sent[next(iter(self._sent))]
        return fitting

    def _make_failure(self, error: Exception) -> Failure:
        from ..errors import HeteroError
        from .wire import HEAD_BYTES, Failure

        message = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        kind = type(error) if isinstance(error, HeteroError) else HeteroError
        return Failure(kind, f"host {self._host!r}: {message}"[: HEAD_BYTES // 4])
