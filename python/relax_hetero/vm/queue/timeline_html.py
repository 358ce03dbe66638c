"""Traces as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...display.html import Column, Markup, bar, colour, escaped, paragraph, table, view

_MAX_SLICES = 2000
_WIDTH, _LABEL, _ROW = 900, 130, 22


def timeline_html(calls: int, left_out: int, events: Sequence[Mapping[str, Any]], busy: Mapping[str, float]) -> str:
    """A picture with a line for each queue and a slice for each step, and how busy each queue was."""
    about = f"Trace of {calls} call{'s' * (calls != 1)}"
    if left_out:
        about += f"; {left_out} more came after the limit"
    tracks = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "call"]
    if not slices:
        return view(paragraph(about, "; nothing ran."))
    rows = [(name, bar(busy.get(name, 0.0))) for name in tracks.values() if name in busy]
    shown = slices[:_MAX_SLICES]
    note = f"The picture shows the first {len(shown):,} of {len(slices):,} steps." if len(shown) < len(slices) else ""
    return view(
        paragraph(about, "."),
        _picture(shown, tracks),
        *([paragraph(note)] if note else []),
        table("Queues", [Column("queue"), Column("busy")], rows),
    )


def _picture(slices: Sequence[Mapping[str, Any]], tracks: Mapping[int, str]) -> Markup:
    begin = min(event["ts"] for event in slices)
    total = max(max(event["ts"] + event["dur"] for event in slices) - begin, 1e-3)
    lines = {track: number for number, track in enumerate(sorted({event["tid"] for event in slices}))}
    scale = (_WIDTH - _LABEL) / total
    drawn = []
    for track, number in lines.items():
        y = number * _ROW
        drawn.append(f'<text x="0" y="{y + 15}" font-size="12" fill="currentColor">{escaped(tracks[track])}</text>')
        drawn.append(
            f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{y + _ROW - 1}" y2="{y + _ROW - 1}" stroke="currentColor" '
            'stroke-opacity=".2"/>'
        )
    for event in slices:
        number = lines[event["tid"]]
        x, width = _LABEL + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.8)
        title = escaped(f"{event['name']}: {event['dur']:,.1f} µs, from {event['ts'] - begin:,.1f} µs")
        opacity = ".5" if event["cat"] == "transfer" else "1"
        drawn.append(
            f'<rect x="{x:.2f}" y="{number * _ROW + 3}" width="{width:.2f}" height="{_ROW - 7}" rx="1.5" '
            f'fill="{colour(number)}" fill-opacity="{opacity}"><title>{title}</title></rect>'
        )
    height = len(lines) * _ROW + 18
    end = f'y="{height - 4}" font-size="11" fill="currentColor" fill-opacity=".7"'
    drawn.append(f'<text x="{_LABEL}" {end}>0</text><text x="{_WIDTH}" text-anchor="end" {end}>{_time(total)}</text>')
    label = escaped(f"Timeline of {len(lines)} queues over {_time(total)}; transfers are pale")
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    )


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f} ms" if microseconds >= 1000 else f"{microseconds:,.1f} µs"
