"""Converters of ops of signal processing."""

from __future__ import annotations

# Each of these registers the converters it defines.
from . import fourier, mel  # noqa: F401
