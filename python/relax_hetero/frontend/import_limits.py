"""Limits of an import, since a small file may expand to more nodes and constants than any machine can hold.

A model grows during import: functions are inlined, recurrent layers unrolled, and nodes with constant inputs folded.
Each of these charges the budget first, so that a malicious model is refused before it takes memory.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from ..errors import FrontendError

# Computed constants may have this multiple of the model's bytes: exporters put Cast, Transpose and Reshape on weights.
_MODEL_BYTES_FACTOR = 8

MAX_RANK = 64  # maximum number of dimensions; numpy and kernels handle fewer
MAX_NESTING = 64  # maximum nesting of graphs and calls; exporters write less
MAX_LIST = 1 << 16  # maximum number of entries of attributes other than constants, trees and vocabularies


@dataclass(frozen=True)
class ImportLimits:
    """Limits on the growth of a model during import.

    Attributes
    ----------
    nodes : int
        Maximum number of nodes after functions are inlined, and of ops that they become, such as the steps of a
        recurrent layer.
    computed_bytes : int
        Maximum bytes of constants that are computed from other constants, in addition to eight times the bytes of the
        model (its file and external data).
    """

    nodes: int = 200_000
    computed_bytes: int = 640 << 20

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            try:
                number = operator.index(value)
            except TypeError:
                number = -1
            if isinstance(value, bool) or number < 0:
                raise FrontendError(f"ImportLimits.{field.name} is {value!r}, expected a whole number >= 0")
            object.__setattr__(self, field.name, number)


class Budget:
    """Limits of one import and their usage."""

    def __init__(self, limits: ImportLimits, model_bytes: int = 0) -> None:
        self.limits = limits
        self._max_bytes = limits.computed_bytes + _MODEL_BYTES_FACTOR * model_bytes
        self._bytes = 0
        self._ops = 0

    def has_bytes(self, nbytes: int) -> bool:
        """Return whether that many more bytes of constants may be computed."""
        return self._bytes + nbytes <= self._max_bytes

    def check_bytes(self, nbytes: int, what: str) -> None:
        """Raise FrontendError, with `what` ("OneHot node 'a'") in its text, unless `has_bytes`."""
        if not self.has_bytes(nbytes):
            raise FrontendError(
                f"{what} computes a constant of {_bytes_text(nbytes)} at import, besides {_bytes_text(self._bytes)} "
                f"before it; this model may take {_bytes_text(self._max_bytes)}. If you trust the model, raise it "
                "with limits=rh.ImportLimits(computed_bytes=...)"
            )

    def take_bytes(self, nbytes: int, what: str) -> None:
        """Charge bytes of constants; raises as `check_bytes`."""
        self.check_bytes(nbytes, what)
        self._bytes += nbytes

    def check_nodes(self, nodes: int, what: str) -> None:
        """Raise FrontendError, with `what` ("the model") in its text, for too many nodes or ops."""
        if nodes > self.limits.nodes:
            raise FrontendError(
                f"{what} becomes {_count_text(nodes)} nodes, expected at most {self.limits.nodes:,}. "
                "If you trust the model, raise it with limits=rh.ImportLimits(nodes=...)"
            )

    def take_op(self, what: str) -> None:
        """Charge an emitted op; raises as `check_nodes`."""
        self.check_nodes(self._ops + 1, what)
        self._ops += 1


_BUDGET: ContextVar[Budget | None] = ContextVar("_BUDGET", default=None)


@contextmanager
def spending(budget: Budget) -> Iterator[Budget]:
    """Charge this budget for the work of an import inside."""
    token = _BUDGET.set(budget)
    try:
        yield budget
    finally:
        _BUDGET.reset(token)


def budget() -> Budget:
    """The budget of the current import, or one with the default limits."""
    return _BUDGET.get() or Budget(ImportLimits())


def _bytes_text(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 1 << 70 else "more than 2^70 bytes"


def _count_text(count: int) -> str:
    return f"{count:,}" if count < 10**15 else "more than 10^15"
