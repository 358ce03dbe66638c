"""The choice of tokens against distributions that are computed plainly, in float64."""

from __future__ import annotations

import numpy as np
import pytest

from relax_hetero.errors import HeteroError
from relax_hetero.llm import RequestError, SamplingParams, sample
from relax_hetero.llm.sampling import History, largest

DRAWS = 20_000


def distribution(logits: np.ndarray, params: SamplingParams, prompt=(), text=()) -> np.ndarray:
    """The probability of each token, by sorting everything."""
    values = logits.astype(np.float64)
    for token, bias in params.logit_bias.items():
        values[token] += bias
    for token in {*prompt, *text}:
        values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
        count = list(text).count(token)
        values[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    values /= params.temperature
    chances = np.exp(values - values.max())
    chances[chances < params.min_p * chances.max()] = 0
    if params.top_k:
        chances[values < np.sort(values)[-min(params.top_k, values.size)]] = 0
    chances /= chances.sum()
    order = np.argsort(-chances, kind="stable")
    before = np.cumsum(chances[order]) - chances[order]
    chances[order[before >= params.top_p - 1e-12]] = 0
    if params.top_p == 0:
        chances[order[0]] = 1
    return chances / chances.sum()


def drawn(logits: np.ndarray, params: SamplingParams, count: int, history: History | None = None) -> np.ndarray:
    generator = np.random.default_rng(7)
    history = history or History()
    tokens = [sample(logits, params, generator, history)[0] for _ in range(count)]
    return np.bincount(tokens, minlength=logits.size)


def chi_square(counts: np.ndarray, chances: np.ndarray) -> float:
    """Chi-square statistic of counts against probabilities, in standard deviations; rare tokens are pooled."""
    expected = chances * counts.sum()
    often = expected >= 10
    observed = np.append(counts[often], counts[~often].sum())
    binned = np.append(expected[often], expected[~often].sum())
    possible = binned > 0
    assert observed[~possible].sum() == 0
    freedom = possible.sum() - 1
    statistic = ((observed[possible] - binned[possible]) ** 2 / binned[possible]).sum()
    return (statistic - freedom) / np.sqrt(2 * max(freedom, 1))


ALL_PARAMS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0, "top_k": 5},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 300},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"top_p": 0.999, "temperature": 2.0},
    {"min_p": 0.1},
    {"min_p": 0.05, "top_k": 12, "top_p": 0.8, "temperature": 1.3},
    {"top_k": 30, "top_p": 0.5},
    {"logit_bias": {3: 5.0, 6: -100.0}, "top_p": 0.9},
]


@pytest.mark.parametrize("options", ALL_PARAMS, ids=str)
@pytest.mark.parametrize("vocabulary", [7, 1000, 5000])
def test_tokens_come_as_often_as_they_are_probable(options, vocabulary):
    logits = (3 * np.random.default_rng(vocabulary).standard_normal(vocabulary)).astype(np.float32)
    params = SamplingParams(**options)
    chances = distribution(logits, params)
    counts = drawn(logits, params, 2000)
    assert not counts[chances == 0].any()
    assert chi_square(counts, chances) < 4


@pytest.mark.parametrize("options", ALL_PARAMS[:1] + ALL_PARAMS[4:7], ids=str)
def test_many_draws_of_a_large_vocabulary(options):
    logits = np.random.default_rng(0).standard_normal(262_144).astype(np.float32) - 14
    hot = np.random.default_rng(1).integers(0, logits.size, 60)
    logits[hot] = np.random.default_rng(2).standard_normal(60) * 2
    params = SamplingParams(**options)
    chances = distribution(logits, params)
    counts = drawn(logits, params, 500)
    assert not counts[chances == 0].any()
    assert chi_square(counts, chances) < 4


@pytest.mark.parametrize("seed", range(4))
def test_exactly_the_tokens_that_filters_leave(seed):
    """Over evenly spread random numbers, every remaining token is drawn, and no other."""
    generator = np.random.default_rng(seed)
    logits = generator.integers(-3, 4, 40).astype(np.float32) + (seed % 2) * generator.random(40, np.float32)
    params = SamplingParams(
        temperature=4, top_k=int(generator.integers(1, 40)), min_p=float(generator.choice([0, 0.3]))
    )

    class Even:
        """Numbers that lie close together."""

        def __init__(self) -> None:
            self.at = -1

        def random(self) -> float:
            self.at += 1
            return (self.at + 0.5) / 3000

    even = Even()
    tokens = {sample(logits, params, even, History())[0] for _ in range(3000)}
    assert sorted(tokens) == np.flatnonzero(distribution(logits, params)).tolist()


