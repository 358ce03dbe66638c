"""Traces: when each step ran in a machine's queues; `Trace.save` writes a file for Perfetto and ``about:tracing``.

A call that is followed has a plan and arguments like any other, only that running a step and making the result note
the time. So a machine that is not traced does nothing for it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tvm_ffi

from ...artifact.metadata import Metadata
from ...display.html import Column, Markup, bar, colour, escaped, paragraph, table, view
from ...errors import BindingError
from ..device.tensors import nbytes_of
from .call import Prepare, Prepared
from .fence import Fence
from .plan import QueuePlan
from .queues import CallState, Queues
from .stream_queue import Point
from .traced_calls import RESULT, TracedCall, chrome_events, in_line

# Traces as HTML for notebooks.

_MAX_SLICES = 2000
_WIDTH, _LABEL, _ROW = 900, 130, 22


def timeline_html(calls: int, left_out: int, events: Sequence[Mapping[str, Any]], busy: Mapping[str, float]) -> str:
    """A picture with a line for each queue and a slice for each step, and how busy each queue was."""
    about = f"Trace of {calls} call{'s' * (calls != 1)}"
    if left_out:
        about += f"; {left_out} more came after the limit"
    tracks = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "call"]
    if not slices:
        return view(paragraph(about, "; nothing ran."))
    rows = [(name, bar(busy.get(name, 0.0))) for name in tracks.values() if name in busy]
    shown = slices[:_MAX_SLICES]
    note = f"The picture shows the first {len(shown):,} of {len(slices):,} steps." if len(shown) < len(slices) else ""
    return view(
        paragraph(about, "."),
        _picture(shown, tracks),
        *([paragraph(note)] if note else []),
        table("Queues", [Column("queue"), Column("busy")], rows),
    )


def _picture(slices: Sequence[Mapping[str, Any]], tracks: Mapping[int, str]) -> Markup:
    begin = min(event["ts"] for event in slices)
    total = max(max(event["ts"] + event["dur"] for event in slices) - begin, 1e-3)
    lines = {track: number for number, track in enumerate(sorted({event["tid"] for event in slices}))}
    scale = (_WIDTH - _LABEL) / total
    drawn = []
    for track, number in lines.items():
        y = number * _ROW
        drawn.append(f'<text x="0" y="{y + 15}" font-size="12" fill="currentColor">{escaped(tracks[track])}</text>')
        drawn.append(
            f'<line x1="{_LABEL}" x2="{_WIDTH}" y1="{y + _ROW - 1}" y2="{y + _ROW - 1}" stroke="currentColor" '
            'stroke-opacity=".2"/>'
        )
    for event in slices:
        number = lines[event["tid"]]
        x, width = _LABEL + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.8)
        title = escaped(f"{event['name']}: {event['dur']:,.1f} µs, from {event['ts'] - begin:,.1f} µs")
        opacity = ".5" if event["cat"] == "transfer" else "1"
        drawn.append(
            f'<rect x="{x:.2f}" y="{number * _ROW + 3}" width="{width:.2f}" height="{_ROW - 7}" rx="1.5" '
            f'fill="{colour(number)}" fill-opacity="{opacity}"><title>{title}</title></rect>'
        )
    height = len(lines) * _ROW + 18
    end = f'y="{height - 4}" font-size="11" fill="currentColor" fill-opacity=".7"'
    drawn.append(f'<text x="{_LABEL}" {end}>0</text><text x="{_WIDTH}" text-anchor="end" {end}>{_time(total)}</text>')
    label = escaped(f"Timeline of {len(lines)} queues over {_time(total)}; transfers are pale")
    return Markup(
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'
    )


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f} ms" if microseconds >= 1000 else f"{microseconds:,.1f} µs"


class Trace:
    """The calls that a machine was given while it was traced.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the machine's executable.
    limit : int
        How many calls are followed; later ones are only counted.

    Attributes
    ----------
    calls : list of TracedCall
        Calls in the order in which they were submitted.
    left_out : int
        How many calls came after the limit.

    Raises
    ------
    BindingError
        A limit that is no positive integer.
    """

    def __init__(self, metadata: Metadata, limit: int) -> None:
        if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
            raise BindingError(f"the limit of a trace is {limit!r}, expected a positive integer")
        self.calls: list[TracedCall] = []
        self.left_out = 0
        self._metadata, self._limit = metadata, limit
        self._changed = threading.Condition()

    def follow(
        self, fence: Fence, plan: Callable[[Queues], QueuePlan], prepare: Prepare
    ) -> tuple[Callable[[Queues], QueuePlan], Prepare]:
        """A plan and a `prepare` that note when steps run, for the next call; beyond the limit those given.

        Parameters
        ----------
        fence : Fence
            Fence of the call.
        plan : callable
            Function that gives the call's queue plan.
        prepare : Prepare
            Function that binds the call's arguments.
        """
        with self._changed:
            if len(self.calls) == self._limit:
                self.left_out += 1
                return plan, prepare
            call = TracedCall(len(self.calls) + 1, time.perf_counter_ns())
            self.calls.append(call)

        def note_end(fence: Any) -> None:
            call.outcome = _outcome(fence)
            with self._changed:
                call.ended = time.perf_counter_ns()
                self._changed.notify_all()

        def traced_plan(queues: Queues) -> QueuePlan:
            call.plan = plan(queues)
            return _TracedPlan(call.plan, call)

        def traced_prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
            prepared = prepare(args, kwargs)
            return replace(prepared, finish=_noting(prepared.finish, call))

        fence.add_done_callback(note_end)
        return traced_plan, traced_prepare

    @property
    def ended(self) -> list[TracedCall]:
        """The calls that have ended."""
        return [call for call in self.calls if call.ended]

    def wait(self) -> None:
        """Wait until the calls have ended that were submitted so far."""
        with self._changed:
            self._changed.wait_for(lambda: all(call.ended for call in self.calls))

    def events(self) -> list[dict[str, Any]]:
        """The calls that have ended, as trace events; times in microseconds of a monotonic clock."""
        return chrome_events(self.ended, self._metadata)

    def busy(self) -> dict[str, float]:
        """How much of the time each queue worked, of that from the first call's submission to the last one's end."""
        calls = self.ended
        total = max((call.ended for call in calls), default=0) - min((call.submitted for call in calls), default=0)
        spent: Counter[str] = Counter()
        for call in in_line(calls):
            for ran in call.ran:
                spent[ran.track] += ran.end - ran.begin
        return {track: spent[track] / total for track in sorted(spent)}

    def _repr_html_(self) -> str:
        return timeline_html(len(self.ended), self.left_out, self.events(), self.busy())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON; ``otherData`` says how many calls it holds and how many came after the limit.

        Parameters
        ----------
        path : str or PathLike of str
            File to write; one that is there is replaced.
        """
        events = self.events()
        about = {"calls": len(self.ended), "calls_left_out": self.left_out}
        data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
        Path(path).write_text(json.dumps(data))


