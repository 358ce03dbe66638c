"""Device time of programs that take turns: events around consecutive launches, medians over rounds."""

from __future__ import annotations

import contextlib
import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from peers.packages import is_installed

Launch = Callable[[], object]

SLICE_MS = 3.0
"""Approximate duration of the launches of one turn."""
MAX_LAUNCHES = 12
"""Maximum number of launches of a turn: more submissions do not fit in the ring of a command buffer without waiting."""
CYCLES_OF_MS = 2.0e6
"""Cycles of a millisecond on the fastest GPU of today."""


@functools.cache
def torch_on_gpu() -> Any:
    """PyTorch if it is installed and has a GPU, else None."""
    if not is_installed("torch"):
        return None
    import torch

    return torch if torch.cuda.is_available() else None


@dataclass(frozen=True)
class Clock:
    """A clock for launches on a device.

    Attributes
    ----------
    device : tvm.runtime.Device
    stream : torch.cuda.Stream, optional
        Stream of all contestants; None without PyTorch, where the host's clock is read instead.
    """

    device: Any
    stream: Any = None

    @staticmethod
    def of(device: Any) -> Clock:
        """The clock of a device: events of PyTorch if it has a GPU."""
        torch = torch_on_gpu()
        return Clock(device, torch.cuda.Stream() if torch and device == tvm.cuda(0) else None)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the stream the current one of TVM and PyTorch."""
        if self.stream is None:
            yield
            return
        torch = torch_on_gpu()
        with torch.cuda.stream(self.stream), tvm_ffi.use_raw_stream(self.device, self.stream.cuda_stream):
            yield

    def milliseconds(self, launch: Launch, launches: int, held: float = 0.0) -> float:
        """Milliseconds of consecutive launches, until the device has finished the last.

        For the first `held` milliseconds, which do not count, the device waits while the host launches, so that only
        the device's time counts, even if the host takes longer than small work does.
        """
        if self.stream is None:
            self.device.sync()
            begin = time.perf_counter()
            for _ in range(launches):
                launch()
            self.device.sync()
            return (time.perf_counter() - begin) * 1e3
        torch = torch_on_gpu()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if held:
            torch.cuda._sleep(int(held * CYCLES_OF_MS))
        begun.record(self.stream)
        for _ in range(launches):
            launch()
        ended.record(self.stream)
        ended.synchronize()
        return float(begun.elapsed_time(ended))


def microseconds(clock: Clock, contestants: Mapping[str, Launch], rounds: int, seed: int = 0) -> dict[str, float]:
    """Median device time of one launch of each contestant.

    In each round every contestant gets one turn, in a new random order: an untimed launch, then as many launches
    as take `SLICE_MS`, at most `MAX_LAUNCHES`, all queued before the first begins.

    Parameters
    ----------
    clock : Clock
    contestants : mapping of str to callable
        Functions that queue work on the clock's stream and do not wait for it.
    rounds : int
    seed : int
        Seed of the orders.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order, shuffle = list(contestants), random.Random(seed)
    with clock.current():
        launches, hold_ms = {}, {}
        for name, launch in contestants.items():
            clock.milliseconds(launch, 3)
            each = min(clock.milliseconds(launch, 2) / 2 for _ in range(2))
            launches[name] = max(1, min(MAX_LAUNCHES, math.ceil(SLICE_MS / max(each, 1e-3))))
            hold_ms[name] = 2 * launches[name] * _host_milliseconds(clock, launch)
        for _ in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                contestants[name]()
                elapsed = clock.milliseconds(contestants[name], launches[name], hold_ms[name])
                times[name].append(elapsed / launches[name] * 1e3)
    return {name: statistics.median(turn_times) for name, turn_times in times.items()}


def _host_milliseconds(clock: Clock, launch: Launch) -> float:
    """The host's longest time for one of a few launches."""
    milliseconds = []
    for _ in range(5):
        clock.device.sync()
        begin = time.perf_counter()
        launch()
        milliseconds.append((time.perf_counter() - begin) * 1e3)
    clock.device.sync()
    return max(milliseconds)
