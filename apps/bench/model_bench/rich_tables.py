"""Tables of benchmarks in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table


def terminal() -> Console:
    """A console for results: as wide as the terminal, or 200 columns without one."""
    return Console(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)


def rich_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], texts: Collection[str]) -> Table:
    """A table with the columns of texts aligned left and all others right."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right")
    for row in rows:
        table.add_row(*row)
    return table
