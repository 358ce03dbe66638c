"""Tables as plain text, for what is printed without a terminal library."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Lines of aligned columns: the first `left` hold text, the rest numbers. Rows may end early."""
    lines = [head, *rows]
    widths = [max((len(line[i]) for line in lines if len(line) == len(head)), default=0) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )
