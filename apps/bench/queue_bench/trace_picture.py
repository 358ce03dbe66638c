"""A picture of a trace that `relax-hetero bench --trace` or `Trace.save` wrote.

python apps/bench/queue_bench/trace_picture.py out.json picture.svg
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

Event = dict[str, Any]

# Share of the width below which bars are not labelled.
NARROW = 0.05


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--title", default="", help="Title above the picture.")
def main(trace: Path, picture: Path, title: str) -> None:
    """Draw TRACE (JSON) as PICTURE (.svg or .png): a row for each track, colours by call, arrows for flows."""
    draw(json.loads(trace.read_text())["traceEvents"], picture, title)


def draw(events: list[Event], picture: Path, title: str) -> None:
    """Draw events of a trace.

    Raises
    ------
    ImportError
        If matplotlib is not installed; it is in the ``bench`` extra.
    """
    import matplotlib
    from matplotlib.figure import Figure

    slices = [event for event in events if event["ph"] == "X"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    rows = {track: row for row, track in enumerate(sorted(names))}
    begin = min(event["ts"] for event in slices)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "trace", "font.size": 8}):
        figure = Figure(figsize=(11, 1.6 + 0.42 * len(rows)), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [len(rows), 1.6]})
        _tracks(upper, slices, rows, begin)
        _arrows(upper, events, rows, begin)
        upper.set_yticks(list(rows.values()), [names[track] for track in rows])
        upper.set_ylim(len(rows) - 0.4, -0.6)
        upper.set_title(title, loc="left")
        _counters(lower, events, begin)
        lower.set_xlabel("ms")
        figure.savefig(picture, dpi=130, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _milliseconds(event: Event, begin: float) -> float:
    return (event["ts"] - begin) / 1e3


def _tracks(axes: Any, slices: list[Event], rows: dict[int, int], begin: float) -> None:
    import matplotlib

    colors = matplotlib.colormaps["tab20"].colors
    last = max(event["ts"] + event["dur"] for event in slices)
    for event in slices:
        row, start, width = rows[event["tid"]], _milliseconds(event, begin), event["dur"] / 1e3
        call = event["args"]["call"]
        faint = 0.45 if event["cat"] == "call" else 1.0
        axes.barh(row, width, left=start, height=0.62, color=colors[call % 20], alpha=faint, linewidth=0, zorder=2)
        if event["dur"] > NARROW * (last - begin):
            label = f"{event['name']}, {call}"
            axes.text(start + width / 2, row, label, ha="center", va="center", fontsize=6, clip_on=True, zorder=4)
    axes.grid(axis="x", alpha=0.3, zorder=0)
    axes.set_xlim(0, (last - begin) / 1e3)


def _arrows(axes: Any, events: list[Event], rows: dict[int, int], begin: float) -> None:
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    for end in (event for event in events if event["ph"] == "f"):
        source = sent[end["id"]]
        points = [(_milliseconds(event, begin), rows[event["tid"]]) for event in (source, end)]
        style = {"arrowstyle": "-|>", "linewidth": 0.6, "color": "#444444", "alpha": 0.7, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", xy=points[1], xytext=points[0], arrowprops=style, zorder=3)


def _counters(axes: Any, events: list[Event], begin: float) -> None:
    memory = [event for event in events if event["ph"] == "C" and event["name"] == "bytes between steps"]
    times = [_milliseconds(event, begin) for event in memory]
    for series in memory[0]["args"] if memory else ():
        axes.step(times, [event["args"][series] / 1024 for event in memory], where="post", label=series, linewidth=1)
    axes.set_ylabel("KiB between\nsteps")
    axes.set_ylim(bottom=0)
    axes.grid(axis="x", alpha=0.3)
    if memory:
        axes.legend(loc="upper right", fontsize=6, ncols=4)


if __name__ == "__main__":
    main()
