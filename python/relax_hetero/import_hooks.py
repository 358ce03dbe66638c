"""Import hooks: TVMScript looks up vdevices strictly, and TVM does not import PyTorch.

TVM imports TVMScript's Relax parser at first use. The hook then imports `relax_hetero.op`, which makes the parser
strict. So the order of a user's imports does not matter, and a process with TVM's runtime only, which lacks the parser,
never imports the compiler.

TVM imports PyTorch where it is installed, which takes seconds: because of a conflict of symbols on Windows, and for a
conversion of tensors that takes 0.3 instead of 4 microseconds. Programs that import PyTorch first keep both.
"""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_PARSER, _TORCH = "tvm.relax.script.parser", "torch"
_Load = Callable[[ModuleType], None]


def _make_strict(load: _Load, module: ModuleType) -> None:
    load(module)
    importlib.import_module(".op", __package__)


def _hide_torch(load: _Load, module: ModuleType) -> None:
    is_hidden = sys.platform != "win32" and _TORCH not in sys.modules
    if is_hidden:
        sys.modules[_TORCH] = None  # type: ignore[assignment]
    try:
        load(module)
    finally:
        if is_hidden:
            del sys.modules[_TORCH]


_HOOKS = {_PARSER: _make_strict, "tvm": _hide_torch, "tvm_ffi": _hide_torch}
"""Function that loads a module, by the module's name; it gets the usual one."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that delegates to the usual one, and changes the loading of modules with hooks."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        hook = _HOOKS.get(fullname)
        spec = None if hook is None else PathFinder.find_spec(fullname, path, target)
        if hook is None or spec is None or spec.loader is None:
            return None
        stock_exec_module = spec.loader.exec_module
        spec.loader.exec_module = lambda module: hook(stock_exec_module, module)  # type: ignore[method-assign]
        return spec


def install_import_hooks() -> None:
    """Install the hooks for modules that are not imported yet; idempotent."""
    if _PARSER in sys.modules:
        importlib.import_module(".op", __package__)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
