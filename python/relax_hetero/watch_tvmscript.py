"""An import hook that makes TVMScript look up vdevices strictly, without importing TVM.

TVM imports TVMScript's Relax parser at first use. The hook then imports `relax_hetero.op`, which makes the parser
strict. So the order of a user's imports does not matter, and a process with TVM's runtime only, which lacks the parser,
never imports the compiler.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PARSER = "tvm.relax.script.parser"


class _ParserFinder(importlib.abc.MetaPathFinder):
    """Finder that delegates to the usual one, and extends the loading of the parser."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PARSER:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        stock_exec_module = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            stock_exec_module(module)
            importlib.import_module(".op", __package__)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch_tvmscript() -> None:
    """Import `relax_hetero.op` as soon as TVMScript's Relax parser is imported; idempotent."""
    if _PARSER in sys.modules:
        importlib.import_module(".op", __package__)
    elif not any(isinstance(finder, _ParserFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ParserFinder())
