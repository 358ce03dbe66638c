"""Queues: pipelines, halves of a call that overlap, the cost of submitting, and MiniLM cut over two cores.

python apps/bench/queues.py                             # all of it: two minutes
python apps/bench/queues.py pipeline halves --rounds 15
python apps/bench/queues.py minilm --json
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click
from bars import Check, verdict
from rich.console import Console
from rich.table import Table
from smoke import smoke

PARTS = ("pipeline", "halves", "latency", "minilm")
# Speed of a pipeline and of overlapping halves over the same without overlap; microseconds added by submitting.
PIPELINE_BAR, HALVES_BAR, LATENCY_BAR = 1.8, 1.7, 60


def _without_weights(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts without MiniLM, whose weights come from the network."""
    return tuple(part for part in parts or PARTS if part != "minilm") or PARTS[:1]


@click.command()
@click.argument("parts", nargs=-1, type=click.Choice(PARTS))
@click.option("--rounds", default=11, show_default=True, type=click.IntRange(1), help="Quiet turns of each program.")
@click.option("--calls", default=16, show_default=True, type=click.IntRange(1), help="Calls of a turn of a pipeline.")
@click.option("--width", default=512, show_default=True, type=click.IntRange(1), help="Rows of the square matrices.")
@click.option("--depth", default=6, show_default=True, type=click.IntRange(1), help="Layers of a stage or a half.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@smoke(parts=_without_weights, rounds=1, calls=2, width=16, depth=1)
def main(parts: tuple[str, ...], rounds: int, calls: int, width: int, depth: int, as_json: bool) -> None:
    """Measure PARTS (pipeline, halves, latency, minilm; all by default) on this CPU, a device per core."""
    # Devices of one core take one thread each unless the environment says otherwise; TVM reads it once.
    os.environ.pop("TVM_NUM_THREADS", None)
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    from queue_bench import measures

    figures_of_part: dict[str, dict[str, Any]] = {}
    for part in parts or PARTS:
        if part == "pipeline":
            figures_of_part[part] = measures.measure_pipeline(width, depth, calls, rounds)
        elif part == "halves":
            figures_of_part[part] = measures.measure_halves(width, depth, rounds)
        elif part == "latency":
            figures_of_part[part] = measures.measure_latency(rounds)
        else:
            from model_zoo import model_path

            figures_of_part[part] = measures.measure_minilm(model_path("minilm"), calls, rounds)
    reached = checks(figures_of_part)
    if as_json:
        rows = [
            {"what": check.what, "found": check.found, "bar": check.bar, "passed": check.passed} for check in reached
        ]
        click.echo(json.dumps({**figures_of_part, "checks": rows}))
    else:
        show(figures_of_part, reached)
    sys.exit(0 if all(check.passed for check in reached) else 1)


def checks(figures: dict[str, dict[str, Any]]) -> list[Check]:
    """The bars of the figures."""
    bars = []
    if "pipeline" in figures:
        bars.append(Check("pipeline of two stages over plain calls", figures["pipeline"]["speedup"], PIPELINE_BAR))
    for name, speedup in figures.get("halves", {}).get("speedup", {}).items():
        bars.append(Check(f"independent halves over one after the other, {name}", speedup, HALVES_BAR))
    if "latency" in figures:
        bars.append(Check("submit over a plain call, µs", figures["latency"]["added"], LATENCY_BAR, at_most=True))
    return bars


def show(figures_of_part: dict[str, dict[str, Any]], reached: list[Check]) -> None:
    """Print a table of every part, and the bars."""
    screen = Console()
    for part, figures in figures_of_part.items():
        quiet = f"{figures['quiet']} of {figures['rounds']} rounds quiet"
        table = Table(title=f"{part}: a call, median ({quiet})", title_justify="left")
        table.add_column("")
        table.add_column("µs", justify="right")
        table.add_column("speedup", justify="right")
        speedup = figures.get("speedup")
        for name, microseconds in figures["microseconds"].items():
            ratio = speedup.get(name) if isinstance(speedup, dict) else speedup if name == "submit" else None
            table.add_row(name, f"{microseconds:.1f}", "" if ratio is None else f"{ratio:.2f}")
        screen.print(table)
    for check in reached:
        screen.print(f"{verdict(check)}: {check}", markup=False)


if __name__ == "__main__":
    main()
