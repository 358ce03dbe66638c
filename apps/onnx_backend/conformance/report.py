"""The document about conformance, made from the outcomes."""

from __future__ import annotations

from .outcome import Outcome


def markdown(results: dict[str, dict[str, Outcome]]) -> str:
    """Text of `docs/conformance.md`."""
    return str(results)
