"""State of collections of remarks (`remarks.collect_placement`), apart from the code that collects them."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

OPEN_COLLECTIONS: ContextVar[tuple[Any, ...]] = ContextVar("relax_hetero_notes", default=())
"""The remarks (`PendingRemarks`) of each open collection, the innermost last."""


def is_collecting() -> bool:
    """Return whether remarks are collected: if not, a pass skips work for reports only."""
    return bool(OPEN_COLLECTIONS.get())
