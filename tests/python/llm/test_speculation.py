"""Speculative decoding: drafts of a look-up and of a draft model change no text, and stop where they do not pay."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from llm.test_engine import CODEC, prompts
from llm.toy_model import EOS, LookAheadToyModel, ToyModel, ToyStep
from relax_hetero.errors import HeteroError
from relax_hetero.llm import Engine, SamplingParams, speculation
from relax_hetero.llm.draft_model import DraftModel
from relax_hetero.llm.request import Request
from relax_hetero.llm.sequence import Sequence
from relax_hetero.llm.speculation import PromptLookup, Speculation, StepTimes
from relax_hetero.llm.structured_output import StructuredOutputs

LIMITS = [
    {},
    {"slots": 1},
    {"pages": 16},
    {"pages": 16, "window": 40, "slots": 3},
    {"pages": 16, "decodes_like_prefill": False},
]
OPTIONS = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0, "stop": ("cdea", "aaaaaaa")},
    {"temperature": 1, "seed": 5, "logprobs": 1, "presence_penalty": 0.1},
    {"temperature": 0, "min_tokens": 20, "logit_bias": {EOS: 9.0}},
    {"temperature": 0.5, "seed": 1, "structured_outputs": StructuredOutputs(regex="[a-m]{5,60}")},
]


@pytest.fixture
def cheap_rows(monkeypatch):
    """Steps take little more time with more rows, and a draft model's steps a twentieth, whatever the clock says."""
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows: 1 + 0.02 * rows)
    monkeypatch.setattr(DraftModel, "seconds", lambda self, text, texts, length: (0.05 * length, 0.0))


def text_of(tokens: list[int], **options) -> Sequence:
    """A text that is decoded: its last token is not in the cache."""
    text = Sequence(Request(tuple(tokens), SamplingParams(**options), lambda: None), 0, CODEC, 10_000)
    text.begin(0, len(tokens) - 1)
    return text


def generate(model: ToyModel, texts: list[list[int]], params: list[SamplingParams], **options):
    """Completions without their usage, and the statistics; afterwards no page is used."""
    with Engine(model, CODEC, **options) as engine:
        completions = [replace(each, usage=None) for each in engine.generate(texts, params)]
        statistics = engine.statistics()
    assert model.cache.used == 0
    return completions, statistics


@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("period", [0, 1, 5])
@pytest.mark.usefixtures("cheap_rows")
def test_look_up_changes_no_text(limits, period):
    """Greedy or sampled, with stop strings, forms and log-probabilities: texts are those of single steps."""
    texts, counts, results = prompts(12), [], []
    params = [SamplingParams(max_tokens=70, **OPTIONS[index % len(OPTIONS)]) for index in range(12)]
    for rows in (0, 8):
        steps: list = []
        model = ToyModel(period=period, on_step=lambda *step: steps.append(step), decode_rows=rows, **limits)  # noqa: B023
        completions, statistics = generate(model, texts, params)
        results.append(completions)
        counts.append(sum(kind == "decode" for kind, _ in steps))
    assert results[0] == results[1]
    assert 0 <= statistics.accepted <= statistics.drafted
    if period:
        assert statistics.accepted > statistics.drafted // 4 > 10
        assert counts[1] < counts[0] * 0.9 or limits.get("slots") != 1


