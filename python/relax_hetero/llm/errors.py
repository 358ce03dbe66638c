"""Errors between a language model and those who ask it."""

from __future__ import annotations

from ..errors import HeteroError


class RequestError(HeteroError):
    """A request that the engine cannot take as it is; says what was found and what was expected.

    Attributes
    ----------
    code : str or None
        The name that the OpenAI endpoints have for it; None for most.
    """

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class EngineFullError(HeteroError):
    """More requests wait than the engine's queue holds; trying again later may help."""


class EngineClosedError(HeteroError):
    """The engine was closed, or its thread ended."""


class TokenizerError(HeteroError):
    """A tokenizer or a chat template that a file does not describe, or not in a form that is known."""
