"""Measurements of the benchmark of queues."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from turns import wait_until_idle

import relax_hetero as rh
from queue_bench.models import MIDDLE, addition, half, halves, one_core_devices, pipeline

# A round counts if other programs used less than this share of the cores meanwhile.
QUIET = 0.05
# Maximum number of rounds while they are not quiet, in multiples of the requested number.
PATIENCE = 3


@dataclass
class Rounds:
    """Seconds of every program in each round.

    Attributes
    ----------
    seconds : dict of str to list of float
        Seconds of one call, by program.
    others : list of float
        Share of the cores that other programs used, by round.
    """

    seconds: dict[str, list[float]]
    others: list[float] = field(default_factory=list)

    @property
    def quiet(self) -> list[int]:
        """The rounds that count: the quiet ones, or all if there are none."""
        indices = [index for index, share in enumerate(self.others) if share < QUIET]
        return indices or list(range(len(self.others)))

    def median(self, name: str) -> float:
        """The median call of a program, in seconds."""
        return statistics.median(self.seconds[name][index] for index in self.quiet)

    def ratio(self, slow: str, fast: str) -> float:
        """The median of the rounds' ratios: the speed of `fast` over that of `slow`."""
        return statistics.median(self.seconds[slow][index] / self.seconds[fast][index] for index in self.quiet)

    def to_json(self) -> dict[str, Any]:
        """Medians in microseconds, and the numbers of rounds and of quiet rounds."""
        medians = {name: self.median(name) * 1e6 for name in self.seconds}
        rounds = {"rounds": len(self.others), "quiet": sum(share < QUIET for share in self.others)}
        return {"microseconds": medians, **rounds, "others": statistics.median(self.others)}


def take_rounds(programs: Mapping[str, Callable[[], object]], calls: int, rounds: int, seed: int = 0) -> Rounds:
    """Time programs, in a new random order each round, each after an untimed run and when the process is idle.

    Parameters
    ----------
    programs : mapping of str to callable
        Programs that make `calls` calls and wait for their results.
    calls : int
    rounds : int
        Requested number of quiet rounds.
    seed : int
        Seed of the orders.
    """
    timed = Rounds({name: [] for name in programs})
    order, shuffle = list(programs), random.Random(seed)
    for _ in range(rounds * PATIENCE):
        shuffle.shuffle(order)
        share = _OthersShare()
        for name in order:
            programs[name]()
            wait_until_idle()
            begin = time.perf_counter()
            programs[name]()
            timed.seconds[name].append((time.perf_counter() - begin) / calls)
            wait_until_idle()
        timed.others.append(share.now())
        if sum(other < QUIET for other in timed.others) == rounds:
            break
    return timed


