"""Plain text: plurals, sizes in bytes, tables of aligned columns."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import printable


def plural(count: int, noun: str) -> str:
    """Format a count, such as ``1 op`` or ``2 ops``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(count: int | None) -> str:
    """Format a number of bytes, such as ``1.5 MiB``; None (a symbolic size) becomes ``?``."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def time_text(seconds: float) -> str:
    """Format seconds in a suitable unit."""
    unit, factor = next(
        (u, f) for u, f in (("s", 1.0), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)) if seconds * f >= 1 or u == "ns"
    )
    return f"{seconds * factor:.3g} {unit}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Format a table whose first `left` columns are aligned on the left. Rows may be short."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max((len(line[i]) for line in lines if len(line) == len(head)), default=0) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )
