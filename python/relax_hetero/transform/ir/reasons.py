"""Reasons of failures, extracted from messages of TVM, LLVM and other compilers."""

from __future__ import annotations

import re

from ...artifact.messages import without_internals

_MAX_CHARACTERS = 600
_MAX_LINES = 3
_COMPILER_ERROR = re.compile(r"(?:^|[^\w])(?:fatal )?error: ")

# TVM's message ends with the pass that failed, and the function with the binding underlined.
_DIAGNOSTIC = "\nError in pass:"
_UNDERLINED = re.compile(r"^ *(\w+)(?:: [^\n]*)? = [^\n]*\n *\^+ *$", re.MULTILINE)
_FUNCTION = re.compile(r"^ *def (\w+)\(", re.MULTILINE)


def reason(error: BaseException) -> str:
    """The reason in TVM's or a compiler's message, in one line without files, classes and conditions of C++."""
    text = str(error).partition(_DIAGNOSTIC)[0]
    lines = [line for line in (line.strip(" \0") for line in text.splitlines()) if line]
    error_lines = [line for line in lines if _COMPILER_ERROR.search(line) or "Check failed" in line][:1]
    text = " ".join(error_lines or lines[:_MAX_LINES])
    text = " ".join(without_internals(text).split()).strip(" :")
    if not text:
        return f"a condition of TVM does not hold ({type(error).__name__})"
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]} …"


def location_of(error: BaseException) -> str:
    """Prefix with the binding that TVM's message underlines: ``"variable 'y' in function 'main': "``; or empty."""
    text = str(error).partition(_DIAGNOSTIC)[2]
    underlined = _UNDERLINED.search(text)
    if underlined is None:
        return ""
    function = _FUNCTION.search(text)
    return f"variable {underlined[1]!r}{f' in function {function[1]!r}' if function else ''}: "
