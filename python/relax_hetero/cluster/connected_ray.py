"""Ray, where it is installed: imported when a cluster is made, and never by importing this library."""

from __future__ import annotations

from typing import Any

from ..errors import HeteroError


def connected_ray() -> Any:
    """The module ``ray``; HeteroError that says what to install where there is none."""
    try:
        import ray
    except ImportError as error:
        raise HeteroError(
            "clusters of hosts run on Ray, which is not installed here: pip install 'relax-hetero[cluster]'"
        ) from error
    return ray
