"""Messages between hosts during a call, for functions that cannot be cut into steps.

If values cross hosts inside of a branch or of a called function, it depends on values which of them cross. Then every
host runs its whole part of the function, ``relax_hetero.host.send`` delivers to mailboxes, and ``receive`` waits for
its value. A call occupies every host until it ends, so such calls run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tvm_ffi

from ..errors import HeteroError, HostError
from ..transform.partition.partition_by_host import RECEIVE, SEND

Deliver = Callable[[str, int, int, Any], None]
"""Delivers to the mailbox of a host: arguments are host, channel, number of the message in it, and value."""


class CallEndedError(HostError):
    """The call has ended on another host, so that no value will come."""


class Mailbox:
    """Values that a host has received during a call, by channel and number; thread-safe."""

    def __init__(self) -> None:
        self._values: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()
        self._ended = ""

    def put(self, channel: int, number: int, value: Any) -> None:
        """Add a value."""
        with self._changed:
            self._values[channel, number] = value
            self._changed.notify_all()

    def take(self, channel: int, number: int) -> Any:
        """Wait for a value and remove it; CallEndedError if the call ends before."""
        with self._changed:
            self._changed.wait_for(lambda: (channel, number) in self._values or self._ended)
            if (channel, number) in self._values:
                return self._values.pop((channel, number))
            raise CallEndedError(self._ended)

    def end(self, reason: str) -> None:
        """Make all waits fail, now and later."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()


class CallMessages:
    """Sends and receives of one host during a call.

    `mailbox`: mailbox of this host; `deliver`: delivers a value to another host; `encode`, `decode`: conversions
    between values of the machine and values in messages, which own their memory when decoded.
    """

    def __init__(
        self, mailbox: Mailbox, deliver: Deliver, encode: Callable[[Any], Any], decode: Callable[[Any], Any]
    ) -> None:
        self._mailbox, self._deliver, self._encode, self._decode = mailbox, deliver, encode, decode
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def send(self, value: Any, host: str, channel: int) -> None:
        """Send a value to another host."""
        number = self._sent[channel] = self._sent.get(channel, -1) + 1
        self._deliver(host, channel, number, self._encode(value))

    def receive(self, channel: int) -> Any:
        """Receive the next value of a channel."""
        number = self._received[channel] = self._received.get(channel, -1) + 1
        return self._decode(self._mailbox.take(channel, number))

    @contextmanager
    def open(self) -> Iterator[None]:
        """Context in which functions that this thread runs send and receive for this call."""
        previous = getattr(_thread, "messages", None)
        _thread.messages = self
        try:
            yield
        finally:
            _thread.messages = previous


_thread = threading.local()


def _current() -> CallMessages:
    messages = getattr(_thread, "messages", None)
    if messages is None:
        raise HeteroError(
            "this function exchanges values with other hosts while it runs; expected a call of an rh.cluster.Cluster"
        )
    return messages


def _send(value: Any, host: str, channel: int) -> None:
    _current().send(value, str(host), int(channel))


def _receive(host: str, channel: int) -> Any:
    return _current().receive(int(channel))


def register() -> None:
    """Register sends and receives with TVM; needed before a machine is made that calls them."""
    tvm_ffi.register_global_func(SEND, _send, override=True)
    tvm_ffi.register_global_func(RECEIVE, _receive, override=True)
