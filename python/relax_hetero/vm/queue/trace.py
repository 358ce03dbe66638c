"""Traces: when each step ran in a machine's queues; `Trace.save` writes a file for Perfetto and ``about:tracing``.

A traced call has a plan and a `prepare` function that also record times, so calls without a trace pay nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tvm_ffi

from ...artifact.commands import Dispatch
from ...artifact.metadata import Metadata, device_names
from ...artifact.schedule import Step
from ...display.html import Column, Markup, bar, colour, escaped, paragraph, table, view
from ...errors import BindingError, first_line
from ..device.tensors import nbytes_of
from .call import Prepare, PreparedCall
from .fence import Fence
from .plan import QueuePlan
from .queues import CallState, Queues
from .stream_queue import Point

# Traced calls as data, and as events of the Trace Event Format (the JSON that Perfetto and Chrome read).
#
# Each queue's thread is a track with a slice for each step, transfer and result. Above them is a track for each of the
# calls in flight, with a slice per call, from its submission to its fence. Flow arrows lead from a call to its first
# steps, from a step to its readers on other tracks, and back to the call.

Event = dict[str, Any]

_FIRST_THREAD_TRACK = 1000  # calls have tracks 0, 1, ...; threads have tracks from this number on

RESULT = -1  # step index that stands for the conversion of the function's result to the caller's


@dataclass(frozen=True)
class RanStep:
    """One execution of a step."""

    step: int  # index of the step, or `RESULT`
    track: str  # name of the thread, or of a GPU's queue
    # Times of ``time.perf_counter_ns``. GPU work begins when it is issued.
    begin: int
    end: int
    error: str = ""  # error that it raised, or empty


@dataclass
class TracedCall:
    """One traced call."""

    number: int  # number of the call, from 1 in the order of submission
    # Times, as in `RanStep`, at which the call was submitted and its fence settled; `ended` is 0 until then.
    submitted: int
    ended: int = 0
    outcome: str = ""  # ``"done"``, ``"cancelled"``, or the error
    plan: QueuePlan | None = None  # plan of the call; None if the call failed before its plan was made
    ran: list[RanStep] = field(default_factory=list)  # executed steps in the order of their ends
    # Bytes of each value that a step made and another step or the caller reads, by its number.
    nbytes: dict[int, int] = field(default_factory=dict)

    def note(self, step: int, begin: int, error: str = "", track: str = "") -> None:
        """Record the execution of a step, or of `RESULT`, from `begin` until now; by default on this thread's track."""
        self.ran.append(RanStep(step, track or threading.current_thread().name, begin, time.perf_counter_ns(), error))


def chrome_events(calls: Sequence[TracedCall], metadata: Metadata) -> list[Event]:
    """All events of calls that have ended; times in microseconds.

    `metadata`: metadata of the executable whose functions were called.
    """
    calls = serialize_tracks(calls)
    call_tracks = _call_tracks(calls)
    thread_tracks = {name: _FIRST_THREAD_TRACK + index for index, name in enumerate(_track_names(calls))}
    names = [*device_names(metadata.devices), "host"]
    titles = {track: f"calls in flight, {track + 1}" for track in call_tracks.values()}
    titles.update((track, name) for name, track in thread_tracks.items())
    slice_maker = _StepSlices(metadata, names)
    events: list[Event] = [_metadata_event("process_name", {"name": "relax_hetero on " + ", ".join(names[:-1])})]
    for track, title in sorted(titles.items()):
        events.append(_metadata_event("thread_name", {"name": title}, track))
        events.append(_metadata_event("thread_sort_index", {"sort_index": track}, track))
    flow_ids = itertools.count(1)
    for call in calls:
        events += _slices(call, call_tracks[call.number], thread_tracks, slice_maker)
        events += _flows(call, call_tracks[call.number], thread_tracks, flow_ids)
    return events + _in_flight(calls) + _bytes_live(calls, names)


