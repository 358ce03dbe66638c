"""The passes of this library by name."""

from __future__ import annotations

import difflib
import sys

from .ir.declare import PassDeclaration, declared_passes


def passes() -> dict[str, PassDeclaration]:
    """Every pass of this library by name, with its summary, its text and its options."""
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
        There is no such pass; near names are listed.
    """
    found = getattr(sys.modules[__package__], name, None) and declared_passes().get(name)
    if not found:
        near = ", ".join(difflib.get_close_matches(name, passes())) or "none"
        raise KeyError(f"no pass is called {name!r}; near names: {near}")
    return found
