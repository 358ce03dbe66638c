"""Elements of HTML for notebooks: tables, bars, swatches of devices. No script, and no colour but those of devices.

A notebook shows what `_repr_html_` returns inside of its own page, which is light or dark: text and lines take the
page's colour, so the same HTML fits both.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import printable

# Okabe and Ito's colours, which people who see few colours tell apart; black is left out, as pages may be dark.
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
    """Text that is HTML already."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    is_number : bool
        Its cells are aligned on the right.
    """

    title: str
    is_number: bool = False


def escaped(value: object) -> Markup:
    """Text as HTML shows it; what is HTML already stays."""
    return value if isinstance(value, Markup) else Markup(html.escape(printable(str(value))))


def view(*parts: str) -> str:
    """Parts of HTML with their style, as `_repr_html_` returns it."""
    return f'<div class="rh-view"><style>{_STYLE}</style>{"".join(parts)}</div>'


def page(title: str, *parts: str) -> str:
    """A whole page of HTML; it loads nothing, and is light or dark as the reader's system is."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escaped(title)}</title><style>:root{{color-scheme:light dark}}body{{margin:1.5em}}</style>"
    )
    body = f"<main><h1>{escaped(title)}</h1>{view(*parts)}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>{body}</body></html>\n'


def table(caption: str, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> Markup:
    """A table; a cell is text, or `Markup`. A row may end early."""
    kinds = [' class="rh-number"' if column.is_number else "" for column in columns]
    head = "".join(f'<th scope="col"{kind}>{escaped(c.title)}</th>' for c, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escaped(cell)}</td>" for cell, kind in zip(row, kinds, strict=False)) + "</tr>"
        for row in rows
    )
    return Markup(
        f"<table><caption>{escaped(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def colour(number: int) -> str:
    """The colour of a device, by its index; -1, the host, has none of theirs."""
    return "#888888" if number < 0 else _COLOURS[number % len(_COLOURS)]


def device_html(name: str, names: Sequence[str]) -> Markup:
    """A device with a swatch of its colour.

    Parameters
    ----------
    name : str
        ``kind:i``, or ``host``.
    names : sequence of str
        Those of all devices, in order.
    """
    number = names.index(name) if name in names else -1
    return Markup(f'<span class="rh-swatch" style="background:{colour(number)}"></span>{escaped(name)}')


def bar(share: float) -> Markup:
    """A share of the whole, as a bar and a number."""
    width = max(0.0, min(1.0, share)) * 6
    return Markup(f'<span class="rh-bar" style="width:{width:.2f}em"></span>{share:.1%}')


def paragraph(*parts: object) -> Markup:
    """A line of text."""
    return Markup(f"<p>{''.join(map(escaped, parts))}</p>")


def folded(summary: object, *parts: str, is_open: bool = False) -> Markup:
    """Parts that open when their summary is clicked."""
    return Markup(f"<details{' open' * is_open}><summary>{escaped(summary)}</summary>{''.join(parts)}</details>")
