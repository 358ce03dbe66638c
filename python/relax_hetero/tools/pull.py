"""``relax-hetero pull``: download of a language model with the package huggingface_hub."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ..display.console import console
from ..errors import HeteroError, pip_install
from .command import command

_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "spiece.model", "vocab.txt", "merges.txt")
"""Files that `rh.llm.load` reads."""
_OTHERS = ("original/*", "consolidated*", "onnx/*", "openvino/*")  # copies of the same weights in other forms


@command("pull")
@click.argument("name", metavar="OWNER/NAME")
@click.option("--revision", metavar="REVISION", help="Branch, tag or commit; the default is the main branch.")
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Download the files that match, such as '*Q4_K_M.gguf', instead of safetensors and tokenizers. Repeatable.",
)
@click.option(
    "--to",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Put the files in this folder; the default is the cache of huggingface_hub.",
)
def pull_command(name: str, revision: str | None, include: tuple[str, ...], folder: Path | None) -> None:
    """Download the model OWNER/NAME of the Hugging Face hub, and print its path.

    Files that are there already are not downloaded again. What protects a model, such as a token in HF_TOKEN, and where
    files are cached, is up to the package huggingface_hub.

    \b
    relax-hetero chat "$(relax-hetero pull Qwen/Qwen3-0.6B)"
    relax-hetero pull ggml-org/gemma-3-1b-it-GGUF --include '*Q4_K_M.gguf'
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise click.UsageError(f"found {name!r}, expected the owner and the name of a model, such as Qwen/Qwen3-0.6B")
    with console(stderr=True).status(f"Downloading {name}"):
        path = download(name, revision, include, folder)
    files = list(path.rglob("*.gguf"))
    click.echo(files[0] if len(files) == 1 and not (path / "config.json").exists() else path)


def download(name: str, revision: str | None, include: tuple[str, ...], folder: Path | None) -> Path:
    """Download files of a model; return their folder.

    Raises HeteroError if the package is not installed, the model does not exist or is protected, or no file matches.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise HeteroError(f"pull needs the package huggingface_hub: {error}; {pip_install('llm')}") from error
    try:
        path = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(include or _FILES),
                ignore_patterns=None if include else list(_OTHERS),
                local_dir=folder,
            )
        )
    except Exception as error:  # of its HTTP client, too, which differs by version
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise HeteroError(f"{name}: cannot be downloaded: {reason}") from error
    found = [file for file in path.rglob("*") if file.is_file() and ".cache" not in file.relative_to(path).parts]
    if not found:
        raise HeteroError(f"{name}: found no file that matches {', '.join(include or _FILES)}")
    return path
