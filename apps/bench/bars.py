"""Results of the matmul benchmark: ratios to the best peer of each shape, geometric means, and their bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "relax-hetero"
# Our speed over the best peer's: geometric mean, minimum over all shapes, minimum at M = 1.
BARS: dict[str, tuple[float, float, float]] = {
    "f32": (1.02, 0.94, 0.90),
    "u8s8": (1.05, 0.0, 0.0),
    "s8s8": (1.00, 0.0, 0.0),
    "bf16": (1.05, 0.0, 0.0),
}
NO_WEIGHT_BAR = 0.95
FOUR_BITS_BAR = 3.0  # speed of weights of 4 bits over our own float32, one row
# Share of the peak on one thread; speed over stock TVM; the shape that both are for.
PEAK_BAR, STOCK_BAR, LARGE = 0.95, 100.0, "1024x1024x1024"
COMPILE_BAR = 1.0  # seconds for a product, at most


@dataclass(frozen=True)
class Check:
    """A number and its bar, a minimum or a maximum."""

    what: str
    found: float
    bar: float
    at_most: bool = False

    @property
    def passed(self) -> bool:
        """True if the bar is reached."""
        return self.found <= self.bar if self.at_most else self.found >= self.bar

    def __str__(self) -> str:
        return f"{self.what}: {self.found:.3f}, at {'most' if self.at_most else 'least'} {self.bar:g}"


SIMULATION_BAR = 0.15
"""Maximum difference of a simulated time from the measured one."""


def simulated_time(name: str, seconds: float, simulated: float) -> Check:
    """Print the verdict on a simulated time beside the measured one of the same work, and return it."""
    ratio = simulated / seconds
    check = Check(f"{name}: difference of the simulated time", abs(ratio - 1), SIMULATION_BAR, at_most=True)
    times = f"measured {seconds * 1e3:.3f} ms, simulated {simulated * 1e3:.3f} ms, {ratio:.2f}"
    print(f"{verdict(check)}: {name}: {times}", flush=True)
    return check


def speed(row: dict[str, Any] | None) -> float | None:
    """Median Gop/s of a contestant's row, None if it has none."""
    return row.get("median_gops") if row else None


