"""Submissions: a command buffer's commands, given to a device with a binding table."""

from __future__ import annotations

from typing import Any, Protocol

from .binding_table import BindingTable


class Submission:
    """Work that was given to a device; made by `CommandBuffer.submit`.

    Parameters
    ----------
    fence : object, optional
        With ``wait()`` and ``done()``; None for work that has ended.
    """

    __slots__ = ("_fence",)

    def __init__(self, fence: Any = None) -> None:
        self._fence = fence

    def __repr__(self) -> str:
        return f"<Submission, {'done' if self.done() else 'running'}>"

    def wait(self) -> None:
        """Return when the work has ended."""
        if self._fence is not None:
            self._fence.wait()

    def done(self) -> bool:
        """Whether the work has ended."""
        return self._fence is None or bool(self._fence.done())


ENDED = Submission()
"""Of devices whose work has ended when `submit` returns."""


class Runner(Protocol):
    """Runs a recording on one device, from any thread, several times at once.

    Each kind of device has its own (`runners.runner_for`); tables and numbers are checked before.
    """

    runs: str
    """How, as `RegionSpec.runs` says it."""

    def __call__(self, table: BindingTable, numbers: tuple[int | float, ...]) -> Submission:
        """Submit with a table and the parameters' values.

        A runner whose work outlasts the call keeps the table alive until then.
        """
