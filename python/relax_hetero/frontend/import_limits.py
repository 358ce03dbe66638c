"""Limits of an import: a small file may ask for more nodes and constants than any machine has.

A model can grow while it is imported: calls of its own functions are replaced by their bodies, recurrent layers by
their steps, and nodes whose inputs are known by their results. Each of these asks here before it does the work, so
that a malicious model is refused early, with little memory taken.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields

from ..errors import FrontendError

# How often the bytes of the model itself may be made anew: exporters put Cast, Transpose and Reshape behind a weight.
_OWN_BYTES = 8

MAX_RANK = 64
"""More dimensions than numpy, or any kernel, can handle."""

MAX_NESTING = 64
"""Deeper nesting of graphs and calls than any exporter writes."""

MAX_LIST = 1 << 16
"""More numbers than any attribute has, except for constants, trees and vocabularies."""


@dataclass(frozen=True)
class ImportLimits:
    """The most that a model may become while it is imported.

    Attributes
    ----------
    nodes : int
        Nodes once calls of the model's own functions are replaced by their bodies, and ops that an op becomes, such as
        the steps of a recurrent layer.
    computed_bytes : int
        Bytes of constants that are computed from other constants, besides eight times the bytes of the model itself
        (its file and external data).
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
    """The limits of one import, and what it has used of them."""

    def __init__(self, limits: ImportLimits, model_bytes: int = 0) -> None:
        self.limits = limits
        self._max_bytes = limits.computed_bytes + _OWN_BYTES * model_bytes
        self._bytes = 0
        self._ops = 0

    def has_bytes(self, nbytes: int) -> bool:
        """Return whether constants of that many bytes may be made besides all that were."""
        return self._bytes + nbytes <= self._max_bytes

    def check_bytes(self, nbytes: int, what: str) -> None:
        """Refuse to make that many bytes; FrontendError, beginning with `what` ("OneHot node 'a'")."""
        if not self.has_bytes(nbytes):
            raise FrontendError(
                f"{what} computes a constant of {_bytes_text(nbytes)} at import, besides {_bytes_text(self._bytes)} "
                f"before it; this model may take {_bytes_text(self._max_bytes)}. If you trust the model, raise it "
                "with limits=rh.ImportLimits(computed_bytes=...)"
            )

    def take_bytes(self, nbytes: int, what: str) -> None:
        """Count bytes of constants; FrontendError as `check_bytes`."""
        self.check_bytes(nbytes, what)
        self._bytes += nbytes

    def check_nodes(self, nodes: int, what: str) -> None:
        """Refuse that many nodes or ops; FrontendError, beginning with `what` ("the model")."""
        if nodes > self.limits.nodes:
            raise FrontendError(
                f"{what} becomes {_count_text(nodes)} nodes, expected at most {self.limits.nodes:,}. "
                "If you trust the model, raise it with limits=rh.ImportLimits(nodes=...)"
            )

    def take_ops(self, ops: int, what: str) -> None:
        """Count ops that an op becomes; FrontendError as `check_nodes`."""
        self.check_nodes(self._ops + ops, what)
        self._ops += ops


_BUDGET: ContextVar[Budget | None] = ContextVar("_BUDGET", default=None)


@contextmanager
def spending(budget: Budget) -> Iterator[Budget]:
    """Within, what is computed at import is taken from this budget."""
    token = _BUDGET.set(budget)
    try:
        yield budget
    finally:
        _BUDGET.reset(token)


def budget() -> Budget:
    """The budget of the import that is under way; one with the default limits where there is none."""
    return _BUDGET.get() or Budget(ImportLimits())


def _bytes_text(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 1 << 70 else "more than 2^70 bytes"


def _count_text(count: int) -> str:
    return f"{count:,}" if count < 10**15 else "more than 10^15"
