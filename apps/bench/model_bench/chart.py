"""A bar chart of the model benchmark: the speed of this library over each peer's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bars import geometric_mean
from model_peers import OURS, PEERS

from model_bench.report import Result, best_peer, ratio

_COLORS = {"onnxruntime": "#1f77b4", "openvino": "#9467bd", "iree": "#ff7f0e", "torch": "#d62728"}
_MAX_RATIO = 2.0  # end of the axis; longer bars show their number


def draw(results: Sequence[Result], file: Path) -> None:
    """Write a PNG: a panel per thread count, a bar per model (to its best peer), a mark per peer.

    Raises
    ------
    ImportError
        If matplotlib is not installed; it is in the ``bench`` extra.
    """
    from matplotlib.figure import Figure

    counts = list(dict.fromkeys(result["threads"] for result in results))
    models = len(dict.fromkeys(result["model"] for result in results))
    figure = Figure(figsize=(6.5 * len(counts), 1.6 + 0.34 * models), layout="constrained")
    for index, threads in enumerate(counts):
        axes = figure.add_subplot(1, len(counts), index + 1)
        group = [result for result in results if result["threads"] == threads and ratio(result)]
        _panel(axes, group, f"{threads} thread{'s' if threads > 1 else ''}")
    figure.savefig(file, dpi=130)


def _panel(axes: object, group: Sequence[Result], title: str) -> None:
    ratios = [ratio(result) or 0.0 for result in group]
    rows = range(len(group))
    colors = ["#4c9a6a" if value >= 1 else "#c9a227" if value >= 0.9 else "#c0504d" for value in ratios]
    axes.barh(rows, [min(value, _MAX_RATIO) for value in ratios], color=colors, height=0.66, zorder=2)
    for row, (result, value) in enumerate(zip(group, ratios, strict=True)):
        best = best_peer(result)
        name = PEERS[best[0]].name if best else ""
        axes.text(0.02, row, f"{value:.2f}  {name}", va="center", fontsize=8, color="white", zorder=4)
    for key, color in _COLORS.items():
        marks = [(value, row) for row, result in enumerate(group) if (value := ratio(result, key))]
        if marks and key != OURS:
            x, y = zip(*((min(value, _MAX_RATIO), row) for value, row in marks), strict=True)
            axes.scatter(x, y, s=26, color=color, edgecolor="white", linewidth=0.6, zorder=5, label=PEERS[key].name)
    axes.axvline(1.0, color="black", linewidth=1, zorder=3)
    axes.set_yticks(list(rows), [result["model"] for result in group], fontsize=9)
    axes.set_xlim(0, _MAX_RATIO + 0.05)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3, zorder=0)
    mean = geometric_mean([value for value in ratios if value])
    axes.set_title(f"{title}: geometric mean {mean:.2f}" if ratios else title, fontsize=11)
    axes.set_xlabel("peer's time over ours; bar: the best peer, marks: each (above 1 we are faster)", fontsize=8)
    if group:
        axes.legend(loc="lower right", fontsize=8)
