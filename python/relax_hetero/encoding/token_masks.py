"""Masks of the tokens that may follow a text: bits, as structured output makes them and devices apply them.

Bit j % 32 of word j // 32 is 1 if token j is allowed.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

MASKED_TOKENS = "masked_tokens"
"""Function of a language model's module that takes logits and masks (`frontend.greedy_tokens.masked_tokens`)."""
MASK_BITS = 32
"""Tokens of a word, int32."""


def mask_words(vocabulary: int) -> int:
    """Number of words of a mask."""
    return -(-vocabulary // MASK_BITS)


def pack_mask(allowed: np.ndarray) -> np.ndarray:
    """Pack whether each token is allowed, bool, into int32 words."""
    data = np.packbits(allowed, bitorder="little")
    return np.pad(data, (0, -data.size % 4)).view(np.int32)


def unpack_mask(mask: np.ndarray, vocabulary: int) -> np.ndarray:
    """Unpack a mask: bool, (vocabulary,)."""
    return np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little").view(np.bool_)


@lru_cache(2)
def full_mask(vocabulary: int) -> np.ndarray:
    """Mask of all tokens, not to be changed."""
    return pack_mask(np.ones(vocabulary, np.bool_))
