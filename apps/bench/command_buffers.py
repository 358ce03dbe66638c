"""Command buffers against the same library without them: kernels, calls, whole models, compile time, memory.

python apps/bench/command_buffers.py elementwise            # 2 to 1,000 kernels on 16 floats, also in stock TVM
python apps/bench/command_buffers.py models shufflenet minilm --threads 1 --executables .cache/executables
python apps/bench/command_buffers.py compile kernels:300 densenet121
python apps/bench/command_buffers.py memory
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from bars import Check, verdict
from model_bench.rich_tables import rich_table, terminal
from smoke import SMALL_MODEL, smoke

LEFT = ("model", "region", "bits")
"""Columns of text."""
COMPILED = ("kernels:300", "densenet121", "shufflenet", "mobilenet_v3")

_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_seed = click.option("--seed", default=0, show_default=True, help="Seed of inputs and of the order of turns.")


def _numbers(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(item) for item in text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected numbers, as in 1,2", param=parameter) from error
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r}: expected numbers from 1 on", param=parameter)
    return numbers


def _model(name: str) -> tuple[str, Path]:
    from model_zoo import model_path

    try:
        return Path(name).stem, model_path(name)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.group()
def main() -> None:
    """Measure command buffers against the same library without them."""


@main.command()
@click.option("--counts", default="2,10,100,1000", show_default=True, callback=_numbers, help="Lengths of chains.")
@click.option("--distinct", default=4, show_default=True, type=click.IntRange(1), help="Distinct kernels of a chain.")
@click.option("--symbolic", is_flag=True, help="Use a symbolic extent.")
@click.option("--rounds", default=30, show_default=True, type=click.IntRange(1), help="Turns of each contestant.")
@_seed
@_json
@smoke(counts=(2, 10), rounds=1)
def elementwise(counts: tuple[int, ...], distinct: int, symbolic: bool, rounds: int, seed: int, as_json: bool) -> None:
    """Time chains of small kernels: the cost of a kernel, and of a call of few kernels."""
    from command_buffer_bench.elementwise import (
        WrongResult,
        elementwise_checks,
        elementwise_table,
        measure_elementwise,
    )

    try:
        figures = measure_elementwise(counts, distinct, symbolic, rounds, seed)
    except WrongResult as error:
        raise click.ClickException(str(error)) from error
    _say(figures, elementwise_table(figures), elementwise_checks(figures), as_json)


@main.command()
@click.argument("names", nargs=-1)
@click.option("--threads", default="1,2", show_default=True, callback=_numbers, help="Threads of each contestant.")
@click.option("--rounds", default=7, show_default=True, type=click.IntRange(0), help="Turns of each; 0 checks only.")
@click.option("--seconds", default=2.0, show_default=True, help="Timed seconds of each contestant, in all its turns.")
@click.option("--executables", type=click.Path(path_type=Path), help="Folder that keeps compiled files for reuse.")
@click.option("--compile-only", is_flag=True, help="With --executables: compile only.")
@_seed
@_json
@smoke(names=(SMALL_MODEL,), threads=(1,), rounds=1, seconds=0.01)
def models(
    names: Sequence[str],
    threads: tuple[int, ...],
    rounds: int,
    seconds: float,
    executables: Path | None,
    compile_only: bool,
    seed: int,
    as_json: bool,
) -> None:
    """Time NAMES (ONNX files or built-in models) with command buffers, without them, and in ONNX Runtime."""
    from command_buffer_bench.model_report import model_checks, model_failures, model_table
    from command_buffer_bench.models import MODELS, measure_models

    chosen = [_model(name) for name in names or MODELS]
    with contextlib.ExitStack() as stack:
        folder = executables or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        results = list(measure_models(chosen, threads, rounds, seconds, folder, seed, compile_only))
    _say(results, model_table(results), model_checks(results), as_json)
    if failures := model_failures(results):
        raise click.ClickException("; ".join(failures))


@main.command("compile")
@click.argument("names", nargs=-1)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1), help="Number of compilations of each.")
@_json
@smoke(names=("kernels:2",), rounds=1)
def compile_time(names: Sequence[str], rounds: int, as_json: bool) -> None:
    """Compile NAMES (as for `models`, or kernels:N for N distinct kernels) with and without command buffers."""
    from command_buffer_bench.compiling import CHAIN, compile_checks, compile_table, measure_compile

    rows = []
    for name in names or COMPILED:
        label, path = (name, name) if name.startswith(CHAIN) else _model(name)
        try:
            rows.append(measure_compile(label, str(path), rounds))
        except RuntimeError as error:
            raise click.ClickException(str(error)) from error
    _say(rows, compile_table(rows), compile_checks(rows), as_json)


@main.command(hidden=True)
@click.argument("model")
@click.option("--without", is_flag=True, help="Without command buffers.")
def compile_here(model: str, without: bool) -> None:
    """Compile in this process and print the seconds; `compile` runs this."""
    from command_buffer_bench import compiling

    click.echo(json.dumps(compiling.compile_here(model, not without)))


@main.command()
@click.option("--kernels", default=100, show_default=True, type=click.IntRange(1), help="Kernels of the region.")
@click.option("--submissions", default=10_000, show_default=True, type=click.IntRange(100))
@_json
@smoke(kernels=2, submissions=100)
def memory(kernels: int, submissions: int, as_json: bool) -> None:
    """Submit a region many times with new bindings: resident memory must not grow."""
    from command_buffer_bench.growth import measure_memory, memory_checks, memory_table

    try:
        rows = measure_memory(kernels, submissions)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    _say(rows, memory_table(rows), memory_checks(rows), as_json)


def _say(figures: Any, table: tuple[str, list[str], list[list[str]]], checks: Sequence[Check], as_json: bool) -> None:
    """Print the measurements, and whether they reach their bars."""
    if as_json:
        bars = [
            {"what": check.what, "found": check.found, "bar": check.bar, "passed": check.passed} for check in checks
        ]
        click.echo(json.dumps({"found": figures, "checks": bars}, indent=1))
        return
    title, columns, rows = table
    console = terminal()
    console.print(rich_table(title, columns, rows, LEFT))
    for check in checks:
        console.print(f"{verdict(check)}: {check}", markup=False)


if __name__ == "__main__":
    main()
