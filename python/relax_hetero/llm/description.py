"""Facts about a language model that are not in its executable: sizes, windows, context length."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from ..encoding.pages import LayerCache


@dataclass(frozen=True)
class ModelDescription:
    """Facts that the engine and the cache need, saved as JSON next to an exported executable.

    Attributes
    ----------
    name : str
        Name of the model in its file.
    vocabulary, context, slots : int
        Number of tokens; maximum length of a sequence in tokens; maximum number of sequences in the cache.
    layers : tuple of LayerCache
        Cache of each layer that has one, or the parts of it that the devices of a mesh have.
    page_type : str
        Element type of the cache.
    experts, experts_used : int
        Number of experts and of experts per token; 0 for a dense model.
    trained_context : int
        Context length of training; 0 if unknown.
    decodes_like_prefill : bool
        See `Model`.
    cache_parts : tuple of int
        Number of parts of each layer's cache; () if all are whole.
    """

    name: str
    vocabulary: int
    context: int
    slots: int
    layers: tuple[LayerCache, ...]
    page_type: str = "float16"
    experts: int = 0
    experts_used: int = 0
    trained_context: int = 0
    decodes_like_prefill: bool = False
    cache_parts: tuple[int, ...] = ()

    @property
    def windows(self) -> tuple[int, ...]:
        """Number of latest positions that each layer with a cache sees; 0: all."""
        firsts = accumulate(self.cache_parts[:-1], initial=0) if self.cache_parts else range(len(self.layers))
        return tuple(self.layers[first].window for first in firsts)

    @property
    def has_states(self) -> bool:
        """True if layers have states, from which no token can be removed."""
        return any(layer.state for layer in self.layers)


def context_warning(context: int, trained_context: int) -> str | None:
    """Warning that the context is longer than the model was trained for; None if it is not."""
    if not 0 < trained_context < context:
        return None
    return (
        f"context: found {context:,} tokens, but the model was trained for {trained_context:,}; longer texts go wrong"
    )
