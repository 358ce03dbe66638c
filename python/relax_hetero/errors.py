"""Errors of relax_hetero: a base class, a subclass for each stage, and the command that installs a missing package.

TVM's C++ `Sequential`, which calls passes in Python, passes exceptions on as a name and a message. Every class is
registered under its name, so that it keeps its class.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata
from typing import Any

from tvm_ffi import register_error  # the foreign-function layer, which does not import TVM

# Otherwise Ctrl-C would become a RuntimeError, which looks like an error in the compiled module.
register_error("KeyboardInterrupt", KeyboardInterrupt)

# Control characters except tab and newline, marks of text direction, and surrogates.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Escape control characters, which names in models and files may contain, for output on a terminal."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


RUNTIME_DISTRIBUTION = "relax-hetero-runtime"
"""Name of the run-time package, which has a part of TVM itself (release/runtime_wheel.py)."""


@cache
def distribution_name() -> str:
    """Name by which pip knows this installation."""
    try:
        metadata.distribution(RUNTIME_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "relax-hetero"
    return RUNTIME_DISTRIBUTION


def pip_install(extras: str) -> str:
    """Command that installs extras, separated by commas: ``pip install 'relax-hetero[llm,serve]'``.

    Extras that the run-time package lacks need the whole one in its place.
    """
    name = distribution_name()
    if name == RUNTIME_DISTRIBUTION:
        provided = metadata.metadata(name).get_all("Provides-Extra") or ()
        if not set(extras.split(",")) <= set(provided):
            return f"pip uninstall {name} && pip install 'relax-hetero[{extras}]'"
    return f"pip install '{name}[{extras}]'"


class HeteroError(Exception):
    """Base of every error that this library raises.

    The message names the subject (op, variable, file), what was found and what was expected. Only the message survives
    TVM's C++ code, so subclasses must be constructible from it alone.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_error(f"relax_hetero.{cls.__name__}", cls)


class VDeviceError(HeteroError):
    """A string, object or list that does not name a device."""


class PlacementError(HeteroError):
    """Values or ops that cannot be placed as requested, or a module that is not fully placed."""


class EncodingError(HeteroError):
    """An encoding that an op does not support, or that no resolver can lay out."""


class FrontendError(HeteroError):
    """A model that cannot be imported; names the node and its op type."""


class EncoderError(FrontendError):
    """A model that encodes texts, where one that generates them is expected."""


class BuildError(HeteroError):
    """A module that cannot be lowered, compiled, exported or loaded."""


class BindingError(HeteroError):
    """Arguments, devices or bindings that do not fit the executable."""


class MemoryLimitError(HeteroError):
    """A machine or a call that exceeds its memory limit."""


class CacheError(HeteroError):
    """A KV cache without a free slot or page for a sequence."""


class HostError(HeteroError):
    """A host of a cluster that cannot be started, or has died."""


def first_line(error: BaseException) -> str:
    """Type of an error, and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__


register_error("relax_hetero.HeteroError", HeteroError)
