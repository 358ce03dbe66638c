"""Measured figures of devices in the folder of the compile cache; independent of TVM.

``KEY.figures`` contains a key and its figures as JSON data.
"""

from __future__ import annotations

import json
import logging
from typing import Any

from .cache_folder import CacheFolder, write_in
from .regular_files import open_regular
from .typed_data import read_json

_log = logging.getLogger("relax_hetero")

SUFFIX = ".figures"
_MAX_BYTES = 1 << 20


def load_figures(folder: CacheFolder, key: str) -> Any:
    """Data that `store_figures` wrote under a key; None if absent, damaged or of another user."""
    with folder.opened() as opened:
        if opened is None:
            return None
        try:
            file, status = open_regular(key + SUFFIX, follow=False, folder=opened, is_private=True)
            with file:
                stored = read_json(file.read()) if status.st_size <= _MAX_BYTES else None
        except (OSError, ValueError):
            return None
    if not isinstance(stored, dict) or stored.get("key") != key:
        _log.warning("the compile cache's %s is damaged, or of another key: measured anew", key + SUFFIX)
        return None
    return stored.get("figures")


def store_figures(folder: CacheFolder, key: str, data: Any) -> None:
    """Store JSON data, if the folder is writable."""
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.opened() as opened:
            if opened is None:
                return
            write_in(opened, key + SUFFIX, json.dumps({"key": key, "figures": data}).encode())
    except OSError as error:
        _log.debug("the compile cache keeps no figures: %s", error)