class _TracedPlan(QueuePlan):
    """A plan whose steps note when they ran."""

    def __init__(self, plan: QueuePlan, call: TracedCall) -> None:
        vars(self).update(vars(plan))  # what is in it is not computed again
        self._traced = call
        self._issued: dict[int, int] = {}

    def execute(self, index: int, call: CallState) -> tuple[Sequence[Any], Point | None]:
        begin = time.perf_counter_ns()
        try:
            made, point = super().execute(index, call)
        except BaseException as error:
            self._traced.note(index, begin, _first_line(error))
            raise
        if point is None:
            self._traced.note(index, begin)
        else:
            self._issued[index] = begin
        for number, value in zip(self.steps[index].makes, made, strict=True):
            if self.readers[number]:
                self._traced.nbytes[number] = _nbytes(value)
        return made, point

    def await_end(self, index: int, point: Point) -> None:
        error = ""
        try:
            super().await_end(index, point)
        except BaseException as raised:
            error = _first_line(raised)
            raise
        finally:
            queue = self.queues[index]
            assert queue is not None, "what is issued is issued to a queue"
            self._traced.note(index, self._issued[index], error, queue.name)


def _noting(finish: Callable[[Any], Any], call: TracedCall) -> Callable[[Any], Any]:
    def noted(returned: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            result = finish(returned)
        except Exception as error:
            call.note(RESULT, begin, _first_line(error))
            raise
        call.note(RESULT, begin)
        return result

    return noted


def _nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all tensors of a tuple; 0 for other values."""
    if isinstance(value, tvm_ffi.core.Tensor):
        return nbytes_of(value)
    if isinstance(value, (tuple, tvm_ffi.Array)):
        return sum(map(_nbytes, value))
    return 0


def _outcome(fence: Any) -> str:
    if fence.cancelled():
        return "cancelled"
    error = fence.exception()
    return "done" if error is None else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
