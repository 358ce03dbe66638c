"""Capabilities of an import's devices that converters may use.

Placement follows conversion, so a capability must be common to all devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import tvm

from ..encoding.block_panels import Panels
from ..encoding.resolver import resolver_or_default
from ..target.vdevice import is_cpu

_GATHERS: ContextVar[bool] = ContextVar("_GATHERS", default=False)


@contextmanager
def importing_for(devices: Sequence[tvm.relax.VDevice] | None) -> Iterator[None]:
    """Convert nodes inside for these devices; None is the native CPU."""
    can_gather = devices is None or all(
        is_cpu(device) and isinstance(resolver_or_default(device.target).block_layout(device.target), Panels)
        for device in devices
    )
    token = _GATHERS.set(can_gather)
    try:
        yield
    finally:
        _GATHERS.reset(token)


def gathers_experts() -> bool:
    """Return whether all devices have kernels that multiply rows by their chosen experts only."""
    return _GATHERS.get()
