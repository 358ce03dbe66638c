"""Messages of TVM's converters without stacks and dumps of ops."""

from __future__ import annotations

import re

_OP_DUMP = "ir.Op("


def reason(error: BaseException) -> str:
    """The error's message without the stack that TVM appends to it, ops by their names."""
    text = " ".join([line.strip() for line in str(error).splitlines() if line.strip()][:3])
    return _with_op_names(text)[:400] or "no reason given"


def _with_op_names(text: str) -> str:
    """``relax.add`` for the dump of all of its fields that TVM prints."""
    begin = text.find(_OP_DUMP)
    if begin < 0:
        return text
    end = _closing(text, begin + len(_OP_DUMP))
    name = re.search(r'\bname="([^"]*)"', text[begin:end])
    return text[:begin] + (name.group(1) if name else "an op") + _with_op_names(text[end:])


def _closing(text: str, position: int) -> int:
    """Where the parenthesis that was opened before `position` has been closed, outside of quoted text."""
    depth, quoted = 1, False
    for index in range(position, len(text)):
        character = text[index]
        if character == '"':
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
        if depth == 0:
            return index + 1
    return len(text)
