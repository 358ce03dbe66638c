"""Errors of the engine, tokenizers and chat templates."""

from __future__ import annotations

from ..errors import HeteroError


class RequestError(HeteroError):
    """A request that the engine rejects.

    Attributes
    ----------
    code : str or None
        OpenAI's error code; None for most.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EngineFullError(HeteroError):
    """The engine's queue is full; retrying later may help."""


class EngineClosedError(HeteroError):
    """The engine was closed, or its thread ended."""


class TokenizerError(HeteroError):
    """A tokenizer or a chat template that is missing, invalid or of an unknown form."""
