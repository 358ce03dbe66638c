"""``relax-hetero``: the group of commands. Nothing here imports TVM, so that ``--help`` answers at once."""

from __future__ import annotations

import click

from .. import __version__
from .bench import bench_command
from .cache import cache_group
from .compile import compile_command
from .explain import explain_command
from .run import run_command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="relax-hetero")
def cli() -> None:
    """One ONNX model over several devices: compile it, run it, time it, and see what was placed where."""


for _command in (compile_command, run_command, bench_command, explain_command, cache_group):
    cli.add_command(_command)


def main() -> None:
    """Entry point of the console script; exits with 0, 1 (an error or a mismatch) or 2 (wrong usage)."""
    cli(prog_name="relax-hetero")
