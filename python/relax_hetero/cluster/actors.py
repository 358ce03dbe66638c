"""The actors of one replica: started where their hosts are bound, checked, and started again when they die."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import HeteroError, HostError
from .bindings import HostBinding
from .host_machine import HostMachine
from .node_info import check_versions, installed_versions
from .payloads import Payload
from .wire import Failure

# Seconds between looks at whether the cluster is being closed.
_POLL_SECONDS = 0.1
# Seconds within which a living actor answers.
_ANSWER_SECONDS = 5.0
# Threads of an actor besides its graph's: steps by actor calls, and questions whether it lives.
_EXTRA_THREADS = 4


@dataclass
class HostState:
    """A host of a replica.

    Attributes
    ----------
    state : str
        ``"starting"``, ``"loading"``, ``"ready"`` or ``"dead"``.
    actor : object
        Its process; None where there is none.
    info : mapping of str to object
        Description that the process gave of itself.
    sizes : mapping of str to (list of int or None, list of int or None)
        Extents of the functions' inputs and results, as `node_info.sizes_of` gives them.
    starts : int
        How often it was started.
    """

    state: str = "dead"
    actor: Any = None
    info: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, tuple[list[int | None], list[int | None]]] = field(default_factory=dict)
    starts: int = 0
    pending: Any = None


class Actors:
    """The processes of one replica.

    Parameters
    ----------
    ray : object
        The module.
    bindings : mapping of str to HostBinding
        Bindings by host.
    parts : mapping of str to Payload
        Parts that run, by host.
    timeout : float
        Seconds that a host may take to be started by Ray.
    pause : callable
        Called with seconds to wait for something; raises where the cluster is closed meanwhile.

    Attributes
    ----------
    states : dict
        States by host.
    """

    def __init__(
        self,
        ray: Any,
        bindings: Mapping[str, HostBinding],
        parts: Mapping[str, Payload],
        timeout: float,
        pause: Callable[[float], None],
    ) -> None:
        self._ray, self._bindings, self._parts = ray, bindings, parts
        self._timeout, self._pause = timeout, pause
        self.states = {host: HostState() for host in bindings}

    @property
    def handles(self) -> dict[str, Any]:
        """The actor of each host."""
        return {host: state.actor for host, state in self.states.items()}

    def start(self) -> None:
        """Have every host that is not ready started, checked and its part loaded; all of them at once.

        Raises
        ------
        HostError
            A host that nothing can take within the timeout (it goes on waiting, and may be there at the next try), that
            dies, or has other versions than this process.
        HeteroError
            A part that cannot be loaded there.
        """
        missing = [host for host, state in self.states.items() if state.state != "ready"]
        for host in missing:
            self._begin(host)
        end = time.monotonic() + self._timeout
        for host in missing:
            state = self.states[host]
            if state.state == "starting":
                state.info = self._answer(host, end)
                check_versions(host, state.info, installed_versions())
                state.state, state.pending = "loading", state.actor.load.remote(self._parts[host])
        for host in missing:
            state = self.states[host]
            sizes = self._answer(host, None)
            if isinstance(sizes, Failure):
                self._drop(host)
                raise sizes.kind(sizes.message)
            state.sizes, state.state, state.pending = sizes, "ready", None

    def find_dead(self) -> list[str]:
        """The hosts whose processes do not answer; they count as dead from then on."""
        ready = [host for host, state in self.states.items() if state.state == "ready"]
        asked = {host: self.states[host].actor.alive.remote() for host in ready}
        if asked:
            self._ray.wait(list(asked.values()), num_returns=len(asked), timeout=_ANSWER_SECONDS)
        for host, reference in asked.items():
            try:
                self._ray.get(reference, timeout=0)
            except Exception:  # Ray has many for actors that died
                self._drop(host)
        return [host for host, state in self.states.items() if state.state == "dead"]

    def kill(self) -> None:
        """End all processes."""
        for host in self.states:
            self._drop(host)

    def _begin(self, host: str) -> None:
        state, binding = self.states[host], self._bindings[host]
        if state.actor is not None:
            return
        remote = self._ray.remote(HostMachine)
        options = binding.options(self._ray)
        state.actor = remote.options(max_concurrency=_EXTRA_THREADS, **options).remote(host, binding.threads)
        state.pending = state.actor.info.remote()
        state.state, state.starts = "starting", state.starts + 1

    def _answer(self, host: str, end: float | None) -> Any:
        """Answer of a host's process; HostError where it dies, or Ray has not started it by `end`."""
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
            raise HostError(f"host {host!r} died as it was started: {first_line(error)}") from error

    def _drop(self, host: str) -> None:
        state = self.states[host]
        actor, state.actor, state.pending, state.state = state.actor, None, None, "dead"
        if actor is not None:
            self._ray.kill(actor)


def first_line(error: BaseException) -> str:
    """First line of an error of Ray's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _resources(ray: Any) -> str:
    """Free resources of the nodes, for messages."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    free = ray.available_resources()
    named = {name: free[name] for name in sorted(free) if not name.startswith(("node:", "object_store"))}
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)} with " + ", ".join(f"{k} {v:g}" for k, v in named.items())
