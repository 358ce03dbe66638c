"""Messages between hosts during a call of a function that cannot be cut into steps.

Where values cross hosts inside of a branch, or in a function that is called, which values cross depends on the values.
There every host runs its whole part of the function, and ``relax_hetero.host.send`` and ``receive`` in it deliver to
mailboxes: a receive waits for its value. A call takes every host until it ends, so such calls run one after the other.
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
"""Takes a host, a channel, the number of the message in it, and the value: brings it to that host's mailbox."""


class CallEndedError(HostError):
    """The call ended elsewhere, so that no value will come."""


class Mailbox:
    """Values that arrive at a host during a call, in whatever order, by channel and number."""

    def __init__(self) -> None:
        self._arrived: dict[tuple[int, int], Any] = {}
        self._changed = threading.Condition()
        self._ended = ""

    def put(self, channel: int, number: int, value: Any) -> None:
        """A value arrives."""
        with self._changed:
            self._arrived[channel, number] = value
            self._changed.notify_all()

    def take(self, channel: int, number: int) -> Any:
        """The value, once it has arrived; CallEndedError where the call ended before."""
        with self._changed:
            self._changed.wait_for(lambda: (channel, number) in self._arrived or self._ended)
            if (channel, number) in self._arrived:
                return self._arrived.pop((channel, number))
            raise CallEndedError(self._ended)

    def end(self, reason: str) -> None:
        """Have all that wait, now or later, fail."""
        with self._changed:
            self._ended = reason
            self._changed.notify_all()


class CallMessages:
    """One host's side of a call.

    Parameters
    ----------
    mailbox : Mailbox
        Where values for this host arrive.
    deliver : Deliver
        Brings a value to another host.
    encode, decode : callable
        Between values of the machine and values as they travel; a decoded value lasts.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        deliver: Deliver,
        encode: Callable[[Any], Any],
        decode: Callable[[Any], Any],
    ) -> None:
        self._mailbox, self._deliver, self._encode, self._decode = mailbox, deliver, encode, decode
        self._sent: dict[int, int] = {}
        self._received: dict[int, int] = {}

    def send(self, value: Any, host: str, channel: int) -> None:
        """Give a value to another host."""
        number = self._sent[channel] = self._sent.get(channel, -1) + 1
        self._deliver(host, channel, number, self._encode(value))

    def receive(self, channel: int) -> Any:
        """The next value of a channel."""
        number = self._received[channel] = self._received.get(channel, -1) + 1
        return self._decode(self._mailbox.take(channel, number))

    @contextmanager
    def open(self) -> Iterator[None]:
        """While this is open, sends and receives of functions that this thread runs are of this call."""
        before = getattr(_thread, "messages", None)
        _thread.messages = self
        try:
            yield
        finally:
            _thread.messages = before


_thread = threading.local()


def _current() -> CallMessages:
    messages = getattr(_thread, "messages", None)
    if messages is None:
        raise HeteroError(
            "this function exchanges values with other hosts while it runs; expected a call by rh.cluster.Cluster"
        )
    return messages


def _send(value: Any, host: str, channel: int) -> None:
    _current().send(value, str(host), int(channel))


def _receive(host: str, channel: int) -> Any:
    return _current().receive(int(channel))


def register() -> None:
    """Register sends and receives with TVM, before a machine is made of functions that have them."""
    tvm_ffi.register_global_func(SEND, _send, override=True)
    tvm_ffi.register_global_func(RECEIVE, _receive, override=True)
