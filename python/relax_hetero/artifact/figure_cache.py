"""Measured figures of a machine's devices in the folder of the compile cache; needs nothing of TVM.

``KEY.figures`` holds the figures of a key as JSON data, together with the key.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from functools import partial
from typing import Any

from .cache_folder import CacheFolder, private_opener
from .regular_files import open_regular
from .typed_data import read_json

_log = logging.getLogger("relax_hetero")

SUFFIX = ".figures"
_MAX_BYTES = 1 << 20


def load_figures(folder: CacheFolder, key: str) -> Any:
    """Data that `store_figures` wrote under a key; None where there is nothing that is whole and this user's own."""
    with folder.opened() as descriptor:
        if descriptor is None:
            return None
        try:
            file, status = open_regular(key + SUFFIX, follow=False, folder=descriptor, is_private=True)
            with file:
                kept = read_json(file.read()) if status.st_size <= _MAX_BYTES else None
        except (OSError, ValueError):
            return None
    if not isinstance(kept, dict) or kept.get("key") != key:
        _log.warning("the compile cache's %s is damaged, or of another key: measured anew", key + SUFFIX)
        return None
    return kept.get("figures")


def store_figures(folder: CacheFolder, key: str, data: Any) -> None:
    """Store JSON data; a folder that cannot be written keeps nothing."""
    try:
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with folder.opened() as descriptor:
            if descriptor is None:
                return
            draft = f".{key}.json.{uuid.uuid4().hex}"  # a name that `CacheFolder.trim` removes where its writer died
            with open(draft, "x", opener=partial(private_opener, descriptor)) as file:
                file.write(json.dumps({"key": key, "figures": data}))
            os.replace(draft, key + SUFFIX, src_dir_fd=descriptor, dst_dir_fd=descriptor)
    except OSError as error:
        _log.debug("the compile cache keeps no figures: %s", error)
