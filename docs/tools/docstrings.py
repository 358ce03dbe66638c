"""Docstrings as the site's API pages read them: blocks after ``::`` become fenced code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from hooks import literal_blocks  # noqa: E402


class LiteralBlocks(griffe.Extension):
    """Changes each docstring once, when it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = literal_blocks(obj.docstring.value)
