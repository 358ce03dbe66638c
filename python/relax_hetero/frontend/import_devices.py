"""Facts that converters may use of an import's devices: nodes are written in the form that these compute.

Placement comes after conversion, so that this is said of all devices together.
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
    """Within, nodes are converted for these devices; None: for the native CPU, as free modules compile."""
    gathers = devices is None or all(
        is_cpu(device) and isinstance(resolver_or_default(device.target).block_layout(device.target), Panels)
        for device in devices
    )
    token = _GATHERS.set(gathers)
    try:
        yield
    finally:
        _GATHERS.reset(token)


def gathers_experts() -> bool:
    """True if all devices multiply rows by the experts that they choose, so that none need compute all of them."""
    return _GATHERS.get()
