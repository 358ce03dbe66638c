"""Interfaces of language models, caches and tokenizers that the engine uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


class Cache(Protocol):
    """Keys and values of several sequences, each in a slot.

    A method that runs out of slots or pages raises `CacheError` and leaves its slots unchanged, or so that `truncate`
    to their previous length restores them.
    """

    def add(self) -> int:
        """Add an empty sequence and return its slot."""

    def extend(self, slot: int, count: int) -> None:
        """Allocate space for `count` more tokens.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        count : int
            Number of tokens.
        """

    def fork(self, slot: int) -> int:
        """Add a sequence with the same tokens, which shares the pages, and return its slot.

        Parameters
        ----------
        slot : int
            Slot of the sequence to share.
        """

    def truncate(self, slot: int, length: int) -> None:
        """Remove the tokens after the first `length`.

        Raises `CacheError` if the window would need pages that were freed.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        length : int
            Number of tokens to keep.
        """

    def free(self, slot: int) -> None:
        """Remove a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """

    def length(self, slot: int) -> int:
        """Return the number of tokens of a sequence.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        """


class DecodeStep(Protocol):
    """A decode step that may still run."""

    def tokens(self) -> list[int]:
        """Wait for the end, and return the index of the largest logit of each sequence (the first of equal ones).

        Raises
        ------
        HeteroError
            If the step failed, or the largest logit of a sequence is infinite, or one is NaN.
        """

    def masked_tokens(self, masks: np.ndarray) -> list[int]:
        """As `tokens`, among tokens that masks allow; only if `Model.masks_tokens`.

        Parameters
        ----------
        masks : np.ndarray
            (sequences, words) of int32, see `encoding.token_masks`.

        Raises
        ------
        HeteroError
            See `tokens`.
        """


class Model(ABC):
    """A language model with its cache; not thread-safe. Members with a default are abilities that it may lack.

    A subclass replaces properties by properties or attributes of its class, as they cannot be assigned to an object.

    Attributes
    ----------
    vocabulary : int
        Number of logits of a token.
    context : int
        Maximum number of tokens of a sequence.
    trained_context : int
        Context length of training; 0 if unknown, the default.
    slots : int
        Maximum number of sequences that are decoded at once.
    chunk : int
        Maximum number of tokens of one call of `prefill`.
    decodes_like_prefill : bool
        Whether `decode` writes the same bits into the cache as `prefill`. If not, the default, only tokens of prompts
        are shared among requests, and a preempted request decodes its text again.
    cache : Cache
        Cache that `prefill` and `decode` extend.
    has_decode_steps : bool
        Whether it has `begin_decode`, from which greedy texts take their tokens; False by default.
    looks_ahead : bool
        Whether `begin_decode` returns before the computation has ended, as on GPUs, so that a step can begin before the
        previous one has ended; otherwise, the default, this would only delay the tokens of the last one.
    masks_tokens : bool
        Whether decode steps have `DecodeStep.masked_tokens`, where logits are computed; False by default.
    draft : Model or None
        Small model of the same vocabulary, whose drafts this one verifies; None without one, the default.
    """

    vocabulary: int
    context: int
    trained_context: int = 0
    slots: int
    chunk: int
    decodes_like_prefill: bool = False
    cache: Cache
    has_decode_steps: bool = False
    looks_ahead: bool = False
    masks_tokens: bool = False
    draft: Model | None = None

    @property
    def decode_rows(self) -> int:
        """Maximum rows of a `decode` with consecutive tokens of a slot, with the bits of single steps; 0: none."""
        return 0

    @property
    def prompt_chunk(self) -> int:
        """Maximum number of tokens of one call of `prefill_logits`; 0 without it, the default."""
        return 0

    @property
    def is_complete(self) -> bool:
        """False while functions are still being compiled, without which several texts take longer; True by default."""
        return True

    @abstractmethod
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
            Logits of the last token, (vocabulary,) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """

    @abstractmethod
    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        """Append one token to each of several sequences.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, each once, or several times if `decode_rows` allows it.
        tokens : sequence of int
            Token of each row.

        Returns
        -------
        np.ndarray
            Logits of each token, (len(slots), vocabulary) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """

    def begin_decode(self, slots: Sequence[int], tokens: Sequence[int] | DecodeStep) -> DecodeStep:
        """Append one token to each of several sequences, without waiting for the end of the computation.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, as for `decode`.
        tokens : sequence of int or DecodeStep
            Token of each sequence, or the last step, which had the same slots, for the tokens that it computes.

        Returns
        -------
        DecodeStep
            The step; `DecodeStep.tokens` must be called, even if the result is not needed.

        Raises
        ------
        CacheError
            If pages run out. After this or any other error no sequence has changed.
        """
        raise NotImplementedError

    def prefill_logits(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        """Append tokens (at most `prompt_chunk`, int32) to a sequence, and return the logits of all of them.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : np.ndarray
            Tokens in order, (count,).

        Returns
        -------
        np.ndarray
            Logits of each token, (count, vocabulary) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """
        raise NotImplementedError


@runtime_checkable
class TokenizerProtocol(Protocol):
    """Tokenizer as the engine uses it; `Tokenizer` and `JsonTokenizer` are made from files.

    Two more attributes are optional. With `max_token_bytes`, the maximum number of bytes of one token (None if
    unknown), prompts that cannot fit are rejected before they are encoded. With `control_names`, the names of control
    tokens, `encode` gets a `Prompt` that marks names that users wrote, which it must encode as text.

    Attributes
    ----------
    stop_ids : frozenset of int
        Tokens that end a text, such as the end of a turn.
    """

    @property
    def stop_ids(self) -> frozenset[int]: ...  # noqa: D102

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        """Encode a text.

        Parameters
        ----------
        text : str
            Unicode text.
        special : bool
            Whether names of control tokens in the text become these tokens.
        begin : bool
            Whether to add the token for the beginning of a text that the model expects.
        """

    def piece(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for control tokens.

        Parameters
        ----------
        token : int
            Token id.
        """
