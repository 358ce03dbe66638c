"""A request while the engine works on it."""

from __future__ import annotations

import numpy as np

from ..errors import HeteroError
from .model import TokenizerProtocol
from .request import FinishReason, Request
from .sampling import History, sample
from .text_stream import Delta, TextStream


class Sequence:
    """The tokens of a request, and how many of them the cache has.

    Parameters
    ----------
    request : Request
        Whose text is written.
    arrival : int
        Its number; smaller ones came earlier.
    codec : TokenizerProtocol
        Makes text of tokens.
    context : int
        The most tokens of prompt and text together.

    Attributes
    ----------
    tokens : list
        Tokens of the prompt and the text so far.
    slot : int or None
        In the cache; None while the request waits.
    cached : int
        How many of the tokens the cache has, the first ones.
    """

    def __init__(self, request: Request, arrival: int, codec: TokenizerProtocol, context: int) -> None:
        params = request.params
        self.request, self.arrival = request, arrival
        self.tokens = list(request.prompt)
        self.slot: int | None = None
        self.cached = 0
        self._reused = 0
        self._max_tokens = min(context, len(self.tokens) + (params.max_tokens or context))
        self._stops = set(params.stop_token_ids) | (set() if params.ignore_eos else codec.stop_ids)
        self._generator = np.random.Generator(np.random.PCG64(_seed(params.seed)))
        self._history = History(self.tokens)
        self._stream = TextStream(codec.piece, params.stop)

    @property
    def written(self) -> int:
        """Tokens of the text so far."""
        return len(self.tokens) - len(self.request.prompt)

    def begin(self, slot: int, cached: int) -> None:
        """Use a slot whose first tokens are in the cache already."""
        if not self.written:
            self._reused = cached
        self.slot, self.cached = slot, cached

    def release(self) -> int:
        """Go back to waiting; the slot that was used."""
        assert self.slot is not None
        slot, self.slot, self.cached = self.slot, None, 0
        return slot

    def accept(self, logits: np.ndarray) -> FinishReason | None:
        """Choose the next token, tell the reader what it adds to the text, and say whether that ends it.

        Parameters
        ----------
        logits : np.ndarray
            (vocabulary,) float32.

        Raises
        ------
        HeteroError
            If no token can be chosen.
        """
        token, logprob = sample(logits, self.request.params, self._generator, self._history)
        self.tokens.append(token)
        self._history.add(token)
        self.request.count(self.written, self._reused)
        ends = token in self._stops
        self._send(self._stream.add(token, logprob, silent=ends))
        if ends or self._stream.stopped:
            return "stop"
        return "length" if len(self.tokens) >= self._max_tokens else None

    def finish(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """Tell the reader what was held back, and that nothing more comes."""
        if reason != "cancelled":
            self._send(self._stream.finish())
        self.request.end(reason, error)

    def _send(self, delta: Delta) -> None:
        if delta.text or delta.tokens:
            self.request.append(delta)


def _seed(seed: int | None) -> int | None:
    # numpy takes no negative ones.
    return None if seed is None else seed % (1 << 64)
