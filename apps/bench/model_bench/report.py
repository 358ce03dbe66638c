"""The report of the model benchmark: times, ratios to the best peer of each model, geometric means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bars import geometric_mean
from model_peers import NO_PEERS, OURS, PEERS, SYMBOLIC

from model_bench.dispatches import COLUMNS, Dispatch, Roof, dispatch_cells

Result = dict[str, Any]
Table = tuple[str, list[str], list[list[str]]]
LEFT = ("model", "best peer", "dispatch", "bound by")
"""Columns of text."""


def best_peer(result: Result) -> tuple[str, float] | None:
    """The fastest other contestant of a result by its median, in milliseconds; of those held to its instructions."""
    left_out = {*NO_PEERS, *(key for key, peer in PEERS.items() if result.get("isa") and not peer.held)}
    measured = {
        key: row["median_ms"] for key, row in result["rows"].items() if key not in left_out and "median_ms" in row
    }
    return min(measured.items(), key=lambda item: item[1]) if measured else None


def ratio(result: Result, peer: str | None = None) -> float | None:
    """A peer's time over ours, the best one's by default: above 1 is faster."""
    own = result["rows"].get(OURS, {}).get("median_ms")
    best = best_peer(result)
    other = result["rows"].get(peer, {}).get("median_ms") if peer else best[1] if best else None
    return other / own if own and other else None


def tables(results: Sequence[Result]) -> list[Table]:
    """Title, columns and cells of a table per thread count; milliseconds, median (fastest)."""
    all_tables = []
    for threads in dict.fromkeys(result["threads"] for result in results):
        group = [result for result in results if result["threads"] == threads]
        keys = [key for key in PEERS if any("median_ms" in result["rows"].get(key, {}) for result in group)]
        rows = [[result["model"], *(_cell(result["rows"].get(key, {})) for key in keys)] for result in group]
        columns = ["model", *(PEERS[key].name for key in keys), "best peer", "ratio", "compiled, s", "error"]
        for row, result in zip(rows, group, strict=True):
            best, value, own = best_peer(result), ratio(result), result["rows"].get(OURS, {})
            row += [PEERS[best[0]].name if best else "", f"{value:.3f}" if value else ""]
            row += [f"{own['compile_seconds']:.1f}" if "compile_seconds" in own else ""]
            row += [f"{own['error']:.2g}" if "error" in own else ""]
        if SYMBOLIC in keys:
            columns.append("any size / static")
            for row, result in zip(rows, group, strict=True):
                slower = _slower_by_any_size(result)
                row.append(f"{slower:.3f}" if slower else "")
        title = f"{threads} thread{'s' if threads > 1 else ''}: ms, median (fastest); error 1 is what is allowed"
        all_tables.append((title, columns, rows))
    return all_tables


def memory_tables(results: Sequence[Result]) -> list[Table]:
    """Title, columns and cells of a table per thread count; none where no memory was measured."""
    tables = []
    for threads in dict.fromkeys(result["threads"] for result in results):
        group = [result for result in results if result["threads"] == threads]
        keys = [key for key in PEERS if any("running" in _memory(result, key) for result in group)]
        rows = []
        for result in group:
            own, ort = (_memory(result, key).get("running") for key in (OURS, "onnxruntime"))
            cells = [
                f"{memory['running'] / 1e6:.0f} ({memory['after'] / 1e6:.0f})" if "running" in memory else "–"
                for memory in (_memory(result, key) for key in keys)
            ]
            rows.append([result["model"], *cells, f"{own / ort:.2f}" if own and ort else ""])
        if keys:
            title = f"{threads} thread{'s' if threads > 1 else ''}: MB above the imports, peak (after three calls)"
            tables.append((title, ["model", *(PEERS[key].name for key in keys), "of ONNX Runtime's"], rows))
    return tables


def dispatch_tables(results: Sequence[Result], count: int) -> list[Table]:
    """A table of our heaviest kernels for each model and thread count that was profiled."""
    tables = []
    for result in results:
        profile = result["rows"].get(OURS, {}).get("profile", {})
        if "dispatches" not in profile:
            continue
        roof = Roof(**profile["roof"])
        rows = [dispatch_cells(Dispatch(**row), roof) for row in profile["dispatches"][:count]]
        title = f"{result['model']}, {result['threads']} thread{'s' if result['threads'] > 1 else ''}: "
        title += f"peak {roof.operations / 1e9:.0f} GFLOP/s, memory {roof.bytes / 1e9:.0f} GB/s"
        tables.append((title, COLUMNS, rows))
    return tables


def all_tables(results: Sequence[Result], dispatches: int = 0) -> list[Table]:
    """Times, memory, and the heaviest `dispatches` kernels, as far as they were measured."""
    return [*tables(results), *memory_tables(results), *dispatch_tables(results, dispatches)]


def summary(results: Sequence[Result]) -> list[str]:
    """Geometric means of ratios, by thread count: to the best peer, and to each."""
    lines = []
    for threads in dict.fromkeys(result["threads"] for result in results):
        group = [result for result in results if result["threads"] == threads]
        parts = []
        for key in (None, *(key for key in PEERS if key not in (OURS, SYMBOLIC))):
            ratios = [value for result in group if (value := ratio(result, key))]
            if ratios:
                name = PEERS[key].name if key else "the best peer"
                parts.append(f"{geometric_mean(ratios):.3f} of {name} ({len(ratios)})")
        if parts:
            lines.append(f"{threads} thread{'s' if threads > 1 else ''}, geometric mean: {', '.join(parts)}")
        if slower := [value for result in group if (value := _slower_by_any_size(result))]:
            mean = f"{geometric_mean(slower):.3f} in the geometric mean, {max(slower):.3f} at most"
            lines.append(f"{threads} thread{'s' if threads > 1 else ''}, any size over static: {mean} ({len(slower)})")
    return lines


def remarks(results: Sequence[Result]) -> list[str]:
    """Failures of contestants, each once, and the precisions of their products."""
    texts: dict[str, None] = {}
    for result in results:
        for key, row in result["rows"].items():
            if row.get("unsupported"):
                texts[f"{PEERS[key].name}: {row['unsupported']}"] = None
            if row.get("failure"):
                texts[f"{PEERS[key].name}, {result['model']}, {result['threads']} threads: {row['failure']}"] = None
            if row.get("products"):
                counts = ", ".join(f"{count} in {precision}" for precision, count in sorted(row["products"].items()))
                texts[f"{PEERS[key].name}, {result['model']}: products {counts}"] = None
            if row.get("note"):
                texts[f"{PEERS[key].name}: {row['note']}"] = None
    return list(texts)


def markdown(results: Sequence[Result], dispatches: int = 0) -> str:
    """The tables as Markdown."""
    lines = []
    for title, columns, rows in all_tables(results, dispatches):
        lines += [f"### {title}", "", _line(columns), _line(["---"] * len(columns)), *map(_line, rows), ""]
    return "\n".join([*lines, *(f"- {line}" for line in [*summary(results), *remarks(results)]), ""])


def _slower_by_any_size(result: Result) -> float | None:
    """The time of the executable for any size over that of the one for this size."""
    static, symbolic = (result["rows"].get(key, {}).get("median_ms") for key in (OURS, SYMBOLIC))
    return symbolic / static if static and symbolic else None


def _memory(result: Result, key: str) -> dict[str, Any]:
    figures: dict[str, Any] = result["rows"].get(key, {}).get("memory", {})
    return figures


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(row: dict[str, Any]) -> str:
    if "median_ms" not in row:
        return "–"
    digits = 1 if row["median_ms"] > 20 else 2
    return f"{row['median_ms']:.{digits}f} ({row['fastest_ms']:.{digits}f})"