def best_peer(result: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest other contestant of a result by its median."""
    speeds = {name: speed(row) for name, row in result["rows"].items() if name != OURS}
    measured = {name: value for name, value in speeds.items() if value is not None}
    return max(measured.items(), key=lambda item: item[1]) if measured else None


def ratio(result: dict[str, Any]) -> float | None:
    """Our speed over the best peer's."""
    own, best = speed(result["rows"].get(OURS)), best_peer(result)
    return own / best[1] if own is not None and best is not None else None


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of positive numbers; NaN of none."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def checks(results: Sequence[dict[str, Any]]) -> list[Check]:
    """The bars for each type and thread count; one without a correct result is missed."""
    bars = []
    for (kind, threads), group in grouped(results).items():
        title = f"{kind}, {threads} thread{'s' if threads > 1 else ''}"
        for weight in (True, False):
            part = [result for result in group if result["weight"] == weight]
            ratios = {result["shape"]: ratio(result) or math.nan for result in part}
            if not ratios:
                continue
            mean = geometric_mean(list(ratios.values()))
            if not weight:
                bars.append(Check(f"{title}: geometric mean without weights", mean, NO_WEIGHT_BAR))
                low = {shape: value for shape, value in ratios.items() if not value >= NO_WEIGHT_BAR}
                bars += [Check(f"{title}: {shape} without weights", low[shape], NO_WEIGHT_BAR) for shape in low]
                continue
            if kind not in BARS:
                continue
            min_mean, min_ratio, min_row_ratio = BARS[kind]
            bars.append(Check(f"{title}: geometric mean over the best peer", mean, min_mean))
            for shape, value in ratios.items():
                bar = min_row_ratio if shape.startswith("1x") else min_ratio
                if bar and not value >= bar:
                    bars.append(Check(f"{title}: {shape}", value, bar))
        bars += _large(title, group, kind, threads)
    bars += _four_bits(results)
    seconds = [result["rows"].get(OURS, {}).get("compile_seconds") for result in results]
    slowest = max((value for value in seconds if value is not None), default=None)
    if slowest is not None:
        bars.append(Check("longest compilation of a product, seconds", slowest, COMPILE_BAR, at_most=True))
    return bars


def _large(title: str, group: Sequence[dict[str, Any]], kind: str, threads: int) -> list[Check]:
    bars = []
    for result in group:
        own, peak = speed(result["rows"].get(OURS)), speed(result.get("peak"))
        stock = speed(result["rows"].get("stock TVM"))
        if result["full_shape"] != LARGE or own is None or kind != "f32":
            continue
        if peak is not None and threads == 1 and result["weight"]:
            bars.append(Check(f"{title}: {result['shape']} over the peak", own / peak, PEAK_BAR))
        if stock is not None:
            bars.append(Check(f"{title}: {result['shape']} over stock TVM", own / stock, STOCK_BAR))
    return bars


def _four_bits(results: Sequence[dict[str, Any]]) -> list[Check]:
    own = {
        (one["kind"], one["shape"], one["threads"]): speed(one["rows"].get(OURS)) for one in results if one["weight"]
    }
    bars = []
    for (kind, shape, threads), value in own.items():
        plain = own.get(("f32", shape, threads))
        if kind == "q4" and shape.startswith("1x") and value and plain:
            title = f"q4, {threads} thread{'s' if threads > 1 else ''}"
            bars.append(Check(f"{title}: {shape} over our f32", value / plain, FOUR_BITS_BAR))
    return bars


def grouped(results: Iterable[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Results by type and thread count, in order of appearance."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["kind"], result["threads"]), []).append(result)
    return groups


def tables(results: Sequence[dict[str, Any]]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and cells of a table per type and thread count; speeds are Gop/s, median (fastest)."""
    output = []
    for (kind, threads), group in grouped(results).items():
        names = [name for name in group[0]["rows"] if any(speed(result["rows"].get(name)) for result in group)]
        columns = ["shape", *names, "kernel alone", "peak", "best peer", "ratio"]
        rows = []
        for result in group:
            best, value = best_peer(result), ratio(result)
            kernel = result["rows"].get(OURS, {}).get("kernel")
            rows.append(
                [
                    result["shape"] + ("" if result["weight"] else " (no weight)"),
                    *(_cell(result["rows"].get(name)) for name in names),
                    _cell(kernel),
                    _cell(result.get("peak")),
                    best[0] if best else "",
                    f"{value:.3f}" if value is not None else "",
                ]
            )
        output.append((f"{kind}, {threads} thread{'s' if threads > 1 else ''}: Gop/s, median (fastest)", columns, rows))
    return output


def remarks(results: Sequence[dict[str, Any]]) -> list[str]:
    """Notes on what contestants compute, what they do not support, and failures; each once."""
    texts: dict[str, None] = {}
    for result in results:
        for name, row in result["rows"].items():
            if row.get("note") and name != OURS:
                texts[f"{result['kind']}, {name}: {row['note']}"] = None
            if row.get("unsupported"):
                texts[f"{result['kind']}, {name}: none, {row['unsupported']}"] = None
            if row.get("failure"):
                texts[f"{result['kind']}, {name}, {result['shape']}: {row['failure']}"] = None
    return list(texts)


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The whole report as Markdown."""
    lines = []
    for title, columns, rows in tables(results):
        lines += [f"### {title}", "", _line(columns), _line(["---"] * len(columns)), *map(_line, rows), ""]
    lines += [f"- {verdict(check)}: {check}" for check in checks(results)]
    return "\n".join([*lines, "", *(f"- {remark}" for remark in remarks(results)), ""])


def verdict(check: Check) -> str:
    """``reached`` or ``missed``."""
    return "reached" if check.passed else "missed"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(row: dict[str, Any] | None) -> str:
    value = speed(row)
    if row is None or value is None:
        return "–"
    digits = 1 if value < 100 else 0
    return f"{value:.{digits}f} ({row['fastest_gops']:.{digits}f})"
