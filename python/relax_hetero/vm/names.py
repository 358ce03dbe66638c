"""Messages about names that are not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ..errors import BindingError


def unknown_name(what: str, name: object, known: Iterable[str], where: str) -> BindingError:
    """An error for a name that `where` does not have, with the nearest one that it has."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return BindingError(f"{where} has no {what} {name!r}; it has {', '.join(map(repr, names)) or 'none'}{hint}")
