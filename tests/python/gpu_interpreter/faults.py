"""The error of a kernel that would compute wrong numbers, hang or crash on a GPU."""

from __future__ import annotations

from typing import Any


class KernelFault(AssertionError):
    """A fault of a kernel, with the statement in which it was found."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._located = False

    def locate(self, statement: Any) -> None:
        """Add the statement in which the fault was found; the innermost one stays."""
        if not self._located:
            self._located = True
            self.args = (f"{self.args[0]}\n  in: {str(statement).strip()[:600]}",)
