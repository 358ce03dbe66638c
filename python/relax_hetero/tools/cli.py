"""``relax-hetero``: the group of commands. Nothing here imports TVM, so that ``--help`` is fast."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper
from typing import Any

INTERRUPTED = 130  # exit code of a command that Ctrl-C ended, as in shells (128 + SIGINT)

try:
    import click

    from .bench import bench_command
    from .cache import cache_group
    from .chat import chat_command
    from .check import check_command
    from .compile import compile_command
    from .config import config_command
    from .devices import devices_command
    from .explain import explain_command
    from .installation.completion import completion_command
    from .installation.doctor import doctor_command
    from .installation.packages import versions
    from .pull import pull_command
    from .run import run_command
    from .scale import scale_command
    from .serve import serve_command
except KeyboardInterrupt:  # during the imports
    print("interrupted", file=sys.stderr)
    sys.exit(INTERRUPTED)
except ImportError as error:  # a package is missing: say how to install it
    from .installation.packages import repairs

    print("\n".join([f"error: {error}; to repair this installation:", *repairs()]), file=sys.stderr)
    sys.exit(1)


class _Interruptible(click.Group):
    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(INTERRUPTED)


_VERSION = "Show the versions of relax_hetero, TVM and Python, and exit."


def _show_versions(context: click.Context, parameter: click.Parameter, requested: bool) -> None:
    if requested and not context.resilient_parsing:
        click.echo("\n".join(f"{name} {version}" for name, version in versions().items()))
        context.exit()


_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=_Interruptible, context_settings=_SETTINGS)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_versions, help=_VERSION)
def cli() -> None:
    """One model over several devices: compile it, run it, time it, and see what was placed where."""


for _command in (
    check_command,
    compile_command,
    run_command,
    bench_command,
    explain_command,
    scale_command,
    devices_command,
    doctor_command,
    completion_command,
    cache_group,
    config_command,
    pull_command,
    chat_command,
    serve_command,
):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script; exits with 0, 1 (an error or a mismatch), 2 (wrong usage) or 130 (Ctrl-C)."""
    for stream in (sys.stdout, sys.stderr):  # of files and pipes, whose encoding on Windows lacks characters
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        cli(prog_name="relax-hetero")
    except SystemExit as end:
        if end.code == INTERRUPTED:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(INTERRUPTED)  # Python would wait for threads in which LLVM compiles
        raise
