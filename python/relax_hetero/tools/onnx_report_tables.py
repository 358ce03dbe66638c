"""The report on an ONNX model as tables: the op types with their counts, then every node that is not supported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from .console import Shown, plural, show, table

if TYPE_CHECKING:
    from ..frontend.onnx_report import OnnxReport

_COLUMNS = ["op", "domain", "opset", "nodes", "supported", "refused", "not looked at", "devices"]


def show_onnx_report(report: OnnxReport, file: TextIO | None = None) -> None:
    """Print a report on stdout, or into `file`."""
    show(report_parts(report), file)


def report_parts(report: OnnxReport) -> Iterator[Shown]:
    """The tables and lines of a report."""
    rows = [(node.op, node.domain, node.opset) for node in report.nodes]
    by_status = Counter((row, node.status) for row, node in zip(rows, report.nodes, strict=True))
    devices: dict[tuple[str, str, int | None], dict[str, None]] = {}
    on_host = {row for row, node in zip(rows, report.nodes, strict=True) if node.on_host}
    for row, node in zip(rows, report.nodes, strict=True):
        devices.setdefault(row, {}).update(dict.fromkeys(node.devices))
    cells = []
    for row, count in sorted(Counter(rows).items(), key=lambda item: (item[0][1], item[0][0])):
        counts = [by_status[row, status] for status in ("supported", "refused", "not looked at")]
        places = ", ".join(devices[row]) + (" and the host" if row in on_host and devices[row] else "")
        shown = [str(number) if number else "" for number in counts]
        cells.append([row[0], row[1], "?" if row[2] is None else str(row[2]), str(count), *shown, places])
    if cells:
        yield table(f"Ops of {report.model}", _COLUMNS, cells, _COLUMNS[2:7])
    missing = [node for node in report.nodes if node.status != "supported"]
    if missing:
        columns = ["node", "op", "domain", "status", "reason"]
        lines = [[node.name, node.op, node.domain, node.status, node.reason] for node in missing]
        yield table("Not supported", columns, lines)
    yield from report.problems
    if report.supported:
        yield f"{plural(len(report.nodes), 'node')}, all supported"
    else:
        yield f"{len(report.refused):,} of {plural(len(report.nodes), 'node')} refused: the model cannot be imported"
