"""Error messages for unknown names, and for failed calls in terms of the model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

from ..errors import BindingError, HeteroError, MemoryLimitError
from .checks import refused_by
from .metadata import Metadata, device_names

AUTO = "auto, "  # prefix of reasons of automatic placement: the deciding criterion up to the first ": ", then figures


def unknown_name(what: str, name: object, known: Iterable[str], where: str, hint: str = "") -> BindingError:
    """An error for a name that `where` lacks, with the most similar name (or `hint`)."""
    names = list(known)
    hint = hint or near_misses(str(name), names)
    shown = repr(name) if isinstance(name, str) else str(name)
    return BindingError(f"{where} has no {what} {shown}; it has {', '.join(map(repr, names)) or 'none'}{hint}")


def near_misses(name: str, known: Iterable[str]) -> str:
    """End of an error message about an unknown name: the most similar known name as a question, or empty."""
    by_lower = {known_name.lower(): known_name for known_name in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


_INTERNALS: Sequence[tuple[re.Pattern[str], str]] = [
    (re.compile(pattern, re.DOTALL), new)
    for pattern, new in [
        (r"(?:\[[\d:]+\] )?\[?[^\s\[\]()]*\.(?:cc|cpp|h|cu):\d+\]?:? ?", ""),
        (r"(?:In |Op\()?ir\.Op\(span=.*?name=\"([\w.]+)\".*?support_level=\d+\)\)?,? ?", r"\1: "),
        (r"(?:\w+Error: ?)?(?:InternalError: ?)?Check failed: ?(?:\(.*?\) is false: ?|[^:()]*\([^:]*?\) ?: ?)?", ""),
        (r"\b(?:InternalError|TVMError|tvm\.error\.\w+): ?", ""),
        (r"\bmetadata\[\"[^\"]*\"\]\[\d+\]", "a constant"),
        (r"\bI\.GlobalVar\(\"([^\"]*)\"\)", r"'\1'"),
        (r"\bT\.(?:int64|int32)\((-?\d+)\)", r"\1"),
        (r"\bT\.((?:u?int|float|bfloat)\d+)\b", r"\1"),
        (r"\bR\.shape\(\[([^\]]*)\]\)", r"(\1)"),
    ]
]


def without_internals(text: str) -> str:
    """Remove conditions, classes and files of C++ from a message of TVM, and simplify its numbers and constants."""
    for pattern, new in _INTERNALS:
        text = pattern.sub(new, text)
    return text


NUMPY_OP = "numpy_op:"
"""Prefix of the packed functions of `vm.numpy_ops`, before domain, op type and version, separated by ``::``."""

_MISSING = re.compile(r"Cannot find ffi::Function (\S+)")


def explain_failure(what: str, error: BaseException, metadata: Metadata) -> HeteroError:
    """A HeteroError for an exception of TVM or of a kernel; it describes the kernels that the message mentions."""
    text = str(error).strip()
    refused = refused_by(text, metadata.checks)
    if refused is not None:
        return HeteroError(f"{what}: {refused}")
    missing = _MISSING.search(text)
    if missing and missing.group(1).startswith(NUMPY_OP):
        domain, op_type, version = missing.group(1).removeprefix(NUMPY_OP).rsplit("::", 2)
        return HeteroError(
            f"{what}: the model calls the numpy function of op {op_type!r} of domain {domain!r}, which this process "
            f"has not registered; expected rh.vm.register_numpy_op({domain!r}, {op_type!r}, function, "
            f"{version}), or @rh.frontend.register_op, before, in a module that is imported (relax-hetero --ops MODULE)"
        )
    if missing:
        return HeteroError(
            f"{what}: the code calls {missing.group(1)!r}, which this process has not registered; expected the library "
            "or Python module that defines it to be loaded before"
        )
    if text.endswith("std::bad_alloc"):
        return MemoryLimitError(f"{what} failed: the system has no memory left for a result or a transient tensor")
    names = [*device_names(metadata.devices), "host"]
    mentioned = [
        f"kernel {symbol} ({'ops ' + ', '.join(dispatch.ops) + ' ' if dispatch.ops else ''}"
        f"on {' or '.join(names[device] for device in dispatch.devices)})"
        for symbol, dispatch in metadata.dispatches.items()
        if re.search(rf"\b{re.escape(symbol)}\b", text)
    ]
    where = f" in {' or '.join(mentioned)}" if mentioned else ""
    text = without_internals(text) or "no message"
    return HeteroError(f"{what} failed{where}: {type(error).__name__}: {text}")
