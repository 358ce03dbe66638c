"""Calls in which hosts exchange messages, at the caller: all hosts start, and if one fails the others end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .call_plan import CallPlan, HostRun, Source, filled
from .mailbox import CallEndedError
from .wire import Failure, decode_copy


def run_on_all_hosts(
    ray: Any, actors: Mapping[str, Any], runs: Sequence[HostRun], number: int, values: Sequence[Any]
) -> list[Any]:
    """Results of each run, or a `Failure`; raises Ray's error where an actor died."""
    references = {actors[run.host].run.remote(number, run, _read_by(run, values)): run for run in runs}
    found: dict[HostRun, Any] = {}
    error: Exception | None = None
    waiting = list(references)
    while waiting:
        (reference, *_), waiting = ray.wait(waiting, num_returns=1)
        run = references[reference]
        try:
            found[run] = ray.get(reference)
        except Exception as raised:
            error = raised
            found[run] = Failure(CallEndedError, f"host {run.host!r} died")
        if isinstance(found[run], Failure):
            for other in waiting:
                actors[references[other].host].end.remote(number, found[run].message)
    if error is not None:
        raise error
    return [found[run] for run in runs]


def result_of_runs(plan: CallPlan, found: Sequence[Any]) -> Any:
    """A call's result, in memory of its own; raises what failed first, not what failed because of it."""
    failures = sorted((each for each in found if isinstance(each, Failure)), key=lambda f: f.kind is CallEndedError)
    if failures:
        raise failures[0].kind(failures[0].message)

    def value_of(source: Source) -> Any:
        return decode_copy(found[source.step][source.index])

    return filled(plan.result, value_of)


def _read_by(run: HostRun, values: Sequence[Any]) -> list[Any]:
    """The call's inputs, but for those that a run does not read."""
    wanted = set(_indices(run.arguments))
    return [value if index in wanted else None for index, value in enumerate(values)]


def _indices(place: Any) -> list[int]:
    if isinstance(place, Source):
        return [place.index]
    return [index for each in place or () for index in _indices(each)]
