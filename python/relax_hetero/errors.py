"""Errors of relax_hetero: one base class, one subclass per stage a user can be in.

Passes written in Python are called from TVM's C++ `Sequential`, which carries an exception as a name and a message.
Every class here is registered under its name, so that it arrives as the class it was raised as.
"""

from __future__ import annotations

import re
from typing import Any

from tvm_ffi import register_error  # the small foreign-function layer, not TVM and not its compiler

# Unknown to TVM, it would arrive as a RuntimeError, and Ctrl-C be taken for a fault of the module that is compiled.
register_error("KeyboardInterrupt", KeyboardInterrupt)

# Control characters but for tab and newline, marks that reverse the direction of text, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Text that a terminal shows as it is: names in models and files may hold commands for it, which are escaped."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)


class HeteroError(Exception):
    """Base of every error this library raises.

    The message names what it is about (op, variable, file), what was found and what was expected. It is all that
    survives a crossing of TVM's C++ code: a subclass must be constructible from its message alone.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(printable(arg) if isinstance(arg, str) else arg for arg in args))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register_error(f"relax_hetero.{cls.__name__}", cls)


class VDeviceError(HeteroError):
    """A device string, object or list that names no device."""


class PlacementError(HeteroError):
    """Values or ops that cannot be placed as asked, or a module that is not fully placed."""


class EncodingError(HeteroError):
    """An encoding that an op does not understand, or that no resolver can lay out."""


class FrontendError(HeteroError):
    """A model that cannot be imported; names the node and its op type."""


class BuildError(HeteroError):
    """A module that cannot be lowered, compiled, exported or loaded."""


class BindingError(HeteroError):
    """Arguments, devices or bindings that do not fit what the executable expects."""


class MemoryLimitError(HeteroError):
    """A machine or a call that would take more memory than it may."""


class CacheError(HeteroError):
    """A cache of keys and values that has no slot or page left for a sequence."""


class HostError(HeteroError):
    """A host of a cluster that cannot be started, or that died; names the host."""


register_error("relax_hetero.HeteroError", HeteroError)
