"""The actor of a host: the process that holds its machine.

Nothing here imports TVM before the number of its threads is set, so that the imports stand inside of methods.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..vm.machine import VirtualMachine
from .call_plan import HostRun, Source, opened
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


# Mailboxes of the calls of one host's process, and the actors of the other hosts.


class Mailboxes:
    """One call at a time runs; values of the next may arrive before it does."""

    def __init__(self) -> None:
        register()
        self._peers: Mapping[str, Any] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._done = -1
        self._lock = threading.Lock()

    def set_peers(self, peers: Mapping[str, Any]) -> None:
        """Learn the actors of the other hosts; calls that were under way are over."""
        with self._lock:
            self._peers, known, self._mailboxes = dict(peers), list(self._mailboxes.values()), {}
        for mailbox in known:
            mailbox.end("a host died, and the cluster begins anew")

    def run(self, machine: VirtualMachine, call: int, run: HostRun, values: Sequence[Any]) -> list[Any]:
        """A host's part of a function: the leaves of its result, encoded. Raises what it raises."""

        def argument(place: Any) -> Any:
            if isinstance(place, Source):
                return decode_copy(values[place.index])
            return () if place is None else tuple(map(argument, place))

        def deliver(host: str, channel: int, number: int, value: Any) -> None:
            self._peers[host].deliver.remote(call, channel, number, value)

        mailbox = self._mailbox(call)
        signature = machine.executable.signature(run.function)
        try:
            if mailbox is None:
                raise AssertionError("calls have numbers that grow")
            with CallMessages(mailbox, deliver, encode, decode_copy).open():
                result = machine.call(run.function, tuple(map(argument, run.arguments)))
        finally:
            with self._lock:
                self._done = max(self._done, call)
                self._mailboxes.pop(call, None)
        parts = result if signature.output_is_tuple else [result]
        return [
            encode(leaf) for part, spec in zip(parts, signature.outputs, strict=True) for leaf in opened(part, spec)
        ]

    def deliver(self, call: int, channel: int, number: int, value: Any) -> None:
        """A value arrives; for a call that is over it is dropped."""
        mailbox = self._mailbox(call)
        if mailbox is not None:
            mailbox.put(channel, number, value)

    def end(self, call: int, reason: str) -> None:
        """A call is over elsewhere."""
        mailbox = self._mailbox(call)
        if mailbox is not None:
            mailbox.end(reason)

    def _mailbox(self, call: int) -> Mailbox | None:
        with self._lock:
            return None if call <= self._done else self._mailboxes.setdefault(call, Mailbox())


