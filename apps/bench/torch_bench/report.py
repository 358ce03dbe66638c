"""The report of the benchmark of PyTorch networks: ratios of both of our importers to their peers, and means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bars import geometric_mean
from model_peers import FROM_TORCH, OURS, PEERS

PAIRS = ((OURS, "onnxruntime"), (FROM_TORCH, "inductor"), (FROM_TORCH, "frozen"), (FROM_TORCH, "eager"))
"""Pairs of contestants; a ratio is the second's time over the first's."""
Result = dict[str, Any]


def median(result: Result, key: str) -> float | None:
    """Milliseconds of a contestant, None if it has none."""
    milliseconds: float | None = result["rows"].get(key, {}).get("median_ms")
    return milliseconds


def ratio(result: Result, pair: tuple[str, str]) -> float | None:
    """The speed of the first contestant over the second's."""
    own, other = (median(result, key) for key in pair)
    return other / own if own and other else None


def table(results: Sequence[Result]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells: median milliseconds of all, and a ratio for each of `PAIRS` that was timed."""
    keys = [key for key in PEERS if any(median(result, key) for result in results)]
    pairs = [pair for pair in PAIRS if set(pair) <= set(keys)]
    columns = ["model", *(PEERS[key].name for key in keys), *(_heading(pair) for pair in pairs)]
    rows = []
    for result in results:
        times = [f"{value:.2f}" if (value := median(result, key)) else "–" for key in keys]
        ratios = [f"{value:.2f}" if (value := ratio(result, pair)) else "–" for pair in pairs]
        rows.append([result["model"], *times, *ratios])
    threads = results[0]["threads"] if results else 0
    return f"{threads} threads: median ms, and how many times as fast we are", columns, rows


def summary(results: Sequence[Result]) -> list[str]:
    """Geometric mean and lowest ratio of each of `PAIRS`."""
    lines = []
    for pair in PAIRS:
        ratios = {result["model"]: value for result in results if (value := ratio(result, pair))}
        if ratios:
            lowest = min(ratios, key=lambda model: ratios[model])
            mean = geometric_mean(list(ratios.values()))
            lines.append(f"{_heading(pair)}: {mean:.3f}, lowest {ratios[lowest]:.3f} of {lowest} ({len(ratios)})")
    return lines


def _heading(pair: tuple[str, str]) -> str:
    return f"{'from_onnx' if pair[0] == OURS else 'from_torch'} against {PEERS[pair[1]].name}"
