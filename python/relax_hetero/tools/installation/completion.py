"""``relax-hetero completion``: prints a script for shell completion."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

PROGRAM = "relax-hetero"
_VARIABLE = "_RELAX_HETERO_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, shell: str) -> None:
    """Print a script for SHELL, which then completes commands, options, devices, sections and files.

    \b
    echo 'eval "$(relax-hetero completion bash)"' >> ~/.bashrc
    echo 'eval "$(relax-hetero completion zsh)"' >> ~/.zshrc
    relax-hetero completion fish > ~/.config/fish/completions/relax-hetero.fish
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    click.echo(completion_class(context.find_root().command, {}, PROGRAM, _VARIABLE).source())