class HostMachine:
    """A machine of one host, as a Ray actor.

    Parameters
    ----------
    host : str
        The logical name of the host.
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
        # By call, and by slot, what later slots of this host read.
        self._later_values: dict[int, dict[int, Any]] = {}
        self._mailboxes: Any = None
        # By call, references to what was sent through the object store: until the receivers have read it.
        self._sent: dict[int, list[Any]] = {}
        self._lock = threading.Lock()

    def info(self) -> dict[str, Any]:
        """Description of this process: versions, its node, and free memory."""
        from .node_info import node_info

        return node_info()

    def alive(self) -> bool:
        """Answers for as long as the process lives."""
        return True

    def load(self, part: Payload) -> Any:
        """Load or compile what this host runs, and make the machine.

        Returns
        -------
        dict or Failure
            For each function, the bytes of its inputs and of its results, None where they are symbolic.
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
            return self._failure(error)

    def connect(self, routes: tuple[Route, ...], channel_bytes: tuple[int, ...], in_flight: int) -> GpuInfo:
        """Learn the routes, and forget the calls that were under way.

        Parameters
        ----------
        channel_bytes : tuple of int
            Sizes of the channels of each route, in bytes; 0 where messages are arguments of actor calls.
        in_flight : int
            How many calls are under way at most.

        Returns
        -------
        GpuInfo
            Description of this host's GPUs.
        """
        import ray

        from . import wire
        from .graph import set_channel_bytes

        # Looked up once: an import inside of a function takes a microsecond each time.
        self._wire, self._get, self._store = wire, ray.get, ray.put
        with self._lock:
            self._routes, self._channel_bytes, self._in_flight = routes, channel_bytes, in_flight
            self._later_values.clear()
            self._sent.clear()
        self.on_links("drop")
        set_channel_bytes(max(channel_bytes))
        info: GpuInfo = self.on_links("info")
        return info

    def on_links(self, request: str, *given: Any) -> Any:
        """Have the links of this host do what a method of `HostLinks` does; nothing before its part is loaded."""
        return None if self._links is None else getattr(self._links, request)(*given)

    def settle(self) -> bool:
        """Remove the names of this process's semaphores, which all that share them have opened by now."""
        from .graph import process_semaphores, remove

        remove(process_semaphores())
        return True

    def step(self, route: int, number: int, *messages: Message) -> Any:
        """Run a slot of a route for one call.

        What the messages hold is not kept: in a channel its memory is free for the next message once it is dropped.

        Returns
        -------
        Message, or tuple of Message
            For each target of the slot.
        """
        wire = self._wire
        function, call = messages[0].function, messages[0].call
        slot = self._routes[route].tasks[number]
        if function == wire.PROBE:
            return messages[0] if len(slot.targets) == 1 else (messages[0],) * len(slot.targets)
        messages = tuple(message._replace(values=self.on_links("arrived", message.values)) for message in messages)
        kept = self._later_values.get(call, {})
        made: list[Any] | Failure
        try:
            made = self._results(slot, slot.work[function], messages, kept)
        except Exception as error:
            made = self._failure(error)
        self._keep(slot, number, call, slot.work[function], made)
        if isinstance(made, wire.Failure):
            sent = [wire.Message(function, call, made)] * len(slot.targets)
        else:
            sent = []
            for target, chosen in zip(slot.targets, slot.work[function].sends, strict=True):
                leaving = self._leaving(route, number, target, function, [made[index] for index in chosen])
                sent.append(wire.Message(function, call, self._fit(route, call, leaving)))
        self.on_links("post")
        return sent[0] if len(sent) == 1 else tuple(sent)

    def set_peers(self, peers: dict[str, Any]) -> bool:
        """Learn the actors of the other hosts, for functions whose hosts exchange messages; forget calls."""
        self._mailboxes.set_peers(peers)
        return True

    def run(self, call: int, run: HostRun, values: Sequence[Any]) -> Any:
        """Run this host's part of a function whose hosts exchange messages meanwhile.

        Returns
        -------
        list or Failure
            The leaves of its result, encoded.
        """
        try:
            return self._mailboxes.run(self._machine, call, run, values)
        except Exception as error:
            return self._failure(error)

    def deliver(self, call: int, channel: int, number: int, value: Any) -> None:
        """A value of another host arrives."""
        self._mailboxes.deliver(call, channel, number, value)

    def end(self, call: int, reason: str) -> None:
        """The call has ended on another host, so that nothing more of it will come."""
        self._mailboxes.end(call, reason)

    def _results(self, slot: Task, visit: TaskWork, messages: tuple[Message, ...], kept: dict[int, Any]) -> Any:
        """Results of the step's function, or the failure of a step before that it depends on."""
        wire = self._wire
        arrived: dict[int, Any] = {}
        for source, message in zip(slot.inputs, messages, strict=False):
            if isinstance(message.values, wire.Failure):
                return message.values
            arrived[source] = wire.fetched(message.values, self._get)
        for source in slot.follows:
            before = kept.get(source)  # of another function of the route, perhaps
            if isinstance(before, wire.Failure):
                return before
        executable = self._machine.executable
        signature = executable.signature(visit.function)
        owns = executable.metadata.writes_arguments or bool(signature.donated)
        take = wire.decode_copy if owns else wire.decode
        arguments = [
            take(arrived[source][index]) if source in arrived else kept[source][index]
            for source, index in visit.arguments
        ]
        if owns:
            self.on_links("finish")
        result = self._machine.call(visit.function, tuple(arguments))
        self.on_links("check")
        return list(result) if signature.output_is_tuple else [result]

    def _keep(self, slot: Task, number: int, call: int, visit: TaskWork, made: Any) -> None:
        wire = self._wire
        if slot.is_last:
            self._later_values.pop(call, None)
        elif isinstance(made, wire.Failure):
            self._later_values.setdefault(call, {})[number] = made
        elif visit.keeps:
            self._later_values.setdefault(call, {})[number] = {index: made[index] for index in visit.keeps}

    def _leaving(self, route: int, number: int, target: int, function: str, values: list[Any]) -> list[Any]:
        """Results for a target, with those that go by links announced only; these are for graphs alone."""
        found: list[Any] = values if route else self.on_links("leaving", (number, target), function, values)
        return found

    def _fit(self, route: int, call: int, values: list[Any]) -> tuple[Any, ...]:
        wire = self._wire
        encoded = [wire.encode(value) for value in values]
        room = self._channel_bytes[route]
        if not room:
            return tuple(encoded)
        fitting, references = wire.fit(encoded, room, self._store)
        if references or self._sent:
            with self._lock:
                self._sent.setdefault(call, []).extend(references)
                # Numbers of calls would not do: those of actor calls are between them.
                while len(self._sent) > self._in_flight:
                    del self._sent[next(iter(self._sent))]
        return fitting

    def _failure(self, error: Exception) -> Failure:
        from ..errors import HeteroError
        from .wire import HEAD_BYTES, Failure

        message = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        kind = type(error) if isinstance(error, HeteroError) else HeteroError
        return Failure(kind, f"host {self._host!r}: {message}"[: HEAD_BYTES // 4])
