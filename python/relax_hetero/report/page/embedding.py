"""Data in a page: JSON in a script element, compressed if it is large."""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import lru_cache
from typing import Any

from ...display.console import finite
from ...errors import HeteroError

SCHEMA = 1
_MAX_PLAIN_CHARACTERS = 64 * 1024
"""Maximum length of JSON that is not compressed, so that it can be read in the page's source."""


def text_of(data: dict[str, Any]) -> str:
    """Serialize the data of a report as JSON; NaN and infinities become null.

    Raises HeteroError if the data is not a report of this schema, or JSON cannot hold it.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise HeteroError(
            f"the data is not a report that this version draws: expected schema {SCHEMA}, found {schema!r}; "
            "make the report again, or use the version of relax_hetero that made it"
        )
    try:
        return json.dumps(finite(data), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise HeteroError(f"the report's data is not JSON: {error}; expected dicts, lists, text, numbers") from error


def embedded(name: str, data: dict[str, Any]) -> str:
    """Make a script element that holds data, with an id; raises HeteroError as `text_of` does."""
    text = text_of(data)
    if len(text) <= _MAX_PLAIN_CHARACTERS:
        # Escaped, so that no text is `</script>` or `<!--`.
        return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>'
    return f'<script type="application/gzip" id="{name}">{compressed(text.encode())}</script>'


def data_of(page: str) -> dict[str, Any]:
    """Read the data of a page.

    Parameters
    ----------
    page : str
        Result of `page_of`.

    Returns
    -------
    dict
        Data of the report.

    Raises
    ------
    HeteroError
        If the text is not such a page.

    Examples
    --------
    >>> from relax_hetero.report.page import data_of, page_of
    >>> data_of(page_of({"schema": 1, "kind": "module", "title": "</script>"}))["title"]
    '</script>'
    """
    match = re.search(r'<script type="application/(json|gzip)" id="report-data">([^<]*)</script>', page)
    if match is None:
        raise HeteroError(
            "the text is not a page of a report: it has no element 'report-data'; expected an HTML report"
        )
    try:
        text = match[2] if match[1] == "json" else gzip.decompress(base64.b64decode(match[2])).decode()
        data: dict[str, Any] = json.loads(text)
    except (ValueError, OSError, EOFError) as error:
        raise HeteroError(f"the data in the page is damaged: {error}; make the report again") from error
    return data


@lru_cache(maxsize=16)
def compressed(content: bytes) -> str:
    """Compress bytes by gzip (deterministically), as base64."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()
