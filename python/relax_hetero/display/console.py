"""Output for people: tables on stdout, progress on stderr; and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, Union

import click

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns where the output is no terminal and so has no width of its own.
FILE_WIDTH = 160

Shown: TypeAlias = Union["Table", str]
"""A table, or a line of text."""


def console(stderr: bool = False, file: TextIO | None = None) -> Console:
    """A console; one that is no terminal is wide enough for a table."""
    from rich.console import Console

    class PlainConsole(Console):
        """Prints names of models and files without the commands for a terminal that they may hold."""

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(part) if isinstance(part, str) else part for part in objects), **options)

    made = PlainConsole(stderr=stderr, file=file, highlight=False, emoji=False)
    if not made.is_terminal:
        made = PlainConsole(stderr=stderr, file=file, highlight=False, emoji=False, width=max(made.width, FILE_WIDTH))
    return made


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> Table:
    """A table; the columns named in `right` hold numbers."""
    from rich.table import Table

    made = Table(title=_plain(title, "bold"), title_justify="left")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Text from a model is no markup: a name may well hold "[1]".
        made.add_row(*(_plain(cell) for cell in row))
    return made


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Print a table on stdout; the columns named in `right` hold numbers."""
    show([table(title, columns, rows, right)])


def show(parts: Iterable[Shown], file: TextIO | None = None) -> None:
    """Print tables and lines on stdout, or into `file`; a line that is wider than the terminal is wrapped."""
    screen = console(file=file)
    for part in parts:
        screen.print(part, markup=False)


def print_json(data: Any) -> None:
    """Print JSON on stdout; NaN and infinities, which JSON lacks, become null."""
    import json

    click.echo(json.dumps(_finite(data), indent=2, allow_nan=False))


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _plain(cell: Any, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(cell), style) if isinstance(cell, str) else cell
