"""Lock for tests that start a service, as services have fixed ports."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def one_service() -> Iterator[None]:
    """Hold the lock: no other test, in any process, has a service meanwhile."""
    with (Path(tempfile.gettempdir()) / "relax_hetero_service.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file
        yield
