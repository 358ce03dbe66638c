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


def plural(count: int, noun: str) -> str:
    """``1 op``, ``2 ops``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def bytes_text(count: int | None) -> str:
    """A number of bytes as people read it; ``?`` where it depends on a symbolic shape."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def target_text(target: str, features: Sequence[str] | None = None) -> str:
    """A target's kind, and a CPU's instructions or the architecture of a GPU: ``llvm AVX2``, ``cuda sm_90``.

    Parameters
    ----------
    target : str
        JSON text; a name, or text that is no target, stays as it is.
    features : sequence of str, optional
        LLVM's names of a CPU's features, where they are known; else LLVM is asked, if it is here.
    """
    import json

    from ..artifact.metadata import DeviceSpec
    from ..target.instruction_names import instruction_names
    from ..vm.device.cpu_features import with_features

    try:
        fields = json.loads(target)
        kind, processor = fields["kind"], fields.get("mcpu", fields.get("arch", ""))
        spec = with_features(DeviceSpec(target, cpu_features=None if features is None else tuple(features)))
        names = instruction_names(spec.cpu_features or ())
        if names and spec.numa_node is not None:
            names = (*names, f"NUMA node {spec.numa_node}")
    except (AttributeError, KeyError, TypeError, ValueError):
        return target
    return f"{kind} {', '.join(names) or processor}".strip()


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _plain(cell: Any, style: str = "") -> Any:
    from rich.text import Text

    return Text(printable(cell), style) if isinstance(cell, str) else cell
