"""`trace_passes`: what each pass of a `Sequential`, or of any other program, did to a module, and how long it took."""

from __future__ import annotations

import difflib
import os
import time
import weakref
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import tvm

from ..artifact.file_hints import describe_value
from ..display.html import Markup, escaped, folded, page, paragraph, view
from ..display.text import text_table
from ..errors import HeteroError
from .ir.rewriting import handle

# Modules as they were at one moment, and the differences of two: functions are shared, texts are made when asked for.
#
# A pass may write into the module that it is given, so a snapshot keeps the functions and not the module. Functions do
# not change, and most passes leave most of them alone: a snapshot costs a reference for each.

ATTRIBUTES = "(attributes)"
"""In place of a function's name: the module's attributes and global infos."""

_INFOS = "global_infos"
_ABBREVIATED = 120


@dataclass(frozen=True)
class FunctionChange:
    """Change of one function by a pass.

    Attributes
    ----------
    function : str
        Its name; ``(attributes)`` for the attributes and global infos of the module.
    before, after : str
        Its text in TVMScript; empty where it is new, or gone.
    """

    function: str
    before: str
    after: str

    @cached_property
    def diff(self) -> str:
        """The lines that differ, with three lines around them, as a unified diff."""
        lines = difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            f"{self.function} before",
            f"{self.function} after",
            "",
            "",
        )
        return "\n".join(line.rstrip("\n") for line in lines)

    @property
    def added(self) -> int:
        """Lines of `after` that `before` does not have."""
        return sum(line.startswith("+") for line in self.diff.splitlines()[2:])

    @property
    def removed(self) -> int:
        """Lines of `before` that `after` does not have."""
        return sum(line.startswith("-") for line in self.diff.splitlines()[2:])


class Snapshot:
    """A module at one moment.

    Parameters
    ----------
    mod : tvm.IRModule
        May change later.
    texts : dict
        Texts by function, shared by the snapshots of a trace.
    """

    def __init__(self, mod: tvm.IRModule, texts: dict[tuple[int, int], str]) -> None:
        self._functions = {gv.name_hint: (gv, func) for gv, func in mod.functions.items()}
        self._attrs, self._infos = mod.attrs, mod.global_infos
        self._texts = texts

    @property
    def has_relax(self) -> bool:
        """True if any function is one of Relax."""
        return any(isinstance(func, tvm.relax.Function) for _, func in self._functions.values())

    def same_as(self, other: Snapshot) -> bool:
        """Return whether both hold the very same functions and attributes."""
        return (
            self._functions.keys() == other._functions.keys()
            and all(func.same_as(other._functions[name][1]) for name, (_, func) in self._functions.items())
            and self._about == other._about
        )

    def module(self) -> tvm.IRModule:
        """The module, as a new one."""
        return tvm.IRModule(dict(self._functions.values()), attrs=self._attrs, global_infos=self._infos)

    def text(self, function: str) -> str:
        """A function in TVMScript, with the names of devices that it has in the module; empty where there is none."""
        if function == ATTRIBUTES:
            return "\n".join(f"{name} = {text}" for name, text in self._about.items())
        if function not in self._functions:
            return ""
        gv, func = self._functions[function]
        # Devices are written by their numbers in the module.
        key = handle(func), hash(self._about.get(_INFOS, ""))
        if key not in self._texts:
            alone = tvm.IRModule({gv: func}, global_infos=self._infos)
            self._texts[key] = _body(alone.script(show_meta=False))
        return self._texts[key]

    def changes_to(self, after: Snapshot) -> tuple[FunctionChange, ...]:
        """The functions whose text differs, Relax functions first, and the attributes, if they do."""
        every = {**self._functions, **after._functions}
        names = sorted(every, key=lambda name: (not isinstance(every[name][1], tvm.relax.Function), name))
        about = self._about != after._about
        candidates = [
            name
            for name in names
            if name not in self._functions
            or name not in after._functions
            or self._about.get(_INFOS) != after._about.get(_INFOS)
            or not self._functions[name][1].same_as(after._functions[name][1])
        ]
        found = [FunctionChange(name, self.text(name), after.text(name)) for name in candidates]
        if about:
            found.append(FunctionChange(ATTRIBUTES, self.text(ATTRIBUTES), after.text(ATTRIBUTES)))
        return tuple(change for change in found if change.before != change.after)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """Attributes and global infos as text: long values, such as reports in JSON, by their beginning and length."""
        infos = {_INFOS: str(dict(self._infos.items()))} if self._infos else {}
        attrs = {str(name): _abbreviated(value) for name, value in sorted((self._attrs or {}).items())}
        return {**attrs, **infos}


