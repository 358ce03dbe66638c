"""Reports as self-contained HTML pages.

A page holds its data, its libraries (`vendor/`) and its scripts (`script/`). Libraries and large data are compressed;
the browser unpacks them when a section needs them.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from ...errors import printable
from .embedding import compressed, data_of, embedded

__all__ = ["data_of", "fragment_of", "page_of"]

_FOLDER = Path(__file__).parent
# In order of execution: each adds to the object of the first.
_SCRIPTS = (
    *("base", "words", "tiles", "layers", "model", "picture", "view", "graph", "panel", "search", "overview"),
    *("charts", "timeline", "memory", "roofline", "tables", "passes", "timings", "token", "plan", "compare", "start"),
)
# Data that a notebook shows of an executable.
_FRAGMENT_KEYS = frozenset(
    {"schema", "kind", "title", "made", "devices", "functions", "nodes", "edges", "groups", "layouts", "passes"}
)


def page_of(data: dict[str, Any], previous: dict[str, Any] | None = None) -> str:
    """Make a report as one HTML file.

    Parameters
    ----------
    data : dict
        Data of the report. Keys that are missing, None or empty get no section; the page says how to get them.
    previous : dict, optional
        Data of an earlier report to compare with.

    Returns
    -------
    str
        HTML of the page, whose content security policy forbids loading anything.

    Raises
    ------
    HeteroError
        If the data has another schema, or values that JSON cannot hold.

    Examples
    --------
    >>> from relax_hetero.report.page import data_of, page_of
    >>> page = page_of({"schema": 1, "kind": "module", "title": "toy"})
    >>> data_of(page)["title"]
    'toy'
    """
    content = embedded("report-data", data)  # checks the data
    parts = {
        "title": escape(printable(str(data.get("title") or "report"))),
        "style": _asset("style.css"),
        "libraries": "\n".join(_library(name) for name in _libraries(data, previous)),
        "data": content,
        "previous": embedded("report-previous", previous) if previous is not None else "",
        "script": "\n".join(_asset(f"script/{name}.js") for name in _SCRIPTS),
    }
    page = _asset("template.html")
    # Substitute in one pass: data may contain a placeholder.
    return re.sub(r"{{(\w+)}}", lambda match: parts[match[1]], page)


def fragment_of(data: dict[str, Any], height: int = 620) -> str:
    """Make a report for notebooks: an iframe with the graph, the devices and the passes.

    Parameters
    ----------
    data : dict
        Data of the report, as for `page_of`.
    height : int
        Height of the frame in pixels.

    Returns
    -------
    str
        A sandboxed `iframe`, which cannot access the notebook.

    Raises
    ------
    HeteroError
        As for `page_of`.

    Examples
    --------
    >>> from relax_hetero.report.page import fragment_of
    >>> fragment_of({"schema": 1, "kind": "module", "title": "toy"}).startswith("<iframe")
    True
    """
    page = page_of({key: value for key, value in data.items() if key in _FRAGMENT_KEYS})
    title = escape(str(data.get("title") or "report"), quote=True)
    return (
        f'<iframe title="Report: {title}" sandbox="allow-scripts" width="100%" height="{int(height)}" '
        f'style="border:0" srcdoc="{escape(page, quote=True)}"></iframe>'
    )


def _libraries(data: dict[str, Any], previous: dict[str, Any] | None) -> list[str]:
    used = []
    if data.get("nodes"):
        used += ["cytoscape.min.js", "d3-dag.min.js"]
    is_timed = any(group.get("seconds") for group in data.get("groups") or ())
    if is_timed or any(data.get(part) for part in ("timeline", "memory", "profile", "token", "plan", "bench", "chat")):
        used += ["echarts.min.js"] if set(data) - _FRAGMENT_KEYS else []
    if any(data.get(part) for part in ("tables", "profile", "bench", "chat")) or previous is not None:
        used += ["tabulator.min.js", "tabulator.min.css"]
    return used


def _library(name: str) -> str:
    folder = _FOLDER / "vendor"
    licences = [folder / f"{name.split('.')[0]}.{part}" for part in ("LICENSE", "NOTICE")]
    notice = "\n".join(path.read_text(encoding="utf-8") for path in licences if path.exists()).replace("*/", "* /")
    text = compressed(f"/*\n{notice}\n*/\n".encode() + (folder / name).read_bytes())
    return f'<script type="application/gzip" data-library="{name}">{text}</script>'


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")
