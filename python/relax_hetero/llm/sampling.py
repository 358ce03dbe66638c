"""Sampling of tokens from logits.

A vocabulary has some 10^5 tokens, of which a handful are probable. Nothing here sorts all of them: maxima of lanes
give a lower bound of the k-th largest logit, and only candidates above it are sorted.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ..encoding.token_masks import is_allowed, is_dense, tokens_of_mask
from ..errors import HeteroError
from .params import SamplingParams

_LANES = 1024  # lanes of the vocabulary, to which tokens belong in turn: numpy takes maxima of all lanes at once
_BLOCK = 256  # weights per block of a sum
_TOP_P_CANDIDATES, _TOP_P_GROWTH = 256, 8
"""Number of tokens that `top_p` sorts first, and its growth while their probabilities sum to less."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token, the logarithm of its probability, and the most probable tokens at its position.

    Attributes
    ----------
    token : int
        Token id.
    logprob : float
        Natural logarithm of its probability; NaN for the first token of a prompt, which nothing predicts.
    top : tuple of (int, float)
        Most probable tokens with their log-probabilities, most probable first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Generator(Protocol):
    """Generator of random numbers, such as `np.random.Generator`."""

    def random(self) -> float:
        """Draw a number from 0 to 1."""


class Uniform(NamedTuple):
    """Generator of one number."""

    value: float

    def random(self) -> float:
        """Return the number."""
        return self.value


class Uniforms:
    """Generator of the random numbers of a text, one for each of its tokens. `seed`: seed, None for a random one."""

    def __init__(self, seed: int | None) -> None:
        # numpy does not accept negative seeds.
        self._generator = np.random.Generator(np.random.PCG64(None if seed is None else seed % (1 << 64)))
        self._ahead: deque[float] = deque()

    def random(self) -> float:
        """Draw the next number."""
        return self._ahead.popleft() if self._ahead else self._generator.random()

    def peek(self, index: int) -> Uniform:
        """Generator of the number that is drawn after `index` others."""
        while len(self._ahead) <= index:
            self._ahead.append(self._generator.random())
        return Uniform(self._ahead[index])