DRAFTS = {
    "equal": (ToyModel, {}),
    "ahead": (LookAheadToyModel, {"max_ahead": 7}),
    "rows": (ToyModel, {"decode_rows": 4}),
    "wrong": (ToyModel, {"period": 3}),
    "few slots": (ToyModel, {"slots": 2, "cache_slots": 2}),
    "few pages": (ToyModel, {"pages": 12}),
    "few pages ahead": (LookAheadToyModel, {"max_ahead": 7, "pages": 12}),
    "window": (ToyModel, {"window": 40}),
    "short context": (ToyModel, {"context": 60}),
    "small vocabulary": (ToyModel, {"vocabulary": 280}),
    "large vocabulary": (ToyModel, {"vocabulary": 320}),
}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("limits", [{}, *LIMITS[2:4]], ids=str)
@pytest.mark.usefixtures("cheap_rows")
def test_draft_models_change_no_text(name, limits, caplog):
    kind, options = DRAFTS[name]
    texts = prompts(12)
    params = [SamplingParams(max_tokens=70, **OPTIONS[index % len(OPTIONS)]) for index in range(12)]
    draft = kind(**{"period": 5, **options})
    model = ToyModel(decode_rows=8, period=5, **limits)
    expected, _ = generate(ToyModel(period=5, **limits), texts, params)
    completions, statistics = generate(model, texts, params, draft=draft, prompt_lookup=False)
    assert completions == expected
    assert draft.cache.used == 0 and not draft.cache.tokens and "has failed" not in caplog.text
    assert 0 <= statistics.accepted <= statistics.drafted and statistics.drafted > 5
    if name in ("equal", "ahead", "rows") and not limits:
        assert statistics.accepted > 0.8 * statistics.drafted > 100


def test_a_sampled_draft_is_right_as_often_as_its_model():
    """With the random numbers of the text, an equal draft model samples what the text will be."""
    text = text_of([1, 2, 3], temperature=1.0, seed=7)
    rows = np.random.default_rng(0).standard_normal((9, 50)).astype(np.float32)
    drafts = [text.sample_ahead(row, index) for index, row in enumerate(rows)]
    for row in rows:
        text.accept(row)
    assert text.tokens[3:] == drafts and len(set(drafts)) > 4


def test_drafts_keep_the_distribution(monkeypatch):
    """A text over a vocabulary of four: after each pair of tokens, the next has its exact probabilities."""
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows: 1.0)
    monkeypatch.setattr(DraftModel, "seconds", lambda *_: (0.0, 0.0))
    logits = np.random.default_rng(0).standard_normal((2, 4, 4, 4)).astype(np.float32)
    logits[1] = 0.7 * logits[0] + 0.5 * logits[1]  # of the draft model, which is often wrong
    model, draft = (ToyModel(decode_rows=8, vocabulary=4, slots=1, context=9000, pages=9000) for _ in range(2))
    for each, own in zip((model, draft), logits, strict=True):
        each.logits_of = lambda tokens, own=own: own[[0, *tokens][-2], tokens[-1]]
    with Engine(model, CODEC, draft=draft, prompt_lookup=False) as engine:
        (text,) = engine.generate([[1, 2]], SamplingParams(max_tokens=8000, ignore_eos=True, seed=0))
        statistics = engine.statistics()
    assert 2000 < statistics.accepted < 0.9 * statistics.drafted
    found = np.zeros((4, 4, 4))
    np.add.at(found, (text.tokens[:-2], text.tokens[1:-1], text.tokens[2:]), 1)
    weights = np.exp(logits[0].astype(float))
    expected = found.sum(-1, keepdims=True) * weights / weights.sum(-1, keepdims=True)
    assert ((found - expected) ** 2 / expected).sum() < 100  # 48 degrees of freedom: above with a probability of 2e-5


class Simulation(PromptLookup):
    """A proposer and a model with a clock of their own: tokens are right with some probability."""

    def __init__(self, acceptance: float, row: float, draft: float, chunks: int, seed: int = 0) -> None:
        super().__init__()
        self.acceptance, self.row, self.per_token, self.chunks = acceptance, row, draft, chunks
        self.random, self.now, self.begun = np.random.default_rng(seed), 0.0, Counter()

    def perf_counter(self) -> float:
        return self.now

    def limit(self, text):
        return 7

    def seconds(self, text, texts, length):
        return self.per_token * length, 2.0 * max(self.chunks - self.begun[text], 0)

    def draft(self, lengths):
        for text, length in lengths.items():
            if self.begun[text] < self.chunks:
                self.begun[text] += 1
                self.now += 2.0
                return {}
            self.now += self.per_token * length
        return {text: [97] * length for text, length in lengths.items()}

    def speed(self, texts: int, tokens: int) -> float:
        """Speed of several texts, one after the other, relative to single steps of a second."""
        speculation = Speculation([self])
        for _ in range(texts):
            text, count = text_of([97] * 40), 0
            while count < tokens:
                begin = self.now
                length = len(speculation.draft([text], [7])[0])
                self.now += 1.0 + self.row * length
                speculation.update(1, 1 + length, self.now - begin)
                right = next((index for index in range(length) if self.random.random() > self.acceptance), length)
                if length:
                    speculation.accept(text, length, right, 1)
                count += 1 + right
            speculation.release(text)
        return texts * tokens / self.now


