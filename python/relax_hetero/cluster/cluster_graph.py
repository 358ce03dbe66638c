"""Compiled graphs of Ray: loops in actors, with channels of shared memory between them.

A hop costs a write into a channel; an actor call costs the actor's queue and the object store. On two cores, two actors
and 200 KB take 0.6 ms instead of 6.9, and a call among 16 in flight 0.5 ms instead of 6.3. A graph that visits a host
twice runs each call's tasks there in order, so that calls in flight do not overlap; it still takes only 0.9 ms per
call, so that actor calls would win only with steps of ten milliseconds or more.
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

# Ray leaks semaphores: it names two for each buffer of a channel in /dev/shm, removes the names only in processes that
# exit cleanly, and closing a channel creates them again, so that every recovery of a replica would leave some. A name
# can be removed once all processes of the channel have opened it.

_SEMAPHORE_PREFIXES = ("/dev/shm/sem.hdr", "/dev/shm/sem.obj")


def process_semaphores() -> set[str]:
    """Files of channels' semaphores that this process has open."""
    with open("/proc/self/maps") as file:
        paths = {line.removesuffix("\n").removesuffix(" (deleted)").split(maxsplit=5)[-1] for line in file}
    return {path for path in paths if path.startswith(_SEMAPHORE_PREFIXES)}


def remove_names(semaphores: Iterable[str]) -> None:
    """Remove the names of semaphores; processes that have opened them can still use them."""
    for name in semaphores:
        with suppress(OSError):
            os.unlink(name)


_TEARDOWN_SECONDS = 3.0
"""Timeout of a graph's teardown, in which Ray sometimes waits forever."""

_compiling = threading.Lock()
"""Held while a graph is compiled: Ray takes the size of channels from a global setting."""

_abandoned: list[Any] = []
"""Graphs whose teardown hangs: their finalizer would hang in whatever thread runs it."""


class Graph:
    """Compiled graph of a route over the actors of its hosts.

    Parameters
    ----------
    ray : object
        The module ``ray``.
    actors : mapping of str to object
        Actors by host.
    route, number
        Route, and its index in the program.
    channel_bytes : int
        Size of each channel, in bytes.
    in_flight : int
        Maximum number of calls in flight.
    """

    def __init__(
        self, ray: Any, actors: Mapping[str, Any], route: Route, number: int, channel_bytes: int, in_flight: int
    ) -> None:
        # Errors of calls report dead actors; Ray would also print a stack trace.
        logging.getLogger("ray.dag.compiled_dag_node").addFilter(_is_unexpected)
        self._ray, self._actors = ray, [actors[host] for host in {task.host: None for task in route.tasks}]
        self._entries = route.entries
        with _compiling:
            semaphores, previous_bytes = process_semaphores(), set_channel_bytes(channel_bytes)
            try:
                self._dag = _bind_tasks(actors, route, number).experimental_compile(
                    _buffer_size_bytes=channel_bytes,
                    # Also the number of buffers of channels within a node. With fewer, a writer would wait while it
                    # holds the GIL, which the reader's thread needs.
                    _max_inflight_executions=in_flight,
                    # No timeout: a step may take any time, and channels of dead actors are closed.
                    _submit_timeout=-1,
                )
            finally:
                set_channel_bytes(previous_bytes)
            self._loops = list(self._dag.worker_task_refs.values())
            self._probe()
            self._semaphores = process_semaphores() - semaphores
        self._remove_semaphores()

    def execute(self, messages: Mapping[int, Any]) -> list[Any]:
        """Send a call's messages, from one thread at a time; waits while the channels to the first hosts are full.

        Parameters
        ----------
        messages : mapping of int to object
            Messages of the caller by task.

        Returns
        -------
        list
            References to the messages of the route's exits, with a method `get`.
        """
        references = self._dag.execute(*(messages[number] for number in self._entries))
        return references if isinstance(references, list) else [references]

    def _probe(self) -> None:
        """Send a message through all channels, after which every process has opened its ends."""
        references = self.execute(dict.fromkeys(self._entries, Message(PROBE, 0, ())))
        for reference in references:
            reference.get(timeout=-1)

    def is_broken(self) -> bool:
        """Return whether the loop of an actor has ended, so that no call can run."""
        ended, _ = self._ray.wait(self._loops, timeout=0)
        return bool(ended)

    def close(self) -> bool:
        """End the loops in the actors; False if they did not end in time, so that the actors were killed."""
        has_ended = self._tear_down(_TEARDOWN_SECONDS)
        if not has_ended:
            for actor in self._actors:
                self._ray.kill(actor)
            if not self._tear_down(_TEARDOWN_SECONDS):
                _abandoned.append(self._dag)
        self._remove_semaphores()
        return has_ended

    def _remove_semaphores(self) -> None:
        """Remove the names of the channels' semaphores in this process and in the actors."""
        remove_names(self._semaphores)
        replies = [actor.remove_semaphores.remote() for actor in self._actors]
        self._ray.wait(replies, num_returns=len(replies), timeout=_TEARDOWN_SECONDS)

    def _tear_down(self, seconds: float) -> bool:
        thread = threading.Thread(target=self._dag.teardown, name="teardown of a graph", daemon=True)
        thread.start()
        thread.join(seconds)
        return not thread.is_alive()


def set_channel_bytes(nbytes: int) -> int:
    """Set the size of channels that this process creates; return the previous size."""
    from ray.dag import DAGContext

    context = DAGContext.get_current()
    previous, context.buffer_size_bytes = context.buffer_size_bytes, nbytes
    return int(previous)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return record.levelno != logging.INFO and "Error cancelling worker task" not in str(record.msg)


def _bind_tasks(actors: Mapping[str, Any], route: Route, number: int) -> Any:
    """Bind the route's tasks to each other's messages, as Ray's DAG."""
    from ray.dag import InputNode, MultiOutputNode

    messages: dict[tuple[int, int], Any] = {}  # by source and target
    with InputNode() as call_input:
        entries = route.entries
        for entry in entries:
            messages[CALL, entry] = call_input if len(entries) == 1 else call_input[entries.index(entry)]
        for index, task in enumerate(route.tasks):
            method = actors[task.host].step
            inputs = [messages[source, index] for source in task.inputs]
            if len(task.targets) == 1:
                messages[index, task.targets[0]] = method.bind(number, index, *inputs)
            else:
                nodes = method.options(num_returns=len(task.targets)).bind(number, index, *inputs)
                messages.update(((index, target), node) for target, node in zip(task.targets, nodes, strict=True))
        exits = [messages[index, END] for index in route.exits]
        return exits[0] if len(exits) == 1 else MultiOutputNode(exits)
