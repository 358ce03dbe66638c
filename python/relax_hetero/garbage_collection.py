"""A pause of Python's garbage collector, for work that makes many objects that stay: imports, loading and compiling."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the collection of cycles of Python objects: it takes a tenth of the time, and finds next to none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
