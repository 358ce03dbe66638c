"""Queued calls: each step of a call enters a queue as soon as the values that it reads are ready.

A call's schedule is a graph of steps. The thread that produces the last input of a step puts the step into the queue of
its device. Each call has values of its own, dropped after their last reader, so concurrent calls do not affect each
other's results.

A value made on a GPU becomes ready twice: issued, for readers on GPUs, and complete, for all others (`stream_queue`).
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..args.donated_arguments import ArgumentMemory
from .fence import Fence
from .plan import QueuePlan
from .stream_queue import Point, StreamQueue


@dataclass(frozen=True)
class PreparedCall:
    """A call whose arguments were checked and placed."""

    values: Sequence[Any]  # arguments as the function takes them
    sizes: Mapping[str, int]  # values of the function's symbolic dimensions
    # Converts the function's result (a value, or nested tuples) to the caller's, in the thread of the last step.
    finish: Callable[[Any], Any]
    # Memory of the arguments; None unless calls in this process may consume donated arguments.
    memory: ArgumentMemory | None = None


Prepare = Callable[[Sequence[Any], Mapping[str, Any]], PreparedCall]
"""Function that checks and places a caller's arguments, by position and by name."""


class QueuedCall:
    """A call on its way through the queues of a machine."""

    def __init__(
        self,
        plan: QueuePlan,  # the function's steps and their queues
        number: int,  # sequence number of the call; queues prefer steps of calls with smaller numbers
        prepared: PreparedCall,
        fence: Fence,  # fence that gets the result, or the error
        owner: object,  # virtual machine, kept alive until the call has ended
    ) -> None:
        self.sizes = prepared.sizes  # values of symbolic dimensions
        # Values by number; None before they are issued and after their last reader.
        self.values: list[Any] = [*prepared.values, *(None,) * (plan.num_values - len(prepared.values))]
        self.points: dict[int, Point] = {}  # stream points, by number, of values that are issued and not yet complete
        self._plan, self._number, self._fence, self._owner = plan, number, fence, owner
        self._finish: Callable[[Any], Any] | None = prepared.finish
        self._lock = threading.RLock()
        self._missing_inputs = list(plan.missing_inputs)
        self._reader_counts = list(plan.reader_counts)
        self._num_unfinished = len(plan.steps)
        self._running: set[int] = set()  # steps that have begun and not ended
        self._error: BaseException | None = None
        self._has_begun = False

    def live_values(self) -> list[Any]:
        """The values by number; None for those that are not issued yet or lack further readers."""
        with self._lock:
            return [*self.values]

    def begin(self) -> None:
        """Push the steps without missing inputs into their queues."""
        if self._plan.steps:
            self._push([index for index, missing in enumerate(self._missing_inputs) if not missing])
        elif self._fence.begin():
            self._settle()

    def run(self, index: int) -> None:
        """Run a step, unless the call has failed or was cancelled."""
        if not self._try_begin_step(index):
            return
        try:
            results, point = self._plan.execute(index, self)
        except BaseException as error:  # kernels may be written in Python
            self.fail(index, error)
            return
        if point is None:
            self._mark_ended(index, results)
            return
        self._mark_issued(index, results, point)
        queue = self._plan.queues[index]
        if isinstance(queue, StreamQueue):
            queue.at_end(_StepWork(self, index, point))
        else:
            self._mark_ended(index)

    def end(self, index: int, point: Point) -> None:
        """Wait until the GPU has completed an issued step."""
        try:
            self._plan.await_end(index, point)
        except BaseException as error:
            self.fail(index, error)
        else:
            self._mark_ended(index)

    def fail(self, index: int, error: BaseException) -> None:
        """Fail the call because a step failed; steps that have not begun are never run."""
        explained = self._explain(index, error)
        with self._lock:
            self._running.discard(index)
            if self._error is None:
                self._error = explained
            is_over = self._is_over()
        if is_over:
            self._settle()

    def _explain(self, index: int | None, error: BaseException) -> BaseException:
        """The error for the caller, without frames that would keep the call's values alive."""
        explained: BaseException
        try:
            explained = self._plan.explain(index, error)
        except Exception:  # the waiting caller must get some error
            explained = error
        trace = error.__traceback__
        traceback.clear_frames(trace)
        error.__traceback__ = trace and trace.tb_next  # the first frame is `run` or `end`
        if explained is not error:
            explained.__cause__ = error
        return explained

    def _try_begin_step(self, index: int) -> bool:
        """Mark a step as running; False if the call has failed or was cancelled."""
        with self._lock:
            if self._error is not None:
                return False
            self._running.add(index)
        if self._has_begun or self._fence.begin():
            self._has_begun = True
            return True
        self._release_values()
        return False

    def _mark_issued(self, index: int, results: Sequence[Any], point: Point) -> None:
        """Publish a step's results to GPU work that waits for `point`."""
        step, ready = self._plan.steps[index], []
        with self._lock:
            for number, value in zip(step.makes, results, strict=True):
                self.values[number] = value
                self.points[number] = point
            if self._error is None:
                ready = self._count_down(self._plan.readers_after_issue[index])
        self._push(ready)

    def _mark_ended(self, index: int, results: Sequence[Any] | None = None) -> None:
        """Release a step's inputs, and publish its results as complete: `results`, unless they were issued."""
        step, ready = self._plan.steps[index], []
        with self._lock:
            if results is not None:
                for number, value in zip(step.makes, results, strict=True):
                    self.values[number] = value
            self._running.discard(index)
            self._num_unfinished -= 1
            for number in step.makes:
                self.points.pop(number, None)
            for number in step.reads:
                self._reader_counts[number] -= 1
            for number in (*step.reads, *step.makes):
                if not self._reader_counts[number]:
                    self.values[number] = None
            if self._error is None:
                ready = self._count_down(self._plan.readers_after_end[index])
            is_over = self._is_over()
        if is_over:
            self._settle()
        else:
            self._push(ready)

    def _is_over(self) -> bool:
        """Return whether no step runs or will run; requires the lock."""
        return not self._running and (self._num_unfinished == 0 or self._error is not None)

    def _count_down(self, readers: Sequence[int]) -> list[int]:
        """Count one more value as ready for each of `readers`; returns the steps that now have all their inputs."""
        for reader in readers:
            self._missing_inputs[reader] -= 1
        return [reader for reader in dict.fromkeys(readers) if not self._missing_inputs[reader]]

    def _push(self, ready: Sequence[int]) -> None:
        for index in ready:
            queue = self._plan.queues[index]
            if queue is None:  # an alias: nothing to wait for
                self.run(index)
            else:
                queue.push((self._number, index), _StepWork(self, index))

    def _settle(self) -> None:
        """Finish the call; the fence is settled last, because that runs the caller's callbacks."""
        error, result = self._error, None
        if error is None and self._finish is not None:
            try:
                result = self._finish(self._plan.result(self.values))
            except BaseException as raised:  # for example, no memory for a copy of a result
                error = self._explain(None, raised)
        self._release_values()
        self._fence.settle(result, error)

    def _release_values(self) -> None:
        self.values, self.points = [], {}
        self._owner = self._finish = None


class _StepWork:
    """A step of a call, or the wait for the end `point` of an issued one, as work of a queue."""

    __slots__ = ("_call", "_index", "_point")

    def __init__(self, call: QueuedCall, index: int, point: Point | None = None) -> None:
        self._call, self._index, self._point = call, index, point

    def run(self) -> None:
        if self._point is None:
            self._call.run(self._index)
        else:
            self._call.end(self._index, self._point)

    def fail(self, error: BaseException) -> None:
        self._call.fail(self._index, error)
