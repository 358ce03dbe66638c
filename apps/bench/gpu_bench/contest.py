"""Compares our workloads with PyTorch's, times them in turns, and shows the results."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from bars import Check, verdict
from rich.console import Console
from rich.table import Table

from .device_time import Clock, Launch, microseconds, torch_on_gpu
from .programs import Program, compiled, device_of, error_of
from .workloads import Array, Workload

OURS = "ours"
Row = dict[str, Any]
Peers = Mapping[str, tuple[Launch, Callable[[], list[Any]]]]
NOTHING: Peers = {}


def contest(
    workloads: Sequence[Workload],
    gpu: Any,
    peers: Callable[[Clock, Workload], Peers],
    wanted: Callable[[Workload], list[Array]],
    rounds: int,
    workers: int,
    say: Callable[[Row], None],
    together: bool = False,
    rehearsed: bool = False,
) -> list[Row]:
    """Compile all workloads, then compare and time one after the other.

    Parameters
    ----------
    workloads : sequence of Workload
    gpu : str or dict
        Target of the GPU.
    peers : callable
        Returns PyTorch's launches and results for a workload; not called without PyTorch on a GPU.
    wanted : callable
        Returns right results, if there is no peer to compare with.
    rounds, workers : int
    say : callable
        Called with each row when it is measured.
    together : bool
        Make PyTorch's programs of all workloads while ours are compiled; all their tensors must fit on the GPU.
    rehearsed : bool
        With `together`: make them in `workers` processes first, so that ``torch.compile`` finds them in its cache.

    Returns
    -------
    list of dict
        ``title``, ``kind``, ``us`` (microseconds of one piece by contestant), ``error``, ``failure`` and others.
    """
    rows = []
    clock = Clock.of(device_of(gpu))
    with tempfile.TemporaryDirectory(dir=_memory_folder()) as folder:
        peers_of_work: dict[int, tuple[Peers, str]] = {}

        def meanwhile() -> None:
            if rehearsed and torch_on_gpu() and workers > 1:
                _rehearse(workloads, gpu, peers, workers)
            peers_of_work.update((index, _peers(clock, work, peers)) for index, work in enumerate(workloads))

        programs = compiled(workloads, gpu, Path(folder), workers, meanwhile if together else None)
        for index, program in enumerate(programs):
            peers_and_failure = peers_of_work.pop(index, None) or _peers(clock, program.workload, peers)
            row = _measured(program.load(gpu), gpu, clock, peers_and_failure, wanted, rounds)
            rows.append(row)
            say(row)
    return rows


def _memory_folder() -> str | None:
    """A folder in memory if files of weights fit there, else the usual one."""
    shared = "/dev/shm"
    return shared if os.path.isdir(shared) and shutil.disk_usage(shared).free > 32 << 30 else None


def _rehearse(workloads: Sequence[Workload], gpu: Any, peers: Callable[[Clock, Workload], Peers], workers: int) -> None:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(workers, len(workloads)), mp_context=context) as pool:
        for work in workloads:
            pool.submit(_rehearse_one, work, gpu, peers)


def _rehearse_one(work: Workload, gpu: Any, peers: Callable[[Clock, Workload], Peers]) -> None:
    peers(Clock.of(device_of(gpu)), replace(work, count=1))  # type: ignore[type-var]


def _peers(clock: Clock, work: Workload, peers: Callable[[Clock, Workload], Peers]) -> tuple[Peers, str]:
    """PyTorch's launches, and the failure of a peer, if any; ours is then measured alone."""
    if not torch_on_gpu():
        return NOTHING, ""
    try:
        return peers(clock, work), ""
    except Exception as error:
        return NOTHING, f"{type(error).__name__}: {error}"[:400]


def _measured(
    program: Program,
    gpu: Any,
    clock: Clock,
    peers_and_failure: tuple[Peers, str],
    wanted: Callable[[Workload], list[Array]],
    rounds: int,
) -> Row:
    work = program.workload
    row: Row = {"title": work.title, "kind": getattr(work, "kind", getattr(work, "dtype", ""))}
    launches_of_peers, failure = peers_and_failure
    if failure:
        row["peer_failure"] = failure
    launches = {name: launch for name, (launch, _) in launches_of_peers.items()}
    if program.failure:
        row["failure"] = program.failure
    else:
        launches[OURS] = program.launch
        first = next(iter(launches_of_peers.values()), None)
        right = first[1]() if first else wanted(work)
        row["error"] = max(error_of(ours, theirs) for ours, theirs in zip(program.results(), right, strict=True))
        row |= {"compile_seconds": round(program.seconds, 2), "graphs": 1 if gpu == "llvm" else program.graphs}
    row["us"] = {name: took / work.count for name, took in microseconds(clock, launches, rounds).items()}
    return row


def ratio(row: Row) -> float | None:
    """The fastest peer's time over ours."""
    times = dict(row["us"])
    own = times.pop(OURS, None)
    return min(times.values()) / own if own and times else None


def show(title: str, rows: Sequence[Row], rate: Callable[[Row, float], str], checks: Sequence[Check]) -> None:
    """A table of microseconds and a rate, failures, and the bars.

    Parameters
    ----------
    title : str
    rows : sequence of dict
    rate : callable
        Returns the cell for the rate of a row with a given time.
    checks : sequence of Check
    """
    names = list(dict.fromkeys(name for row in rows for name in row["us"]))
    table = Table(title=title, title_justify="left")
    for column in ("", "", *names, "ratio", "error", "compiled, s"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        times = row["us"]
        cells = [f"{times[name]:.1f} µs, {rate(row, times[name])}" if name in times else "" for name in names]
        value = ratio(row)
        ends = [f"{value:.3f}" if value else "", f"{row['error']:.1e}" if "error" in row else "failed"]
        table.add_row(row["title"], row["kind"], *cells, *ends, str(row.get("compile_seconds", "")))
    console = Console(highlight=False, width=180)
    console.print(table)
    for row in rows:
        for key in ("failure", "peer_failure"):
            if key in row:
                console.print(f"{row['title']} {row['kind']}, {key}: {row[key]}", markup=False, soft_wrap=True)
        if row.get("graphs") != 1 and "failure" not in row:
            console.print(f"{row['title']} {row['kind']}: {row.get('graphs')} CUDA graphs", markup=False)
    for check in checks:
        console.print(f"{verdict(check)}: {check}", markup=False)


def write(file: Path | None, rows: Sequence[Row]) -> None:
    """Append rows to a file as lines of JSON."""
    if file:
        with file.open("a") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)


def end(rows: Sequence[Row], allowed: Callable[[Row], float]) -> None:
    """Exit if results are wrong or nothing was compiled."""
    wrong = [row for row in rows if "failure" in row or row["error"] > allowed(row)]
    if wrong:
        texts = [f"{row['title']} {row['kind']}: {row.get('error', 'failed')}" for row in wrong]
        raise click.ClickException("; ".join(texts))


def gpu_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all benchmarks of GPUs share."""
    options = [
        click.option("--gpu", default="cuda", show_default=True, help="Target of the GPU; llvm: a CPU in its place."),
        click.option("--rounds", default=15, show_default=True, help="Turns of each contestant."),
        click.option("--workers", default=8, show_default=True, help="Number of compiling processes."),
        click.option("--json", "json_file", type=click.Path(path_type=Path), help="Append JSON lines to this file."),
    ]
    for option in reversed(options):
        command = option(command)
    return command
