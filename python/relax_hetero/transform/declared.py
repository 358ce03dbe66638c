"""Look-up of this library's passes by name."""

from __future__ import annotations

import difflib
import sys

from .ir.declare import PassDeclaration, declared_passes


def passes() -> dict[str, PassDeclaration]:
    """All passes of this library by name, each with its summary, text and options."""
    package = sys.modules[__package__]
    for name in package.__all__:
        getattr(package, name)  # imports the pass, which declares it
    return {name: declared for name, declared in sorted(declared_passes().items()) if name in package.__all__}


def find_pass(name: str) -> PassDeclaration:
    """A pass by name.

    Parameters
    ----------
    name : str
        E.g. "FormRows".

    Returns
    -------
    PassDeclaration
        Its ``constructor`` takes the options and returns the ``tvm.transform.Pass``.

    Raises
    ------
    KeyError
        No pass has that name; similar names are listed.
    """
    declaration = getattr(sys.modules[__package__], name, None) and declared_passes().get(name)
    if not declaration:
        near = ", ".join(difflib.get_close_matches(name, passes())) or "none"
        raise KeyError(f"no pass is called {name!r}; near names: {near}")
    return declaration
