"""Messages about names that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import BindingError


def unknown_name(what: str, name: object, known: Iterable[str], where: str) -> BindingError:
    """An error for a name that `where` does not have, with the nearest one that it has."""
    names = list(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    close = difflib.get_close_matches(str(name).lower(), by_lower, n=1)
    hint = f"; did you mean {by_lower[close[0]]!r}?" if close else ""
    shown = repr(name) if isinstance(name, str) else str(name)
    return BindingError(f"{where} has no {what} {shown}; it has {', '.join(map(repr, names)) or 'none'}{hint}")