def serialize_tracks(calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Delay the begin times of steps so that steps of one track do not overlap.

    GPU work is recorded from its issue to its end. It cannot have begun before the previous work of its queue had
    ended, nor before its inputs were made.
    """
    end_times = {(call.number, ran.step): ran.end for call in calls for ran in call.ran}
    track_ends: dict[str, int] = {}
    steps: dict[int, list[RanStep]] = {call.number: [] for call in calls}
    pairs = [(ran, call) for call in calls for ran in call.ran]
    for ran, call in sorted(pairs, key=lambda pair: pair[0].end):
        input_ends = [end_times.get((call.number, maker), 0) for maker in _makers(call, ran.step)]
        begin = max(ran.begin, track_ends.get(ran.track, 0), *input_ends)
        steps[call.number].append(replace(ran, begin=min(begin, ran.end - 1)))
        track_ends[ran.track] = ran.end
    return [replace(call, ran=steps[call.number]) for call in calls]


def _metadata_event(name: str, args: Event, track: int = 0) -> Event:
    return {"name": name, "ph": "M", "pid": os.getpid(), "tid": track, "args": args}


def _microseconds(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _slice(name: str, category: str, track: int, times: tuple[int, int], args: Event) -> Event:
    begin, end = times
    event = {"name": name, "cat": category, "ph": "X", "ts": _microseconds(begin), "dur": _microseconds(end - begin)}
    return {**event, "pid": os.getpid(), "tid": track, "args": args}


def _call_tracks(calls: Sequence[TracedCall]) -> dict[int, int]:
    """A track for each call, by the call's number: the first track that is free at its submission."""
    free_at: list[int] = []  # for each track, the end of its last call
    call_tracks: dict[int, int] = {}
    for call in sorted(calls, key=lambda call: call.submitted):
        track = next((index for index, end in enumerate(free_at) if end <= call.submitted), len(free_at))
        free_at[track : track + 1] = [call.ended]
        call_tracks[call.number] = track
    return call_tracks


def _track_names(calls: Sequence[TracedCall]) -> list[str]:
    """The names of the machine's queues in order, then of other threads that ran something."""
    queues = [queue for call in calls if call.plan is not None for queue in call.plan.queues if queue is not None]
    names = sorted({ran.track for call in calls for ran in call.ran})
    return list(dict.fromkeys([queue.name for queue in queues if queue.name in names] + names))


class _StepSlices:
    """Maker of the slices of steps, with their names and arguments."""

    def __init__(self, metadata: Metadata, names: Sequence[str]) -> None:
        self._names, self._dispatches = names, metadata.dispatches
        self._regions = {region.name: region for region in metadata.regions}

    def _ops(self, step: Step) -> dict[str, int]:
        """The model's ops that a step computes, with their counts."""
        kernels: list[str] = []
        for name in step.calls:
            region = self._regions.get(name)
            kernels += [name] if region is None else [c.kernel for c in region.commands if isinstance(c, Dispatch)]
        return Counter(op for kernel in kernels if kernel in self._dispatches for op in self._dispatches[kernel].ops)

    def slice_of(self, ran: RanStep, call: TracedCall, track: int) -> Event:
        args: Event = {"call": call.number}
        if ran.error:
            args["error"] = ran.error
        if ran.step < 0 or call.plan is None:
            return _slice("result", "result", track, (ran.begin, ran.end), args)
        step = call.plan.steps[ran.step]
        args["step"] = ran.step
        args["bytes"] = sum(call.nbytes.get(number, 0) for number in step.makes)
        if step.is_transfer:
            name, category = f"{self._names[step.source]} to {self._names[step.device]}", "transfer"
        else:
            name, category = step.function, "step"
            args["device"] = ", ".join(self._names[device] for device in step.devices)
            args["regions"] = [name for name in step.calls if name in self._regions]
            args["ops"] = self._ops(step)
        return _slice(name, category, track, (ran.begin, ran.end), args)


def _slices(
    call: TracedCall, call_track: int, thread_tracks: Mapping[str, int], slice_maker: _StepSlices
) -> Iterator[Event]:
    name = call.plan.function if call.plan is not None else "call"
    args = {"call": call.number, "outcome": call.outcome}
    yield _slice(name, "call", call_track, (call.submitted, call.ended), args)
    for ran in call.ran:
        yield slice_maker.slice_of(ran, call, thread_tracks[ran.track])


def _flows(
    call: TracedCall, call_track: int, thread_tracks: Mapping[str, int], flow_ids: Iterator[int]
) -> Iterator[Event]:
    """Arrows from a call to its first steps, from a step to its readers on other tracks, and back to the call."""
    ran_steps = {ran.step: ran for ran in call.ran}
    for step, reader in ran_steps.items():
        target = thread_tracks[reader.track], reader.begin
        makers = _makers(call, step)
        if not makers:
            yield from _flow(next(flow_ids), "submit", (call_track, call.submitted), target)
        for maker in [ran_steps[index] for index in sorted(makers & ran_steps.keys())]:
            if maker.track != reader.track:
                time_in_maker = max(maker.begin, min(maker.end, reader.begin) - 1)
                yield from _flow(next(flow_ids), "value", (thread_tracks[maker.track], time_in_maker), target)
    if call.ran:
        last = max(call.ran, key=lambda ran: ran.end)
        source = thread_tracks[last.track], last.end - 1
        yield from _flow(next(flow_ids), "fence", source, (call_track, call.ended - 1))


def _flow(flow_id: int, name: str, source: tuple[int, int], target: tuple[int, int]) -> Iterator[Event]:
    """An arrow between two points (track, time), each inside of a slice."""
    common = {"name": name, "cat": "flow", "id": flow_id, "pid": os.getpid()}
    yield {**common, "ph": "s", "tid": source[0], "ts": _microseconds(source[1])}
    yield {**common, "ph": "f", "bp": "e", "tid": target[0], "ts": _microseconds(target[1])}


def _makers(call: TracedCall, step: int) -> set[int]:
    """The steps whose values a step, or the result, reads."""
    plan = call.plan
    if plan is None:
        return set()
    reads = set(plan.steps[step].reads if step >= 0 else plan.returned_values)
    return {index for index, other in enumerate(plan.steps) if not reads.isdisjoint(other.makes)}


def _in_flight(calls: Sequence[TracedCall]) -> list[Event]:
    changes = [(call.submitted, 1) for call in calls] + [(call.ended, -1) for call in calls]
    return _counter("calls in flight", {"calls": changes})


def _bytes_live(calls: Sequence[TracedCall], names: Sequence[str]) -> list[Event]:
    """Bytes of live intermediate values and pending results, by device."""
    changes: dict[str, list[tuple[int, int]]] = {}
    for call in calls:
        for device, nbytes, begin, end in _lifetimes(call):
            if nbytes:
                changes.setdefault(names[device], []).extend([(begin, nbytes), (end, -nbytes)])
    return _counter("bytes between steps", changes)


def _lifetimes(call: TracedCall) -> Iterator[tuple[int, int, int, int]]:
    """Device, bytes, and the times of allocation and release, for each value that owns memory."""
    plan, ran_steps = call.plan, {ran.step: ran for ran in call.ran}
    if plan is None:
        return
    owners: dict[int, int] = {}  # for each value, the one that owns its memory: itself unless it is an alias
    ends: dict[int, int] = {}
    for index, step in enumerate(plan.steps):
        for number in step.makes:
            owners[number] = owners.get(step.reads[0], step.reads[0]) if plan.queues[index] is None else number
    for number, owner in owners.items():
        readers = [index for index, step in enumerate(plan.steps) if number in step.reads]
        lives_until_end = number in plan.returned_values or any(reader not in ran_steps for reader in readers)
        end = call.ended if lives_until_end else max((ran_steps[reader].end for reader in readers), default=0)
        ends[owner] = max(ends.get(owner, 0), end)
    for index, step in enumerate(plan.steps):
        for number in step.makes:
            if owners[number] == number and index in ran_steps and ends[number] > ran_steps[index].end:
                yield step.device, call.nbytes.get(number, 0), ran_steps[index].end, ends[number]


def _counter(name: str, changes: Mapping[str, Sequence[tuple[int, int]]]) -> list[Event]:
    """Events of a counter with several series, from the times and amounts of changes."""
    current = dict.fromkeys(changes, 0)
    values_at: dict[int, Event] = {}
    all_changes = sorted((at, series, amount) for series, pairs in changes.items() for at, amount in pairs)
    for at, series, amount in all_changes:
        current[series] += amount
        values_at[at] = dict(current)
    common = {"name": name, "ph": "C", "pid": os.getpid(), "tid": 0}
    return [{**common, "ts": _microseconds(at), "args": values} for at, values in values_at.items()]


# Traces as pictures for notebooks.

_MAX_SLICES = 2000
_WIDTH, _LABEL_WIDTH, _ROW_HEIGHT = 900, 130, 22  # sizes of a picture in pixels


def timeline_html(calls: int, left_out: int, events: Sequence[Mapping[str, Any]], busy: Mapping[str, float]) -> str:
    """A picture with a row for each queue and a slice for each step, and a table of busy fractions."""
    summary = f"Trace of {calls} call{'s' * (calls != 1)}"
    if left_out:
        summary += f"; {left_out} more came after the limit"
    tracks = {e["tid"]: str(e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X" and event["cat"] != "call"]
    if not slices:
        return view(paragraph(summary, "; nothing ran."))
    rows = [(name, bar(busy.get(name, 0.0))) for name in tracks.values() if name in busy]
    note = f"The picture shows the first {_MAX_SLICES:,} of {len(slices):,} steps." if len(slices) > _MAX_SLICES else ""
    return view(
        paragraph(summary, "."),
        _picture(slices[:_MAX_SLICES], tracks),
        *([paragraph(note)] if note else []),
        table("Queues", [Column("queue"), Column("busy")], rows),
    )


def _picture(slices: Sequence[Mapping[str, Any]], tracks: Mapping[int, str]) -> Markup:
    begin = min(event["ts"] for event in slices)
    total = max(max(event["ts"] + event["dur"] for event in slices) - begin, 1e-3)
    rows = {track: row for row, track in enumerate(sorted({event["tid"] for event in slices}))}
    scale = (_WIDTH - _LABEL_WIDTH) / total
    elements = []
    for track, row in rows.items():
        y = row * _ROW_HEIGHT
        elements.append(f'<text x="0" y="{y + 15}" font-size="12" fill="currentColor">{escaped(tracks[track])}</text>')
        elements.append(
            f'<line x1="{_LABEL_WIDTH}" x2="{_WIDTH}" y1="{y + _ROW_HEIGHT - 1}" y2="{y + _ROW_HEIGHT - 1}" '
            'stroke="currentColor" stroke-opacity=".2"/>'
        )
    for event in slices:
        row = rows[event["tid"]]
        x, width = _LABEL_WIDTH + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.8)
        title = escaped(f"{event['name']}: {event['dur']:,.1f} µs, from {event['ts'] - begin:,.1f} µs")
        opacity = ".5" if event["cat"] == "transfer" else "1"
        elements.append(
            f'<rect x="{x:.2f}" y="{row * _ROW_HEIGHT + 3}" width="{width:.2f}" height="{_ROW_HEIGHT - 7}" rx="1.5" '
            f'fill="{colour(row)}" fill-opacity="{opacity}"><title>{title}</title></rect>'
        )
    height = len(rows) * _ROW_HEIGHT + 18
    style = f'y="{height - 4}" font-size="11" fill="currentColor" fill-opacity=".7"'
    elements.append(
        f'<text x="{_LABEL_WIDTH}" {style}>0</text><text x="{_WIDTH}" text-anchor="end" {style}>{_time(total)}</text>'
    )
    label = escaped(f"Timeline of {len(rows)} queues over {_time(total)}; transfers are pale")
    attributes = f'viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img" aria-label="{label}"'
    return Markup(f"<svg {attributes}>{''.join(elements)}</svg>")


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.2f} ms" if microseconds >= 1000 else f"{microseconds:,.1f} µs"


class Trace:
    """The calls that a virtual machine got while it was traced.

    Parameters
    ----------
    metadata : Metadata
        Metadata of the machine's executable.
    limit : int
        Maximum number of recorded calls; later ones are only counted.

    Attributes
    ----------
    calls : list of TracedCall
        Calls in the order of submission.
    left_out : int
        Number of calls beyond the limit.

    Raises
    ------
    BindingError
        A limit that is not a positive integer.
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
        """Wrap a call's `plan` and `prepare` so that they record times; beyond the limit, return them unchanged.

        Parameters
        ----------
        fence : Fence
            Fence of the call.
        plan : callable
            Function that makes the call's queue plan.
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

        def traced_prepare(args: Sequence[Any], kwargs: Mapping[str, Any]) -> PreparedCall:
            prepared = prepare(args, kwargs)
            return replace(prepared, finish=_traced_finish(prepared.finish, call))

        fence.add_done_callback(note_end)
        return traced_plan, traced_prepare

    @property
    def ended(self) -> list[TracedCall]:
        """The calls that have ended."""
        return [call for call in self.calls if call.ended]

    def wait(self) -> None:
        """Wait until all calls submitted so far have ended."""
        with self._changed:
            self._changed.wait_for(lambda: all(call.ended for call in self.calls))

    def events(self) -> list[dict[str, Any]]:
        """The calls that have ended, as trace events; times in microseconds of a monotonic clock."""
        return chrome_events(self.ended, self._metadata)

    def busy(self) -> dict[str, float]:
        """Fraction of the time from the first submission to the last end in which each queue worked."""
        calls = self.ended
        total = max((call.ended for call in calls), default=0) - min((call.submitted for call in calls), default=0)
        spent: Counter[str] = Counter()
        for call in serialize_tracks(calls):
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
            File to write; an existing file is replaced.
        """
        events = self.events()
        counts = {"calls": len(self.ended), "calls_left_out": self.left_out}
        data = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": counts}
        Path(path).write_text(json.dumps(data))


class _TracedPlan(QueuePlan):
    """A plan whose steps record when they ran."""

    def __init__(self, plan: QueuePlan, call: TracedCall) -> None:
        vars(self).update(vars(plan))  # share what the plan has computed
        self._traced_call = call
        self._issue_times: dict[int, int] = {}

    def execute(self, index: int, call: CallState) -> tuple[Sequence[Any], Point | None]:
        begin = time.perf_counter_ns()
        try:
            results, point = super().execute(index, call)
        except BaseException as error:
            self._traced_call.note(index, begin, first_line(error))
            raise
        if point is None:
            self._traced_call.note(index, begin)
        else:
            self._issue_times[index] = begin
        for number, value in zip(self.steps[index].makes, results, strict=True):
            if self.reader_counts[number]:
                self._traced_call.nbytes[number] = _nbytes(value)
        return results, point

    def await_end(self, index: int, point: Point) -> None:
        error = ""
        try:
            super().await_end(index, point)
        except BaseException as raised:
            error = first_line(raised)
            raise
        finally:
            queue = self.queues[index]
            assert queue is not None, "only queues issue work"
            self._traced_call.note(index, self._issue_times[index], error, queue.name)


def _traced_finish(finish: Callable[[Any], Any], call: TracedCall) -> Callable[[Any], Any]:
    def traced(returned: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            result = finish(returned)
        except Exception as error:
            call.note(RESULT, begin, first_line(error))
            raise
        call.note(RESULT, begin)
        return result

    return traced


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
    return "done" if error is None else first_line(error)
