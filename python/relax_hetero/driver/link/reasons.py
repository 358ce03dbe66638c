"""The line that says what is wrong, out of the messages of TVM and of compilers."""

from __future__ import annotations


def reason(error: Exception) -> str:
    """The line of TVM's or a compiler's message that says what is wrong."""
    lines = [line.strip(" \0\n") for line in str(error).splitlines()]
    telling = [line for line in lines if "error:" in line.lower() or "check failed" in line.lower()]
    return next(iter(telling or [line for line in reversed(lines) if line]), repr(error))
