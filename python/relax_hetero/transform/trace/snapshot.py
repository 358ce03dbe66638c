"""Modules as they were at one moment, and the differences of two: functions are shared, texts are made when asked for.

A pass may write into the module that it is given, so a snapshot keeps the functions and not the module. Functions do
not change, and most passes leave most of them alone: a snapshot costs a reference for each.
"""

from __future__ import annotations

import difflib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import tvm

from ..ir.rewriting import handle

ATTRIBUTES = "(attributes)"
"""In place of a function's name: the module's attributes and global infos."""

_INFOS = "global_infos"
_ABBREVIATED = 120


@dataclass(frozen=True)
class FunctionChange:
    """Change of one function by a pass.

    Attributes
    ----------
    function : str
        Its name; ``(attributes)`` for the attributes and global infos of the module.
    before, after : str
        Its text in TVMScript; empty where it is new, or gone.
    """

    function: str
    before: str
    after: str

    @cached_property
    def diff(self) -> str:
        """The lines that differ, with three lines around them, as a unified diff."""
        lines = difflib.unified_diff(
            self.before.splitlines(),
            self.after.splitlines(),
            f"{self.function} before",
            f"{self.function} after",
            "",
            "",
        )
        return "\n".join(line.rstrip("\n") for line in lines)

    @property
    def added(self) -> int:
        """Lines of `after` that `before` does not have."""
        return sum(line.startswith("+") for line in self.diff.splitlines()[2:])

    @property
    def removed(self) -> int:
        """Lines of `before` that `after` does not have."""
        return sum(line.startswith("-") for line in self.diff.splitlines()[2:])


class Snapshot:
    """A module at one moment.

    Parameters
    ----------
    mod : tvm.IRModule
        May change later.
    texts : dict
        Texts by function, shared by the snapshots of a trace.
    """

    def __init__(self, mod: tvm.IRModule, texts: dict[tuple[int, int], str]) -> None:
        self._functions = {gv.name_hint: (gv, func) for gv, func in mod.functions.items()}
        self._attrs, self._infos = mod.attrs, mod.global_infos
        self._texts = texts

    @property
    def has_relax(self) -> bool:
        """True if any function is one of Relax."""
        return any(isinstance(func, tvm.relax.Function) for _, func in self._functions.values())

    def same_as(self, other: Snapshot) -> bool:
        """Return whether both hold the very same functions and attributes."""
        return (
            self._functions.keys() == other._functions.keys()
            and all(func.same_as(other._functions[name][1]) for name, (_, func) in self._functions.items())
            and self._about == other._about
        )

    def module(self) -> tvm.IRModule:
        """The module, as a new one."""
        return tvm.IRModule(dict(self._functions.values()), attrs=self._attrs, global_infos=self._infos)

    def text(self, function: str) -> str:
        """A function in TVMScript, with the names of devices that it has in the module; empty where there is none."""
        if function == ATTRIBUTES:
            return "\n".join(f"{name} = {text}" for name, text in self._about.items())
        if function not in self._functions:
            return ""
        gv, func = self._functions[function]
        # Devices are written by their numbers in the module.
        key = handle(func), hash(self._about.get(_INFOS, ""))
        if key not in self._texts:
            alone = tvm.IRModule({gv: func}, global_infos=self._infos)
            self._texts[key] = _body(alone.script(show_meta=False))
        return self._texts[key]

    def changes_to(self, after: Snapshot) -> tuple[FunctionChange, ...]:
        """The functions whose text differs, Relax functions first, and the attributes, if they do."""
        every = {**self._functions, **after._functions}
        names = sorted(every, key=lambda name: (not isinstance(every[name][1], tvm.relax.Function), name))
        about = self._about != after._about
        candidates = [
            name
            for name in names
            if name not in self._functions
            or name not in after._functions
            or self._about.get(_INFOS) != after._about.get(_INFOS)
            or not self._functions[name][1].same_as(after._functions[name][1])
        ]
        found = [FunctionChange(name, self.text(name), after.text(name)) for name in candidates]
        if about:
            found.append(FunctionChange(ATTRIBUTES, self.text(ATTRIBUTES), after.text(ATTRIBUTES)))
        return tuple(change for change in found if change.before != change.after)

    @cached_property
    def _about(self) -> Mapping[str, str]:
        """Attributes and global infos as text: long values, such as reports in JSON, by their beginning and length."""
        infos = {_INFOS: str(dict(self._infos.items()))} if self._infos else {}
        attrs = {str(name): _abbreviated(value) for name, value in sorted((self._attrs or {}).items())}
        return {**attrs, **infos}


def _abbreviated(value: Any) -> str:
    text = str(value)
    if len(text) <= _ABBREVIATED:
        return text
    return (
        f"{text[:_ABBREVIATED]}... ({len(text):,} characters, checksum {zlib.crc32(text.encode(errors='replace')):08x})"
    )


def _body(script: str) -> str:
    """The function of a module's text, without the module around it."""
    lines = script.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith("    @")), 0)
    return "\n".join(line.removeprefix("    ") for line in lines[start:])
