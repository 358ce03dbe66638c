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

_DEVICES: ContextVar[Sequence[tvm.relax.VDevice]] = ContextVar("_DEVICES", default=())


@contextmanager
def importing_for(devices: Sequence[tvm.relax.VDevice] | None) -> Iterator[None]:
    """Convert nodes inside for these devices; None is the native CPU."""
    token = _DEVICES.set(devices or ())
    try:
        yield
    finally:
        _DEVICES.reset(token)


def default_device() -> tvm.relax.VDevice | None:
    """The device of nodes that no placement rule matches; None is the native CPU."""
    return next(iter(_DEVICES.get()), None)


def gathers_experts() -> bool:
    """Return whether all devices have kernels that multiply rows by their chosen experts only."""
    return all(
        is_cpu(device) and isinstance(resolver_or_default(device.target).block_layout(device.target), Panels)
        for device in _DEVICES.get()
    )


def has_recurrent_kernels() -> bool:
    """Return whether all devices have a kernel of whole recurrent layers."""
    return all(map(is_cpu, _DEVICES.get()))