def _abbreviated(value: Any) -> str:
    text = str(value)
    if len(text) <= _ABBREVIATED:
        return text
    return (
        f"{text[:_ABBREVIATED]}... ({len(text):,} characters, checksum {zlib.crc32(text.encode(errors='replace')):08x})"
    )


def _body(script: str) -> str:
    """The function of a module's text, without the module around it."""
    lines = script.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("    @")), 0)
    return "\n".join(line.removeprefix("    ") for line in lines[start:])


_IN_NOTEBOOK, _ON_PAGE = 40, 200
"""Lines of a function that a notebook keeps, in its file, and a page."""


@dataclass
class TracedPass:
    """One run of one pass.

    Attributes
    ----------
    number : int
        Passes are counted from 1, in the order in which they began.
    name : str
        E.g. "FormRows"; TVM calls a `Sequential` without a name "sequential".
    depth : int
        How many other passes it ran inside of.
    seconds : float
        Without the time that tracing itself took, the passes inside included.
    outcome : str
        "done", or "failed" for a pass that raised an error.
    """

    number: int
    name: str
    depth: int
    seconds: float = 0.0
    outcome: str = "failed"
    _before: Snapshot | None = field(default=None, repr=False)
    _after: Snapshot | None = field(default=None, repr=False)
    _changes: tuple[FunctionChange, ...] | None = field(default=None, repr=False)

    @property
    def is_kept(self) -> bool:
        """True if the module was kept before and after the pass: not where it failed, or saw kernels alone."""
        return self._before is not None and self._after is not None

    @property
    def before(self) -> tvm.IRModule:
        """The module that the pass was given; HeteroError where it was not kept."""
        return _kept(self, self._before).module()

    @property
    def after(self) -> tvm.IRModule:
        """The module that the pass made; HeteroError where it was not kept, or the pass failed."""
        return _kept(self, self._after).module()

    @property
    def changed(self) -> bool:
        """True if the text of any function, or an attribute of the module, is another one after the pass."""
        return bool(self.changes)

    @property
    def changes(self) -> tuple[FunctionChange, ...]:
        """Changes by the pass, function by function; made when it is first asked for."""
        if self._changes is None:
            if self._before is None or self._after is None or self._before is self._after:
                self._changes = ()
            else:
                self._changes = self._before.changes_to(self._after)
        return self._changes


def _kept(one: TracedPass, snapshot: Snapshot | None) -> Snapshot:
    if snapshot is None:
        why = "the pass failed" if one.outcome == "failed" else "it holds kernels alone: use trace_passes(kernels=True)"
        raise HeteroError(f"pass {one.number}, {one.name}: its module was not kept, as {why}")
    return snapshot


