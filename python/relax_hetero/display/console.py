"""Terminal output: tables on stdout, progress on stderr, and JSON for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias, Union

import click

from ..errors import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FILE_WIDTH = 160  # columns of output that is not a terminal
Shown: TypeAlias = Union["Table", str]  # a table, or a line of text


def console(stderr: bool = False, file: TextIO | None = None) -> Console:
    """Make a console; if it is not a terminal, it is wide enough for tables."""
    from rich.console import Console

    class PlainConsole(Console):
        """Removes escape sequences, which names of models and files may hold."""

        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(each) if isinstance(each, str) else each for each in objects), **options)

    result = PlainConsole(stderr=stderr, file=file, highlight=False, emoji=False)
    if not result.is_terminal:
        result.width = max(result.width, FILE_WIDTH)
    return result


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> Table:
    """Make a table; columns named in `right` are aligned on the right."""
    from rich.table import Table

    result = Table(title=_plain(title, "bold"), title_justify="left")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        # Not markup: names of a model may hold "[1]".
        result.add_row(*(_plain(cell) for cell in row))
    return result


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], right: Sequence[str] = ()) -> None:
    """Print a table on stdout; columns named in `right` are aligned on the right."""
    show([table(title, columns, rows, right)])


def show(parts: Iterable[Shown], file: TextIO | None = None) -> None:
    """Print tables and lines on stdout or into `file`; long lines are wrapped."""
    output = console(file=file)
    for part in parts:
        output.print(part, markup=False)


def print_json(data: Any) -> None:
    """Print JSON on stdout; NaN and infinities become null."""
    import json

    click.echo(json.dumps(finite(data), indent=2, allow_nan=False))


def finite(data: Any) -> Any:
    """Replace NaN and infinities, which JSON lacks, by None."""
    if isinstance(data, dict):
        return {str(key): finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _plain(cell: Any, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(cell), style) if isinstance(cell, str) else cell
