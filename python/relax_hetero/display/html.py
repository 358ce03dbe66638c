"""HTML elements for notebooks: tables, bars, swatches of devices. No scripts.

Notebooks have light or dark pages: text and lines inherit the page's colour, and only devices have colours.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import printable

# Okabe and Ito's colours for colour-blind readers, without black, since pages may be dark.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#999999")

_STYLE = """
.rh-view{font:13px/1.45 system-ui,sans-serif;max-width:100%;overflow-x:auto}
.rh-view table{border-collapse:collapse;margin:.3em 0 .8em;font-size:12.5px}
.rh-view caption{caption-side:top;text-align:left;font-weight:600;padding:.2em 0;white-space:nowrap}
.rh-view th,.rh-view td{padding:.2em .8em .2em 0;text-align:left;vertical-align:top}
.rh-view th,.rh-view td{border:0;background:none;color:inherit}
.rh-view th{font-weight:600;border-bottom:1px solid;white-space:nowrap}
.rh-view td{border-bottom:1px solid rgba(128,128,128,.25)}
.rh-view .rh-number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.rh-view code,.rh-view pre{font:12px/1.4 ui-monospace,monospace;background:none;color:inherit}
.rh-view pre{margin:.3em 0;overflow-x:auto}
.rh-view p{margin:.2em 0 .5em}
.rh-view svg{display:block;max-width:100%;height:auto;font-family:system-ui,sans-serif}
.rh-view .rh-swatch{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.4em}
.rh-view .rh-bar{display:inline-block;height:.6em;background:currentColor;opacity:.45;margin-right:.4em}
.rh-view .rh-quiet{opacity:.65}
.rh-view .rh-plus{background:rgba(0,158,115,.18)}
.rh-view .rh-minus{background:rgba(213,94,0,.18)}
.rh-view .rh-pair{display:block;white-space:pre}
.rh-view details{margin:.15em 0}
.rh-view summary{cursor:pointer}
"""


class Markup(str):
    """HTML text, which is not escaped again."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    title: str
    is_number: bool = False  # whether cells are aligned on the right


def escaped(value: object) -> Markup:
    """Escape text for HTML; `Markup` stays as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(printable(str(value))))


def view(*parts: str) -> str:
    """Wrap HTML with its style, for `_repr_html_`."""
    return f'<div class="rh-view"><style>{_STYLE}</style>{"".join(parts)}</div>'


def page(title: str, *parts: str) -> str:
    """Make a page that loads nothing, and is light or dark as the reader's system."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>:root{{color-scheme:light dark}}body{{margin:1.5em}}</style>"
    )
    body = f"<main><h1>{escaped(title)}</h1>{view(*parts)}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Markup:
    """Make a table; cells are text or `Markup`. Rows may be short."""
    attributes = [' class="rh-number"' if column.is_number else "" for column in columns]
    head = "".join(f'<th scope="col"{a}>{escaped(c.title)}</th>' for c, a in zip(columns, attributes, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{a}>{escaped(cell)}</td>" for cell, a in zip(row, attributes, strict=False)) + "</tr>"
        for row in rows
    )
    return Markup(
        f"<table><caption>{escaped(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def colour(index: int) -> str:
    """Colour of a device by its index; -1, the host, is grey."""
    return "#888888" if index < 0 else _COLOURS[index % len(_COLOURS)]


def device_html(name: str, names: Sequence[str]) -> Markup:
    """Make a device's name with a swatch of its colour.

    `name`: ``kind:i``, or ``host``. `names`: names of all devices, in order.
    """
    index = names.index(name) if name in names else -1
    return Markup(f'<span class="rh-swatch" style="background:{colour(index)}"></span>{escaped(name)}')


def bar(share: float) -> Markup:
    """Make a bar and a percentage for a fraction."""
    width = max(0.0, min(1.0, share)) * 6
    return Markup(f'<span class="rh-bar" style="width:{width:.2f}em"></span>{share:.1%}')


def paragraph(*parts: object) -> Markup:
    """Make a paragraph."""
    return Markup(f"<p>{''.join(map(escaped, parts))}</p>")


def folded(summary: object, *parts: str, is_open: bool = False) -> Markup:
    """Make a ``details`` element."""
    return Markup(f"<details{' open' * is_open}><summary>{escaped(summary)}</summary>{''.join(parts)}</details>")
