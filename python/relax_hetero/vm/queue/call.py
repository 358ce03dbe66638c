"""Queued calls: each step of a call enters a queue as soon as the values it reads are made.

A call's schedule is a graph of steps. A step enters the queue of its device when all it reads is made; the thread that
made the last of it puts it there. Each call has values of its own, dropped after their last reader, so calls do not
meet, and what they give does not depend on what runs beside them.

What work on a GPU makes is there twice: issued, for what reads it on a GPU, and made, for all others (`stream_queue`).
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
class Prepared:
    """A call whose arguments were checked and placed.

    Attributes
    ----------
    values : sequence of object
        Arguments as the function takes them.
    sizes : mapping of str to int
        The values of its symbolic dimensions.
    finish : callable
        Makes the result for the caller of what the function returned (a value, or nested tuples), in the thread that
        made it.
    memory : ArgumentMemory or None
        Where the arguments lie, where calls of the process may consume some.
    """

    values: Sequence[Any]
    sizes: Mapping[str, int]
    finish: Callable[[Any], Any]
    memory: ArgumentMemory | None = None


Prepare = Callable[[Sequence[Any], Mapping[str, Any]], Prepared]
"""Checks the arguments that a caller gave, by position and by name, and places them."""


class QueuedCall:
    """A call on its way through the queues of a machine.

    Parameters
    ----------
    plan : QueuePlan
        The function's steps, and where they run.
    number : int
        Older calls have smaller ones.
    fence : Fence
        Gets the result, or the error.
    owner : object
        Kept until the call has ended: its machine.

    Attributes
    ----------
    values : list of object
        Values by number, those that are made, or issued, and still wanted.
    points : dict of int to Point
        Points by number, where the values that are issued and not made yet will be.
    sizes
        The values of symbolic dimensions.
    """

    def __init__(self, plan: QueuePlan, number: int, prepared: Prepared, fence: Fence, owner: object) -> None:
        self.sizes = prepared.sizes
        self.values: list[Any] = [*prepared.values, *(None,) * (plan.values - len(prepared.values))]
        self.points: dict[int, Point] = {}
        self._plan, self._number, self._fence, self._owner = plan, number, fence, owner
        self._finish: Callable[[Any], Any] | None = prepared.finish
        self._lock = threading.RLock()
        self._missing = list(plan.missing)
        self._readers = list(plan.readers)
        self._left = len(plan.steps)
        self._running: set[int] = set()  # steps that have begun and not ended
        self._error: BaseException | None = None
        self._has_begun = False

    def held(self) -> list[Any]:
        """The values that are still wanted, at this time."""
        with self._lock:
            return [*self.values]

    def begin(self) -> None:
        """Put the steps that wait for nothing into their queues."""
        if self._plan.steps:
            self._push([index for index, missing in enumerate(self._missing) if not missing])
        elif self._fence.begin():
            self._settle()

    def run(self, index: int) -> None:
        """Run a step, unless the call has failed or was cancelled."""
        if not self._enter(index):
            return
        try:
            made, point = self._plan.execute(index, self)
        except BaseException as error:  # kernels may be written in Python
            self.fail(index, error)
            return
        self._issued(index, made, point)
        queue = self._plan.queues[index]
        if point is not None and isinstance(queue, StreamQueue):
            queue.at_end(_StepEnd(self, index, point))
        else:
            self._ended(index)

    def end(self, index: int, point: Point) -> None:
        """Wait until the GPU is done with a step that was issued."""
        try:
            self._plan.await_end(index, point)
        except BaseException as error:
            self.fail(index, error)
        else:
            self._ended(index)

    def fail(self, index: int, error: BaseException) -> None:
        """A step failed, so the call does: what has not begun is never run."""
        told = self._told(index, error)
        with self._lock:
            self._running.discard(index)
            if self._error is None:
                self._error = told
            is_over = self._is_over()
        if is_over:
            self._settle()

    def _told(self, index: int | None, error: BaseException) -> BaseException:
        """The error for the caller; what it comes from keeps nothing of the call alive."""
        told: BaseException
        try:
            told = self._plan.explain(index, error)
        except Exception:  # whoever waits for the call gets what there is
            told = error
        frames = error.__traceback__
        traceback.clear_frames(frames)
        error.__traceback__ = frames and frames.tb_next  # the first is this call's own
        if told is not error:
            told.__cause__ = error
        return told

    def _enter(self, index: int) -> bool:
        with self._lock:
            if self._error is not None:
                return False
            self._running.add(index)
        if self._has_begun or self._fence.begin():
            self._has_begun = True
            return True
        self._free()
        return False

    def _issued(self, index: int, made: Sequence[Any], point: Point | None) -> None:
        """A step's values can be read: on GPUs by work that waits for `point`, or by all where that is None."""
        step, ready = self._plan.steps[index], []
        with self._lock:
            for number, value in zip(step.makes, made, strict=True):
                self.values[number] = value
                if point is not None:
                    self.points[number] = point
            if self._error is None:
                ready = self._released(self._plan.follow_issue[index])
        self._push(ready)

    def _ended(self, index: int) -> None:
        """A step is done with what it reads, and what it makes is made."""
        step, ready = self._plan.steps[index], []
        with self._lock:
            self._running.discard(index)
            self._left -= 1
            for number in step.makes:
                self.points.pop(number, None)
            for number in step.reads:
                self._readers[number] -= 1
            for number in (*step.reads, *step.makes):
                if not self._readers[number]:
                    self.values[number] = None
            if self._error is None:
                ready = self._released(self._plan.follow_end[index])
            is_over = self._is_over()
        if is_over:
            self._settle()
        else:
            self._push(ready)

    def _is_over(self) -> bool:
        """Return whether nothing of the call runs or will run; under the lock."""
        return not self._running and (self._left == 0 or self._error is not None)

    def _released(self, readers: Sequence[int]) -> list[int]:
        """The steps that wait for nothing more, of those that one value each is there for now."""
        for reader in readers:
            self._missing[reader] -= 1
        return [reader for reader in dict.fromkeys(readers) if not self._missing[reader]]

    def _push(self, ready: Sequence[int]) -> None:
        for index in ready:
            queue = self._plan.queues[index]
            if queue is None:  # an alias: nothing to wait for
                self.run(index)
            else:
                queue.push((self._number, index), _StepWork(self, index))

    def _settle(self) -> None:
        """Tell the fence. Last comes what may run code of the caller's."""
        error, result = self._error, None
        if error is None and self._finish is not None:
            try:
                result = self._finish(self._plan.result(self.values))
            except BaseException as raised:  # memory for a copy of a result, say
                error = self._told(None, raised)
        self._free()
        self._fence.settle(result, error)

    def _free(self) -> None:
        self.values, self.points = [], {}
        self._owner = self._finish = None


class _StepWork:
    """A step of a call, as queues run it."""

    __slots__ = ("_call", "_index")

    def __init__(self, call: QueuedCall, index: int) -> None:
        self._call, self._index = call, index

    def run(self) -> None:
        self._call.run(self._index)

    def fail(self, error: BaseException) -> None:
        self._call.fail(self._index, error)


class _StepEnd:
    """The wait for the end of a step, as queues run it."""

    __slots__ = ("_call", "_index", "_point")

    def __init__(self, call: QueuedCall, index: int, point: Point) -> None:
        self._call, self._index, self._point = call, index, point

    def run(self) -> None:
        self._call.end(self._index, self._point)

    def fail(self, error: BaseException) -> None:
        self._call.fail(self._index, error)
