"""`trace_passes`: the changes that each pass of a `Sequential`, or of any other program, made to a module, and time."""

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

# Snapshots of a module, and the differences of two. A pass may write into the module that it is given, so a snapshot
# keeps the functions and not the module. Functions are immutable, and most passes leave most of them alone: a snapshot
# costs a reference for each. Texts are made on first use.

ATTRIBUTES = "(attributes)"  # name that stands for the module's attributes and global infos

_INFOS = "global_infos"
_MAX_VALUE_LENGTH = 120


@dataclass(frozen=True)
class FunctionChange:
    """Change of one function by a pass."""

    function: str  # its name; ``(attributes)`` for the attributes and global infos of the module
    # Its text in TVMScript; empty where it is new, or gone.
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
        """Number of lines of `after` that `before` lacks."""
        return sum(line.startswith("+") for line in self.diff.splitlines()[2:])

    @property
    def removed(self) -> int:
        """Number of lines of `before` that `after` lacks."""
        return sum(line.startswith("-") for line in self.diff.splitlines()[2:])


class Snapshot:
    """A module at one moment.

    `mod`: may change later. `texts`: texts by function, shared by the snapshots of a trace.
    """

    def __init__(self, mod: tvm.IRModule, texts: dict[tuple[int, int], str]) -> None:
        self._functions = {gv.name_hint: (gv, func) for gv, func in mod.functions.items()}
        self._attrs, self._infos = mod.attrs, mod.global_infos
        self._texts = texts

    @property
    def has_relax(self) -> bool:
        """True if any function is a Relax function."""
        return any(isinstance(func, tvm.relax.Function) for _, func in self._functions.values())

    def same_as(self, other: Snapshot) -> bool:
        """Return whether both hold the same function objects and attributes."""
        return (
            self._functions.keys() == other._functions.keys()
            and all(func.same_as(other._functions[name][1]) for name, (_, func) in self._functions.items())
            and self._attributes == other._attributes
        )

    def module(self) -> tvm.IRModule:
        """The module, as a new one."""
        return tvm.IRModule(dict(self._functions.values()), attrs=self._attrs, global_infos=self._infos)

    def text(self, function: str) -> str:
        """A function in TVMScript, with the module's names of devices; empty if the module lacks it."""
        if function == ATTRIBUTES:
            return "\n".join(f"{name} = {text}" for name, text in self._attributes.items())
        if function not in self._functions:
            return ""
        gv, func = self._functions[function]
        # Devices are written by their numbers in the module.
        key = handle(func), hash(self._attributes.get(_INFOS, ""))
        if key not in self._texts:
            single = tvm.IRModule({gv: func}, global_infos=self._infos)
            self._texts[key] = _body(single.script(show_meta=False))
        return self._texts[key]

    def changes_to(self, after: Snapshot) -> tuple[FunctionChange, ...]:
        """The functions whose text differs, Relax functions first, and the attributes, if they do."""
        functions = {**self._functions, **after._functions}
        names = sorted(functions, key=lambda name: (not isinstance(functions[name][1], tvm.relax.Function), name))
        candidates = [
            name
            for name in names
            if name not in self._functions
            or name not in after._functions
            or self._attributes.get(_INFOS) != after._attributes.get(_INFOS)
            or not self._functions[name][1].same_as(after._functions[name][1])
        ]
        changes = [FunctionChange(name, self.text(name), after.text(name)) for name in [*candidates, ATTRIBUTES]]
        return tuple(change for change in changes if change.before != change.after)

    @cached_property
    def _attributes(self) -> Mapping[str, str]:
        """Attributes and global infos as text; long values, such as reports in JSON, are abbreviated."""
        infos = {_INFOS: str(dict(self._infos.items()))} if self._infos else {}
        attrs = {str(name): _abbreviated(value) for name, value in sorted((self._attrs or {}).items())}
        return {**attrs, **infos}


def _abbreviated(value: Any) -> str:
    text = str(value)
    if len(text) <= _MAX_VALUE_LENGTH:
        return text
    checksum = zlib.crc32(text.encode(errors="replace"))
    return f"{text[:_MAX_VALUE_LENGTH]}... ({len(text):,} characters, checksum {checksum:08x})"


