"""Calls on their way through the queues of a machine.

A call's schedule is a graph of steps. A step enters the queue of its device when all it reads is made; the thread that
made the last of it puts it there. Each call has values of its own, dropped after their last reader, so calls do not
meet, and what they give does not depend on what runs beside them.

What work on a GPU makes is there twice: issued, for what reads it on a GPU, and made, for all others (`cuda_queue`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .cuda_queue import CudaQueue, Point
from .fence import Fence, here
from .queue import Timeline
from .queues import Plan


class CallsInFlight:
    """How many calls a machine has under way, and room for them.

    Parameters
    ----------
    limit : int
        How many there may be; further ones wait in the thread that submits them.

    Attributes
    ----------
    ended : Timeline
        How many calls have ended, whatever way.
    """

    def __init__(self, limit: int) -> None:
        self.ended = Timeline()
        self._slots = threading.Semaphore(limit)
        self._numbers = itertools.count(1)
        self._begun = 0

    @property
    def is_idle(self) -> bool:
        """Whether no call is under way."""
        return self._begun == self.ended.reached

    def enter(self) -> bool:
        """Wait for room; whether there is any, for which a thread that runs queues does not wait."""
        return self._slots.acquire(blocking=not here.is_worker)

    def leave(self, has_room: bool) -> None:
        """Give back what `enter` returned."""
        if has_room:
            self._slots.release()

    def begin(self) -> int:
        """The number of a call that begins; not to be called by two threads at once."""
        self._begun = next(self._numbers)
        return self._begun

    def end(self, has_room: bool) -> None:
        """A call has ended."""
        self.ended.signal()
        self.leave(has_room)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the calls that have begun have ended; False after `timeout` seconds."""
        return self.ended.wait(self._begun, timeout)


class Call:
    """One call.

    Parameters
    ----------
    plan : Plan
        The function's steps, and where they run.
    number : int
        Older calls have smaller ones.
    values : sequence
        What the function takes.
    sizes : mapping of str to int
        The values of its symbolic dimensions.
    fence : Fence
        Gets the result, or the error.
    finish : callable
        Makes the result of what the function returned (a value, or nested tuples), in the thread that made it.
    end : callable
        Called once, before the fence is set, when no step of the call runs or will run.

    Attributes
    ----------
    values : list
        By number, those that are made, or issued, and still wanted.
    points : dict of int to Point
        By number, where the values that are issued and not made yet will be.
    number, sizes
        As given.
    """

    def __init__(
        self,
        plan: Plan,
        number: int,
        values: Sequence[Any],
        sizes: Mapping[str, int],
        fence: Fence,
        finish: Callable[[Any], Any],
        end: Callable[[], None],
    ) -> None:
        self.number, self.sizes = number, sizes
        self.values: list[Any] = [*values, *(None,) * (plan.values - len(values))]
        self.points: dict[int, Point] = {}
        self._plan, self._fence, self._finish = plan, fence, finish
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()
        self._missing = list(plan.missing)
        self._readers = list(plan.readers)
        self._left = len(plan.steps)
        self._running: set[int] = set()
        self._error: BaseException | None = None
        self._has_begun = self._has_ended = False

    def begin(self) -> None:
        """Put the steps that wait for nothing into their queues."""
        if self._plan.steps:
            self._push([index for index, missing in enumerate(self._missing) if not missing])
        elif self._fence.set_running_or_notify_cancel():
            self._settle()

    def run(self, index: int) -> None:
        """Run a step, unless the call has failed or was cancelled."""
        if not self._enter(index):
            return
        try:
            made, point = self._plan.execute(index, self)
        except Exception as error:
            self.fail(index, self._plan.explain(index, error))
            return
        self._issued(index, made, point)
        queue = self._plan.queues[index]
        if point is not None and isinstance(queue, CudaQueue):
            queue.at_end(_StepEnd(self, index, point))
        else:
            self._ended(index)

    def end(self, index: int, point: Point) -> None:
        """Wait until the GPU is done with a step that was issued."""
        try:
            point.event.synchronize()
        except Exception as error:
            self.fail(index, self._plan.explain(index, error))
        else:
            self._ended(index)

    def fail(self, index: int, error: BaseException) -> None:
        """A step failed, so the call does: what has not begun is never run."""
        with self._lock:
            self._running.discard(index)
            self._error = self._error or error
            is_last = not self._running and not self._has_ended
            self._has_ended |= is_last
        if is_last or (self._has_ended and not self._fence.done()):
            self._settle()

    def _enter(self, index: int) -> bool:
        with self._lock:
            if self._has_ended or self._error is not None:
                return False
            is_first, self._has_begun = not self._has_begun, True
            self._running.add(index)
        if is_first and not self._fence.set_running_or_notify_cancel():
            self._has_ended = True
            self._free()
            return False
        return True

    def _issued(self, index: int, made: Sequence[Any], point: Point | None) -> None:
        """What a step makes can be read, by what waits for `point` on a GPU, or by all where that is None."""
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
            is_over = self._left == 0 or self._error is not None
            is_last = is_over and not self._running and not self._has_ended
            self._has_ended |= is_last
            if self._error is None:
                ready = self._released(self._plan.follow_end[index])
        if is_last:
            self._settle()
        else:
            self._push(ready)

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
                queue.push((self.number, index), _StepWork(self, index))

    def _settle(self) -> None:
        """Tell the fence. Last comes what may run code of the caller's."""
        error, result = self._error, None
        if error is None:
            try:
                result = self._finish(self._plan.result(self.values))
            except Exception as raised:  # memory for a copy of a result, say
                error = raised
        self._free()
        if error is None:
            self._fence.set_result(result)
        else:
            self._fence.set_exception(error)

    def _free(self) -> None:
        self.values = []
        end, self._end = self._end, None
        if end is not None:
            end()


class _StepWork:
    """A step of a call, as queues run it."""

    __slots__ = ("_call", "_index")

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index

    def run(self) -> None:
        self._call.run(self._index)

    def fail(self, error: BaseException) -> None:
        self._call.fail(self._index, error)


class _StepEnd:
    """The wait for the end of a step, as queues run it."""

    __slots__ = ("_call", "_index", "_point")

    def __init__(self, call: Call, index: int, point: Point) -> None:
        self._call, self._index, self._point = call, index, point

    def run(self) -> None:
        self._call.end(self._index, self._point)

    def fail(self, error: BaseException) -> None:
        self._call.fail(self._index, error)
