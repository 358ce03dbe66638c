"""Names that are found when they are first asked for: what a lower room asks of a higher one, and public names.

No import runs upwards. Where a lower room has work for a higher one all the same, it asks for a provider by name; the
package's ``__init__``, which knows all rooms, says where each is. A process with TVM's runtime alone never asks for one
that needs the compiler. Packages find their public names so, since whoever wants one should not wait for all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

_places: dict[str, tuple[str, str]] = {}


def provide(name: str, module: str, attribute: str) -> None:
    """Say where a provider is: an attribute of a module, which is imported when it is first asked for."""
    _places[name] = (module, attribute)


def provided(name: str) -> Any:
    """The provider of a name; KeyError where nobody provides it."""
    module, attribute = _places[name]
    return getattr(importlib.import_module(module), attribute)


def on_first_use(package: str, modules: Mapping[str, str], namespace: dict[str, Any]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, which imports a public name's module when that name is first asked for.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    modules : mapping of str to str
        Public name to module, relative to the package.
    namespace : dict
        Its ``globals()``, which keep what was found.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(modules[name], package), name)
        namespace[name] = value
        return value

    return find