def _body(script: str) -> str:
    """The function of a module's text, without the module around it."""
    lines = script.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("    @")), 0)
    return "\n".join(line.removeprefix("    ") for line in lines[start:])


_MAX_NOTEBOOK_LINES, _MAX_PAGE_LINES = 40, 200
"""Lines of a function's difference in a notebook, which keeps them in its file, and on a page."""


@dataclass
class TracedPass:
    """One run of one pass."""

    number: int  # position among the passes, in the order in which they began; the first is 1
    name: str  # E.g. "FormRows"; TVM calls a `Sequential` without a name "sequential".
    depth: int  # number of passes that it ran inside of
    seconds: float = 0.0  # time, that of inner passes included, without the time that tracing took
    outcome: str = "failed"  # "done", or "failed" for a pass that raised an error
    _before: Snapshot | None = field(default=None, repr=False)
    _after: Snapshot | None = field(default=None, repr=False)
    _changes: tuple[FunctionChange, ...] | None = field(default=None, repr=False)

    @property
    def is_kept(self) -> bool:
        """True if the modules before and after the pass were kept: not if it failed, or they hold kernels only."""
        return self._before is not None and self._after is not None

    @property
    def before(self) -> tvm.IRModule:
        """Module before the pass; HeteroError if it was not kept."""
        return _required_snapshot(self, self._before).module()

    @property
    def after(self) -> tvm.IRModule:
        """Module after the pass; HeteroError if it was not kept, or the pass failed."""
        return _required_snapshot(self, self._after).module()

    @property
    def changed(self) -> bool:
        """True if the pass changed the text of a function, or an attribute of the module."""
        return bool(self.changes)

    @property
    def changes(self) -> tuple[FunctionChange, ...]:
        """Changes by the pass, function by function; computed on first use."""
        if self._changes is None:
            if self._before is None or self._after is None or self._before is self._after:
                self._changes = ()
            else:
                self._changes = self._before.changes_to(self._after)
        return self._changes


def _required_snapshot(run: TracedPass, snapshot: Snapshot | None) -> Snapshot:
    if snapshot is None:
        why = "the pass failed" if run.outcome == "failed" else "it holds kernels only: use trace_passes(kernels=True)"
        raise HeteroError(f"pass {run.number}, {run.name}: its module was not kept, as {why}")
    return snapshot


