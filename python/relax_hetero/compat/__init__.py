"""ONNX Runtime's Python interface over this library: programs run after a change of their import.

``import relax_hetero.compat as onnxruntime`` replaces ``import onnxruntime``; `install` does so for the modules that a
program imports.
"""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

from relax_hetero.compat.binding import IOBinding
from relax_hetero.compat.devices import OrtDevice, get_all_providers, get_available_providers, get_device
from relax_hetero.compat.graph import ModelMetadata, NodeArg
from relax_hetero.compat.options import (
    ExecutionMode,
    ExecutionOrder,
    GraphOptimizationLevel,
    RunOptions,
    SessionOptions,
    log,
    warn_once,
)
from relax_hetero.compat.session import InferenceSession
from relax_hetero.compat.values import OrtValue

__version__ = "1.23.0"
"""Version of ONNX Runtime whose interface this is."""

__all__ = [
    "ExecutionMode",
    "ExecutionOrder",
    "GraphOptimizationLevel",
    "IOBinding",
    "InferenceSession",
    "ModelMetadata",
    "NodeArg",
    "OrtDevice",
    "OrtValue",
    "RunOptions",
    "SessionIOBinding",
    "SessionOptions",
    "disable_telemetry_events",
    "enable_telemetry_events",
    "get_all_providers",
    "get_available_providers",
    "get_build_info",
    "get_device",
    "get_version_string",
    "install",
    "preload_dlls",
    "set_default_logger_severity",
    "set_default_logger_verbosity",
    "set_seed",
]

SessionIOBinding = IOBinding
_LEVELS = [10, 20, 30, 40, 50]
"""Levels of Python's logging by ONNX Runtime's severity, from verbose to fatal."""


def __getattr__(name: str) -> NoReturn:
    raise AttributeError(f"relax_hetero.compat lacks onnxruntime.{name}; it has {', '.join(__all__)}")


def get_version_string() -> str:
    """Version of ONNX Runtime whose interface this is."""
    return __version__


def get_build_info() -> str:
    """Name of this library."""
    return f"relax_hetero.compat, the interface of ONNX Runtime {__version__}"


def set_default_logger_severity(severity: int) -> None:
    """Set the level of the library's messages: 0 for all, 4 for errors only."""
    log.parent.setLevel(_LEVELS[severity])  # type: ignore[union-attr]


def set_default_logger_verbosity(verbosity: int) -> None:
    """Warn: messages have no levels of verbosity."""
    if verbosity:
        warn_once("set_default_logger_verbosity has no effect here")


def set_seed(seed: int) -> None:
    """Warn: random ops take their seed from the model."""
    warn_once("set_seed has no effect here: random ops take their seed from the model")


def preload_dlls(cuda: bool = True, cudnn: bool = True, msvc: bool = True, directory: str | None = None) -> None:
    """Nothing: libraries of GPUs are loaded when they are needed."""


def enable_telemetry_events() -> None:
    """Nothing: the library sends nothing."""


def disable_telemetry_events() -> None:
    """Nothing: the library sends nothing."""


def install() -> Callable[[], None]:
    """Make ``import onnxruntime`` give this package, in this process; returns a function that undoes it.

    Modules of an installed ONNX Runtime that are not here, such as ``onnxruntime.quantization``, then use this package.
    """
    former = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_onnxruntime(name)}
    sys.modules["onnxruntime"] = sys.modules[__name__]

    def undo() -> None:
        for name in list(filter(_is_onnxruntime, sys.modules)):
            del sys.modules[name]
        sys.modules.update(former)

    return undo


def _is_onnxruntime(name: str) -> bool:
    return name == "onnxruntime" or name.startswith("onnxruntime.")


class _InstalledModules(importlib.abc.MetaPathFinder):
    """Finder of the modules of an installed ONNX Runtime that this package lacks, while it stands in its place."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.count(".") != 1 or not _is_onnxruntime(fullname):
            return None
        installed = PathFinder.find_spec("onnxruntime")
        if installed is None or sys.modules.get("onnxruntime") is not sys.modules[__name__]:
            return None
        return PathFinder.find_spec(fullname, installed.submodule_search_locations)


sys.meta_path.append(_InstalledModules())
