"""Facts that a language model's executable does not say of itself: sizes, windows, tokens that end a text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDescription:
    """Facts that the engine and the cache need; plain data, kept in a file beside an exported executable.

    Attributes
    ----------
    name : str
        Name of the model, as its file has it.
    vocabulary, context, slots : int
        Number of tokens; maximum length of a sequence in tokens; maximum number of sequences in the cache.
    kv_heads, size : int
        Number of heads of keys and values, and the numbers of one.
    windows : tuple of int
        Positions that each layer sees; 0: all.
    page_type : str
        Element type of the cache.
    experts, experts_used : int
        0 for a model without.
    trained_context : int
        Positions that the model was trained for; 0 where that is not known.
    decodes_like_prefill : bool
        See `Model`.
    """

    name: str
    vocabulary: int
    context: int
    slots: int
    kv_heads: int
    size: int
    windows: tuple[int, ...]
    page_type: str = "float16"
    experts: int = 0
    experts_used: int = 0
    trained_context: int = 0
    decodes_like_prefill: bool = False


def context_warning(context: int, trained_context: int) -> str | None:
    """A warning that texts may be longer than those that a model was trained for; None if they may not."""
    if not 0 < trained_context < context:
        return None
    return (
        f"context: found {context:,} tokens, but the model was trained for {trained_context:,}; longer texts go wrong"
    )
