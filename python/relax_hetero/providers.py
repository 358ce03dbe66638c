"""Extension points: work that a lower package asks of a higher one, by name.

No import runs upwards. The package's ``__init__``, which knows all packages, says where each provider is, and why there
is one. It is imported when it is first asked for: a process with TVM's runtime alone never meets the compiler.
"""

from __future__ import annotations

import importlib
from typing import Any

_places: dict[str, tuple[str, str]] = {}


def provide(name: str, module: str, attribute: str) -> None:
    """Say where a provider is: an attribute of a module, which is imported when it is first asked for."""
    _places[name] = (module, attribute)


def provided(name: str) -> Any:
    """The provider of a name; KeyError where nobody provides it."""
    module, attribute = _places[name]
    return getattr(importlib.import_module(module), attribute)