class History:
    """Tokens that occur in the prompt and the text so far, for penalties.

    `prompt`: tokens of the prompt, which only the repetition penalty considers.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._counts: dict[int, int] = dict.fromkeys(prompt, 0)

    def add(self, token: int) -> None:
        """Append a token to the text."""
        self._counts[token] = self._counts.get(token, 0) + 1

    def penalize(self, logits: np.ndarray, params: SamplingParams) -> None:
        """Apply penalties to logits, in place."""
        if not self._counts:
            return
        tokens = np.fromiter(self._counts, np.int64, len(self._counts))
        counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
        penalized = logits[tokens]
        if params.repetition_penalty != 1:
            penalty = np.float32(params.repetition_penalty)
            penalized = np.where(penalized > 0, penalized / penalty, penalized * penalty)
        logits[tokens] = penalized - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)


def sample(
    logits: np.ndarray, params: SamplingParams, generator: Generator, history: History, mask: np.ndarray | None = None
) -> tuple[int, TokenLogprob | None]:
    """Sample a token.

    Parameters
    ----------
    logits : array of float32, (vocabulary,)
        Logits; not changed.
    params : SamplingParams
        Sampling parameters.
    generator : Generator
        Generator of one random number; unused if sampling is greedy.
    history : History
        Tokens for penalties.
    mask : array of int32, (words,), optional
        Tokens that may be sampled, see `token_masks`; all without it.

    Returns
    -------
    token : int
        Token id.
    logprob : TokenLogprob or None
        Log-probabilities before bias, penalties and mask; None if `params.logprobs` is None.

    Raises
    ------
    HeteroError
        If the largest logit is infinite, or one is NaN.
    """
    token = sample_token(logits, params, generator, history, mask)
    return token, None if params.logprobs is None else logprob_of(logits, token, params.logprobs)


def sample_token(
    logits: np.ndarray, params: SamplingParams, generator: Generator, history: History, mask: np.ndarray | None = None
) -> int:
    """Sample a token without its log-probability; see `sample`."""
    adjusted = _apply_bias_and_penalties(logits, params, history)
    if mask is None:
        return _sample_token(adjusted, params, generator)
    if params.greedy:
        token = int(np.argmax(adjusted))
        if is_allowed(mask, token) and math.isfinite(adjusted[token]):  # as most are
            return token
    if is_dense(mask):
        masked = _scratch(logits.size, "masked")
        masked[:] = adjusted
        masked[tokens_of_mask(~mask, logits.size)] = -np.inf
        return _sample_token(masked, params, generator)
    tokens = tokens_of_mask(mask, logits.size)
    return int(tokens[_sample_token(adjusted[tokens], params, generator)])


def largest(logits: np.ndarray, count: int, maxima: np.ndarray | None = None) -> np.ndarray:
    """Tokens of the `count` largest logits, and of ties with the smallest of them, in order of token ids.

    The count-th largest maximum of a lane is a lower bound of the count-th largest logit.
    """
    if count >= logits.size:
        return np.arange(logits.size)
    if count > _LANES or logits.size <= _LANES:
        return np.flatnonzero(logits >= np.partition(logits, logits.size - count)[logits.size - count])
    maxima = _lane_maxima(logits) if maxima is None else maxima
    candidates = _at_least(logits, maxima, np.partition(maxima, _LANES - count)[_LANES - count])
    values = logits[candidates]
    return candidates[values >= np.partition(values, values.size - count)[values.size - count]]


def _lane_maxima(logits: np.ndarray) -> np.ndarray:
    """Maximum of each lane; NaN if a logit of it is."""
    rows, rest = divmod(logits.size, _LANES)
    maxima = logits[: rows * _LANES].reshape(rows, _LANES).max(axis=0, initial=-np.inf)
    np.maximum(maxima[:rest], logits[rows * _LANES :], out=maxima[:rest])
    return maxima


def _at_least(logits: np.ndarray, maxima: np.ndarray, bound: np.float32 | float) -> np.ndarray:
    """Tokens with logits of at least `bound`, which most lanes lack, in order of token ids."""
    lanes, rows = np.flatnonzero(maxima >= bound), logits.size // _LANES
    hits = np.flatnonzero(logits[: rows * _LANES].reshape(rows, _LANES).take(lanes, axis=1) >= bound)
    row, lane = np.divmod(hits, max(lanes.size, 1))
    rest = np.flatnonzero(logits[rows * _LANES :] >= bound)
    return np.concatenate([row * _LANES + lanes[lane], rows * _LANES + rest])


def _apply_bias_and_penalties(logits: np.ndarray, params: SamplingParams, history: History) -> np.ndarray:
    """Logits with bias and penalties; a copy, if there are any."""
    if not params.logit_bias and not params.penalizes:
        return logits
    adjusted = logits.astype(np.float32)
    for token, bias in params.logit_bias.items():
        adjusted[token] += bias
    if params.penalizes:
        history.penalize(adjusted, params)
    return adjusted


def _sample_token(logits: np.ndarray, params: SamplingParams, generator: Generator) -> int:
    if params.greedy:
        best = int(np.argmax(logits))  # the first NaN, if there is one
        _check_finite(logits, float(logits[best]))
        return best
    maxima = _lane_maxima(logits)
    max_logit = _check_finite(logits, float(maxima.max()))
    uniform = generator.random()
    # Exponentials of the whole vocabulary are taken only if many tokens may remain.
    if 0 < params.top_k <= logits.size // _BLOCK or params.min_p > 0:
        tokens = _filter_tokens(logits, params, max_logit, maxima)
        weights = np.exp((logits[tokens].astype(np.float64) - max_logit) / params.temperature)
        return _draw_token(*_top_p(tokens, weights, params.top_p), uniform)
    scaled = np.subtract(logits, np.float32(max_logit), out=_scratch(logits.size, "scaled"))
    scaled /= np.float32(params.temperature)
    if 0 < params.top_k < logits.size:
        tokens = largest(logits, params.top_k, maxima)
        return _draw_token(*_top_p(tokens, np.exp(scaled[tokens].astype(np.float64)), params.top_p), uniform)
    weights = np.exp(scaled, out=scaled)
    if params.top_p < 1:
        return _draw_token(*_top_p_from_all(logits, weights, params.top_p, maxima), uniform)
    return _draw_from_all(weights, uniform)


def _check_finite(logits: np.ndarray, max_logit: float) -> float:
    if not math.isfinite(max_logit):
        raise HeteroError(f"logits: found {max_logit} as the largest of {logits.size:,}, expected a finite number")
    return max_logit


def _scratch(size: int, name: str) -> np.ndarray:
    """Memory of this thread for `size` float32; new memory for each token would be paged in again and again."""
    values: np.ndarray | None = getattr(_memory, name, None)
    if values is None or values.size < size:
        values = np.empty(size, np.float32)
        setattr(_memory, name, values)
    return values[:size]


_memory = threading.local()


def _filter_tokens(logits: np.ndarray, params: SamplingParams, max_logit: float, maxima: np.ndarray) -> np.ndarray:
    """Tokens that pass `min_p` and `top_k`, in order of token ids."""
    threshold = max_logit + params.temperature * math.log(params.min_p) if params.min_p else -math.inf
    if not params.top_k:
        return _at_least(logits, maxima, threshold)
    tokens = largest(logits, params.top_k, maxima)
    return tokens[logits[tokens] >= threshold]


def _top_p(tokens: np.ndarray, weights: np.ndarray, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """Most probable tokens whose weights reach `top_p` of the sum, most probable first."""
    if top_p >= 1:
        return tokens, weights
    order = np.argsort(-weights, kind="stable")
    count = _count_reaching(weights[order], top_p * float(weights.sum()))
    return tokens[order[:count]], weights[order[:count]]


def _top_p_from_all(
    logits: np.ndarray, weights: np.ndarray, top_p: float, maxima: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`_top_p` of the whole vocabulary, which sorts more and more candidates until they reach the sum."""
    target = top_p * float(weights.sum(dtype=np.float64))
    count = _TOP_P_CANDIDATES
    while True:
        tokens = largest(logits, count, maxima)
        candidates = weights[tokens].astype(np.float64)
        if tokens.size == logits.size or float(candidates.sum()) >= target:
            break
        count *= _TOP_P_GROWTH
    order = np.argsort(-candidates, kind="stable")
    nucleus = order[: _count_reaching(candidates[order], target)]
    return tokens[nucleus], candidates[nucleus]