@pytest.mark.parametrize(
    ("acceptance", "row", "draft", "chunks", "least"),
    [
        (0.0, 0.1, 0.0, 0, 0.98),
        (0.0, 1.0, 0.0, 0, 0.98),
        (0.0, 0.3, 0.3, 1, 0.98),
        (0.2, 0.3, 0.3, 1, 0.98),
        (0.2, 0.3, 0.3, 4, 0.97),
        (0.95, 0.1, 0.0, 0, 3.0),
        (0.95, 0.1, 0.1, 1, 2.0),
        (0.95, 0.1, 0.1, 4, 1.9),
        (0.5, 0.05, 0.05, 1, 1.3),
        (1.0, 1.0, 0.0, 0, 0.98),
    ],
)
def test_drafts_that_do_not_pay_stop(acceptance, row, draft, chunks, least, monkeypatch):
    """With exact times: hardly below the speed of single steps, and a gain where there is one."""
    speeds = []
    for seed in range(3):
        simulation = Simulation(acceptance, row, draft, chunks, seed)
        monkeypatch.setattr(speculation, "time", simulation)
        speeds.append(simulation.speed(3, 400))
    assert min(speeds) > least, speeds


def test_a_draft_model_that_fails_ends_no_text(monkeypatch, caplog):
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows: 1 + 0.02 * rows)
    draft = ToyModel()
    draft.logits_of = lambda tokens: np.full(300, np.nan, np.float32)
    expected, _ = generate(ToyModel(), prompts(4), [SamplingParams(temperature=0, max_tokens=20)] * 4)
    monkeypatch.setattr(DraftModel, "seconds", lambda *_: (0.0, 0.0))
    model = ToyModel(decode_rows=8)
    completions, statistics = generate(
        model, prompts(4), [SamplingParams(temperature=0, max_tokens=20)] * 4, draft=draft
    )
    assert completions == expected and "the draft model has failed, and drafts no more: HeteroError" in caplog.text


def test_a_model_that_cannot_verify_has_no_draft_model():
    with pytest.raises(HeteroError, match="draft: the model's decode steps take one row of each text"):
        Engine(ToyModel(), CODEC, draft=ToyModel())


def test_a_draft_model_is_another_model():
    model = ToyModel(decode_rows=8)
    for draft, found in ((model, "the model itself"), ((model, CODEC), "found tuple"), ("draft.gguf", "'draft.gguf'")):
        with pytest.raises(HeteroError, match=f"draft: .*{found}.*; expected another model"):
            Engine(model, CODEC, draft=draft)
    with pytest.raises(HeteroError, match="model: .*found tuple.*; expected an rh.llm.Model, the first of the pair"):
        Engine((model, CODEC), CODEC)


