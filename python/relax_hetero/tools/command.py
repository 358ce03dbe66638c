"""How a command of this command line is declared, and how it fails."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..errors import HeteroError


def command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Declare a click command with ``--debug``, whose errors become one line on stderr and exit code 1.

    A `HeteroError` or an `OSError` (a file that cannot be written, say) is the user's to mend, so no traceback is
    shown unless ``--debug`` asks for it. Anything else is a defect and keeps its traceback.
    """

    def declare(work: Callable[..., None]) -> click.Command:
        @functools.wraps(work)
        def guarded(debug: bool, **options: Any) -> None:
            try:
                work(**options)
            except (HeteroError, OSError) as error:
                if debug:
                    traceback.print_exc()
                else:
                    click.echo(f"error: {error}", err=True)
                sys.exit(1)

        shown = click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")(guarded)
        return click.command(name)(shown)

    return declare


def refuse_overwriting(output: Path, *sources: Path) -> None:
    """Usage error where the file to write is one that is read: the model would be lost, and a loaded one crash."""
    for source in sources:
        if output.exists() and output.samefile(source):
            raise click.UsageError(f"the output {output} is the model itself; give it another name")


cache_option = click.option(
    "--cache/--no-cache",
    default=True,
    show_default=True,
    help="Whether a model that was compiled before is taken from the compile cache.",
)

checks_option = click.option(
    "--checks",
    type=click.Choice(["default", "strict"]),
    default="default",
    show_default=True,
    help="Which wrong indices and divisors are errors: those on CPUs, or (strict) those on every device.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, for programs.")
