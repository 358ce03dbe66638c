"""Calls of ``relax-hetero bench --trace``: submitted one after the other, and what each queue did meanwhile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import console, plural

if TYPE_CHECKING:
    import numpy as np

    from ..vm.file.executable import Executable


@dataclass(frozen=True)
class TracedCalls:
    """Calls that were traced.

    Attributes
    ----------
    path : Path
        Where the trace is.
    calls : int
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
    executable : Executable
    inputs : mapping of str to numpy.ndarray
    calls : int
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
