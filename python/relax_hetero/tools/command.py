"""Declaration of commands: error handling, and options that several commands share."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..artifact.regular_files import read_regular
from ..artifact.signing import checked_key
from ..errors import HeteroError, printable

INPUT = click.Path(exists=True, path_type=Path)  # a file or folder
INPUT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(path_type=Path)
OUTPUT_FILE = click.Path(dir_okay=False, path_type=Path)
_MAX_KEY_BYTES = 1 << 16


def command(name: str) -> Callable[[Callable[..., None]], click.Command]:
    """Declare a click command with ``--debug``, whose errors become one line on stderr and exit code 1.

    A `HeteroError` or an `OSError` (such as a file that cannot be written) is the user's to fix, so its traceback is
    shown only with ``--debug``. Anything else is a defect and keeps its traceback.
    """

    def declare(function: Callable[..., None]) -> click.Command:
        @functools.wraps(function)
        def guarded(debug: bool, **options: Any) -> None:
            try:
                function(**options)
            except (HeteroError, OSError) as error:
                if debug:
                    traceback.print_exc()
                else:
                    click.echo(f"error: {printable(str(error))}", err=True)
                sys.exit(1)

        debug_option = click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
        return click.command(name)(debug_option(guarded))

    return declare


def refuse_overwriting(output: Path, *sources: Path) -> None:
    """Raise UsageError if the output is an input: the model would be lost, and mapped weights would change."""
    for source in sources:
        if output.exists() and output.samefile(source):
            raise click.UsageError(f"the output {output} is the model itself; give it another name")


def _read_key(context: click.Context, parameter: click.Parameter, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return checked_key(read_regular(path, _MAX_KEY_BYTES).rstrip(b"\r\n"))
    except OSError as error:
        raise click.BadParameter(f"{path}: {error.strerror or error}") from error
    except HeteroError as error:
        raise click.BadParameter(f"{path}: {error}") from error


def key_option(purpose: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make the option ``--key-file``, with `purpose` as its help; the command gets the `key` as bytes."""
    return click.option(
        "--key-file",
        "key",
        type=OUTPUT,
        envvar="RELAX_HETERO_KEY_FILE",
        metavar="FILE",
        callback=_read_key,
        help=f"{purpose} Also RELAX_HETERO_KEY_FILE.",
    )


verify_option = key_option("Load a library only if it was signed with the key in this file.")

cache_option = click.option(
    "--cache/--no-cache", default=True, help="Use the compile cache, or always compile the model."
)

checks_option = click.option(
    "--checks",
    type=click.Choice(["default", "strict"]),
    default="default",
    help="Report wrong indices and divisors as errors: on CPUs, or (strict) on every device.",
)

accuracy_option = click.option(
    "--accuracy",
    type=click.Choice(["default", "exact", "fast"]),
    default="default",
    help="Choose how exact convolutions of float32 are: fast takes forms with larger errors, exact only direct ones.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout, for programs.")
