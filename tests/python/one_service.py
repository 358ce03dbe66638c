"""Services of a machine have fixed ports, so that tests that start one wait for each other."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_service() -> Iterator[None]:
    """No other test, of any worker, has a service meanwhile."""
    with (Path(tempfile.gettempdir()) / "relax_hetero_service.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
        yield
