"""The report on whole models with and without command buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bars import Check, geometric_mean
from model_peers import OURS

WITHOUT, REFERENCE = "bytecode", "onnxruntime"
# Models of many small kernels must be faster in command buffers; all others not slower than the noise of turns.
MANY_SMALL, NOISE = ("shufflenet", "shufflenet_v2"), 0.98


def ratio(result: dict[str, Any]) -> float | None:
    """The time without command buffers over the time with them: above 1 they are faster."""
    own, other = (result["rows"].get(key, {}).get("median_ms") for key in (OURS, WITHOUT))
    return other / own if own and other else None


def model_checks(results: Sequence[dict[str, Any]]) -> list[Check]:
    """The bars of the ratios, and of their geometric mean by thread count."""
    checks = []
    for threads in dict.fromkeys(result["threads"] for result in results):
        ratios = {r["model"]: value for r in results if r["threads"] == threads and (value := ratio(r))}
        for model, value in ratios.items():
            checks.append(Check(f"{model}, {threads} threads", value, 1.0 if model in MANY_SMALL else NOISE))
        if ratios:
            checks.append(Check(f"geometric mean, {threads} threads", geometric_mean(list(ratios.values())), 1.0))
    return checks


def model_table(results: Sequence[dict[str, Any]]) -> tuple[str, list[str], list[list[str]]]:
    """Title, columns and cells."""
    rows = []
    for result in results:
        counts, value = result.get("peers", {}).get(OURS, {}), ratio(result)
        cells = [_cell(result["rows"].get(key, {})) for key in (OURS, WITHOUT)]
        own = result["rows"].get(OURS, {})
        rows.append(
            [
                result["model"],
                str(result["threads"]),
                *(str(counts.get(key, "–")) for key in ("regions", "commands")),
                *cells,
                f"{value:.3f}" if value else "–",
                _cell(result["rows"].get(REFERENCE, {})),
                {True: "equal", False: "different", None: "–"}[result.get("equal")],
                f"{own['error']:.2g}" if "error" in own else "–",
            ]
        )
    columns = ["model", "threads", "regions", "commands", "command buffers", "without", "ratio", "ONNX Runtime"]
    title = "ms, median (fastest); bits of both; error, where 1 is what is allowed"
    return title, [*columns, "bits", "error"], rows


def model_failures(results: Sequence[dict[str, Any]]) -> list[str]:
    """Failures, a line each."""
    lines = []
    for result in results:
        where = f"{result['model']}, {result['threads']} threads"
        for key, row in [*result["rows"].items(), ("regions", result)]:
            if why := row.get("failure") or row.get("unsupported"):
                lines.append(f"{where}, {key}: {why}")
        if result.get("equal") is False:
            lines.append(f"{where}: command buffers compute other bits than bytecode")
    return lines


def _cell(row: dict[str, Any]) -> str:
    return f"{row['median_ms']:.3f} ({row['fastest_ms']:.3f})" if "median_ms" in row else "–"
