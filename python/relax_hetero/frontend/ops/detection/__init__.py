"""Converters of ops of object detection."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import nms, regions, sampling  # noqa: F401
