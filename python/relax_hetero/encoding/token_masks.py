"""Masks of the tokens that may follow a text: bits, as structured output makes them and devices apply them.

Bit j % 32 of word j // 32 is 1 if token j is allowed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

MASKED_TOKENS = "masked_tokens"
"""Function of a language model's module that takes logits and masks (`frontend.greedy_tokens.masked_tokens`)."""
MASK_BITS = 32  # tokens of a word, int32


def mask_words(vocabulary: int) -> int:
    """Number of words of a mask."""
    return -(-vocabulary // MASK_BITS)


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """Pack whether each token is allowed, bool, into int32 words."""
    data = np.packbits(allowed, bitorder="little")
    return np.pad(data, (0, -data.size % 4)).view(np.int32)


def is_allowed(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask allows a token."""
    return bool(mask[token // MASK_BITS] >> token % MASK_BITS & 1)


def without_tokens(mask: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """Copy of a mask that does not allow some tokens; those that it lacks are ignored."""
    words = mask.copy().view(np.uint32)
    for token in tokens:
        if token < MASK_BITS * words.size:
            words[token // MASK_BITS] &= np.uint32(~(1 << token % MASK_BITS) & 0xFFFFFFFF)
    return words.view(np.int32)


def is_dense(mask: np.ndarray) -> bool:
    """Return whether most words allow all of their tokens."""
    return 2 * np.count_nonzero(mask == -1) > mask.size


def tokens_of_mask(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """Tokens that a mask allows, in order; only words with a bit are unpacked."""
    words = np.flatnonzero(mask)
    bits = np.unpackbits(mask[words].view(np.uint8), bitorder="little")
    tokens = (words[:, None] * MASK_BITS + np.arange(MASK_BITS))[bits.view(np.bool_).reshape(-1, MASK_BITS)]
    return tokens[: np.searchsorted(tokens, vocabulary)]


@lru_cache(2)
def full_mask(vocabulary: int) -> np.ndarray:
    """Mask of all tokens, not to be changed."""
    return pack_mask(np.ones(vocabulary, np.bool_))