def _count_reaching(weights: np.ndarray, target: float) -> int:
    """Number of leading weights whose sum reaches `target`, at least one."""
    return min(int(np.searchsorted(np.cumsum(weights), target)) + 1, weights.size)


def _draw_token(tokens: np.ndarray, weights: np.ndarray, uniform: float) -> int:
    return int(tokens[_index_of_quantile(np.cumsum(weights), uniform)])


def _draw_from_all(weights: np.ndarray, uniform: float) -> int:
    """Draw a token by weight: first a block by its sum, then a token of it."""
    starts = np.arange(0, weights.size, _BLOCK)
    block_sums = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    block = _index_of_quantile(block_sums, uniform)
    sum_before = float(block_sums[block - 1]) if block else 0.0
    token_sums = np.cumsum(weights[starts[block] : starts[block] + _BLOCK], dtype=np.float64)
    offset = _first_above(token_sums, max(0.0, uniform * float(block_sums[-1]) - sum_before))
    return int(starts[block]) + offset


def _index_of_quantile(sums: np.ndarray, uniform: float) -> int:
    """Index at which cumulative sums reach the fraction `uniform` of the total."""
    return _first_above(sums, uniform * float(sums[-1]))


def _first_above(sums: np.ndarray, value: float) -> int:
    """First index whose cumulative sum exceeds a value; the last nonzero weight's if rounding lets none."""
    return min(int(np.searchsorted(sums, value, side="right")), int(np.searchsorted(sums, sums[-1])))


def logprob_of(logits: np.ndarray, chosen: int, count: int) -> TokenLogprob:
    """Log-probabilities of a token and of the `count` most probable ones.

    `chosen`: token; `count`: number of most probable tokens.
    """
    max_logit = float(logits.max())
    log_sum = max_logit + math.log(float(np.exp(logits - np.float32(max_logit)).sum(dtype=np.float64)))
    top: tuple[tuple[int, float], ...] = ()
    if count:
        tokens = largest(logits, count)
        order = np.argsort(-logits[tokens], kind="stable")[:count]
        top = tuple((int(token), float(logits[token]) - log_sum) for token in tokens[order])
    return TokenLogprob(chosen, float(logits[chosen]) - log_sum, top)