class PassTrace(AbstractContextManager["PassTrace"]):
    """The passes that ran while this was open; `trace_passes` makes one. Printing it gives a table.

    Parameters
    ----------
    kernels : bool
        As `trace_passes` takes it.

    Attributes
    ----------
    passes : list of TracedPass
        In the order in which they began.
    result : tvm.IRModule or None
        Module after the passes that `trace_passes` was given; None without one.
    """

    def __init__(self, kernels: bool = False) -> None:
        self.passes: list[TracedPass] = []
        self.result: tvm.IRModule | None = None
        self._kernels = kernels
        self._open: list[_Running] = []
        self._texts: dict[tuple[int, int], str] = {}
        self._latest: Snapshot | None = None
        self._context: tvm.transform.PassContext | None = None

    def __enter__(self) -> PassTrace:
        if self._context is not None:
            raise HeteroError("this trace of passes is open already: each `with` needs a trace_passes() of its own")
        around = tvm.transform.PassContext.current()
        self._context = tvm.transform.PassContext(
            *(int(around.opt_level), list(around.required_pass), list(around.disabled_pass)),
            instruments=[*(around.instruments or ()), self.instrument],
            config=dict(around.config),
        )
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._context is not None, "it was entered"
        context, self._context = self._context, None
        context.__exit__(*error)
        self._open.clear()

    @property
    def instrument(self) -> tvm.ir.instrument.PassInstrument:
        """For a ``tvm.transform.PassContext`` that you make yourself: ``PassContext(instruments=[trace.instrument])``.

        ``with trace_passes()`` makes one with the settings of the context around it.
        """
        return _Instrument(self)

    def find(self, name: str | int) -> list[TracedPass]:
        """The runs of a pass.

        Parameters
        ----------
        name : str or int
            Its name, or its number in the table.

        Returns
        -------
        list of TracedPass
            In order; a pass may have run several times.

        Raises
        ------
        HeteroError
            It did not run.
        """
        found = [one for one in self.passes if name in (one.number, one.name)]
        if not found:
            names = list(dict.fromkeys(one.name for one in self.passes))
            near = ", ".join(difflib.get_close_matches(str(name), names) or names[:8]) or "none"
            raise HeteroError(f"no pass {name!r} ran; passes that did: {near}")
        return found

    def show(self, name: str | int, function: str | None = None, file: TextIO | None = None) -> None:
        """Print what a pass changed, with colours on a terminal.

        Parameters
        ----------
        name : str or int
            The pass, as `find` takes it.
        function : str, optional
            Only this function of the module.
        file : text file, optional
            Default: standard output.

        Raises
        ------
        HeteroError
            No pass or function has that name, or the module was not kept.

        Examples
        --------
        >>> trace = rh.transform.trace_passes(mod)
        >>> trace.show("FormRows")
        """
        from rich.console import Console
        from rich.syntax import Syntax

        screen = Console(file=file, highlight=False, emoji=False, markup=False, soft_wrap=True)
        for one in self.find(name):
            _kept(one, one._before), _kept(one, one._after)
            changes = [change for change in one.changes if function in (None, change.function)]
            if function is not None and not changes:
                self._refuse_unknown(one, function)
            screen.print(f"{one.number} {one.name}: {pass_summary(one)}")
            for change in changes:
                if screen.is_terminal:
                    screen.print(Syntax(change.diff, "diff", background_color="default"))
                else:
                    screen.print(change.diff)

    def _refuse_unknown(self, one: TracedPass, function: str) -> None:
        names = [gv.name_hint for mod in (one.before, one.after) for gv in mod.functions]
        if function not in names:
            known = ", ".join(dict.fromkeys(names[:8]))
            raise HeteroError(f"pass {one.number}, {one.name}: the module has no function {function!r}; it has {known}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML with the passes, their times and what each changed; it needs no network.

        Parameters
        ----------
        path : str or PathLike of str
            File to write; one that is there is replaced.

        Raises
        ------
        HeteroError
            The file cannot be written.
        """
        text = page("What each pass changed", *self._html(_ON_PAGE))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise HeteroError(f"{path}: the page of passes cannot be written: {error.strerror or error}") from None

    def to_data(self) -> list[dict[str, Any]]:
        """The passes as JSON data: names, times, and a unified diff for each function that changed."""
        return [
            {
                **{"number": one.number, "name": one.name, "depth": one.depth, "seconds": one.seconds},
                **{"outcome": one.outcome, "changed": one.changed},
                "functions": {change.function: _change_data(change) for change in one.changes},
            }
            for one in self.passes
        ]

    def shown(self) -> list[TracedPass]:
        """The passes that tables show: those inside other passes only where they changed something."""
        return [one for one in self.passes if one.depth <= 1 or one.changed]

    def __str__(self) -> str:
        head = ("pass", "what changed", "no", "ms", "lines")
        rows = []
        for one in self.shown():
            name = "  " * one.depth + one.name
            rows.append((name, pass_summary(one), str(one.number), f"{one.seconds * 1e3:.2f}", pass_lines(one)))
        hidden = len(self.passes) - len(rows)
        note = f"\n{hidden} more inside of these changed nothing" if hidden else ""
        return text_table(head, rows, left=2) + note

    def __repr__(self) -> str:
        return f"<PassTrace of {len(self.passes)} passes>"

    def _repr_html_(self) -> str:
        return view(*self._html(_IN_NOTEBOOK))

    def _html(self, max_lines: int) -> list[str]:
        shown = self.shown()
        outer = sum(one.seconds for one in self.passes if one.depth == 0)
        hidden = len(self.passes) - len(shown)
        note = f"; {hidden} inside of others that changed nothing are left out" if hidden else ""
        head = paragraph(f"{len(self.passes)} passes, {outer * 1e3:,.1f} ms{note}.")
        return [head, *(_pass_html(one, max_lines) for one in shown)]

    def _begin(self, mod: tvm.IRModule, name: str) -> None:
        begin = time.perf_counter()
        one = TracedPass(len(self.passes) + 1, name, len(self._open))
        self.passes.append(one)
        one._before = self._snapshot(mod)
        now = time.perf_counter()
        self._open.append(_Running(one, now, now - begin))

    def _end(self, mod: tvm.IRModule, name: str) -> None:
        now = time.perf_counter()
        while self._open and self._open[-1].traced.name != name:  # passes that raised, in a program that went on
            self._open.pop()
        if not self._open:
            return
        running = self._open.pop()
        one = running.traced
        one.seconds, one.outcome = now - running.begin - running.inside, "done"
        one._after = self._snapshot(mod)
        if self._open:
            own = running.before + time.perf_counter() - now
            self._open[-1].inside += running.inside + own

    def _snapshot(self, mod: tvm.IRModule) -> Snapshot | None:
        """The module as it is; the very snapshot of before where nothing is new."""
        made = Snapshot(mod, self._texts)
        if not (self._kernels or made.has_relax):
            return None
        if self._latest is None or not made.same_as(self._latest):
            self._latest = made
        return self._latest


@dataclass
class _Running:
    """A pass that has begun, when, and the time that tracing took before it and inside of it."""

    traced: TracedPass
    begin: float
    before: float
    inside: float = 0.0


@tvm.ir.instrument.pass_instrument
class _Instrument:
    """Tells a trace of the passes that run. TVM never frees an instrument with methods, so this one holds nothing."""

    def __init__(self, trace: PassTrace) -> None:
        self._trace = weakref.ref(trace)

    def run_before_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        trace = self._trace()
        if trace is not None:
            trace._begin(mod, str(info.name))

    def run_after_pass(self, mod: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        trace = self._trace()
        if trace is not None:
            trace._end(mod, str(info.name))


def trace_passes(
    mod: tvm.IRModule | None = None,
    passes: tvm.transform.Pass | Sequence[tvm.transform.Pass] | None = None,
    *,
    kernels: bool = False,
) -> PassTrace:
    """Keep the module after each pass, the differences and the times.

    Without a module this is a context: every pass that runs inside of the ``with`` block is traced, be it alone, in a
    ``tvm.transform.Sequential`` or in ``rh.compile``. With a module, passes are run on it now.

    Parameters
    ----------
    mod : tvm.IRModule, optional
        Run `passes` on it; the trace's ``result`` is what they made.
    passes : tvm.transform.Pass, or sequence of them, optional
        Default: those of ``rh.compile``.
    kernels : bool
        Keep modules that hold kernels alone, too. ``rh.compile`` runs many passes of TVM on kernels when it links, and
        their modules take much memory; they are only timed by default.

    Returns
    -------
    PassTrace
        ``print(trace)`` gives a table, ``trace.show("FormRows")`` the lines that a pass changed, ``trace.save`` a page.

    Raises
    ------
    HeteroError
        Something else than a module or a pass is given, or passes without a module. Errors of passes are theirs.

    Examples
    --------
    >>> with rh.transform.trace_passes() as trace:
    ...     mod = tvm.transform.Sequential([rh.transform.RealizeVDevice(), rh.transform.FormRows()])(mod)
    >>> print(trace)
    >>> trace = rh.transform.trace_passes(mod)
    >>> trace.show("FormRows")
    >>> trace.save("passes.html")
    """
    trace = PassTrace(kernels)
    if mod is None:
        if passes is not None:
            raise HeteroError("trace_passes: found passes without a module, expected trace_passes(mod, passes)")
        return trace
    if not isinstance(mod, tvm.IRModule):
        raise HeteroError(f"trace_passes: {describe_value(mod)}; expected a tvm.IRModule")
    from .pipeline import pipeline_steps  # which imports every pass

    run = _checked([step.run for step in pipeline_steps()] if passes is None else passes)
    with trace:
        for each in run:
            mod = each(mod)
    trace.result = mod
    return trace


def _checked(passes: Any) -> list[tvm.transform.Pass]:
    run = [passes] if isinstance(passes, tvm.transform.Pass) else passes
    if not isinstance(run, (list, tuple)):
        raise HeteroError(f"trace_passes: found {type(passes).__name__}, expected a pass, or a list of passes")
    for each in run:
        if not isinstance(each, tvm.transform.Pass):
            call = f": did you mean {each.__name__}()?" if callable(each) and hasattr(each, "__name__") else ""
            raise HeteroError(f"trace_passes: found {type(each).__name__} among the passes, expected a pass{call}")
    return list(run)


def _change_data(change: FunctionChange) -> dict[str, Any]:
    lines = {"before_lines": len(change.before.splitlines()), "after_lines": len(change.after.splitlines())}
    return {**lines, "diff": change.diff}


def pass_lines(one: TracedPass) -> str:
    """How many lines of text came and went."""
    if not one.changed:
        return ""
    return f"+{sum(c.added for c in one.changes)} -{sum(c.removed for c in one.changes)}"


def pass_summary(one: TracedPass) -> str:
    """The functions that a pass changed, in a line: new ones with a plus, those that are gone with a minus."""
    if one.outcome == "failed":
        return "failed"
    if not one.is_kept:
        return "not kept (kernels alone)"
    names = [_change_name(change) for change in one.changes]
    return ", ".join([*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names) or "nothing"


def _change_name(change: FunctionChange) -> str:
    sign = "+" if not change.before else "-" if not change.after else ""
    return sign + change.function


def _pass_html(one: TracedPass, max_lines: int) -> str:
    lines, indent = pass_lines(one), f"margin-left:{1.4 * one.depth:.1f}em"
    quiet = "" if one.changes or one.outcome == "failed" else ' class="rh-quiet"'
    title = Markup(
        f"<b>{escaped(one.name)}</b> <span>{one.seconds * 1e3:,.2f} ms</span> {escaped(lines)} "
        f'<span class="rh-quiet">{escaped(pass_summary(one))}</span>'
    )
    if not one.changes:
        return f'<div{quiet} style="{indent}">{one.number}. {title}</div>'
    inside = [folded(_change_title(change), _diff(change, max_lines)) for change in one.changes]
    return f'<div style="{indent}">{folded(Markup(f"{one.number}. {title}"), *inside)}</div>'


def _change_title(change: FunctionChange) -> str:
    state = "" if change.before and change.after else ", new" if change.after else ", gone"
    return f"{change.function}{state}: +{change.added} -{change.removed}"


def _diff(change: FunctionChange, max_lines: int) -> Markup:
    lines = change.diff.splitlines()[2:]
    drawn = [f'<span class="rh-pair{_class(line)}">{escaped(line)}</span>' for line in lines[:max_lines]]
    more = len(lines) - max_lines
    rest = paragraph(f"{more:,} more lines: trace.show(...) prints them.") if more > 0 else ""
    return Markup(f"<pre>{''.join(drawn)}</pre>{rest}")


def _class(line: str) -> str:
    return {"+": " rh-plus", "-": " rh-minus"}.get(line[:1], "")
