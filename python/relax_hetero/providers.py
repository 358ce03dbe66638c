"""Extension points: functions of higher packages that lower packages call by name, so that no import runs upwards.

The package's ``__init__`` registers the providers. They are imported at first use, so that a process with TVM's runtime
only never imports the compiler.
"""

from __future__ import annotations

import importlib
from typing import Any

_providers: dict[str, tuple[str, str]] = {}


def provide(name: str, module: str, attribute: str) -> None:
    """Register a provider, an attribute of a module that is imported at first use."""
    _providers[name] = (module, attribute)


def provided(name: str) -> Any:
    """The provider of a name; KeyError if there is none."""
    module, attribute = _providers[name]
    return getattr(importlib.import_module(module), attribute)