@pytest.mark.parametrize("vocabulary", [3, 255, 256, 257, 10_000])
def test_the_largest_logits_with_their_equals(vocabulary):
    generator = np.random.default_rng(vocabulary)
    for logits in (
        generator.standard_normal(vocabulary).astype(np.float32),
        generator.integers(0, 5, vocabulary).astype(np.float32),
        np.zeros(vocabulary, np.float32),
    ):
        for count in (1, 2, 20, 39, 40, vocabulary - 1, vocabulary, vocabulary + 1):
            least = np.sort(logits)[-min(count, vocabulary)]
            np.testing.assert_array_equal(largest(logits, count), np.flatnonzero(logits >= least))


def test_penalties_are_of_tokens_that_came():
    logits = np.random.default_rng(3).standard_normal(12).astype(np.float32)
    before = logits.copy()
    history = History([1, 2, 2])
    for token in (2, 5, 5, 5):
        history.add(token)
    params = SamplingParams(repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=-0.5)
    chances = distribution(logits, params, [1, 2, 2], [2, 5, 5, 5])
    assert chi_square(drawn(logits, params, DRAWS, history), chances) < 4
    np.testing.assert_array_equal(logits, before)


def test_greedy_takes_the_largest_and_draws_nothing():
    logits = np.random.default_rng(4).standard_normal(1000).astype(np.float32)
    generator = np.random.default_rng(0)
    token, logprob = sample(logits, SamplingParams(temperature=0, top_k=3, min_p=0.5), generator, History())
    assert token == int(np.argmax(logits)) and logprob is None
    assert generator.random() == np.random.default_rng(0).random()
    biased = SamplingParams(temperature=0, logit_bias={17: 50.0})
    assert sample(logits, biased, generator, History())[0] == 17


def test_extreme_random_numbers_choose_tokens_that_are_possible():
    class Last:
        def __init__(self, value: float) -> None:
            self.value = value

        def random(self) -> float:
            return self.value

    logits = np.full(1000, -np.inf, np.float32)
    logits[[300, 700]] = 1
    for options in ({}, {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}):
        tokens = [sample(logits, SamplingParams(**options), Last(u), History())[0] for u in (0.0, 1 - 2**-53)]
        assert tokens == [300, 700]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(value):
    logits = np.zeros(10, np.float32)
    logits[4] = value
    with pytest.raises(HeteroError, match="expected a finite number"):
        sample(logits, SamplingParams(), np.random.default_rng(0), History())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1}, "temperature: found -1, expected 0 to 100"),
        ({"temperature": float("nan")}, "temperature: found nan, expected a number"),
        ({"temperature": "1"}, "temperature: found '1'"),
        ({"top_k": -1}, "top_k: found -1"),
        ({"top_k": 1.5}, "top_k: found 1.5"),
        ({"top_p": 1.1}, "top_p: found 1.1, expected 0 to 1"),
        ({"min_p": True}, "min_p: found True"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty: found 3, expected -2 to 2"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"logit_bias": {-1: 1}}, "logit_bias: found -1"),
        ({"logit_bias": {1: 101}}, "logit_bias of token 1: found 101"),
        ({"seed": 1 << 64}, "seed"),
        ({"stop": "text"}, "stop: found 'text', expected a tuple"),
        ({"stop": ("",)}, "stop: found a string of 0 characters"),
        ({"stop": ("a",) * 17}, "stop: found 17 strings"),
        ({"max_tokens": -1}, "max_tokens: found -1"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens: found 3"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs: found"),
        ({"prompt_logprobs": 21}, "prompt_logprobs: found 21"),
        ({"logprobs": 21}, "logprobs: found 21"),
    ],
    ids=str,
)
def test_parameters_outside_of_their_ranges_are_refused(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)
