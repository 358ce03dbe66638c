"""Walk nested programs without Python's recursion limit."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any


def run(walk: Generator[Any, Any, Any]) -> Any:
    """Run a generator that yields the generators it wants run, and gets their return values back.

    Parameters
    ----------
    walk : Generator

    Returns
    -------
    result
        What `walk` returns. An exception ends all of them.
    """
    stack = [walk]
    result: Any = None
    while stack:
        try:
            nested = stack[-1].send(result)
        except StopIteration as stop:
            stack.pop()
            result = stop.value
        else:
            stack.append(nested)
            result = None
    return result
