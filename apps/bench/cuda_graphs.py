"""Command buffers on an NVIDIA GPU compared with PyTorch's CUDA graphs: chains of small kernels, and memory leaks.

python apps/bench/cuda_graphs.py --counts 10,200,1000
python apps/bench/cuda_graphs.py --counts 200 --replays 10000 --json

Each of our submissions has new bindings: one of sixteen inputs, one of sixteen results. PyTorch's graphs, one of
the very same kernels and one of as many ``torch.add``, are replayed as they were captured.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
import torch
import tvm
import tvm_ffi
from bars import Check, verdict
from command_buffer_bench.chains import WIDTH, Chain, whole_numbers
from memory import resident
from rich.console import Console
from rich.table import Table
from smoke import smoke

import relax_hetero as rh
from relax_hetero.target.vdevice import with_vdevices

OURS, CALL, REPLAY, ADD = (
    "ours, new bindings",
    "ours, whole call",
    "torch replay, same kernels",
    "torch replay, torch.add",
)
BAR = 1.1
BINDINGS, WARM_CALLS, CALLS = 16, 10, 50


@dataclass
class Times:
    """Microseconds of one contestant until the submission returns, and until the GPU has finished it."""

    host: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)


class Contest:
    """Contestants that run a chain on a GPU, all on one stream.

    Attributes
    ----------
    calls : dict of str to callable
    """

    def __init__(self, chain: Chain, device: rh.VDevice) -> None:
        self._chain, self._device = chain, tvm.cuda(0)
        self.stream = torch.cuda.Stream()
        self._inputs = [self._on_gpu(whole_numbers(seed)) for seed in range(BINDINGS)]
        self._results = [tvm.runtime.empty((WIDTH,), "float32", self._device) for _ in range(BINDINGS)]
        self._turn = 0
        module = with_vdevices(chain.module(), [device])
        machine = rh.vm.VirtualMachine(rh.compile(module))
        (graph,) = machine.graphs
        submit = graph.submit_function
        inputs, results = self._inputs, self._results

        def ours() -> None:
            turn = self._turn = (self._turn + 1) % BINDINGS
            submit(inputs[turn], graph.state, results[turn])

        def call() -> None:
            turn = self._turn = (self._turn + 1) % BINDINGS
            machine["main"](inputs[turn])

        self._machine = machine
        self._captured = [self._same_kernels(rh.vm.VirtualMachine(rh.compile(module, command_buffers=False)))]
        self._captured.append(self._additions())
        replay, add = (graph.replay for graph in self._captured)
        self.calls: dict[str, Callable[[], None]] = {OURS: ours, CALL: call, REPLAY: replay, ADD: add}

    def check(self) -> None:
        """Run ours with every binding; RuntimeError if a result is wrong."""
        for _ in range(2 * BINDINGS):
            self.calls[OURS]()
        self.stream.synchronize()
        for x, y in zip(self._inputs, self._results, strict=True):
            if not np.array_equal(y.numpy(), self._chain.result(x.numpy())):
                raise RuntimeError(f"wrong numbers from {self._chain.kernels} kernels")

    def _on_gpu(self, array: np.ndarray) -> tvm.runtime.Tensor:
        return tvm.runtime.tensor(array, self._device)

    def _same_kernels(self, machine: rh.vm.VirtualMachine) -> torch.cuda.CUDAGraph:
        for _ in range(3):  # loads and allocates everything before the capture
            machine["main"](self._inputs[0])
        self._device.sync()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="relaxed"):
            with tvm_ffi.use_raw_stream(self._device, self.stream.cuda_stream):
                self._replayed = machine["main"](self._inputs[0])
        self._replaying = machine
        return graph

    def _additions(self) -> torch.cuda.CUDAGraph:
        self._sums = [torch.zeros(WIDTH, device="cuda") for _ in range(2)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for index in range(self._chain.kernels):
                torch.add(self._sums[index % 2], 1.0, out=self._sums[1 - index % 2])
        return graph


def measure(count: int, rounds: int, device: rh.VDevice) -> dict[str, Any]:
    """Medians of every contestant on a chain of `count` kernels, in turns."""
    contest = Contest(Chain(count), device)
    times = {name: Times() for name in contest.calls}
    order, shuffle = list(times), random.Random(0)
    with torch.cuda.stream(contest.stream), tvm_ffi.use_raw_stream(tvm.cuda(0), contest.stream.cuda_stream):
        contest.check()
        for _ in range(rounds):
            shuffle.shuffle(order)
            for name in order:
                _take_turn(contest.calls[name], contest.stream.synchronize, times[name])
        contest.check()
    medians = {
        name: {"host_us": statistics.median(time.host), "total_us": statistics.median(time.total)}
        for name, time in times.items()
    }
    return {"kernels": count, "contestants": medians}


def _take_turn(call: Callable[[], None], synchronize: Callable[[], None], times: Times) -> None:
    for _ in range(WARM_CALLS):
        call()
    synchronize()
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        returned = time.perf_counter()
        synchronize()
        times.host.append((returned - begin) * 1e6)
        times.total.append((time.perf_counter() - begin) * 1e6)


def measure_growth(count: int, replays: int, device: rh.VDevice) -> dict[str, Any]:
    """Memory that submissions leak, in KB, of the process and of the GPU."""
    contest = Contest(Chain(count), device)

    def used() -> tuple[float, float]:
        contest.stream.synchronize()
        free, total = torch.cuda.mem_get_info()
        return resident("VmRSS") / 1024, (total - free) / 1024

    with tvm_ffi.use_raw_stream(tvm.cuda(0), contest.stream.cuda_stream):
        for _ in range(replays // 10):
            contest.calls[OURS]()
        before = used()
        for _ in range(replays):
            contest.calls[OURS]()
        after = used()
        contest.check()
    return {"kernels": count, "replays": replays, "host_kb": after[0] - before[0], "gpu_kb": after[1] - before[1]}


def checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The bars of ours over the replay of the same kernels."""
    return [
        Check(
            f"{row['kernels']} kernels: {figure} against torch's replay",
            row["contestants"][OURS][key] / row["contestants"][REPLAY][key],
            BAR,
            at_most=True,
        )
        for row in rows
        for figure, key in (("host time", "host_us"), ("total time", "total_us"))
    ]


