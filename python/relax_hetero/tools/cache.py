"""``relax-hetero cache``: list and remove entries of the compile cache."""

from __future__ import annotations

import time
from dataclasses import asdict

import click
from click.shell_completion import CompletionItem

from ..artifact.cache_folder import CacheFolder, Entry, resolve_cache_folder
from ..artifact.kernel_cache import cached_code
from ..display.console import console, print_json, print_table
from ..display.text import bytes_text, plural
from ..errors import BuildError
from ..report.text.target_text import target_text
from .command import command, json_option

_SHOWN_KEY_CHARACTERS = 12
_AGES = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@click.group("cache")
def cache_group() -> None:
    """List or remove the executables that the compile cache keeps (RELAX_HETERO_CACHE, by default ~/.cache)."""


@command("ls")
@json_option
def ls_command(as_json: bool) -> None:
    """List compiled models, the last used first."""
    folder = _folder()
    entries, kernels = folder.entries(), cached_code(folder)
    if as_json:
        data = {"folder": str(folder.path), "limit": folder.limit, "entries": [asdict(entry) for entry in entries]}
        print_json({**data, "kernels": {"count": len(kernels), "bytes": sum(kernels)}})
        return
    if entries:
        columns = ["key", "made", "last used", "hits", "size", "compile s", "functions", "targets"]
        print_table("Compile cache", columns, map(_row, entries), right=["hits", "size", "compile s"])
    size = bytes_text(sum(entry.bytes for entry in entries))
    gpu = f"; {plural(len(kernels), 'kernel')} of GPUs, {bytes_text(sum(kernels))}" if kernels else ""
    console().print(
        f"{plural(len(entries), 'executable')}, {size} of at most {bytes_text(folder.limit)} in {folder.path}{gpu}",
        markup=False,
    )


def _complete_keys(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    folder = resolve_cache_folder()
    return [
        CompletionItem(entry.key[:_SHOWN_KEY_CHARACTERS], help="; ".join(entry.description.get("functions", ())))
        for entry in ([] if folder is None else folder.entries())
        if entry.key[:_SHOWN_KEY_CHARACTERS].startswith(incomplete)
    ]


@command("clear")
@click.argument("keys", nargs=-1, metavar="[KEY]...", shell_complete=_complete_keys)
@json_option
def clear_command(keys: tuple[str, ...], as_json: bool) -> None:
    """Remove compiled models: those whose key begins with a KEY, or all. Programs that have loaded one keep it."""
    folder = _folder()
    entries = [entry for entry in folder.entries() if not keys or entry.key.startswith(keys)]
    for key in keys:
        if not any(entry.key.startswith(key) for entry in entries):
            raise BuildError(f"no key in {folder.path} begins with {key!r}; see relax-hetero cache ls")
    if keys:
        for entry in entries:
            folder.drop(entry.key)
    else:
        folder.clear()
    freed = sum(entry.bytes for entry in entries)
    if as_json:
        print_json({"folder": str(folder.path), "removed": [entry.key for entry in entries], "bytes": freed})
    else:
        message = f"Removed {plural(len(entries), 'executable')} ({bytes_text(freed)}) from {folder.path}"
        console().print(message, markup=False)


def _folder() -> CacheFolder:
    folder = resolve_cache_folder()
    if folder is None:
        raise BuildError(
            "there is no compile cache: RELAX_HETERO_CACHE switches it off, or there is no home folder for it"
        )
    return folder


def _row(entry: Entry) -> list[str]:
    description, now = entry.description, time.time()
    return [
        entry.key[:_SHOWN_KEY_CHARACTERS],
        _ago(now - entry.created),
        _ago(now - entry.used),
        f"{entry.hits:,}",
        bytes_text(entry.bytes),
        f"{description['seconds']:.2f}" if "seconds" in description else "?",
        "\n".join(description.get("functions", ["?"])),
        "; ".join(map(target_text, description.get("targets", ["?"]))),
    ]


def _ago(seconds: float) -> str:
    """Format an age, such as ``5 minutes ago``."""
    for length, name in _AGES:
        if seconds >= length:
            return f"{plural(int(seconds / length), name)} ago"
    return "just now"


for _command in (ls_command, clear_command):
    cache_group.add_command(_command)
