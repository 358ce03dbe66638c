"""The engine: requests that share a model get what each would get alone."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from llm.toy_model import EOS, LookAheadToyModel, ToyCodec, ToyModel, alone
from relax_hetero.errors import HeteroError
from relax_hetero.llm import Engine, EngineClosedError, EngineFullError, RequestError, SamplingParams
from relax_hetero.llm.request import Request
from relax_hetero.llm.scheduler import Scheduler
from relax_hetero.llm.sequence import Sequence

CODEC = ToyCodec()


def prompts(count: int, seed: int = 0, longest: int = 100) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(97, 123, generator.integers(1, longest)).tolist() for _ in range(count)]


def text_alone(model: ToyModel, prompt: list[int], count: int) -> tuple[str, str]:
    """Text and reason of its end."""
    tokens = alone(model, prompt, count)
    if tokens[-1] == EOS:
        return CODEC.decode(tokens[:-1]), "stop"
    return CODEC.decode(tokens), "length"


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"pages": 16},  # requests are put back now and then
        {"pages": 16, "window": 40},
        {"cache_slots": 4},
        {"slots": 1, "chunk": 7},
        {"slots": 16, "cache_slots": 16, "pages": 20, "chunk": 5},
        {"pages": 16, "decodes_like_prefill": False},
        {"pages": 16, "decodes_like_prefill": False, "window": 40, "chunk": 9},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", [ToyModel, LookAheadToyModel])
def test_batched_requests_get_the_text_of_each_alone(limits, kind):
    model = kind(**limits)
    texts = prompts(24)
    params = SamplingParams(temperature=0, max_tokens=60)
    with Engine(model, CODEC) as engine:
        requests = [engine.submit(prompt, params) for prompt in texts]
        results = [(request.result(60), request.finish_reason) for request in requests]
        preempted = engine.statistics().preempted
    assert results == [text_alone(model, prompt, 60) for prompt in texts]
    assert model.cache.used == 0 and not model.cache.tokens
    assert (preempted > 0) == ("pages" in limits)


def test_seeds_decide_whatever_else_runs():
    params = [SamplingParams(temperature=0.8, top_p=0.9, seed=seed, max_tokens=40) for seed in range(6)]
    with Engine(ToyModel(), CODEC) as engine:
        one_by_one = [engine.submit("once", each).result(60) for each in params]
    with Engine(ToyModel(pages=12), CODEC) as engine:
        background = [engine.submit(prompt, SamplingParams(max_tokens=30)) for prompt in prompts(6, 1)]
        requests = [engine.submit("once", each) for each in params]
        together = [request.result(60) for request in requests]
        for other in background:
            other.result(60)
    assert together == one_by_one
    assert len(set(together)) > 1


def test_a_prompt_with_the_beginning_of_another_is_not_computed_again():
    model = ToyModel(ends=False)
    start = prompts(1, 2)[0] * 3
    params = SamplingParams(temperature=0, max_tokens=5)
    with Engine(model, CODEC) as engine:
        for end in ([], [98], [99, 100]):
            request = engine.submit([*start, *end], params)
            assert request.result(60) == text_alone(model, [*start, *end], 5)[0]
        reused = engine.statistics().reused_tokens
        assert request.usage.cached_tokens == len(start)
    assert reused == len(start) + len(start)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_kept_sequences_leave_room_for_requests_that_begin_alike(slots):
    model = ToyModel(slots=slots, cache_slots=slots, ends=False)
    start = [97] * 100
    params = SamplingParams(temperature=0, max_tokens=5)
    with Engine(model, CODEC) as engine:
        for end in range(6):
            other = [98 + end] * 40
            assert engine.submit(other, params).result(60) == text_alone(model, other, 5)[0]
            for tail in (100, 101):
                request = engine.submit([*start, tail], params)
                assert request.result(60) == text_alone(model, [*start, tail], 5)[0]
            assert request.usage.cached_tokens == 100
    assert model.cache.used == 0


def test_equal_prompts_at_once_share_their_pages():
    model = ToyModel(slots=8, ends=False)
    prompt = [97] * 200
    with Engine(model, CODEC) as engine:
        requests = [engine.submit(prompt, SamplingParams(seed=n, max_tokens=20)) for n in range(5)]
        texts = {request.result(60) for request in requests}
        assert engine.statistics().prompt_tokens == 200 + 4
    assert len(texts) == 5


def test_cancelled_requests_end_and_give_their_pages_back():
    model = ToyModel(ends=False, slots=2, context=100_000, pages=10_000)
    params = SamplingParams(temperature=0, max_tokens=90_000)
    with Engine(model, CODEC) as engine:
        running, other, waiting = (engine.submit("abc", params) for _ in range(3))
        next(iter(running))
        waiting.cancel()
        running.cancel()
        "".join(delta.text for delta in running)
        assert waiting.result(60) == ""
        assert running.finish_reason == waiting.finish_reason == "cancelled"
        other.cancel()
        other.result(60)
        assert engine.submit("abc", SamplingParams(max_tokens=2)).result(60)
    assert model.cache.used == 0


def test_the_oldest_request_goes_on_while_the_cache_is_full():
    order: list[int] = []
    model = ToyModel(ends=False, slots=8, pages=10, context=160)
    lock = threading.Lock()
    with Engine(model, CODEC) as engine:
        requests = [engine.submit([97 + n] * 20, SamplingParams(temperature=0, max_tokens=100)) for n in range(8)]

        def read(n: int) -> None:
            assert len(requests[n].result(60)) == 100
            with lock:
                order.append(n)

        threads = [threading.Thread(target=read, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(order) == list(range(8))
    ends = [request.times.finished for request in requests]
    assert ends == sorted(ends)


def test_a_text_that_outgrows_the_whole_cache_ends_and_a_prompt_is_refused():
    model = ToyModel(ends=False, pages=4)
    with Engine(model, CODEC) as engine:
        request = engine.submit([97] * 40, SamplingParams(temperature=0))
        assert len(request.result(60)) == 25  # four pages of 16, and the token that is not in the cache yet
        assert request.finish_reason == "length"
        refused = engine.submit([97] * 100)
        with pytest.raises(HeteroError, match="free pages"):
            refused.result(60)
        assert refused.finish_reason == "error"
        assert engine.submit("a", SamplingParams(max_tokens=3)).result(60)


def test_an_error_in_a_batch_ends_only_the_request_that_has_it_alone():
    bad: list[int] = []

    def fail(kind: str, slots: list[int]) -> None:
        if kind == "decode" and bad and bad[0] in slots:
            raise ZeroDivisionError("the model is at fault")

    model = ToyModel(ends=False, on_step=fail)
    params = SamplingParams(temperature=0, max_tokens=300)
    with Engine(model, CODEC) as engine:
        requests = [engine.submit(prompt, params) for prompt in prompts(3, 4, 20)]
        for request in requests:
            next(iter(request))
        bad.append(1)
        with pytest.raises(HeteroError, match="ZeroDivisionError: the model is at fault"):
            requests[1].result(60)
        bad.clear()
        assert [requests[n].finish_reason or requests[n].result(60) and "length" for n in (0, 2)] == ["length"] * 2
        assert requests[0].usage.completion_tokens == 300


def test_a_defect_of_the_engine_leaves_nobody_waiting(monkeypatch):
    engine = Engine(ToyModel(), CODEC)
    monkeypatch.setattr(engine._scheduler, "step", lambda: 1 / 0)
    with pytest.raises(EngineClosedError, match="ZeroDivisionError"):
        engine.submit("abc").result(60)
    with pytest.raises(EngineClosedError):
        engine.submit("abc")
    assert not engine.healthy
    engine.close()


def test_refused_requests_name_found_and_expected_values():
    model = ToyModel(context=50)
    with Engine(model, CODEC) as engine:
        for prompt, message in (
            ("", "no token"),
            ("a" * 50, "found 50 tokens, expected at most 49"),
            ([1, 300], "found token 300, expected 0 to 299"),
            ([-1], "found token -1"),
        ):
            with pytest.raises(RequestError, match=message):
                engine.submit(prompt)
        with pytest.raises(RequestError, match="logit_bias: found 300"):
            engine.submit("a", SamplingParams(logit_bias={300: 1.0}))
        assert len(engine.submit("a" * 49, SamplingParams(ignore_eos=True)).result(60)) >= 1
    with pytest.raises(EngineClosedError):
        engine.submit("a")


def test_a_prompt_that_cannot_fit_is_refused_before_it_becomes_tokens():
    class Codec(ToyCodec):
        max_token_bytes = 3

        def encode(self, text, *, special=True, begin=True):
            assert len(text) <= 300
            return super().encode(text)[:5]

    with Engine(ToyModel(context=100), Codec()) as engine:
        assert engine.submit("a" * 300, SamplingParams(max_tokens=1)).result(30) is not None
        with pytest.raises(RequestError, match="found 301 bytes, which are more than 100 tokens") as caught:
            engine.submit("a" * 301)
        assert caught.value.code == "context_length_exceeded"


def test_the_queue_is_bounded():
    entered, leave = threading.Event(), threading.Event()

    def hold(kind: str, slots: list[int]) -> None:
        entered.set()
        leave.wait(60)

    with Engine(ToyModel(slots=1, ends=False, on_step=hold), CODEC, max_waiting=2) as engine:
        requests = [engine.submit("a", SamplingParams(temperature=0, max_tokens=1))]
        entered.wait(60)
        with pytest.raises(EngineFullError, match="expected at most 2"):
            for _ in range(9):
                requests.append(engine.submit("a", SamplingParams(temperature=0, max_tokens=1)))
        assert 3 <= len(requests) <= 4
        leave.set()
        assert all(len(request.result(60)) == 1 for request in requests)


def test_stop_strings_and_tokens_end_a_text():
    model = ToyModel(ends=False)
    full = CODEC.decode(alone(model, [97], 50))
    stop = full[20:24]
    with Engine(model, CODEC) as engine:
        request = engine.submit("a", SamplingParams(temperature=0, stop=("no such text", stop), max_tokens=50))
        assert request.result(60) == full[: full.index(stop)]
        assert request.finish_reason == "stop"
        token = ord(full[5])
        request = engine.submit("a", SamplingParams(temperature=0, stop_token_ids=(token,), max_tokens=50))
        assert request.result(60) == full[: full.index(full[5])]


def test_logprobs_are_those_of_the_models_distribution():
    model = ToyModel(ends=False)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=12, logprobs=3)
    with Engine(model, CODEC) as engine:
        deltas = list(engine.submit("abc", params))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    tokens = [token for delta in deltas for token in delta.tokens]
    assert [entry.token for entry in entries] == tokens and len(tokens) == 12
    text = list(b"abc")
    for entry in entries:
        logits = model.logits_of(text).astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum())
        best = np.argsort(-expected)[:3]
        assert [token for token, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], expected[best], rtol=1e-5)
        np.testing.assert_allclose(entry.logprob, expected[entry.token], rtol=1e-5)
        text.append(entry.token)


def test_texts_are_read_in_an_event_loop():
    model = ToyModel()
    texts = prompts(10, 5)

    async def read(engine: Engine, prompt: list[int]) -> str:
        request = engine.submit(prompt, SamplingParams(temperature=0, max_tokens=40))
        return "".join([delta.text async for delta in request])

    async def read_all(engine: Engine) -> list[str]:
        return await asyncio.gather(*(read(engine, prompt) for prompt in texts))

    with Engine(model, CODEC) as engine:
        results = asyncio.run(read_all(engine))
    assert results == [text_alone(model, prompt, 40)[0] for prompt in texts]


def test_closing_ends_all_requests():
    engine = Engine(ToyModel(ends=False, context=10_000, pages=10_000), CODEC)
    requests = [engine.submit("abc", SamplingParams(max_tokens=9000)) for _ in range(8)]
    engine.close()
    engine.close()
    assert {request.finish_reason for request in requests} <= {"cancelled", "length"}
    assert engine.statistics().waiting == 0


def test_statistics_count_tokens():
    with Engine(ToyModel(ends=False), CODEC) as engine:
        for _ in range(3):
            engine.submit("abcdefgh", SamplingParams(max_tokens=10)).result(60)
        engine.close()
        statistics = engine.statistics()
    assert (statistics.tokens, statistics.prompt_tokens, statistics.finished["length"]) == (30, 24, 3)
    assert statistics.tokens_per_second > 0 and statistics.ttft_seconds > 0


def test_a_step_begins_before_the_tokens_of_the_last_one_are_handed_out():
    handed_out: list[int] = []
    request: list[Request] = []

    def note(kind: str, slots: list[int]) -> None:
        if kind == "decode":
            handed_out.append(request[0].usage.completion_tokens)

    model = LookAheadToyModel(ends=False, on_step=note)
    scheduler = Scheduler(model)
    request.append(Request((97, 98), SamplingParams(temperature=0, max_tokens=10), lambda: None))
    scheduler.add(Sequence(request[0], 0, CODEC, model.context))
    steps = 1
    while scheduler.step():
        steps += 1
    assert request[0].result() == text_alone(model, [97, 98], 10)[0]
    # The prefill's token is known to the first step; each other one begins a token ahead, and none after the last.
    assert handed_out == [1, *range(1, 9)] and model.ahead == 8
    assert scheduler.counts.tokens == 10 and scheduler.counts.steps == steps - 1 and not model.in_flight


@pytest.mark.parametrize(
    "other", [{"temperature": 1.0}, {"logprobs": 1}, {"logit_bias": {97: 1.0}}, {"presence_penalty": 1.0}]
)
def test_no_step_begins_ahead_for_requests_that_need_logits(other):
    texts = []
    for kind in (ToyModel, LookAheadToyModel):
        model = kind(ends=False)
        params = SamplingParams(**{"temperature": 0.0, "seed": 1, "max_tokens": 20} | other)
        with Engine(model, CODEC) as engine:
            texts.append(engine.submit("abc", params).result(60))
    assert texts[0] == texts[1] and not model.ahead


def test_a_step_ahead_of_requests_that_end_or_are_cancelled_is_dropped():
    model = LookAheadToyModel(ends=False, context=8192)
    full = CODEC.decode(alone(model, [97], 60))
    with Engine(model, CODEC) as engine:
        stopping = engine.submit("a", SamplingParams(temperature=0, stop_token_ids=(ord(full[9]),)))
        # The cancelled one does not end before it is cancelled, even if this thread waits for a processor.
        lengths = zip(prompts(3, 6), (8000, 200, 200), strict=True)
        others = [engine.submit(each, SamplingParams(temperature=0, max_tokens=length)) for each, length in lengths]
        next(iter(others[0]))
        others[0].cancel()
        assert stopping.result(60) == full[: full.index(full[9])] and stopping.finish_reason == "stop"
        for request, prompt in zip(others[1:], prompts(3, 6)[1:], strict=True):
            assert request.result(60) == text_alone(model, prompt, 200)[0]
        assert others[0].result(60) is not None and others[0].finish_reason == "cancelled"
        # What ended is in the prefix cache, without the token that the dropped step appended.
        again = engine.submit([97, *full.encode()[:5], 98] * 3, SamplingParams(temperature=0, max_tokens=3))
        assert again.result(60) == text_alone(model, [97, *full.encode()[:5], 98] * 3, 3)[0]
    assert model.ahead and not model.in_flight and model.cache.used == 0


@pytest.mark.parametrize(("temperature", "logprobs", "steps"), [(0, None, 29), (0, 1, 0), (1, None, 0)])
def test_greedy_texts_take_the_tokens_that_the_model_computes(monkeypatch, temperature, logprobs, steps):
    model, calls = LookAheadToyModel(ends=False), []
    begin_decode = model.begin_decode
    monkeypatch.setattr(model, "looks_ahead", False)
    monkeypatch.setattr(model, "begin_decode", lambda *args: calls.append(args) or begin_decode(*args))
    with Engine(model, CODEC) as engine:
        params = SamplingParams(temperature=temperature, logprobs=logprobs, max_tokens=30)
        text = engine.submit(prompts(1)[0], params).result(60)
    assert len(calls) == steps and not model.ahead and not model.in_flight
    assert (text == text_alone(model, prompts(1)[0], 30)[0]) == (temperature == 0)


def test_an_error_in_a_step_ahead_ends_only_its_request(monkeypatch):
    model = LookAheadToyModel(ends=False)
    texts = prompts(3, 4, 20)
    expected = [text_alone(model, prompt, 60)[0] for prompt in texts]
    plain = model.logits_of
    bad = [*texts[1], *expected[1].encode()[:30]]
    monkeypatch.setattr(model, "logits_of", lambda tokens: plain(tokens) * (np.nan if list(tokens) == bad else 1))
    with Engine(model, CODEC) as engine:
        requests = [engine.submit(prompt, SamplingParams(temperature=0, max_tokens=60)) for prompt in texts]
        with pytest.raises(HeteroError, match="logits: found nan as the largest of 300"):
            requests[1].result(60)
        assert [requests[n].result(60) for n in (0, 2)] == [expected[0], expected[2]]
    assert requests[1].usage.completion_tokens == 30 and model.ahead and not model.in_flight


def test_steps_ahead_change_no_counts_and_no_prefixes():
    outcomes = []
    for kind in (ToyModel, LookAheadToyModel):
        scheduler, requests, texts = Scheduler(kind(cache_slots=30), 26), [], prompts(20) + prompts(4)
        while len(requests) < 24 or scheduler.step():
            if len(requests) < 24:
                params = SamplingParams(temperature=0, max_tokens=1 + 17 * len(requests) % 60)
                requests.append(Request(tuple(texts[len(requests)]), params, lambda: None))
                scheduler.add(Sequence(requests[-1], len(requests), CODEC, 512))
                for _ in range(7):
                    scheduler.step()
        prefixes = sorted(entry.tokens.tolist() for entry in scheduler._prefix_cache._entries)
        scheduler.counts.steps = 0  # a request begins after the step ahead, so other steps may have more rows
        outcomes.append(([(each.result(), each.usage) for each in requests], vars(scheduler.counts), prefixes))
    assert outcomes[0] == outcomes[1]


def expected_prompt_logprobs(model: ToyModel, prompt: list[int]) -> list[float]:
    values = []
    for end in range(1, len(prompt)):
        logits = model.logits_of(prompt[:end]).astype(np.float64)
        values.append(float(logits[prompt[end]] - np.log(np.exp(logits).sum())))
    return values


@pytest.mark.parametrize("limits", [{}, {"pages": 16}, {"pages": 16, "decodes_like_prefill": False}], ids=str)
def test_logprobs_of_prompts(limits):
    """Their prompts are computed whole, whatever is in the cache; other requests get what they get alone."""
    model, texts = ToyModel(**limits), prompts(12)
    texts += texts[:6]
    options = [
        SamplingParams(temperature=0, max_tokens=index % 2 * 30, prompt_logprobs=2) if index % 3 else
        SamplingParams(temperature=0, max_tokens=40)
        for index in range(len(texts))
    ]  # fmt: skip
    with Engine(model, CODEC) as engine:
        completions = engine.generate(texts, options)
    for prompt, params, completion in zip(texts, options, completions, strict=True):
        text, reason = text_alone(model, prompt, params.max_tokens) if params.max_tokens else ("", "length")
        assert (completion.text, completion.finish_reason) == (text, reason)
        if params.prompt_logprobs is None:
            assert completion.prompt_logprobs == ()
            continue
        first, *others = completion.prompt_logprobs
        assert np.isnan(first.logprob) and first.top == ()
        assert [entry.token for entry in completion.prompt_logprobs] == prompt
        assert [entry.logprob for entry in others] == pytest.approx(expected_prompt_logprobs(model, prompt), rel=1e-4)
        assert all(len(entry.top) == 2 and entry.top[0][1] >= entry.logprob for entry in others)
    assert model.cache.used == 0


def test_no_tokens_need_no_step():
    steps = []
    with Engine(ToyModel(on_step=lambda *step: steps.append(step)), CODEC) as engine:
        completion = engine.generate("abc", SamplingParams(max_tokens=0))[0]
    assert (completion.text, completion.tokens, completion.finish_reason, steps) == ("", (), "length", [])


def test_more_prompts_than_the_queue_has_room_for():
    model, texts = ToyModel(slots=2), prompts(20)
    with Engine(model, CODEC, max_waiting=3) as engine:
        completions = engine.generate(texts, SamplingParams(temperature=0, max_tokens=10, logprobs=1))
        assert [each.text for each in completions] == [text_alone(model, prompt, 10)[0] for prompt in texts]
        assert all(len(each.tokens) == len(each.logprobs) == each.usage.completion_tokens for each in completions)
        with pytest.raises(RequestError, match="found 1, expected one for each of 2"):
            engine.generate(["a", "b"], [SamplingParams()])
        with pytest.raises(RequestError, match="no token"):
            engine.generate(["a", ""])
