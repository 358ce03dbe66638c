"""Data within a page: JSON that no text in it can end early, compressed when it is large, and read back."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from functools import lru_cache
from typing import Any

from ...errors import HeteroError

SCHEMA = 1
# Below this the JSON can be read in the page's source; above it the page would be slow to send and to open.
_PLAIN = 64 * 1024


def text_of(data: dict[str, Any]) -> str:
    """The data of a report as JSON; numbers that are not finite are null.

    Raises
    ------
    HeteroError
        If the data is no report of a schema known here, or JSON cannot hold it.
    """
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else type(data).__name__
        raise HeteroError(
            f"the data is not a report that this version draws: expected schema {SCHEMA}, found {found!r}; "
            "make the report again, or use the version of relax_hetero that made it"
        )
    try:
        return json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise HeteroError(f"the report's data is not JSON: {error}; expected dicts, lists, text, numbers") from error


def embedded(name: str, data: dict[str, Any]) -> str:
    """A script element of this id that holds data; HeteroError as `text_of`."""
    text = text_of(data)
    if len(text) <= _PLAIN:
        # Neither `</script>` nor `<!--` can appear.
        return f'<script type="application/json" id="{name}">{text.replace("<", chr(92) + "u003c")}</script>'
    return f'<script type="application/gzip" id="{name}">{compressed(text.encode())}</script>'


def data_of(page: str) -> dict[str, Any]:
    """The data that a page was made of.

    Parameters
    ----------
    page : str
        The text of a page by `page_of`.

    Returns
    -------
    dict
        The data; numbers that were not finite are None.

    Raises
    ------
    HeteroError
        If the text is no such page.

    Examples
    --------
    >>> from relax_hetero.report.page import data_of, page_of
    >>> data_of(page_of({"schema": 1, "kind": "module", "title": "</script>"}))["title"]
    '</script>'
    """
    found = re.search(r'<script type="application/(json|gzip)" id="report-data">([^<]*)</script>', page)
    if found is None:
        raise HeteroError("the text is no page of a report: it has no element 'report-data'; expected an HTML report")
    try:
        text = found[2] if found[1] == "json" else gzip.decompress(base64.b64decode(found[2])).decode()
        data: dict[str, Any] = json.loads(text)
    except (ValueError, OSError, EOFError) as error:
        raise HeteroError(f"the data in the page is damaged: {error}; make the report again") from error
    return data


@lru_cache(maxsize=16)
def compressed(content: bytes) -> str:
    """Bytes as base64 of gzip, always the same for the same bytes."""
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
