"""State of a request in the engine: tokens, slot, sampling, text."""

from __future__ import annotations

import math

import numpy as np

from ..encoding.token_masks import full_mask, without_tokens
from ..errors import HeteroError
from .model import TokenizerProtocol
from .request import FinishReason, Request
from .sampling import History, TokenLogprob, Uniforms, logprob_of, sample, sample_token
from .structured_output import Constraint
from .text_stream import Delta, TextStream


class Sequence:
    """Tokens of a request, and the number of them that are in the cache."""

    def __init__(
        self,
        request: Request,  # handle that the caller holds
        arrival: int,  # number of the request in order of arrival
        tokenizer: TokenizerProtocol,  # tokenizer that the text is made with
        context: int,  # maximum number of tokens of prompt and text together
        constraint: Constraint | None = None,  # tokens that `SamplingParams.structured_outputs` allows
    ) -> None:
        params = request.params
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)  # tokens of the prompt and the text so far
        self.slot: int | None = None  # slot in the cache; None while the request waits
        self.cached = 0  # number of leading tokens that are in the cache
        self.needs_logits = params.needs_logits  # see `SamplingParams`
        self._reused = 0
        self._constraint = constraint
        max_tokens = context if params.max_tokens is None else params.max_tokens
        self._max_tokens = min(context, len(self.tokens) + max_tokens)
        # Whether log-probabilities of the prompt's tokens are requested.
        self.needs_prompt_logits = params.prompt_logprobs is not None
        self._stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else tokenizer.stop_ids)
        self._uniforms = Uniforms(params.seed)
        self._history = History(self.tokens)
        self._stream = TextStream(tokenizer.piece, params.stop)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def has_mask(self) -> bool:
        """True if only some tokens may follow."""
        return self._constraint is not None or self.generated < self.request.params.min_tokens

    @property
    def remaining(self) -> int:
        """Maximum number of tokens to generate."""
        return self._max_tokens - len(self.tokens)

    def begin(self, slot: int, cached: int) -> None:
        """Take a slot that holds the first `cached` tokens already."""
        if not self.generated:  # otherwise the request was preempted
            self._reused = cached
        self.slot, self.cached = slot, cached

    def release(self) -> int:
        """Give up the slot, and return it."""
        assert self.slot is not None
        slot, self.slot, self.cached = self.slot, None, 0
        return slot

    def accept(self, logits: np.ndarray) -> FinishReason | None:
        """Sample the next token and `append` it.

        `logits`: logits of the last token, ``(vocabulary,)`` float32. Raises HeteroError if they are not finite, or the
        grammar takes too long.
        """
        mask = self.mask(logits.size) if self.has_mask else None
        return self.append(*sample(logits, self.request.params, self._uniforms, self._history, mask))

    def sample_ahead(self, logits: np.ndarray, index: int) -> int:
        """Sample a token of a draft with the random number of the text's token at its position.

        `logits`: logits of a draft model, ``(vocabulary,)`` float32; `index`: number of tokens of the draft before.
        """
        return sample_token(logits, self.request.params, self._uniforms.peek(index), self._history)

    def observe(self, logits: np.ndarray) -> None:
        """Record the log-probabilities of tokens of the prompt.

        `logits`: logits of the tokens after the first `cached` ones, ``(count, vocabulary)`` float32.
        """
        logprobs, prompt = self.request.prompt_logprobs, self.request.prompt
        count = self.request.params.prompt_logprobs or 0
        if not logprobs:
            logprobs.append(TokenLogprob(prompt[0], math.nan))
        for position, row in enumerate(logits, self.cached + 1):
            if len(logprobs) <= position < len(prompt):  # not known from before a preemption
                logprobs.append(logprob_of(row, prompt[position], count))

    def append(self, token: int, logprob: TokenLogprob | None = None) -> FinishReason | None:
        """Append a token and stream its text; return the reason if that ends the text."""
        self.tokens.append(token)
        self._history.add(token)
        self.request.update_usage(self.generated, self._reused)
        is_stop = token in self._stop_ids
        is_complete = self._constraint is not None and self._constraint.advance(token)
        is_early = self.generated < self.request.params.min_tokens
        self._send(self._stream.add(token, logprob, silent=is_stop, may_stop=not is_early))
        if is_stop or is_complete or self._stream.stopped:
            return "stop"
        return "length" if self.remaining <= 0 else None

    def finish(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """Stream the text that `TextStream` holds back, and end the request."""
        if reason != "cancelled":
            self._send(self._stream.finish())
        self.request.finish(reason, error)

    def mask(self, vocabulary: int) -> np.ndarray:
        """Bits of the tokens that may follow, see `token_masks`.

        `vocabulary`: number of logits. Raises HeteroError if the grammar takes too long.
        """
        mask = full_mask(vocabulary) if self._constraint is None else self._constraint.mask()
        if self.generated >= self.request.params.min_tokens:
            return mask
        continuing = without_tokens(mask, self._stop_ids)
        return continuing if continuing.any() else mask

    def _send(self, delta: Delta) -> None:
        if delta.text or delta.tokens:
            self.request.append(delta)
