"""Calls that go by actor calls and not by a graph: each attempt of one ends once, with a result or lost."""

from __future__ import annotations

import threading

from .calls import ClusterCall


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