class _OthersShare:
    """The share of the cores that other programs, and the virtualization host, have used since construction."""

    def __init__(self) -> None:
        self._begin = self._state()

    def _state(self) -> tuple[float, float, float]:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        user, nice, system, _idle, _wait, interrupts, soft, stolen = (int(number) for number in fields)
        ticks = user + nice + system + interrupts + soft + stolen
        return ticks / os.sysconf("SC_CLK_TCK"), time.process_time(), time.perf_counter()

    def now(self) -> float:
        busy, own, wall = (end - begin for begin, end in zip(self._begin, self._state(), strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def _inputs(count: int, width: int) -> list[tvm.runtime.Tensor]:
    generator = np.random.default_rng(0)
    return [tvm.runtime.tensor(generator.standard_normal((width, width)).astype("float32")) for _ in range(count)]


def _same(result: Any, expected: Any) -> None:
    pairs = zip(_arrays(result), _arrays(expected), strict=True)
    if not all(np.array_equal(a, b) for a, b in pairs):
        raise SystemExit("a submitted call gives other numbers than a plain one")


def _arrays(result: Any) -> list[np.ndarray]:
    return [part.numpy() for part in (result if isinstance(result, tuple) else (result,))]


def _submitted(vm: rh.vm.VirtualMachine, inputs: list[Any]) -> Callable[[], None]:
    def run() -> None:
        for fence in [vm.submit("main", x) for x in inputs]:
            fence.result()

    return run


def _plain(vm: rh.vm.VirtualMachine, inputs: list[Any]) -> Callable[[], None]:
    main = vm["main"]

    def run() -> None:
        for x in inputs:
            main(x)

    return run


def measure_pipeline(width: int, depth: int, calls: int, rounds: int) -> dict[str, Any]:
    """Calls of two equal stages on one core each, submitted, over the same calls one after the other."""
    vm = rh.vm.VirtualMachine(rh.compile(pipeline(width, depth)))
    inputs = _inputs(calls, width)
    for x in inputs[:3]:
        _same(vm.submit("main", x).result(), vm["main"](x))
    timed = take_rounds({"plain": _plain(vm, inputs), "submit": _submitted(vm, inputs)}, calls, rounds)
    return {**timed.to_json(), "speedup": timed.ratio("plain", "submit"), "possible": 2 * calls / (calls + 1)}


def measure_halves(width: int, depth: int, rounds: int) -> dict[str, Any]:
    """One call of two independent halves on one core each, over the halves one after the other."""
    both = rh.vm.VirtualMachine(rh.compile(halves(width, depth)))
    one_core = rh.vm.VirtualMachine(rh.compile(half(width, depth)))
    (x,) = _inputs(1, width)
    expected = one_core["main"](x)
    for result in (both["main"](x), both.submit("main", x).result()):
        _same(result, (expected, expected))

    def in_turn() -> None:
        one_core["main"](x)
        one_core["main"](x)

    programs = {
        "in turn": in_turn,
        "plain call": lambda: both["main"](x),
        "submit": lambda: both.submit("main", x).result(),
    }
    timed = take_rounds(programs, 1, rounds)
    speedups = {name: timed.ratio("in turn", name) for name in ("plain call", "submit")}
    return {**timed.to_json(), "speedup": speedups}


def measure_latency(rounds: int) -> dict[str, Any]:
    """The time that submitting one call and waiting for it takes beyond a plain call: one device, one small kernel."""
    vm = rh.vm.VirtualMachine(rh.compile(addition()))
    x = tvm.runtime.tensor(np.ones(16, "float32"))
    main, calls = vm["main"], 200

    def median_of(call: Callable[[], object]) -> float:
        for _ in range(20):
            call()
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    timed = Rounds({"plain": [], "submit": []})
    for _ in range(rounds):
        share = _OthersShare()
        timed.seconds["plain"].append(median_of(lambda: main(x)))
        timed.seconds["submit"].append(median_of(lambda: vm.submit("main", x).result()))
        timed.others.append(share.now())
    return {**timed.to_json(), "added": (timed.median("submit") - timed.median("plain")) * 1e6}


def measure_minilm(path: Path, calls: int, rounds: int) -> dict[str, Any]:
    """MiniLM cut in the middle over two devices of one core, one device of all cores, and ONNX Runtime."""
    two = rh.compile(rh.from_onnx(str(path), vdevices=one_core_devices(2), placement=MIDDLE))
    cut, one = rh.vm.VirtualMachine(two), rh.vm.VirtualMachine(rh.compile(rh.from_onnx(str(path))))
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(calls):
        batch = {}
        for spec in two.signature().inputs:
            batch[spec.name] = generator.integers(1 if "mask" in spec.name else 0, 2, spec.shape).astype(spec.dtype)
        batches.append(batch)
    inputs = [[tvm.runtime.tensor(array) for array in batch.values()] for batch in batches]
    whole, threads = _session(path, os.cpu_count() or 1), [_session(path, 1) for _ in range(2)]
    (expected,) = whole.run(None, batches[0])[:1]
    for result in (cut["main"](*inputs[0]), cut.submit("main", *inputs[0]).result(), one["main"](*inputs[0])):
        if not np.allclose(_arrays(result)[0], expected, rtol=1e-3, atol=1e-4):
            raise SystemExit("MiniLM gives other numbers than ONNX Runtime")

    def submit() -> None:
        for fence in [cut.submit("main", *x) for x in inputs]:
            fence.result()

    def side_by_side() -> None:
        def half_of(session: Any, first: int) -> None:
            for batch in batches[first::2]:
                session.run(None, batch)

        running = [threading.Thread(target=half_of, args=pair) for pair in zip(threads, range(2), strict=True)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()

    programs: dict[str, Callable[[], object]] = {
        "two devices, plain": lambda: [cut["main"](*x) for x in inputs],
        "two devices, submit": submit,
        "one device, all cores": lambda: [one["main"](*x) for x in inputs],
        "ONNX Runtime, all cores": lambda: [whole.run(None, batch) for batch in batches],
        "ONNX Runtime, a session per core": side_by_side,
    }
    timed = take_rounds(programs, calls, rounds)
    speedups = {name: timed.ratio("two devices, plain", name) for name in programs}
    return {**timed.to_json(), "speedup": speedups}


def _session(path: Path, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
