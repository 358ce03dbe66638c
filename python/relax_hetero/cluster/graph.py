"""Compiled graphs of Ray: tasks that wait in their actors, and channels of shared memory between them.

A call costs a write into a channel for each hop, where one of actor calls costs the actors' queues and the object
store: on two cores 0.6 ms against 6.9 for two actors and 200 KB, and 0.5 ms against 6.3 for a call among 16 in flight.
A graph that visits a host twice runs each call's tasks there in order, so that calls in flight do not overlap; it is
still 0.9 ms for a call, so that steps have to take ten milliseconds before actor calls would gain by overlapping.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from .call_plan import CALL
from .route import END, Route
from .wire import PROBE, Message

# The semaphores of channels, of which Ray leaves some behind.
#
# Ray names two semaphores for each buffer of a channel, in the memory file system. It removes the names only where a
# process that holds them ends in order, and closing a channel makes them anew. Every recovery of a replica would leave
# some. A name is needed until all processes of a channel have opened it; then it can go.

_PREFIXES = ("/dev/shm/sem.hdr", "/dev/shm/sem.obj")


def process_semaphores() -> set[str]:
    """The files of the channels' semaphores that this process has open."""
    with open("/proc/self/maps") as file:
        paths = {line.removesuffix("\n").removesuffix(" (deleted)").split(maxsplit=5)[-1] for line in file}
    return {path for path in paths if path.startswith(_PREFIXES)}


def remove(semaphores: Iterable[str]) -> None:
    """Remove names; who has opened them keeps them."""
    for name in semaphores:
        with suppress(OSError):
            os.unlink(name)


# Seconds. Ray waits for the loops of a graph that is torn down, and for some of them in vain.
_TEARDOWN_SECONDS = 3.0

# Ray takes the size of channels from a setting of the process, whatever `experimental_compile` is asked for.
_compiling = threading.Lock()

_abandoned: list[Any] = []
"""Graphs whose teardown did not end: to let go of one would begin another teardown in whatever thread does."""


class Graph:
    """The compiled graph of a route over the actors of its hosts.

    Parameters
    ----------
    ray : object
        The module.
    actors : mapping of str to object
        Actors by host.
    route, number
        The route, and its number among the program's.
    channel_bytes : int
        Size of each channel, in bytes.
    in_flight : int
        How many calls are under way at most.
    """

    def __init__(
        self, ray: Any, actors: Mapping[str, Any], route: Route, number: int, channel_bytes: int, in_flight: int
    ) -> None:
        # That an actor died is told by the errors of calls; Ray would print it with all its frames.
        logging.getLogger("ray.dag.compiled_dag_node").addFilter(_is_unexpected)
        self._ray, self._actors = ray, [actors[host] for host in {slot.host: None for slot in route.tasks}]
        self._entries = route.entries
        with _compiling:
            known, before = process_semaphores(), set_channel_bytes(channel_bytes)
            try:
                self._dag = _bound(actors, route, number).experimental_compile(
                    _buffer_size_bytes=channel_bytes,
                    # Also the buffers of channels within a node. With fewer, whoever waits to write would hold
                    # Python's lock, and the thread that could make room would not run.
                    _max_inflight_executions=in_flight,
                    # Without end: a step may take any time, and channels of an actor that died are closed.
                    _submit_timeout=-1,
                )
            finally:
                set_channel_bytes(before)
            self._loops = list(self._dag.worker_task_refs.values())
            self._probe()
            self._semaphores = process_semaphores() - known
        self._settle()

    def execute(self, messages: Mapping[int, Any]) -> list[Any]:
        """Begin a call, from one thread at a time; waits while the channels to the first hosts are full.

        Parameters
        ----------
        messages : mapping of int to object
            Messages by the slot that takes one of the caller.

        Returns
        -------
        list
            For each slot that sends the caller a message, a reference whose `get` gives it.
        """
        references = self._dag.execute(*(messages[number] for number in self._entries))
        return references if isinstance(references, list) else [references]

    def _probe(self) -> None:
        """Send a message that no step answers through all channels: every process has opened its ends then."""
        references = self.execute(dict.fromkeys(self._entries, Message(PROBE, 0, ())))
        for reference in references:
            reference.get(timeout=-1)

    def is_broken(self) -> bool:
        """Return whether an actor has left its loop, so that no further call can run."""
        ended, _ = self._ray.wait(self._loops, timeout=0)
        return bool(ended)

    def close(self) -> bool:
        """End the loops in the actors; False where they did not end in time, and the actors have to be killed."""
        is_over = self._end(_TEARDOWN_SECONDS)
        if not is_over:
            for actor in self._actors:
                self._ray.kill(actor)
            if not self._end(_TEARDOWN_SECONDS):
                _abandoned.append(self._dag)
        self._settle()
        return is_over

    def _settle(self) -> None:
        """Remove the names of the channels' semaphores, here and on the hosts that live."""
        remove(self._semaphores)
        replies = [actor.settle.remote() for actor in self._actors]
        self._ray.wait(replies, num_returns=len(replies), timeout=_TEARDOWN_SECONDS)

    def _end(self, seconds: float) -> bool:
        thread = threading.Thread(target=self._dag.teardown, name="teardown of a graph", daemon=True)
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()


def set_channel_bytes(nbytes: int) -> int:
    """Set the bytes of channels that this process makes; returns what it was before."""
    from ray.dag import DAGContext

    context = DAGContext.get_current()
    before, context.buffer_size_bytes = context.buffer_size_bytes, nbytes
    return int(before)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO and "Error cancelling worker task" not in str(record.msg)


def _bound(actors: Mapping[str, Any], route: Route, number: int) -> Any:
    """The route's tasks, bound to each other's messages."""
    from ray.dag import InputNode, MultiOutputNode

    made: dict[tuple[int, int], Any] = {}
    with InputNode() as given:
        entries = route.entries
        for entry in entries:
            made[CALL, entry] = given if len(entries) == 1 else given[entries.index(entry)]
        for index, slot in enumerate(route.tasks):
            method = actors[slot.host].step
            inputs = [made[source, index] for source in slot.inputs]
            if len(slot.targets) == 1:
                made[index, slot.targets[0]] = method.bind(number, index, *inputs)
            else:
                sent = method.options(num_returns=len(slot.targets)).bind(number, index, *inputs)
                made.update(((index, target), node) for target, node in zip(slot.targets, sent, strict=True))
        ends = [made[index, END] for index in route.exits]
        return ends[0] if len(ends) == 1 else MultiOutputNode(ends)