class PassTrace(AbstractContextManager["PassTrace"]):
    """The passes that ran while this was open; `trace_passes` makes one. Printing it gives a table.

    Parameters
    ----------
    kernels : bool
        Keep modules that hold kernels only, too.

    Attributes
    ----------
    passes : list of TracedPass
        In the order in which they began.
    result : tvm.IRModule or None
        Module after the passes that `trace_passes` was given; None if it was given no module.
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
        current = tvm.transform.PassContext.current()
        self._context = tvm.transform.PassContext(
            *(int(current.opt_level), list(current.required_pass), list(current.disabled_pass)),
            instruments=[*(current.instruments or ()), self.instrument],
            config=dict(current.config),
        )
        self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        assert self._context is not None, "the trace is open"
        context, self._context = self._context, None
        context.__exit__(*error)
        self._open.clear()

    @property
    def instrument(self) -> tvm.ir.instrument.PassInstrument:
        """Instrument for a ``tvm.transform.PassContext`` of your own: ``PassContext(instruments=[trace.instrument])``.

        ``with trace_passes()`` opens a context with the settings of the current one.
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
            Runs in order; a pass may have run several times.

        Raises
        ------
        HeteroError
            No such pass ran.
        """
        runs = [run for run in self.passes if name in (run.number, run.name)]
        if not runs:
            names = list(dict.fromkeys(run.name for run in self.passes))
            near = ", ".join(difflib.get_close_matches(str(name), names) or names[:8]) or "none"
            raise HeteroError(f"no pass {name!r} ran; passes that did: {near}")
        return runs

    def show(self, name: str | int, function: str | None = None, file: TextIO | None = None) -> None:
        """Print what a pass changed, with colours on a terminal.

        Parameters
        ----------
        name : str or int
            Name of the pass, or its number in the table.
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
        for run in self.find(name):
            _required_snapshot(run, run._before), _required_snapshot(run, run._after)
            changes = [change for change in run.changes if function in (None, change.function)]
            if function is not None and not changes:
                self._refuse_unknown(run, function)
            screen.print(f"{run.number} {run.name}: {pass_summary(run)}")
            for change in changes:
                if screen.is_terminal:
                    screen.print(Syntax(change.diff, "diff", background_color="default"))
                else:
                    screen.print(change.diff)

    def _refuse_unknown(self, run: TracedPass, function: str) -> None:
        names = [gv.name_hint for mod in (run.before, run.after) for gv in mod.functions]
        if function not in names:
            examples = ", ".join(dict.fromkeys(names[:8]))
            raise HeteroError(
                f"pass {run.number}, {run.name}: the module has no function {function!r}; it has {examples}"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a page of HTML with the passes, their times and what each changed; it needs no network.

        Parameters
        ----------
        path : str or PathLike of str
            File to write; an existing file is replaced.

        Raises
        ------
        HeteroError
            The file cannot be written.
        """
        text = page("What each pass changed", *self._html(_MAX_PAGE_LINES))
        try:
            Path(path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise HeteroError(f"{path}: the page of passes cannot be written: {error.strerror or error}") from None

    def to_data(self) -> list[dict[str, Any]]:
        """The passes as JSON data: names, times, and a unified diff for each function that changed."""
        return [
            {
                **{"number": run.number, "name": run.name, "depth": run.depth, "seconds": run.seconds},
                **{"outcome": run.outcome, "changed": run.changed},
                "functions": {change.function: _change_data(change) for change in run.changes},
            }
            for run in self.passes
        ]

    def shown(self) -> list[TracedPass]:
        """The passes that tables show: those inside other passes only where they changed something."""
        return [run for run in self.passes if run.depth <= 1 or run.changed]

    def __str__(self) -> str:
        head = ("pass", "what changed", "no", "ms", "lines")
        rows = []
        for run in self.shown():
            name = "  " * run.depth + run.name
            rows.append((name, pass_summary(run), str(run.number), f"{run.seconds * 1e3:.2f}", pass_lines(run)))
        hidden = len(self.passes) - len(rows)
        note = f"\n{hidden} more inside of these changed nothing" if hidden else ""
        return text_table(head, rows, left=2) + note

    def __repr__(self) -> str:
        return f"<PassTrace of {len(self.passes)} passes>"

    def _repr_html_(self) -> str:
        return view(*self._html(_MAX_NOTEBOOK_LINES))

    def _html(self, max_lines: int) -> list[str]:
        shown = self.shown()
        outer = sum(run.seconds for run in self.passes if run.depth == 0)
        hidden = len(self.passes) - len(shown)
        note = f"; {hidden} inside of others that changed nothing are left out" if hidden else ""
        head = paragraph(f"{len(self.passes)} passes, {outer * 1e3:,.1f} ms{note}.")
        return [head, *(_pass_html(run, max_lines) for run in shown)]

    def _begin(self, mod: tvm.IRModule, name: str) -> None:
        begin = time.perf_counter()
        run = TracedPass(len(self.passes) + 1, name, len(self._open))
        self.passes.append(run)
        run._before = self._snapshot(mod)
        now = time.perf_counter()
        self._open.append(_Running(run, now, now - begin))

    def _end(self, mod: tvm.IRModule, name: str) -> None:
        now = time.perf_counter()
        while self._open and self._open[-1].traced.name != name:  # passes that raised in a program that continued
            self._open.pop()
        if not self._open:
            return
        running = self._open.pop()
        run = running.traced
        run.seconds, run.outcome = now - running.begin - running.inner_overhead, "done"
        run._after = self._snapshot(mod)
        if self._open:
            own = running.overhead + time.perf_counter() - now
            self._open[-1].inner_overhead += running.inner_overhead + own

    def _snapshot(self, mod: tvm.IRModule) -> Snapshot | None:
        """Snapshot of the module; the latest one where nothing has changed."""
        snapshot = Snapshot(mod, self._texts)
        if not (self._kernels or snapshot.has_relax):
            return None
        if self._latest is None or not snapshot.same_as(self._latest):
            self._latest = snapshot
        return self._latest


@dataclass
class _Running:
    """A pass that has begun, and the seconds that tracing took before it and inside of it."""

    traced: TracedPass
    begin: float
    overhead: float
    inner_overhead: float = 0.0


@tvm.ir.instrument.pass_instrument
class _Instrument:
    """Reports passes to a trace. TVM never frees an instrument with methods: this one holds a weak reference only."""

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
        Module to run `passes` on; the trace's ``result`` is the module after them.
    passes : tvm.transform.Pass, or sequence of them, optional
        Default: those of ``rh.compile``.
    kernels : bool
        Keep modules that hold kernels only, too. ``rh.compile`` runs many passes of TVM on kernels when it links, and
        their modules take much memory; they are only timed by default.

    Returns
    -------
    PassTrace
        ``print(trace)`` gives a table, ``trace.show("FormRows")`` the lines that a pass changed, ``trace.save`` a page.

    Raises
    ------
    HeteroError
        An argument is not a module or a pass, or there are passes without a module. Errors of passes pass through.

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
    from .pipeline import pipeline_steps  # imports every pass

    sequence = _checked([step.run for step in pipeline_steps()] if passes is None else passes)
    with trace:
        for traced in sequence:
            mod = traced(mod)
    trace.result = mod
    return trace


def _checked(passes: Any) -> list[tvm.transform.Pass]:
    run = [passes] if isinstance(passes, tvm.transform.Pass) else passes
    if not isinstance(run, (list, tuple)):
        raise HeteroError(f"trace_passes: found {type(passes).__name__}, expected a pass, or a list of passes")
    for item in run:
        if not isinstance(item, tvm.transform.Pass):
            call = f": did you mean {item.__name__}()?" if callable(item) and hasattr(item, "__name__") else ""
            raise HeteroError(f"trace_passes: found {type(item).__name__} among the passes, expected a pass{call}")
    return list(run)


def _change_data(change: FunctionChange) -> dict[str, Any]:
    lines = {"before_lines": len(change.before.splitlines()), "after_lines": len(change.after.splitlines())}
    return {**lines, "diff": change.diff}


def pass_lines(run: TracedPass) -> str:
    """Numbers of added and removed lines of text."""
    if not run.changed:
        return ""
    return f"+{sum(c.added for c in run.changes)} -{sum(c.removed for c in run.changes)}"


def pass_summary(run: TracedPass) -> str:
    """The functions that a pass changed, in a line: new ones with a plus, removed ones with a minus."""
    if run.outcome == "failed":
        return "failed"
    if not run.is_kept:
        return "not kept (kernels only)"
    names = [_change_name(change) for change in run.changes]
    return ", ".join([*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names) or "nothing"


def _change_name(change: FunctionChange) -> str:
    sign = "+" if not change.before else "-" if not change.after else ""
    return sign + change.function


def _pass_html(run: TracedPass, max_lines: int) -> str:
    lines, indent = pass_lines(run), f"margin-left:{1.4 * run.depth:.1f}em"
    quiet = "" if run.changes or run.outcome == "failed" else ' class="rh-quiet"'
    title = Markup(
        f"<b>{escaped(run.name)}</b> <span>{run.seconds * 1e3:,.2f} ms</span> {escaped(lines)} "
        f'<span class="rh-quiet">{escaped(pass_summary(run))}</span>'
    )
    if not run.changes:
        return f'<div{quiet} style="{indent}">{run.number}. {title}</div>'
    details = [folded(_change_title(change), _diff(change, max_lines)) for change in run.changes]
    return f'<div style="{indent}">{folded(Markup(f"{run.number}. {title}"), *details)}</div>'


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
