"""Interfaces that the engine asks of a language model, of its cache and of its tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


class Cache(Protocol):
    """The keys and values of several sequences, each in a slot.

    A method that runs out of slots or of pages raises `CacheError` and leaves the slots that it was given as they
    were, or such that `cut` to the length that they had brings that back.
    """

    def add(self) -> int:
        """An empty sequence's slot."""

    def extend(self, slot: int, count: int) -> None:
        """Make room for `count` more tokens.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        count : int
            Number of tokens.
        """

    def fork(self, slot: int) -> int:
        """The slot of a new sequence with the same tokens, which share their pages.

        Parameters
        ----------
        slot : int
            Slot of the sequence to share.
        """

    def cut(self, slot: int, length: int) -> None:
        """Forget the tokens behind the first `length`.

        Raises `CacheError` where keys that a window needs at that length were given back already.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        length : int
            Number of tokens that stay.
        """

    def free(self, slot: int) -> None:
        """Forget a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """

    def length(self, slot: int) -> int:
        """How many tokens a sequence has.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """


class Model(Protocol):
    """A language model with its cache, called by one thread at a time.

    Attributes
    ----------
    vocabulary : int
        Logits of a token.
    context : int
        The most positions of a sequence.
    trained_context : int
        Positions that the model was trained for; 0 where that is not known.
    slots : int
        The most sequences that are decoded at once.
    chunk : int
        The most tokens of one call of `prefill`.
    decodes_like_prefill : bool
        True if `decode` writes the same bits of a token into the cache as `prefill`. If not, only tokens of prompts are
        shared among requests, and a request that waited again has its text decoded again.
    cache : Cache
        Where `prefill` and `decode` append; both extend it themselves.
    """

    @property
    def vocabulary(self) -> int: ...  # noqa: D102

    @property
    def context(self) -> int: ...  # noqa: D102

    @property
    def trained_context(self) -> int: ...  # noqa: D102

    @property
    def slots(self) -> int: ...  # noqa: D102

    @property
    def chunk(self) -> int: ...  # noqa: D102

    @property
    def decodes_like_prefill(self) -> bool: ...  # noqa: D102

    @property
    def cache(self) -> Cache: ...  # noqa: D102

    def prefill(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        """Append tokens (at most `chunk`, int32) to a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : np.ndarray
            Tokens in order, (count,).

        Returns
        -------
        np.ndarray
            Logits behind the last of them, (vocabulary,) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, each once.
        tokens : sequence of int
            Token of each sequence.

        Returns
        -------
        np.ndarray
            Logits behind each, (len(slots), vocabulary) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """


@runtime_checkable
class TokenizerProtocol(Protocol):
    """Text as tokens and back; `Tokenizer` is the one that files describe.

    Two more attributes are optional. With `longest`, the maximum number of bytes of a text that one token stands for
    (None where that is not known), prompts that cannot fit are refused before they are encoded. With `control_names`,
    the names of its control tokens, `encode` is given a `Prompt` that marks those names that users wrote, which it
    encodes as text.

    Attributes
    ----------
    stop_ids : frozenset of int
        Tokens that end a text, such as the one for the end of a turn.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...  # noqa: D102

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        """The tokens of a text.

        Parameters
        ----------
        text : str
            Any text of Unicode.
        special : bool
            Whether names of control tokens in the text stand for these tokens.
        begin : bool
            Whether the model's token for the begin of a text comes first, where it wants one.
        """

    def piece(self, token: int) -> bytes:
        """The bytes that a token adds to a text; none for control tokens.

        Parameters
        ----------
        token : int
            Number of the token.
        """
