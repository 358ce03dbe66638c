"""Ray actors of one replica: starts, checks and restarts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import HeteroError, HostError, first_line
from .bindings import HostBinding
from .host_machine import HostMachine
from .node_info import check_versions, installed_versions
from .payloads import Payload
from .wire import Failure

_POLL_SECONDS = 0.1  # interval between checks for a closed cluster
_ALIVE_SECONDS = 5.0  # time within which a living actor answers
_ACTOR_THREADS = 5  # threads of an actor: one runs tasks, the others actor calls


@dataclass
class HostState:
    """State of a host's process."""

    state: str = "dead"  # ``"starting"``, ``"loading"``, ``"ready"`` or ``"dead"``
    actor: Any = None  # Ray actor, if there is one
    info: Mapping[str, Any] = field(default_factory=dict)  # result of `node_info`
    starts: int = 0  # number of starts
    pending: Any = None  # reference to the result of the actor's current method


class Actors:
    """Actors of one replica."""

    def __init__(
        self,
        ray: Any,  # the module ``ray``
        bindings: Mapping[str, HostBinding],  # bindings by host
        parts: Mapping[str, Payload],  # code of each host
        timeout: float,  # seconds that Ray may take to start a host
        pause: Callable[[float], None],  # sleeps for a number of seconds; raises if the cluster is closed
    ) -> None:
        self._ray, self._bindings, self._parts = ray, bindings, parts
        self._timeout, self._pause = timeout, pause
        self.states = {host: HostState() for host in bindings}  # state of each host

    @property
    def handles(self) -> dict[str, Any]:
        """Actor of each host."""
        return {host: state.actor for host, state in self.states.items()}

    def start(self) -> None:
        """Start all hosts that are not ready in parallel, check them, and load their code.

        Raises HostError if a host cannot be scheduled within the timeout (its actor stays pending for the next try),
        dies, or has other versions than this process, and HeteroError if the code cannot be loaded.
        """
        missing = [host for host, state in self.states.items() if state.state != "ready"]
        for host in missing:
            self._start_actor(host)
        end = time.monotonic() + self._timeout
        for host in missing:
            state = self.states[host]
            if state.state == "starting":
                state.info = self._wait_for_answer(host, end)
                check_versions(host, state.info, installed_versions())
                state.state, state.pending = "loading", state.actor.load.remote(self._parts[host])
        for host in missing:
            state = self.states[host]
            failure = self._wait_for_answer(host, None)
            if isinstance(failure, Failure):
                self._drop(host)
                raise failure.kind(failure.message)
            state.state, state.pending = "ready", None

    def find_dead(self) -> list[str]:
        """Find the hosts whose processes do not answer, and mark them as dead."""
        ready = [host for host, state in self.states.items() if state.state == "ready"]
        replies = {host: self.states[host].actor.alive.remote() for host in ready}
        if replies:
            self._ray.wait(list(replies.values()), num_returns=len(replies), timeout=_ALIVE_SECONDS)
        for host, reference in replies.items():
            try:
                self._ray.get(reference, timeout=0)
            except Exception:  # Ray has several types for dead actors
                self._drop(host)
        return [host for host, state in self.states.items() if state.state == "dead"]

    def kill(self) -> None:
        """End all processes."""
        for host in self.states:
            self._drop(host)

    def _start_actor(self, host: str) -> None:
        state, binding = self.states[host], self._bindings[host]
        if state.actor is not None:
            return
        remote = self._ray.remote(HostMachine)
        options = binding.options(self._ray)
        state.actor = remote.options(max_concurrency=_ACTOR_THREADS, **options).remote(host, binding.threads)
        state.pending = state.actor.info.remote()
        state.state, state.starts = "starting", state.starts + 1

    def _wait_for_answer(self, host: str, end: float | None) -> Any:
        """Wait for the pending result; HostError if the actor dies, or is not started by `end`."""
        state = self.states[host]
        while True:
            ready, _ = self._ray.wait([state.pending], timeout=_POLL_SECONDS)
            if ready:
                break
            self._pause(0)
            if end is not None and time.monotonic() > end:
                raise HostError(
                    f"host {host!r} was not started within {self._timeout:g} s: it needs "
                    f"{self._bindings[host]}, found {_resources(self._ray)}"
                )
        try:
            return self._ray.get(state.pending)
        except HeteroError:
            self._drop(host)
            raise
        except Exception as error:
            self._drop(host)
            raise HostError(f"host {host!r} died while it was started: {first_line(error)}") from error

    def _drop(self, host: str) -> None:
        state = self.states[host]
        actor, state.actor, state.pending, state.state = state.actor, None, None, "dead"
        if actor is not None:
            self._ray.kill(actor)


def _resources(ray: Any) -> str:
    """Format the free resources of the cluster."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    listed = {name: free[name] for name in sorted(free) if not name.startswith(("node:", "object_store"))}
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)} with " + ", ".join(f"{k} {v:g}" for k, v in listed.items())
