"""Interfaces of language models, caches and tokenizers that the engine uses."""

from __future__ import annotations

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


@runtime_checkable
class Model(Protocol):
    """A language model with its cache; not thread-safe.

    Attributes
    ----------
    vocabulary : int
        Number of logits of a token.
    context : int
        Maximum number of tokens of a sequence.
    trained_context : int
        Context length of training; 0 if unknown.
    slots : int
        Maximum number of sequences that are decoded at once.
    chunk : int
        Maximum number of tokens of one call of `prefill`.
    decodes_like_prefill : bool
        Whether `decode` writes the same bits into the cache as `prefill`. If not, only tokens of prompts are shared
        among requests, and a preempted request decodes its text again.
    cache : Cache
        Cache that `prefill` and `decode` extend.
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
            Logits of the last token, (vocabulary,) float32; may be overwritten by the next call.

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
            Logits of each token, (len(slots), vocabulary) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
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


@runtime_checkable
class LookAheadModel(Model, Protocol):
    """A model that can begin a decode step before the previous one has ended.

    Attributes
    ----------
    looks_ahead : bool
        Whether `begin_decode` returns before the computation has ended, as on GPUs; otherwise a step ahead would only
        delay the tokens of the last one. Greedy texts take the step's tokens anyway.
    """

    @property
    def looks_ahead(self) -> bool: ...  # noqa: D102

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


class MaskableStep(DecodeStep, Protocol):
    """A decode step of a `MaskingModel`."""

    def masked_tokens(self, masks: np.ndarray) -> list[int]:
        """As `tokens`, among tokens that masks allow.

        Parameters
        ----------
        masks : np.ndarray
            (sequences, words) of int32, see `encoding.token_masks`.

        Raises
        ------
        HeteroError
            See `tokens`.
        """


@runtime_checkable
class MaskingModel(LookAheadModel, Protocol):
    """A model whose decode steps apply masks of allowed tokens where logits are computed.

    Attributes
    ----------
    masks_tokens : bool
        Whether its steps are `MaskableStep` objects.
    """

    @property
    def masks_tokens(self) -> bool: ...  # noqa: D102

    def begin_decode(self, slots: Sequence[int], tokens: Sequence[int] | DecodeStep) -> MaskableStep:
        """See `LookAheadModel`.

        Parameters
        ----------
        slots : sequence of int
            Slots of the sequences, each once.
        tokens : sequence of int or DecodeStep
            Token of each sequence, or the last step.
        """


@runtime_checkable
class MultiRowModel(Model, Protocol):
    """A model whose decode steps may have several tokens of a sequence, with the bits of single steps.

    Attributes
    ----------
    decode_rows : int
        Maximum number of rows of a call of `decode` that gives a slot several times, for consecutive tokens; 0 if none
        may.
    """

    @property
    def decode_rows(self) -> int: ...  # noqa: D102


@runtime_checkable
class DraftedModel(Model, Protocol):
    """A model with a draft model.

    Attributes
    ----------
    draft : Model or None
        Small model of the same vocabulary, whose drafts this one verifies; None without one.
    """

    @property
    def draft(self) -> Model | None: ...  # noqa: D102


@runtime_checkable
class PromptLogitsModel(Model, Protocol):
    """A model that can return the logits of all tokens of a prompt.

    Attributes
    ----------
    prompt_chunk : int
        Maximum number of tokens of one call of `prefill_logits`.
    """

    @property
    def prompt_chunk(self) -> int: ...  # noqa: D102

    def prefill_logits(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        """Append tokens to a sequence as `prefill` does.

        Parameters
        ----------
        slot : int
            Slot of the sequence.
        tokens : np.ndarray
            Tokens in order, (count,) int32.

        Returns
        -------
        np.ndarray
            Logits of each token, (count, vocabulary) float32; may be overwritten by the next call.

        Raises
        ------
        CacheError
            If pages run out.
        """


@runtime_checkable
class GrowingModel(Model, Protocol):
    """A model that can be used before all its functions are compiled.

    Attributes
    ----------
    is_complete : bool
        False while functions are still being compiled, without which several texts take longer.
    """

    @property
    def is_complete(self) -> bool: ...  # noqa: D102


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
