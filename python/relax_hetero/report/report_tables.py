"""The tables of an explanation as data: what a report shows is what ``explain`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SECTIONS = ("encodings", "kernels", "commands", "steps", "memory", "token")
_KINDS = {"bytes": "bytes"}


def tables_of(explanation: Any) -> list[dict[str, Any]]:
    """Every table of an explanation, in its order."""
    ops = ("variable", "op", "device", "bytes", "reason", "function")
    found = [_entries("ops", "Ops", explanation.of_kind("op"), ops)]
    moved = ("variable", "device", "bytes", "reason", "function")
    found.append(_entries("transfers", "Transfers", explanation.of_kind("transfer"), moved))
    for section in _SECTIONS:
        shown = [part for part in explanation.tables(section) if not isinstance(part, str)]
        found += [_shown(f"{section}-{number}" if number else section, part) for number, part in enumerate(shown)]
    return [table for table in found if table["rows"]]


def _entries(name: str, title: str, entries: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> dict[str, Any]:
    columns = [{"name": key, "kind": _KINDS.get(key, "text")} for key in keys]
    return {"id": name, "title": title, "columns": columns, "rows": [[e[key] for key in keys] for e in entries]}


def _shown(name: str, table: Any) -> dict[str, Any]:
    """A table that was made for a terminal; its numbers become numbers where a whole column has nothing else."""
    columns: list[dict[str, str]] = []
    cells: list[list[Any]] = []
    for column in table.columns:
        texts = [str(cell) for cell in column.cells]
        numbers = [_number(text) for text in texts]
        is_number = column.justify == "right" and None not in numbers
        columns.append({"name": str(column.header), "kind": "number" if is_number else "text"})
        cells.append(list(numbers) if is_number else list(texts))
    return {
        "id": name,
        "title": str(table.title),
        "columns": columns,
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }


def _number(text: str) -> float | int | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value
