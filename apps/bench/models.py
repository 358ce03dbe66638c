"""Whole models against other libraries: medians of turns taken one after the other, batch 1, float32.

python apps/bench/models.py                                     # every model and peer, 1 and 2 threads: long
python apps/bench/models.py resnet50 bert --threads 1 --peers ours,onnxruntime
python apps/bench/models.py path/to/model.onnx --dims batch=1,sequence=128 --json results.json
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from model_peers import OURS, PEERS
from model_report import LEFT, all_tables, markdown, remarks, summary
from model_worker import Job, shortened
from model_zoo import MAKERS, model_path, random_inputs
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table


class Worker:
    """A process that loads a model into some contestants and takes turns when asked."""

    def __init__(self, job: Job) -> None:
        self.keys = job.peers
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            job.command(), env=job.environment(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True
        )

    def answer(self) -> Any:
        """Its next answer; EOFError where it died."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"its process ended with status {self._process.wait()}")
        return json.loads(line)

    def turn(self, key: str) -> list[float]:
        """Seconds of the calls of one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(key) + "\n")
        self._process.stdin.flush()
        found: list[float] = self.answer()
        return found

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def at_once(job: Job, limit: float | None = None) -> dict[str, Any]:
    """Run a job that has one answer; what went wrong under ``failure``."""
    try:
        done = subprocess.run(job.command(), env=job.environment(), capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"failure": f"not done after {limit:.0f} s"}
    if done.returncode or not done.stdout:
        said = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "")
        return {"failure": f"status {done.returncode}: {shortened(said)}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def prepare(job: Job, folder: Path, label: str, limit: float) -> tuple[Job, dict[str, dict[str, Any]]]:
    """Have those contestants that compile ahead of time do so, each in a process of its own.

    Files that are there are taken as they are. Returns the job with its files, and a row for each contestant; one that
    failed says why and is out of the job.
    """
    rows: dict[str, dict[str, Any]] = {key: {} for key in job.peers}
    files: dict[str, str] = {}
    for key in job.peers:
        peer = PEERS[key]
        if not peer.installed:
            rows[key] = {"unsupported": f"{peer.package} is not installed"}
            continue
        if not peer.suffix:
            continue
        file, facts = (folder / f"{label}-{job.threads}-{key}{end}" for end in (peer.suffix, ".json"))
        files[key] = str(file)
        if not (file.exists() and facts.exists()):
            compiling = replace(job, action="compile", peers=(key,), files=files)
            found = at_once(compiling, limit)
            facts.write_text(json.dumps(found.get(key, found)))
        rows[key] = json.loads(facts.read_text())
        if "failure" in rows[key]:
            facts.unlink()
    able = tuple(key for key in job.peers if not rows[key].keys() & {"failure", "unsupported"})
    return replace(job, peers=able, files=files), rows


def time_models(job: Job, rows: dict[str, dict[str, Any]], rounds: int, cap: float, isolate: bool, seed: int) -> None:
    """Load the contestants of a job and time them in rounds; results go to their rows."""
    groups = [(key,) for key in job.peers] if isolate else [job.peers] if job.peers else []
    workers: dict[str, Worker] = {}
    seconds: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for group in groups:
            worker = Worker(replace(job, peers=group))
            stack.callback(worker.close)
            try:
                loaded = worker.answer()
            except EOFError as error:
                loaded = {key: {"failure": str(error)} for key in group}
            for key, row in loaded.items():
                rows[key].update(row)
                if "failure" in row or "unsupported" in row:
                    continue
                workers[key] = worker
                seconds[key] = []
                if row["first_seconds"] > cap:
                    seconds[key] = [row["first_seconds"]]
                    del workers[key]
        order, shuffle = list(workers), random.Random(seed)
        for _ in range(rounds):
            shuffle.shuffle(order)
            for key in order:
                if workers[key] is not None:
                    seconds[key] += workers[key].turn(key)
    for key, found in seconds.items():
        if found:
            milliseconds = np.array(found) * 1e3
            rows[key].update(median_ms=float(np.median(milliseconds)), fastest_ms=float(milliseconds.min()))
            rows[key].update(calls=len(found))


def add_memory(job: Job, rows: dict[str, dict[str, Any]]) -> None:
    """Have each contestant of a job load and run in a fresh process; bytes go to its row."""
    for key in job.peers:
        if not rows[key].keys() & {"failure", "unsupported"}:
            rows[key]["memory"] = at_once(replace(job, action="memory", peers=(key,)))


def _names(_context: click.Context, _parameter: click.Parameter, names: Sequence[str]) -> list[tuple[str, Path]]:
    try:
        return [(Path(name).stem, model_path(name)) for name in names or MAKERS]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _peers(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    keys = tuple(key.strip() for key in text.split(",") if key.strip())
    for key in keys:
        if key not in PEERS:
            raise click.BadParameter(f"{key!r} is none of {', '.join(PEERS)}", param=parameter)
    return keys


def _threads(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(",") if int(item) > 0)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected numbers of threads, as in 1,2", param=parameter) from error


def _dims(_context: click.Context, parameter: click.Parameter, text: str) -> dict[str, int]:
    try:
        return {name.strip(): int(size) for name, size in (item.split("=") for item in text.split(",") if item)}
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected sizes of dimensions, as in batch=1,sequence=128") from error


@click.command()
@click.argument("models", nargs=-1, callback=_names)
@click.option("--threads", default="1,2", show_default=True, callback=_threads, help="All contestants get so many.")
@click.option("--peers", default="ours,onnxruntime,openvino,iree,torch", show_default=True, callback=_peers)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(0), help="Turns of each; 0 checks only.")
@click.option("--seconds", default=2.0, show_default=True, help="How long each contestant is timed, in all its turns.")
@click.option("--cap", default=2.0, show_default=True, help="A first call of more seconds is the only one.")
@click.option("--isolate", is_flag=True, help="A process for each contestant instead of one for all.")
@click.option("--dims", default="", callback=_dims, help="Sizes of named dimensions: batch=1,sequence=128.")
@click.option("--executables", type=click.Path(path_type=Path), help="Keeps what is compiled here, and takes it again.")
@click.option("--compile-limit", default=300.0, show_default=True, help="Seconds that a contestant may compile.")
@click.option("--compile-only", is_flag=True, help="With --executables: time nothing.")
@click.option("--memory", is_flag=True, help="Also what a fresh process takes that only loads and runs.")
@click.option("--dispatches", default=0, help="Also our so many heaviest kernels, beside the peaks of the machine.")
@click.option("--seed", default=0, show_default=True, help="Of inputs and of the order of turns.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="Write results there.")
@click.option("--png", "png_file", type=click.Path(path_type=Path, dir_okay=False), help="Draw the ratios there.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
def main(
    models: list[tuple[str, Path]],
    threads: tuple[int, ...],
    peers: tuple[str, ...],
    rounds: int,
    seconds: float,
    cap: float,
    isolate: bool,
    dims: Mapping[str, int],
    executables: Path | None,
    compile_limit: float,
    compile_only: bool,
    memory: bool,
    dispatches: int,
    seed: int,
    json_file: Path | None,
    png_file: Path | None,
    as_markdown: bool,
) -> None:
    """Time MODELS (ONNX files, or names of built-in ones; else all of these) here and in the libraries installed."""
    results: list[dict[str, Any]] = []
    with _folder(executables) as folder, _progress() as progress:
        task = progress.add_task("starting")
        for name, path in models:
            arrays = folder / f"{name}.npz"
            np.savez(arrays, **{f"in:{key}": array for key, array in random_inputs(path, dims, seed).items()})
            job = Job("reference", str(path), (), {}, max(threads), str(arrays), seconds / max(rounds, 1))
            reference = at_once(job)
            if "failure" in reference:
                raise click.ClickException(f"{name}: no reference by ONNX Runtime: {reference['failure']}")
            for count in threads:
                progress.update(task, description=f"{name}, {count} threads: compiling")
                ready = replace(job, action="turns", peers=peers, threads=count)
                ready, rows = prepare(ready, folder, name, compile_limit)
                if not compile_only:
                    progress.update(task, description=f"{name}, {count} threads: running")
                    time_models(ready, rows, rounds, cap, isolate, seed)
                if memory:
                    progress.update(task, description=f"{name}, {count} threads: memory")
                    add_memory(ready, rows)
                if dispatches and OURS in ready.peers:
                    progress.update(task, description=f"{name}, {count} threads: dispatches")
                    rows[OURS]["profile"] = at_once(replace(ready, action="profile", peers=(OURS,)))
                results.append({"model": name, "threads": count, "rows": rows})
                if json_file:  # each time, so that what was measured is there after an interrupt
                    json_file.write_text(json.dumps({"made": time.strftime("%Y-%m-%d"), "results": results}, indent=1))
    if png_file:
        from model_chart import draw

        draw(results, png_file)
    if as_markdown:
        click.echo(markdown(results, dispatches))
    else:
        _print(results, dispatches)


@contextlib.contextmanager
def _folder(chosen: Path | None) -> Iterator[Path]:
    if chosen:
        chosen.mkdir(parents=True, exist_ok=True)
        yield chosen
    else:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _print(results: list[dict[str, Any]], dispatches: int) -> None:
    console = Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
    for title, columns, rows in all_tables(results, dispatches):
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in LEFT else "right")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for line in [*summary(results), *remarks(results)]:
        console.print(line, markup=False)


if __name__ == "__main__":
    main()
