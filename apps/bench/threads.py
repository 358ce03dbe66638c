"""Placement of threads: the number of cores that run the tasks of a loop, and the speed over one thread.

python apps/bench/threads.py                            # all of it: two minutes on two cores
python apps/bench/threads.py alone --processes 50
python apps/bench/threads.py busy quota --threads 4 --json
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from bars import Check, verdict
from busy_machine import busy_processes
from rich.console import Console
from rich.table import Table
from smoke import smoke
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import relax_hetero as rh
from relax_hetero.target.cpu_cores import cpus_of_cores, num_cores

PARTS = ("alone", "together", "busy", "quota")
# Share of the processes run alone that reach both other bars: share of calls whose threads all have cores of their own,
# and speed over one thread divided by the number of threads.
PROCESSES_BAR, CORES_BAR, SPEED_BAR = 0.96, 0.99, 0.9
GROUPS = Path("/sys/fs/cgroup")


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--threads", default=max(2, num_cores()), show_default=True, type=click.IntRange(2), help="Per process.")
@click.option("--processes", default=16, show_default=True, type=click.IntRange(1), help="Number of processes.")
@click.option("--steps", default=65536, show_default=True, type=click.IntRange(1), help="Length of a task.")
@click.option("--seconds", default=0.5, show_default=True, help="Seconds of calls with each number of threads.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(parts=lambda parts: parts[:1] or PARTS[:1], threads=2, processes=1, steps=64, seconds=0.05)
def main(parts: tuple[str, ...], threads: int, processes: int, steps: int, seconds: float, as_json: bool) -> None:
    """Measure PARTS (alone, together, busy, quota; all by default) in processes of their own.

    alone: one process at a time. together: two at a time, each with half of the threads, from four threads on. busy:
    while other processes compute, one, and as many as cores. quota: in control groups with CPU time for all threads,
    and for half of them, if this process may make control groups.
    """
    results_of_part: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts or PARTS:
            for name, results in _part(part, Path(folder), threads, processes, steps, seconds):
                results_of_part[name] = results
    reached = checks(results_of_part)
    if as_json:
        rows = [{"what": c.what, "found": c.found, "bar": c.bar, "passed": c.passed} for c in reached]
        click.echo(json.dumps({"processes": results_of_part, "checks": rows}))
    else:
        show(results_of_part, reached)
    sys.exit(0 if all(check.passed for check in reached) else 1)


def _part(
    part: str, folder: Path, threads: int, processes: int, steps: int, seconds: float
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    few = max(1, processes // 4)
    if part == "alone":
        yield "one process", [_wait(_begin(folder, threads, steps, seconds)) for _ in range(processes)]
    elif part == "together" and threads >= 4:
        pairs = [[_begin(folder, threads // 2, steps, seconds) for _ in range(2)] for _ in range(few)]
        yield "two processes at a time", [_wait(process) for pair in pairs for process in pair]
    elif part == "busy":
        for busy in dict.fromkeys((1, num_cores())):
            with busy_processes(busy):
                results = [_wait(_begin(folder, threads, steps, seconds)) for _ in range(few)]
            yield f"{busy} busy processes", results
    elif part == "quota":
        for quota in (threads, threads / 2):
            with control_group(quota) as join:
                if join is None:
                    click.echo("quota: left out, this process may not make control groups", err=True)
                    return
                results = [_wait(_begin(folder, threads, steps, seconds, join)) for _ in range(few)]
            yield f"time of {quota:g} CPUs", results


def libraries(folder: Path, threads: int, steps: int) -> list[Path]:
    """Libraries of a loop of four tasks per thread that record their CPUs, for one thread and for all."""
    paths = [folder / f"{threads}_{width}.so" for width in (1, threads)]
    for path, width in zip(paths, (1, threads), strict=True):
        if not path.exists():
            target = {**rh.native("llvm").export(), "num-cores": width}
            rh.compile(rh.transform.UpdateVDevice(rh.VDevice(target), 0)(_loop(4 * threads, steps))).export_library(
                path
            )
    return paths


def _loop(rows: int, steps: int) -> Any:
    @I.ir_module
    class Loop:
        I.module_global_infos({"vdevice": [I.vdevice("llvm")]})

        @T.prim_func(s_tir=True)
        def work(x: T.Buffer((64,), "float32"), y: T.Buffer((rows, 64), "float32"), cpus: T.Buffer((rows,), "int32")):
            for i in T.parallel(rows):
                for j in T.vectorized(64):
                    y[i, j] = x[j]
                for _ in T.serial(steps):
                    for j in T.vectorized(64):
                        y[i, j] = y[i, j] * T.float32(0.999) + T.float32(0.5)
                cpus[i] = T.call_extern("int32", "sched_getcpu")

        @R.function
        def main(x: R.Tensor((64,), "float32")):
            cls = Loop
            result = R.call_tir(cls.work, (x,), out_ty=[R.Tensor((rows, 64), "float32"), R.Tensor((rows,), "int32")])
            return result

    return Loop


def _begin(folder: Path, threads: int, steps: int, seconds: float, join: Path | None = None) -> subprocess.Popen[str]:
    paths = libraries(folder, threads, steps)
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment["TVM_NUM_THREADS"] = ""
    arguments = [str(argument) for argument in (*paths, threads, seconds)]
    # Set before the process counts its cores.
    before = None if join is None else functools.partial(_join, join)
    return subprocess.Popen(
        [sys.executable, __file__, "--child", *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        preexec_fn=before,
    )


def _join(group: Path) -> None:
    group.write_text(str(os.getpid()))


def _wait(process: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = process.communicate(timeout=120)
    if process.returncode:
        raise click.ClickException(f"a process that was measured ended with {process.returncode}")
    return dict(json.loads(text.splitlines()[-1]))


@contextmanager
def control_group(cpus: float) -> Iterator[Path | None]:
    """The file by which processes join a control group with the time of `cpus` CPUs; None if it cannot be made."""
    is_second = (GROUPS / "cgroup.controllers").exists()
    folder = (GROUPS if is_second else GROUPS / "cpu") / f"relax_hetero_threads_{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        yield None
        return
    try:
        try:
            if is_second:
                (folder / "cpu.max").write_text(f"{int(cpus * 1e5)} 100000")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(int(cpus * 1e5)))
        except OSError:
            yield None
        else:
            yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def child(one: str, all_: str, threads: int, seconds: float) -> dict[str, Any]:
    """Run the loop on one thread and on all in the measured process, in turns with rests between.

    Returns
    -------
    dict
        "speed" over one thread, the share of calls in which threads had "cores" of their own, the "late" calls that
    took more than twice the median, and whether the "mask" of the calling thread is unchanged.
    """
    before = os.sched_getaffinity(0)
    threads = min(threads, num_cores())  # a quota reduces the number of cores
    core_of = {cpu: number for number, core in enumerate(cpus_of_cores()) for cpu in core}
    calls = [rh.vm.VirtualMachine(rh.load(path))["main"] for path in (one, all_)]
    x = np.ones(64, "float32")
    times: list[list[float]] = [[], []]
    on_cores = 0
    turns = 5
    for _ in range(turns):
        for call, own in zip(calls, times, strict=True):
            time.sleep(0.02)  # idle threads go to sleep
            until = time.perf_counter() + seconds / turns
            while (start := time.perf_counter()) < until:
                cpus = call(x)[1]
                own.append(time.perf_counter() - start)
                if own is times[1]:
                    on_cores += len({core_of[cpu] for cpu in cpus.numpy()[:: len(cpus.numpy()) // threads]}) == threads
    means = [statistics.fmean(own) for own in times]
    middle = statistics.median(times[1])
    return {
        "threads": threads,
        "microseconds": middle * 1e6,
        "speed": means[0] / means[1],
        "cores": on_cores / len(times[1]),
        "late": sum(took > 2 * middle for took in times[1]) / len(times[1]),
        "mask": os.sched_getaffinity(0) == before,
    }


def checks(results_of_part: dict[str, list[dict[str, Any]]]) -> list[Check]:
    """The bars of the figures."""
    every = [result for results in results_of_part.values() for result in results]
    bars = [Check("processes whose calling thread kept its CPUs", statistics.fmean(r["mask"] for r in every), 1)]
    single = results_of_part.get("one process", [])
    if single:
        good = [r["cores"] >= CORES_BAR and r["speed"] >= SPEED_BAR * r["threads"] for r in single]
        bars.append(
            Check("processes with threads apart and as fast as they are many", statistics.fmean(good), PROCESSES_BAR)
        )
    return bars


def show(results_of_part: dict[str, list[dict[str, Any]]], reached: Sequence[Check]) -> None:
    """Print a table and the bars."""
    screen = Console()
    table = Table(title="median and worst process", title_justify="left")
    names = ("", "processes", "threads", "call, µs", "speed over one thread", "cores of their own", "late calls")
    for name in names:
        table.add_column(name, justify="right" if name else "left")
    for name, results in results_of_part.items():
        cells = [
            f"{statistics.median(values):{form}}, {worst(values):{form}}"
            for key, worst, form in (("speed", min, ".2f"), ("cores", min, ".1%"), ("late", max, ".1%"))
            if (values := [result[key] for result in results])
        ]
        middle = statistics.median(result["microseconds"] for result in results)
        table.add_row(name, str(len(results)), str(results[0]["threads"]), f"{middle:.0f}", *cells)
    screen.print(table)
    for check in reached:
        screen.print(f"{verdict(check)}: {check}", markup=False)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        one, all_, threads, seconds = sys.argv[2:]
        print(json.dumps(child(one, all_, int(threads), float(seconds))))
    else:
        main()
