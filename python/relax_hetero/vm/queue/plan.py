"""Queue plans: the schedule of a function together with the queues of one machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...artifact.schedule import Results, Schedule, Step
from ...artifact.signature import FunctionSignature
from ...errors import HeteroError
from ..device.error_records import raise_reported
from .queues import CallState, Queues
from .stream_queue import Point


class QueuePlan:
    """A schedule with the queues of a machine.

    Attributes
    ----------
    function
        Its name.
    queues : list
        Queue of each step; None for one that runs where what it reads was made.
    values
        How many there are.
    missing : list
        For each step how many values it reads that are not there at the beginning.
    readers : list
        How many steps read each value; the caller counts as one.
    returned
        The values that the function returns.
    follow_issue, follow_end : list of list of int
        For each step the steps that read what it makes, once for each value: those that may when it is issued, and
        those that may when it has ended.
    """

    def __init__(self, schedule: Schedule, queues: Queues) -> None:
        self.steps = schedule.steps
        self.values = schedule.values
        self.queues = [queues.queue_of(step) for step in schedule.steps]
        self._owner, self._results, self.function = queues, schedule.results, schedule.function
        self.missing = [sum(number >= schedule.inputs for number in step.reads) for step in self.steps]
        self.returned = _leaves(self._results)
        self.readers = [self.returned.count(number) for number in range(schedule.values)]
        makers = {number: index for index, step in enumerate(self.steps) for number in step.makes}
        issued = [queues.is_issued(*pair) for pair in zip(self.steps, self.queues, strict=True)]
        self.follow_issue: list[list[int]] = [[] for _ in self.steps]
        self.follow_end: list[list[int]] = [[] for _ in self.steps]
        for index, step in enumerate(self.steps):
            for number in step.reads:
                self.readers[number] += 1
                maker = makers.get(number)
                if maker is not None:
                    follow = self.follow_issue if issued[maker] and issued[index] else self.follow_end
                    follow[maker].append(index)
        self._leaves = [any(number in self.returned for number in step.makes) for step in self.steps]

    def execute(self, index: int, call: CallState) -> tuple[Sequence[Any], Point | None]:
        """Run a step of a call; what it makes, in order, and the point at which that is made."""
        step = self.steps[index]
        made, point = self._owner.run(step, self.queues[index], self._leaves[index], call)
        return made if len(step.makes) != 1 else (made,), point

    def await_end(self, index: int, point: Point) -> None:
        """Wait until the GPU is done with a step that was issued; HeteroError for what its kernels have refused."""
        point.event.synchronize()
        raise_reported(point.stream.gpu)

    def explain(self, index: int | None, error: BaseException) -> HeteroError:
        """The error that a failed step means for the caller; None for the result that was not made."""
        what = f"function {self.function!r}"
        if index is None:
            what += ", making the result"
        elif self.steps[index].is_transfer:
            what += ", a transfer"
        elif self.steps[index].function != self.function:
            what += f", step {self.steps[index].function!r}"
            if self.steps[index].calls:
                what += f" ({', '.join(self.steps[index].calls)})"
        return self._owner.explain(what, error)

    def result(self, values: Sequence[Any]) -> Any:
        """The function's result, gathered from the values of a call."""
        return _gather(self._results, values)


def single_step_schedule(signature: FunctionSignature, entries: Sequence[int]) -> Schedule:
    """The schedule of a function that has none: one step, on all devices."""
    inputs = len(signature.inputs)
    first, *also = entries or (-1,)
    reads, takes = tuple(range(inputs)), signature.takes_constants
    step = Step(first, reads, (inputs,), signature.name, other_devices=tuple(also), takes_constants=takes)
    return Schedule(signature.name, inputs, inputs + 1, (step,), inputs)


def _leaves(results: Results) -> list[int]:
    return [results] if isinstance(results, int) else [number for part in results for number in _leaves(part)]


def _gather(results: Results, values: Sequence[Any]) -> Any:
    return values[results] if isinstance(results, int) else tuple(_gather(part, values) for part in results)
