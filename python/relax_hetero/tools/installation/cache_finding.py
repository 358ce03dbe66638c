"""The folder of the compile cache: whether it is used, what it holds, and whether it can be written."""

from __future__ import annotations

import os
from pathlib import Path

from ...artifact.cache_folder import CacheFolder, folder_of
from ...artifact.regular_files import why_foreign
from ...display.text import bytes_text, plural
from ...errors import HeteroError
from .findings import Finding, State

_VARIABLE = "RELAX_HETERO_CACHE"


def cache_finding() -> Finding:
    """Finding about the folder that the environment names."""
    try:
        folder = folder_of()
    except HeteroError as error:
        return _finding("warning", str(error), f"set {_VARIABLE}_SIZE to a size such as 10G")
    if folder is None:
        return _finding("absent", "switched off, or there is no home: every model is compiled each time")
    try:
        return _of_folder(folder)
    except OSError as error:
        return _finding("warning", f"{folder.path}: {error.strerror}", f"chmod u+rwx '{folder.path}'")


def _of_folder(folder: CacheFolder) -> Finding:
    path = folder.path
    if not os.path.lexists(path):
        above = next((place for place in path.parents if place.exists()), Path("/"))
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            fix = f"make {above} a folder that you can write, or set {_VARIABLE} to another"
            return _finding("warning", f"{path} cannot be made", fix)
        return _finding("ok", f"{path}: empty, at most {bytes_text(folder.limit)}")
    status = path.stat()
    foreign = why_foreign(status)
    if foreign:
        return _finding(
            "warning", f"{path} is not used: {foreign}", f"chmod go-w '{path}', or set {_VARIABLE} to another"
        )
    if not path.is_dir() or not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return _finding("warning", f"{path} cannot be read and written", f"chmod u+rwx '{path}'")
    entries = folder.entries()
    used = bytes_text(sum(entry.bytes for entry in entries))
    return _finding("ok", f"{path}: {plural(len(entries), 'executable')}, {used} of at most {bytes_text(folder.limit)}")


def _finding(state: State, about: str, fix: str = "") -> Finding:
    return Finding("tools", "compile cache", state, about, fix)
