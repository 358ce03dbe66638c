"""Timing of ``relax-hetero bench``: programs in interleaved rounds, and a trace of submitted calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..display.console import console
from ..display.text import plural

if TYPE_CHECKING:
    import numpy as np

    from ..vm.file.executable import Executable

# A program that takes longer than this per call gets no untimed call before each timed one.
WARM_BELOW_SECONDS = 1.0
# Timed calls of every program, however slow.
MIN_SECONDS = 2


@dataclass
class Timing:
    """The timed calls of one program, in seconds."""

    seconds: list[float] = field(default_factory=list)
    spent: float = 0.0

    @property
    def median(self) -> float:
        """The median call; NaN without any."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def fastest(self) -> float:
        """The fastest call; NaN without any."""
        return min(self.seconds, default=float("nan"))


def interleave(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    budget: float,
    advance: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time every program once per round, so that a slow minute of the machine touches all alike.

    Parameters
    ----------
    calls : mapping of str to callable
        Programs by name.
    rounds : int
        How many timed calls each gets.
    budget : float
        Seconds after which a program sits out the remaining rounds, once it has `MIN_SECONDS` timed calls.
    advance : callable
        Told the program's name after each of its turns, taken or sat out.
    """
    timings = {name: Timing() for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            timing = timings[name]
            if timing.spent < budget or len(timing.seconds) < MIN_SECONDS:
                _time_call(call, timing)
            advance(name)
    return timings


def _time_call(call: Callable[[], object], timing: Timing) -> None:
    begun = time.perf_counter()
    # The untimed call brings back the caches and threads that the other programs' turns took away.
    if not timing.seconds or timing.fastest < WARM_BELOW_SECONDS:
        call()
    start = time.perf_counter()
    call()
    end = time.perf_counter()
    timing.seconds.append(end - start)
    timing.spent += end - begun


@dataclass(frozen=True)
class TracedCalls:
    """Calls that were traced.

    Attributes
    ----------
    path : Path
        Where the trace is.
    seconds : float
        From the first submission to the last result.
    busy : dict of str to float
        The share of that time, 0 to 1, in which each queue worked.
    """

    path: Path
    calls: int
    seconds: float
    busy: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """The same as JSON data."""
        rate = self.calls / self.seconds
        return {"path": str(self.path), "calls": self.calls, "calls_per_second": rate, "busy": self.busy}

    def print(self) -> None:
        """Print it for people."""
        shares = ", ".join(f"{queue} {share:.0%} busy" for queue, share in self.busy.items())
        rate = self.calls / self.seconds
        screen = console()
        screen.print(f"{plural(self.calls, 'call')} submitted: {rate:.1f} a second; {shares}.", markup=False)
        screen.print(f"Wrote {self.path}, for https://ui.perfetto.dev.", markup=False)


def trace_calls(executable: Executable, inputs: Mapping[str, np.ndarray], calls: int, path: Path) -> TracedCalls:
    """Submit calls of ``main`` on the same inputs, and write their trace.

    Parameters
    ----------
    path : Path
        Written over.
    """
    from ..vm.machine import VirtualMachine

    machine = VirtualMachine(executable)
    machine.submit("main", *inputs.values()).result()  # threads begin, memory comes
    begin = time.perf_counter()
    with machine.trace(limit=calls) as trace:
        for _ in range(calls):
            machine.submit("main", *inputs.values())
    seconds = time.perf_counter() - begin
    trace.save(path)
    return TracedCalls(path, calls, seconds, trace.busy())
