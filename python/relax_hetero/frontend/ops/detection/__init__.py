"""Converters of ops of object detection."""

from __future__ import annotations

# Importing a module registers its converters.
from . import nms, regions, sampling  # noqa: F401
