"""Matrix products against other libraries and the peak of the arithmetic: medians of interleaved turns.

python apps/bench/matmul.py                                        # every shape and type, 1 and 2 threads: an hour
python apps/bench/matmul.py --types f32 --shapes 1024,1x4096x4096 --threads 1 --peers torch,openvino
python apps/bench/matmul.py --no-weight --types f32 --markdown
python apps/bench/matmul.py --types f32,q4 --shapes 1x4096x4096    # weights of 4 bits and of float32
python apps/bench/matmul.py --types f32,f16 --shapes 1024          # float16, which AVX512-FP16 multiplies
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import click
from bars import checks, markdown, remarks, tables, verdict
from model_bench.rich_tables import rich_table, terminal
from peers.matmul_worker import Job
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from smoke import smoke

TYPES = ("f32", "u8s8", "s8s8", "bf16")
OTHER_TYPES = ("q4", "f16")
SHAPES = (
    "256,512,1024,2048,1x4096x4096,8x4096x4096,32x4096x4096,128x768x768,128x768x3072,128x3072x768,127x255x511,"
    "12*128x64x128"
)
PACKAGES = ("tvm", "numpy", "onnxruntime", "torch", "openvino", "iree")


def run(job: Job, describe: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Yield a worker's results when they arrive; ClickException if it fails."""
    with subprocess.Popen(job.command(), env=job.environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            if "begins" in result:
                describe(f"{result['begins']}, {job.threads} threads")
            else:
                yield result
    if process.returncode:
        raise click.ClickException(f"the process for {job.threads} threads ended with status {process.returncode}")


def _listed(choices: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str], tuple[str, ...]]:
    def parse(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
        items = tuple(item.strip() for item in text.split(",") if item.strip())
        for item in items:
            if choices and item not in choices:
                raise click.BadParameter(f"{item!r} is none of {', '.join(choices)}", param=parameter)
        return items

    return parse


def _shapes(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    from peers.shape import Shape

    shapes = tuple(item.strip() for item in text.split(",") if item.strip())
    for shape in shapes:
        try:
            Shape.parse(shape)
        except ValueError as error:
            raise click.BadParameter(str(error), param=parameter) from error
    return shapes


def _threads(_context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(item) for item in text.split(",") if int(item) > 0)
    except ValueError as error:
        raise click.BadParameter(f"{text!r}: expected numbers of threads, as in 1,2", param=parameter) from error


@click.command()
@click.option("--shapes", default=SHAPES, callback=_shapes, help="MxKxN, N for a cube, B*MxKxN for a batch; a list.")
@click.option("--types", default=",".join(TYPES), show_default=True, callback=_listed((*TYPES, *OTHER_TYPES)))
@click.option("--threads", default="1,2", show_default=True, callback=_threads, help="Numbers of threads, in turn.")
@click.option("--peers", default="", callback=_listed(PACKAGES), help=f"Some of {', '.join(PACKAGES)}; default: all.")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(1), help="Turns of each contestant.")
@click.option("--no-weight", is_flag=True, help="Make the right operand an activation, too.")
@click.option("--seed", default=0, show_default=True, help="Seed of operands and of the order of turns.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown.")
@smoke(shapes=("64",), threads=(1,), peers=("numpy",), rounds=1)
def main(
    shapes: tuple[str, ...],
    types: tuple[str, ...],
    threads: tuple[int, ...],
    peers: tuple[str, ...],
    rounds: int,
    no_weight: bool,
    seed: int,
    as_json: bool,
    as_markdown: bool,
) -> None:
    """Time matrix products here and in the installed libraries of the `bench` extra."""
    results = []
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*bars, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting", total=len(shapes) * len(types) * len(threads))
        for count in threads:
            job = Job(types, shapes, peers, count, rounds, no_weight, seed)
            for result in run(job, lambda text: progress.update(task, description=text)):
                results.append(result)
                progress.advance(task)
    if as_json:
        click.echo(json.dumps(results, indent=1))
    elif as_markdown:
        click.echo(markdown(results))
    else:
        _print(results)


def _print(results: list[dict[str, Any]]) -> None:
    console = terminal()
    for title, columns, rows in tables(results):
        console.print(rich_table(title, columns, rows, ("shape", "best peer")))
    for check in checks(results):
        color = "green" if check.passed else "red"
        console.print(f"[{color}]{verdict(check)}[/] {check}")
    for remark in remarks(results):
        console.print(remark, markup=False, style="dim")


if __name__ == "__main__":
    main()
