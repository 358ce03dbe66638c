"""``relax-hetero config``: how to compile programs in C and C++."""

from __future__ import annotations

import shlex

import click

from .command import command


@command("config")
@click.option("--cflags", is_flag=True, help="Options to compile.")
@click.option("--libs", is_flag=True, help="Options to link.")
@click.option("--cmakedir", is_flag=True, help="The folder of relax_hetero-config.cmake.")
def config_command(cflags: bool, libs: bool, cmakedir: bool) -> None:
    """Print options to build programs in C and C++ that run exported files.

    For example: c++ program.cpp $(relax-hetero config --cflags --libs)
    """
    from ..target.c_options import CMAKE_FOLDER, compile_options, link_options

    if not (cflags or libs or cmakedir):
        raise click.UsageError("expected --cflags, --libs or --cmakedir")
    words = [*(compile_options() if cflags else []), *(link_options() if libs else [])]
    click.echo(shlex.join([*words, *([str(CMAKE_FOLDER)] if cmakedir else [])]))
