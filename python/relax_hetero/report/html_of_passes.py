"""Traces of passes as HTML: a line for each pass, which opens to the lines that it changed."""

from __future__ import annotations

from ..transform.trace.pass_trace import PassTrace, TracedPass, pass_lines, pass_summary
from ..transform.trace.snapshot import FunctionChange
from .html_elements import Markup, escaped, folded, page, paragraph, view

# Lines of a function that a notebook keeps, in its file, and a page.
_IN_NOTEBOOK, _ON_PAGE = 40, 200


def pass_trace_html(trace: PassTrace) -> str:
    """HTML that a notebook shows."""
    return view(*_parts(trace, _IN_NOTEBOOK))


def pass_trace_page(trace: PassTrace) -> str:
    """A page of its own."""
    return page("What each pass changed", *_parts(trace, _ON_PAGE))


def _parts(trace: PassTrace, most: int) -> list[str]:
    shown = trace.shown()
    outer = sum(one.seconds for one in trace.passes if one.depth == 0)
    hidden = len(trace.passes) - len(shown)
    note = f"; {hidden} inside of others that changed nothing are left out" if hidden else ""
    return [paragraph(f"{len(trace.passes)} passes, {outer * 1e3:,.1f} ms{note}."), *(_one(one, most) for one in shown)]


def _one(one: TracedPass, most: int) -> str:
    lines, indent = pass_lines(one), f"margin-left:{1.4 * one.depth:.1f}em"
    quiet = "" if one.changes or one.outcome == "failed" else ' class="rh-quiet"'
    title = Markup(
        f"<b>{escaped(one.name)}</b> <span>{one.seconds * 1e3:,.2f} ms</span> {escaped(lines)} "
        f'<span class="rh-quiet">{escaped(pass_summary(one))}</span>'
    )
    if not one.changes:
        return f'<div{quiet} style="{indent}">{one.number}. {title}</div>'
    inside = [folded(_change_title(change), _diff(change, most)) for change in one.changes]
    return f'<div style="{indent}">{folded(Markup(f"{one.number}. {title}"), *inside)}</div>'


def _change_title(change: FunctionChange) -> str:
    state = "" if change.before and change.after else ", new" if change.after else ", gone"
    return f"{change.function}{state}: +{change.added} -{change.removed}"


def _diff(change: FunctionChange, most: int) -> Markup:
    lines = change.diff.splitlines()[2:]
    drawn = [f'<span class="rh-pair{_class(line)}">{escaped(line)}</span>' for line in lines[:most]]
    more = len(lines) - most
    rest = paragraph(f"{more:,} more lines: trace.show(...) prints them.") if more > 0 else ""
    return Markup(f"<pre>{''.join(drawn)}</pre>{rest}")


def _class(line: str) -> str:
    return {"+": " rh-plus", "-": " rh-minus"}.get(line[:1], "")
