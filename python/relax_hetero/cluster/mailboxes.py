"""Mailboxes of the calls of one host's process, and the actors of the other hosts."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from ..vm.machine import VirtualMachine
from .call_plan import HostRun, Source, opened
from .mailbox import CallMessages, Mailbox, register
from .wire import decode_copy, encode


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
