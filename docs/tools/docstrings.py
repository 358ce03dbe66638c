"""Conversion of docstrings for the site's API pages: blocks after ``::`` become fenced code, names one entry each."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from hooks import literal_blocks  # noqa: E402

SHARED = re.compile(r"^((?:\*{0,2}\w+, )+\*{0,2}\w+)( : .*)?\n((?:    .*\n?)+)", re.MULTILINE)
"""An entry of several names, for which griffe would show only the type and the default of the first."""


class LiteralBlocks(griffe.Extension):
    """A griffe extension that converts each docstring once, when it is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SHARED.sub(_apart, literal_blocks(obj.docstring.value))


def _apart(entry: re.Match[str]) -> str:
    text = entry[3].rstrip("\n")
    return "".join(f"{name}{entry[2] or ''}\n{text}\n" for name in entry[1].split(", "))