def _numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


@click.command()
@click.option("--counts", default="10,200,1000", show_default=True, callback=_numbers, help="Kernels of the chains.")
@click.option("--rounds", default=20, show_default=True, help=f"Turns of each, of {CALLS} submissions.")
@click.option("--replays", default=0, show_default=True, help="Number of submissions whose memory is also measured.")
@click.option("--arch", default="sm_90", show_default=True, help="Architecture of the GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(counts=[10], rounds=1, replays=lambda given: min(given, 10))
def main(counts: list[int], rounds: int, replays: int, arch: str, as_json: bool) -> None:
    """Time submissions on an NVIDIA GPU; needs torch."""
    device = rh.VDevice({"kind": "cuda", "arch": arch})
    rows = [measure(count, rounds, device) for count in counts]
    growth = [measure_growth(counts[-1], replays, device)] if replays else []
    if as_json:
        click.echo(json.dumps({"rows": rows, "growth": growth}))
        return
    table = Table(title=f"{torch.cuda.get_device_name()}: median µs, host / total", title_justify="left")
    for column in ("kernels", OURS, CALL, REPLAY, ADD):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["contestants"][name] for name in (OURS, CALL, REPLAY, ADD)]
        table.add_row(f"{row['kernels']:,}", *(f"{c['host_us']:.2f} / {c['total_us']:.1f}" for c in cells))
    console = Console(highlight=False, width=140)
    console.print(table)
    for check in checks(rows):
        console.print(f"{verdict(check)}: {check}", markup=False)
    for leak in growth:
        console.print(
            "{replays:,} submissions of {kernels} kernels: {host_kb:+.0f} KB, GPU {gpu_kb:+.0f} KB".format(**leak)
        )


if __name__ == "__main__":
    main()
