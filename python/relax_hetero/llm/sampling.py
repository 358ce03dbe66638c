"""The choice of a token from logits.

A vocabulary has some 10^5 tokens, of which a handful is probable. Nothing here sorts all of them: candidates are those
above a bound that the maxima of blocks give, and only they are ordered.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import HeteroError
from .params import SamplingParams

# Logits of a block whose maximum is taken.
_BLOCK = 256
# Tokens that are ordered first for `top_p`, and how many times more if they do not reach its sum.
_FIRST, _MORE = 256, 8


@dataclass(frozen=True)
class TokenLogprob:
    """A token, the logarithm of its probability, and the most probable tokens in its place, in their order.

    Attributes
    ----------
    token : int
        Number of the token.
    logprob : float
        Natural logarithm of its probability.
    top : tuple of (int, float)
        Most probable tokens with their logarithms, most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class History:
    """Which tokens a prompt and the text so far hold, and how often.

    Parameters
    ----------
    prompt : iterable of int
        Tokens of the prompt, counted as seen only.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._counts: dict[int, int] = dict.fromkeys(prompt, 0)

    def add(self, token: int) -> None:
        """The text goes on with `token`."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def penalize(self, logits: np.ndarray, params: SamplingParams) -> None:
        """Change the logits of tokens that were seen, in place."""
        if not self._counts:
            return
        tokens = np.fromiter(self._counts, np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        seen = logits[tokens]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            seen = np.where(seen > 0, seen / penalty, seen * penalty)
        logits[tokens] = seen - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def sample(
    logits: np.ndarray, params: SamplingParams, generator: np.random.Generator, history: History
) -> tuple[int, TokenLogprob | None]:
    """Choose a token.

    Parameters
    ----------
    logits : np.ndarray
        (vocabulary,) float32, left as they are.
    params : SamplingParams
        The steps and their order are described there.
    generator : np.random.Generator
        One number is drawn from it, none for greedy choices.
    history : History
        For penalties.

    Returns
    -------
    token : int
        Int
    logprob : TokenLogprob or None
        TokenLogprob or None: By the logits as they are given; None unless `params.logprobs` asks for it.

    Raises
    ------
    HeteroError
        If no logit is finite, or one is not a number.
    """
    chosen = _chosen(_changed(logits, params, history), params, generator)
    return chosen, None if params.logprobs is None else _logprob(logits, chosen, params.logprobs)


def largest(logits: np.ndarray, count: int) -> np.ndarray:
    """The tokens of the `count` largest logits and of all that equal the smallest of these, by token.

    The count-th largest of the maxima of blocks is a lower bound of the count-th largest logit, since as many logits
    reach it.
    """
    if count >= logits.size:
        return np.arange(logits.size)
    blocks = logits.size // _BLOCK
    if count > blocks:
        return np.flatnonzero(logits >= np.partition(logits, logits.size - count)[logits.size - count])
    maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
    bound = np.partition(maxima, blocks - count)[blocks - count]
    candidates = np.flatnonzero(logits >= bound)
    values = logits[candidates]
    return candidates[values >= np.partition(values, values.size - count)[values.size - count]]


def _changed(logits: np.ndarray, params: SamplingParams, history: History) -> np.ndarray:
    """The logits with bias and penalties; the given ones are not written to."""
    if not params.logit_bias and not params.penalizes:
        return logits
    changed = logits.astype(np.float32)
    for token, bias in params.logit_bias.items():
        changed[token] += bias
    if params.penalizes:
        history.penalize(changed, params)
    return changed


def _chosen(logits: np.ndarray, params: SamplingParams, generator: np.random.Generator) -> int:
    greedy = int(np.argmax(logits))  # that of the first NaN, if there is one
    peak = float(logits[greedy])
    if not math.isfinite(peak):
        raise HeteroError(f"logits: found {peak} as the largest of {logits.size:,}, expected a finite number")
    if params.greedy:
        return greedy
    draw = generator.random()
    if 0 < params.top_k <= logits.size // _BLOCK or params.min_p > 0:
        tokens = _filtered(logits, params, peak)
        weights = np.exp((logits[tokens].astype(np.float64) - peak) / params.temperature)
        return _drawn(*_top_p(tokens, weights, params.top_p), draw)
    scaled = (logits - np.float32(peak)) / np.float32(params.temperature)
    if 0 < params.top_k < logits.size:
        tokens = largest(logits, params.top_k)
        return _drawn(*_top_p(tokens, np.exp(scaled[tokens].astype(np.float64)), params.top_p), draw)
    weights = np.exp(scaled)
    if params.top_p < 1:
        return _drawn(*_top_p_of_all(logits, weights, params.top_p), draw)
    return _drawn_of_all(weights, draw)


def _filtered(logits: np.ndarray, params: SamplingParams, peak: float) -> np.ndarray:
    """The tokens that `min_p` and `top_k` leave, by token; both are bounds of logits, so that any order will do."""
    threshold = peak + params.temperature * math.log(params.min_p) if params.min_p else -math.inf
    if not params.top_k:
        return np.flatnonzero(logits >= threshold)
    tokens = largest(logits, params.top_k)
    return tokens[logits[tokens] >= threshold]


def _top_p(tokens: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Most probable tokens that reach `top_p` of the sum of all weights, the most probable first."""
    if top_p >= 1:
        return tokens, weights
    order = np.argsort(-weights, kind="stable")
    count = _prefix_reaching(weights[order], top_p * float(weights.sum()))
    return tokens[order[:count]], weights[order[:count]]


def _top_p_of_all(logits: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """`_top_p` of the whole vocabulary: the largest are ordered, more and more of them until they reach the sum."""
    wanted = top_p * float(weights.sum(dtype=np.float64))
    count = _FIRST
    while True:
        tokens = largest(logits, count)
        some = weights[tokens].astype(np.float64)
        if tokens.size == logits.size or float(some.sum()) >= wanted:
            break
        count *= _MORE
    order = np.argsort(-some, kind="stable")
    kept = order[: _prefix_reaching(some[order], wanted)]
    return tokens[kept], some[kept]


def _prefix_reaching(weights: np.ndarray, target: float) -> int:
    """How many of the first weights it takes to reach a sum; at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), target)) + 1, weights.size)


def _drawn(tokens: np.ndarray, weights: np.ndarray, draw: float) -> int:
    return int(tokens[_search(np.cumsum(weights), draw)])


def _drawn_of_all(weights: np.ndarray, draw: float) -> int:
    """A token by its weight; sums of blocks first, so that only one block is summed up token by token."""
    starts = np.arange(0, weights.size, _BLOCK)
    sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    block = _search(sums, draw)
    before = float(sums[block - 1]) if block else 0.0
    of_block = np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    inside = _index(of_block, max(0.0, draw * float(sums[-1]) - before))
    return int(starts[block]) + inside


def _search(sums: np.ndarray, draw: float) -> int:
    """The index whose share of the last sum a number of [0, 1) falls into."""
    return _index(sums, draw * float(sums[-1]))


def _index(sums: np.ndarray, value: float) -> int:
    """Where running sums first exceed a value; the last that adds anything where rounding made it too large."""
    return min(int(np.searchsorted(sums, value, side="right")), int(np.searchsorted(sums, sums[-1])))


def _logprob(logits: np.ndarray, chosen: int, count: int) -> TokenLogprob:
    peak = float(logits.max())
    total = peak + math.log(float(np.exp(logits - np.float32(peak)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        tokens = largest(logits, count)
        order = np.argsort(-logits[tokens], kind="stable")[:count]
        top = tuple((int(token), float(logits[token]) - total) for token in tokens[order])
    return TokenLogprob(chosen, float(logits[chosen]) - total, top)
