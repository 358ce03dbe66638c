"""Whole models against other libraries: medians of interleaved turns.

python apps/bench/models.py                                     # every model and peer, 1 and 2 threads: long
python apps/bench/models.py resnet50 bert --threads 1 --peers ours,onnxruntime
python apps/bench/models.py minilm.int8 resnet50.int8 bert:bf16 # quantized; in bfloat16
python apps/bench/models.py minilm.symbolic --peers ours,symbolic --dims batch=1:8,sequence=16:77:128:384
python apps/bench/models.py path/to/model.onnx --dims batch=1,sequence=128 --json results.json
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from isa import isa_option
from model_bench.cases import Case, cases_of
from model_bench.model_worker import Job
from model_bench.report import LEFT, all_tables, markdown, remarks, summary
from model_bench.rich_tables import rich_table, terminal
from model_bench.runs import add_memory, at_once, file_stem, prepare, time_models
from model_peers import FLOAT32, OURS, PEERS, PRECISIONS
from model_zoo import MAKERS, random_inputs
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from smoke import SMALL_MODEL, smoke


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


def _dims(_context: click.Context, _parameter: click.Parameter, text: str) -> dict[str, list[int]]:
    try:
        pairs = [item.split("=") for item in text.split(",") if item]
        return {name.strip(): [int(size) for size in sizes.split(":")] for name, sizes in pairs}
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected sizes of dimensions, as in batch=1:8,sequence=128") from error


@click.command()
@click.argument("models", nargs=-1)
@click.option("--threads", default="1,2", show_default=True, callback=_threads, help="Numbers of threads, in turn.")
@click.option("--peers", default="ours,onnxruntime,openvino,iree,torch", show_default=True, callback=_peers)
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(0), help="Turns of each; 0 checks only.")
@click.option("--seconds", default=2.0, show_default=True, help="Timed seconds of each contestant, in all its turns.")
@click.option("--cap", default=2.0, show_default=True, help="A slower first call, in seconds, is the only one.")
@click.option("--isolate", is_flag=True, help="Run each contestant in a process of its own.")
@click.option(
    "--dims", default="", callback=_dims, help="Sizes of named dimensions, all combinations: batch=1:8,sequence=128."
)
@click.option(
    "--precision",
    default=FLOAT32,
    show_default=True,
    type=click.Choice(list(PRECISIONS)),
    help="Precision of float products of models without :bf16 or :f16 after their name.",
)
@isa_option
@click.option("--cpu-time", is_flag=True, help="Time the process's CPU time: for one thread, on a busy machine.")
@click.option("--max-error", default=1.0, show_default=True, help="Time results with so many times the allowed error.")
@click.option("--executables", type=click.Path(path_type=Path), help="Folder that keeps compiled files for reuse.")
@click.option("--compile-limit", default=300.0, show_default=True, help="Time limit of a compilation, in seconds.")
@click.option("--compile-only", is_flag=True, help="With --executables: compile only.")
@click.option("--memory", is_flag=True, help="Also measure the memory of a process that loads and runs.")
@click.option("--dispatches", default=0, help="Number of heaviest kernels to list, with the machine's peaks.")
@click.option("--seed", default=0, show_default=True, help="Seed of inputs and of the order of turns.")
@click.option("--json", "json_file", type=click.Path(path_type=Path, dir_okay=False), help="File to write results to.")
@click.option("--png", "png_file", type=click.Path(path_type=Path, dir_okay=False), help="File to draw the ratios to.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@smoke(models=(SMALL_MODEL,), threads=(1,), peers=("ours",), rounds=1, seconds=0.01, dims={})
def main(
    models: tuple[str, ...],
    threads: tuple[int, ...],
    peers: tuple[str, ...],
    rounds: int,
    seconds: float,
    cap: float,
    isolate: bool,
    dims: Mapping[str, Sequence[int]],
    precision: str,
    isa: str,
    cpu_time: bool,
    max_error: float,
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
    """Time MODELS (ONNX files or built-in models; default: all of these) here and in the installed libraries."""
    try:
        cases = cases_of(models or tuple(MAKERS), precision, dims)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="MODELS") from error
    results: list[dict[str, Any]] = []
    with _folder(executables) as folder, _progress() as progress:
        task = progress.add_task("starting")
        for case in cases:
            job = _referenced(case, folder, max(threads), seconds / max(rounds, 1), seed)
            for count in threads:
                progress.update(task, description=f"{case.label}, {count} threads: compiling")
                ready = replace(
                    job, action="turns", peers=peers, threads=count, isa=isa, cpu_time=cpu_time, max_error=max_error
                )
                ready, rows = prepare(
                    ready, folder, f"{case.label} {isa}".strip(), compile_limit, f"{case.family} {isa}".strip()
                )
                if not compile_only:
                    progress.update(task, description=f"{case.label}, {count} threads: running")
                    time_models(ready, rows, rounds, cap, isolate, seed)
                if memory:
                    progress.update(task, description=f"{case.label}, {count} threads: memory")
                    add_memory(ready, rows)
                if dispatches and OURS in ready.peers:
                    progress.update(task, description=f"{case.label}, {count} threads: dispatches")
                    rows[OURS]["profile"] = at_once(replace(ready, action="profile", peers=(OURS,)))
                results.append({"model": case.label, "threads": count, "isa": isa, "rows": rows})
                if json_file:  # each time, so that an interrupt does not lose results
                    json_file.write_text(json.dumps({"made": time.strftime("%Y-%m-%d"), "results": results}, indent=1))
    if png_file:
        from model_bench.chart import draw

        draw(results, png_file)
    if as_markdown:
        click.echo(markdown(results, dispatches))
    else:
        _print(results, dispatches)


def _referenced(case: Case, folder: Path, threads: int, seconds: float, seed: int) -> Job:
    """A job of the model, with inputs and ONNX Runtime's results in its file of arrays."""
    arrays = folder / f"{file_stem(case.label)}.npz"
    np.savez(arrays, **{f"in:{key}": array for key, array in random_inputs(case.path, case.dims, seed).items()})
    job = Job("reference", str(case.path), (), {}, threads, str(arrays), seconds, case.precision, case.allowed())
    reference = at_once(job)
    if "failure" in reference:
        raise click.ClickException(f"{case.label}: no reference by ONNX Runtime: {reference['failure']}")
    return job


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
    console = terminal()
    for title, columns, rows in all_tables(results, dispatches):
        console.print(rich_table(title, columns, rows, LEFT))
    for line in [*summary(results), *remarks(results)]:
        console.print(line, markup=False)


if __name__ == "__main__":
    main()
