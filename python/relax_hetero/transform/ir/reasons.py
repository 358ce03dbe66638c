"""What is wrong, out of messages of TVM, LLVM and other compilers, without what only their authors read."""

from __future__ import annotations

import re

from ...artifact.messages import without_internals

_LONGEST = 600
_LINES = 3
_COMPILER_ERROR = re.compile(r"(?:^|[^\w])(?:fatal )?error: ")

# What TVM writes after its message: the pass that failed, and the whole function with the place underlined.
_DIAGNOSTIC = "\nError in pass:"
_UNDERLINED = re.compile(r"^ *(\w+)(?:: [^\n]*)? = [^\n]*\n *\^+ *$", re.MULTILINE)
_FUNCTION = re.compile(r"^ *def (\w+)\(", re.MULTILINE)


def reason(error: BaseException) -> str:
    """What is wrong, by TVM's or a compiler's message, in one line: no files, classes or conditions of C++."""
    text = str(error).partition(_DIAGNOSTIC)[0]
    lines = [line for line in (line.strip(" \0") for line in text.splitlines()) if line]
    telling = [line for line in lines if _COMPILER_ERROR.search(line) or "Check failed" in line][:1]
    text = " ".join(telling or lines[:_LINES])
    text = " ".join(without_internals(text).split()).strip(" :")
    if not text:
        return f"a condition of TVM does not hold ({type(error).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def place_of(error: BaseException) -> str:
    """Where TVM's message underlines a binding: ``"variable 'y' in function 'main': "``; else empty."""
    text = str(error).partition(_DIAGNOSTIC)[2]
    underlined = _UNDERLINED.search(text)
    if underlined is None:
        return ""
    function = _FUNCTION.search(text)
    return f"variable {underlined[1]!r}{f' in function {function[1]!r}' if function else ''}: "
