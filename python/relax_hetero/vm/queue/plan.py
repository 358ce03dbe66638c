"""Queue plans: the schedule of a function, bound to the queues of one machine."""

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
    """A schedule bound to the queues of a machine.

    Attributes
    ----------
    function : str
        Name of the function.
    queues : list of DeviceQueue or None
        Queue of each step; None for an alias, which runs in the thread that made its input.
    num_values : int
        Number of values of a call.
    missing_inputs : list of int
        For each step, the number of inputs that other steps make.
    reader_counts : list of int
        For each value, the number of its readers: steps and the caller.
    returned_values : list of int
        Numbers of the values that the function returns.
    readers_after_issue, readers_after_end : list of list of int
        For each step, the steps that read its values (once for each value): those that may begin when it is issued, and
        those that must wait until it has ended.
    """

    def __init__(self, schedule: Schedule, queues: Queues) -> None:
        self.steps = schedule.steps
        self.num_values = schedule.values
        self.queues = [queues.queue_of(step) for step in schedule.steps]
        self._machine_queues, self._results, self.function = queues, schedule.results, schedule.function
        self.missing_inputs = [sum(number >= schedule.inputs for number in step.reads) for step in self.steps]
        self.returned_values = _result_numbers(self._results)
        self.reader_counts = [self.returned_values.count(number) for number in range(schedule.values)]
        makers = {number: index for index, step in enumerate(self.steps) for number in step.makes}
        issued = [queues.is_issued(*pair) for pair in zip(self.steps, self.queues, strict=True)]
        self.readers_after_issue: list[list[int]] = [[] for _ in self.steps]
        self.readers_after_end: list[list[int]] = [[] for _ in self.steps]
        for index, step in enumerate(self.steps):
            for number in step.reads:
                self.reader_counts[number] += 1
                maker = makers.get(number)
                if maker is not None:
                    are_issued = issued[maker] and issued[index]
                    (self.readers_after_issue if are_issued else self.readers_after_end)[maker].append(index)
        self._makes_results = [any(number in self.returned_values for number in step.makes) for step in self.steps]

    def execute(self, index: int, call: CallState) -> tuple[Sequence[Any], Point | None]:
        """Run a step of a call; returns its results in order, and the stream point that completes them, if any."""
        step = self.steps[index]
        results, point = self._machine_queues.run(step, self.queues[index], self._makes_results[index], call)
        return results if len(step.makes) != 1 else (results,), point

    def await_end(self, index: int, point: Point) -> None:
        """Wait until the GPU has completed an issued step; HeteroError for errors that its kernels reported."""
        point.event.synchronize()
        raise_reported(point.stream.gpu)

    def explain(self, index: int | None, error: BaseException) -> HeteroError:
        """The caller's error for a failed step; `index` is None if making the result failed."""
        what = f"function {self.function!r}"
        if index is None:
            what += ", making the result"
        elif self.steps[index].is_transfer:
            what += ", a transfer"
        elif self.steps[index].function != self.function:
            what += f", step {self.steps[index].function!r}"
            if self.steps[index].calls:
                what += f" ({', '.join(self.steps[index].calls)})"
        return self._machine_queues.explain(what, error)

    def result(self, values: Sequence[Any]) -> Any:
        """The function's result, gathered from the values of a call."""
        return _gather(self._results, values)


def single_step_schedule(signature: FunctionSignature, entries: Sequence[int]) -> Schedule:
    """A schedule of one step, on the devices with the manifest indices `entries`, for functions without a schedule."""
    inputs = len(signature.inputs)
    first, *other_devices = entries or (-1,)
    reads, takes_constants = tuple(range(inputs)), signature.takes_constants
    step = Step(
        first, reads, (inputs,), signature.name, other_devices=tuple(other_devices), takes_constants=takes_constants
    )
    return Schedule(signature.name, inputs, inputs + 1, (step,), inputs)


def _result_numbers(results: Results) -> list[int]:
    return [results] if isinstance(results, int) else [number for item in results for number in _result_numbers(item)]


def _gather(results: Results, values: Sequence[Any]) -> Any:
    return values[results] if isinstance(results, int) else tuple(_gather(item, values) for item in results)
