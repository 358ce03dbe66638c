"""Converters of ops of random numbers."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import distributions  # noqa: F401