def test_drafts_of_unlike_lengths():
    """Steps ahead write as many tokens for each text: those that a text did not ask for are not lost, nor too many."""
    model = LookAheadToyModel(max_ahead=7, ends=False, context=24)
    draft = DraftModel(model, model.vocabulary)
    short, long = (text_of([1, 2, 3, last], temperature=0, max_tokens=99) for last in (4, 5))

    def step(short_length: int, long_length: int) -> None:
        drafts = draft.draft({short: short_length, long: long_length})
        for text, length in ((short, short_length), (long, long_length)):
            for token in (*drafts[text], None):  # all are right
                text.tokens.append(int(model.logits_of(text.tokens).argmax()))
                assert token in (text.tokens[-1], None)
            assert len(drafts[text]) == length

    step(1, 6)
    step(1, 1)
    step(2, 2)
    long.tokens += [97] * (model.context - 1 - len(long.tokens))  # one more token fits
    assert draft.limit(long) == 1 and len(draft.draft({short: 5, long: 1})[long]) == 1
    assert not draft._failed


@pytest.mark.usefixtures("cheap_rows")
def test_steps_are_measured_again_when_a_model_has_all_functions():
    """A step ahead is of the functions before: none begins until those that were compiled meanwhile are in use."""

    class GrowingModel(LookAheadToyModel):
        is_complete, begun = False, 0

        def begin_decode(self, slots, tokens):
            self.begun += not isinstance(tokens, ToyStep)
            self.is_complete = self.cache.length(slots[0]) > 60
            return super().begin_decode(slots, tokens)

    model = GrowingModel(ends=False)
    with Engine(model, CODEC, prefixes=0) as engine:
        times = engine._scheduler.speculation.times
        engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=50))
        assert engine._scheduler.speculation.times is times and model.begun == 1
        engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=100))
        assert engine._scheduler.speculation.times is not times and model.begun == 3


def test_slow_steps_of_few_functions_are_forgotten():
    chooser, text = Speculation([PromptLookup()]), text_of([97] * 40, max_tokens=500)

    def lengths(seconds_of_row: float) -> list[int]:
        """Lengths of drafts, all of whose tokens are right."""
        drafts = []
        for _ in range(60):
            drafts.append(len(chooser.draft([text], [7])[0]))
            chooser.update(1, 1 + drafts[-1], 1 + seconds_of_row * drafts[-1])
            if drafts[-1]:
                chooser.accept(text, drafts[-1], drafts[-1], 1)
        return drafts[30:]

    assert not any(lengths(1.0)) and not any(lengths(0.1))
    chooser.forget_times()
    assert set(lengths(0.1)) == {7}


@pytest.mark.usefixtures("cheap_rows")
def test_a_draft_model_keeps_the_beginnings_of_texts():
    """Cancelled and ended texts give their slots back; a longer conversation is not drafted from its beginning."""
    steps: list = []
    model = ToyModel(decode_rows=8, ends=False, context=4000)
    draft = ToyModel(decode_rows=8, ends=False, context=4000, on_step=lambda kind, slots: steps.append(kind))
    params = SamplingParams(temperature=0, max_tokens=30)
    prompt = prompts(1)[0] * 5
    with Engine(model, CODEC, draft=draft, prompt_lookup=False) as engine:
        (first,) = engine.generate([prompt], params)
        chunks = steps.count("prefill")
        engine.generate([[*prompt, *first.tokens, 100]], params)
        assert steps.count("prefill") <= chunks + 2 < 2 * chunks
        endless = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=3000))
        next(iter(endless))
        endless.cancel()
        endless.result(60)
    assert draft.cache.used == 0


def test_look_up_follows_the_last_occurrence():
    lookup = PromptLookup()
    for tokens, draft in (([1, 2, 3, 9, 1, 2, 3, 7, 8, 5, 1, 2, 3], [7, 8, 5]), ([5, 1, 2, 1, 2, 1], [2, 1, 2, 1, 2])):
        text = text_of(tokens)
        assert lookup.limit(text) > 7 and lookup.draft({text: len(draft)}) == {text: draft}
    assert not any(lookup.limit(text_of(tokens)) for tokens in ([1], [1, 1, 1], [1, 2, 3, 4]))
    text = text_of([1, 2, 3, 4])
    assert lookup.limit(text) == 0
    text.tokens += [1, 2, 3]
    assert lookup.draft({text: 2}) == {text: [4, 1]}
    lookup.release(text)
