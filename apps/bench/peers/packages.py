"""What is installed here."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Whether a package is there, also one inside another; nothing is loaded."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of a package's parent
        return False
