"""The heaviest dispatches of a compiled model, and the peaks of the machine: a roofline in numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Number of profiled calls; the median of each kernel counts.
_CALLS = 15


@dataclass(frozen=True)
class Dispatch:
    """A kernel of a model, with all its calls.

    Attributes
    ----------
    name : str
    ops : tuple of str
        Ops that it computes.
    calls : int
        Calls in one run of the model.
    microseconds : float
        Time of each call.
    operations, bytes : int
        Operations and bytes of each call; 0 if unknown.
    share : float
        Share of the time of all kernels of a run.
    precision : str
        Element types of its products, else of its operands.
    """

    name: str
    ops: tuple[str, ...]
    calls: int
    microseconds: float
    operations: int
    bytes: int
    share: float
    precision: str = ""


@dataclass(frozen=True)
class Roof:
    """Peaks of the machine: operations and bytes per second; infinity if not measured."""

    operations: float
    bytes: float


def fastest(run: Callable[[], object], seconds: float = 0.4) -> float:
    """Seconds of the fastest call."""
    run()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - begin)
    return best


def measured_roof(threads: int) -> Roof:
    """Time loops of multiply-adds in registers and of memory reads."""
    from peers.bandwidth import read_bandwidth
    from peers.peak import peak

    arithmetic, reads = peak("f32", threads), read_bandwidth(threads)
    return Roof(arithmetic.operations / fastest(arithmetic.run), reads.operations / fastest(reads.run))


def dispatches_of(machine: Any, operands: Sequence[Any]) -> list[Dispatch]:
    """The kernels of ``main``, heaviest first, with shares of their sum, since measuring takes time, too."""
    profiles = []
    for _ in range(_CALLS):
        machine["main"](*operands)
        profiles.append(machine.profile("main", *operands))
    times: dict[str, list[float]] = {}
    rows = {}
    for profile in profiles:
        for row in profile.rows:
            if row.symbol == "(machine)":
                continue
            times.setdefault(row.symbol, []).append(row.microseconds / row.calls)
            rows[row.symbol] = row
    medians = {symbol: statistics.median(dispatches) for symbol, dispatches in times.items()}
    total = sum(medians[symbol] * row.calls for symbol, row in rows.items())
    dispatches = [
        Dispatch(symbol, tuple(row.ops), row.calls, medians[symbol], row.operations, row.bytes, 0.0, row.precision)
        for symbol, row in rows.items()
    ]
    dispatches = [Dispatch(**{**asdict(one), "share": one.microseconds * one.calls / total}) for one in dispatches]
    return sorted(dispatches, key=lambda one: -one.share)


COLUMNS = [
    "dispatch",
    "calls",
    "µs each",
    "of the kernels",
    "GFLOP/s",
    "of peak",
    "GB/s",
    "of bandwidth",
    "precision",
    "bound by",
]


def dispatch_cells(dispatch: Dispatch, roof: Roof) -> list[str]:
    """The cells of `COLUMNS`."""
    seconds = dispatch.microseconds / 1e6
    operations, moved = dispatch.operations / seconds, dispatch.bytes / seconds
    shares = operations / roof.operations, moved / roof.bytes
    return [
        dispatch.name,
        str(dispatch.calls),
        f"{dispatch.microseconds:.1f}",
        f"{dispatch.share:.1%}",
        f"{operations / 1e9:.0f}" if dispatch.operations else "",
        f"{shares[0]:.0%}" if dispatch.operations and roof.operations < float("inf") else "",
        f"{moved / 1e9:.1f}" if dispatch.bytes else "",
        f"{shares[1]:.0%}" if dispatch.bytes else "",
        dispatch.precision,
        _bound(dispatch, roof),
    ]


def _bound(dispatch: Dispatch, roof: Roof) -> str:
    """The nearest bound: arithmetic, memory or caches; "neither" if it reaches less than half of each."""
    seconds = dispatch.microseconds / 1e6
    arithmetic = dispatch.operations / seconds / roof.operations
    memory = dispatch.bytes / seconds / roof.bytes
    if max(arithmetic, memory) < 0.5:
        return "" if not dispatch.bytes else "neither"
    if arithmetic >= memory:
        return "arithmetic"
    return "memory" if memory <= 1.05 else "caches"
