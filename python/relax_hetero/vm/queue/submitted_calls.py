"""The half of a machine whose calls go through queues."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from tvm import runtime

from ...errors import HeteroError
from ..args.donated_arguments import argument_memory
from ..args.results import check_out, fill, to_python
from ..device.constants import PlacedConstants
from ..device.forks import RefusingLock, tell_of_forks
from ..device.pool_watch import PoolWatch
from ..device.tensors import AddressRange, is_host
from ..device.threads import has_lost_threads
from ..file.executable import Executable
from ..stateful_calls import StatefulCalls
from .call import Prepared
from .fence import Fence
from .plan import QueuePlan, whole
from .queued_calls import QueuedCalls
from .queues import Queues, overlapping
from .trace import Trace


class SubmittedCalls(StatefulCalls):
    """The half of a machine whose calls go through queues.

    Parameters
    ----------
    executable : Executable
    devices : sequence of Device
        By manifest index; the last is the host.
    """

    _constants: PlacedConstants
    _values: Any

    def __init__(self, executable: Executable, devices: Sequence[runtime.Device]) -> None:
        super().__init__(executable, devices)
        about = executable.metadata
        self._pool = PoolWatch()
        self._schedules = {schedule.function: schedule for schedule in about.schedules}
        self._plans: dict[str, QueuePlan] = {}
        # The functions whose plain calls go through the queues too.
        self._queued_functions = set(executable.function_names) if has_lost_threads() else overlapping(about)
        self._is_host_alone = all(map(is_host, devices))
        self._consumes = any(signature.donated for signature in about.signatures.values())

    def _take_submissions(self, max_in_flight: int, load: Callable[[], runtime.Module]) -> None:
        """Take calls from now on; `load` makes a virtual machine of TVM's for each queue."""
        make_queues = partial(Queues, self.executable.metadata, self._devices, self._scopes, self._values, load)
        self._queued = QueuedCalls(self, self._lock, max_in_flight, make_queues)
        tell_of_forks(self)

    def submit(self, name: str, /, *args: Any, **kwargs: Any) -> Fence:
        """Have function `name` run, without waiting for it.

        Arguments are as in a call, and are checked now; those that are lent must not change until the fence is done.
        A `Fence` among them stands for its result, and they are checked when that is there. Steps on different devices
        overlap, within a call and between calls; what a call gives does not depend on it. Where `max_in_flight` calls
        are under way, this waits. A machine that is dropped ends with the last of its calls.

        Returns
        -------
        Fence
            Of the result that ``vm[name](*args, **kwargs)`` would return.

        Raises
        ------
        BindingError
            As in a call; and for memory that a call under way consumes, or that this one does and another reads.
        HeteroError
            In a process that was forked since the machine took calls.
        """
        return self.submit_into(None, name, args, kwargs)

    def submit_into(self, out: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Fence:
        """`submit` that fills the buffers `out`, unless that is None: ``vm[name].submit(*args, **kwargs, out=out)``."""
        signature = self.executable.signature(name)
        return self._queued.submit(
            signature, partial(self._plan, name), partial(self._prepare, name, out), args, kwargs
        )

    def synchronize(self, timeout: float | None = None) -> bool:
        """Wait until all calls that were submitted have ended; False if they have not after `timeout` seconds."""
        return self._queued.wait(timeout)

    def trace(self, limit: int = 1000) -> AbstractContextManager[Trace]:
        """Record what runs when, while a ``with`` block lasts: ``with vm.trace() as trace``, then ``trace.save(path)``.

        Plain calls go through the queues meanwhile. The end of the block waits for the calls that were recorded, at
        most `limit`; `Trace.left_out` counts the others. BindingError for a `limit` that is no positive integer;
        HeteroError, in the ``with``, while another trace is taken of this machine.
        """
        return self._queued.traced(Trace(self.executable.metadata, limit))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock when no call is under way."""
        while True:
            self._queued.wait(None)
            with self._lock:
                if self._queued.wait(0):
                    yield
                    return

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Hold the lock; where GPUs are at work, whose graphs have arenas of their own, when no call is under way."""
        with self._lock if self._is_host_alone else self._alone():
            yield

    def _plan(self, name: str, queues: Queues) -> QueuePlan:
        plan = self._plans.get(name)
        if plan is None:
            signature = self.executable.signature(name)
            entries = range(len(self._devices) - 1)
            schedule = self._schedules.get(name) or whole(signature, entries)
            plan = self._plans[name] = QueuePlan(schedule, queues)
        return plan

    def _prepare(self, name: str, out: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Prepared:
        known, ordered, call, tensors = self._recall(name, args, kwargs)
        if call is not None:
            values, dims, lent = call.values(tensors), call.dims, call.lent(tensors)
        else:
            values, dims, lent = self._bind_new(name, known, ordered, args, kwargs)
        if out is not None:
            check_out(out, self.executable.signature(name), dims.copy())
        extents = (name, *dims.values.values()) if dims.values else None
        memory = argument_memory(self.executable.signature(name), values) if self._consumes else None
        return Prepared(values, dims.values, partial(self._finish, extents, lent, out), memory)

    def _finish(self, extents: Hashable, lent: list[AddressRange], out: Any, result: Any) -> Any:
        """What the caller of a call through the queues gets; in a queue's thread."""
        if extents is not None:
            self._pool.note(extents, (result,))
        return to_python(result, self._constants.ranges, lent) if out is None else fill(out, result)

    def after_fork(self) -> None:
        """See `forks`; nobody else calls this."""
        if self._queued.has_queues or not self._lock.acquire(blocking=False):
            why = (
                "this machine was at work when the process was forked, and its threads stayed behind; expected a "
                "VirtualMachine made from the Executable in the new process"
            )
            self._lock = RefusingLock(why)
            self._queued.lose(self._lock, HeteroError(why))
            return
        self._lock.release()
        if has_lost_threads():
            self._queued_functions = set(self.executable.function_names)
