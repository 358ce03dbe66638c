"""Look-up of installed packages."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """True if a package, or a package inside another, is installed; nothing is loaded."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False
