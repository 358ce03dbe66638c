"""What a lower room asks of a higher one: functions by name, found when they are first asked for.

No import runs upwards. Where a lower room has work for a higher one all the same, it asks for a provider by name; the
package's ``__init__``, which knows all rooms, says where each is. A process with TVM's runtime alone never asks for one
that needs the compiler.
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
