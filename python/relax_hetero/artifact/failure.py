"""Failures inside a call, told in terms of the model."""

from __future__ import annotations

import re

from ..errors import HeteroError
from .metadata import Metadata, device_names

_MISSING = re.compile(r"Cannot find ffi::Function (\S+)")


def explain_failure(what: str, error: BaseException, metadata: Metadata) -> HeteroError:
    """A HeteroError for an exception of TVM or of a kernel, naming the kernels that its message mentions."""
    text = str(error).strip()
    missing = _MISSING.search(text)
    if missing:
        return HeteroError(
            f"{what}: the code calls {missing.group(1)!r}, which this process has not registered; expected the library "
            "or Python module that defines it to be loaded before"
        )
    names = [*device_names(metadata.devices), "host"]
    mentioned = [
        f"kernel {symbol} ({'ops ' + ', '.join(dispatch.ops) + ' ' if dispatch.ops else ''}on {names[dispatch.device]})"
        for symbol, dispatch in metadata.dispatches.items()
        if re.search(rf"\b{re.escape(symbol)}\b", text)
    ]
    where = f" in {' or '.join(mentioned)}" if mentioned else ""
    return HeteroError(f"{what} failed{where}: {type(error).__name__}: {text or 'no message'}")
