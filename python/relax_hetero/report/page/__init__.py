"""Data of a report as one HTML page that needs no network.

The page holds its data, its libraries (`vendor/`) and its own scripts (`script/`).
Libraries and large data are compressed; a browser unpacks them when a section needs them.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from ...errors import printable
from .embedding import compressed, data_of, embedded

__all__ = ["data_of", "fragment_of", "page_of"]

_FOLDER = Path(__file__).parent
# In this order: each adds to the object that the first makes.
_SCRIPTS = (
    *("base", "words", "tiles", "layers", "model", "picture", "view", "graph", "panel", "search", "overview"),
    *("charts", "timeline", "memory", "roofline", "tables", "passes", "timings", "token", "compare", "start"),
)
# What a notebook shows of an executable: the rest is in its report.
_OF_A_FRAGMENT = frozenset(
    {"schema", "kind", "title", "made", "devices", "functions", "nodes", "edges", "groups", "layouts", "passes"}
)


def page_of(data: dict[str, Any], previous: dict[str, Any] | None = None) -> str:
    """A report as the text of one HTML file.

    Parameters
    ----------
    data : dict
        The data of a report. Parts that are missing, None or empty have no section; the page says how to get them.
    previous : dict, optional
        The data of an earlier report, which the page compares with `data`.

    Returns
    -------
    str
        The whole page. It loads nothing: a policy in the page forbids browsers to.

    Raises
    ------
    HeteroError
        If the data is of a newer schema than this page draws, or holds values that JSON does not have.

    Examples
    --------
    >>> from relax_hetero.report.page import data_of, page_of
    >>> page = page_of({"schema": 1, "kind": "module", "title": "toy"})
    >>> data_of(page)["title"]
    'toy'
    """
    inside = embedded("report-data", data)
    parts = {
        "title": escape(printable(str(data.get("title") or "report"))),
        "style": _asset("style.css"),
        "libraries": "\n".join(_library(name) for name in _libraries(data, previous)),
        "data": inside,
        "previous": embedded("report-previous", previous) if previous is not None else "",
        "script": "\n".join(_asset(f"script/{name}.js") for name in _SCRIPTS),
    }
    page = _asset("template.html")
    # Pieces, not replace() one after another: data may hold the name of a place.
    pieces = page.split("{{")
    return pieces[0] + "".join(parts[name] + rest for name, rest in (piece.split("}}", 1) for piece in pieces[1:]))


def fragment_of(data: dict[str, Any], height: int = 620) -> str:
    """A report as a piece of HTML for notebooks: a frame with the graph, the devices and the passes.

    Parameters
    ----------
    data : dict
        The data of a report, as for `page_of`.
    height : int
        The height of the frame in pixels.

    Returns
    -------
    str
        An `iframe` that holds a page and cannot reach the notebook around it.

    Raises
    ------
    HeteroError
        As `page_of`.

    Examples
    --------
    >>> from relax_hetero.report.page import fragment_of
    >>> fragment_of({"schema": 1, "kind": "module", "title": "toy"}).startswith("<iframe")
    True
    """
    page = page_of({key: value for key, value in data.items() if key in _OF_A_FRAGMENT})
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
    if is_timed or any(data.get(part) for part in ("timeline", "memory", "profile", "token", "bench", "chat")):
        used += ["echarts.min.js"] if set(data) - _OF_A_FRAGMENT else []
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
