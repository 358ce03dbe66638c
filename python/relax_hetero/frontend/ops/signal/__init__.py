"""Converters of ops of signal processing."""

from __future__ import annotations

# Importing a module registers its converters.
from . import fourier, mel  # noqa: F401
