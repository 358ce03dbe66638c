"""The server as its callers see it: the clients of OpenAI, and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from llm.server.running import Server, running  # noqa: E402
from llm.toy_model import EOS, ToyCodec, ToyModel, alone  # noqa: E402
from relax_hetero.errors import HeteroError  # noqa: E402
from relax_hetero.llm import ChatTemplate, Engine, RequestError, SamplingParams  # noqa: E402
from relax_hetero.llm.server import app, serve  # noqa: E402
from relax_hetero.llm.server.api_errors import ApiError  # noqa: E402
from relax_hetero.llm.server.app import Settings  # noqa: E402
from relax_hetero.llm.server.bodies import ChatBody, CompletionBody  # noqa: E402
from relax_hetero.llm.server.chat_messages import Message, render_checked  # noqa: E402
from relax_hetero.llm.server.limits import Limits  # noqa: E402
from relax_hetero.llm.server.responses import Choices, CompletionResponses  # noqa: E402
from relax_hetero.llm.structured_output import Grammars  # noqa: E402

CODEC = ToyCodec()
LIMITS = Limits(prompt_tokens=300, max_tokens=400, in_flight=80, choices=6, body_bytes=20_000, seconds=60)


@pytest.fixture(scope="module")
def server():
    engine = Engine(ToyModel(slots=16, pages=400), CODEC)
    with running(engine, limits=LIMITS) as started:
        yield started


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as connection:
        yield connection


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as connection:
        yield connection


def expected(prompt: str, count: int) -> tuple[str, str]:
    tokens = alone(ToyModel(), list(prompt.encode()), count)
    ended = tokens[-1] == EOS
    return CODEC.decode(tokens), "stop" if ended else "length"


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
def test_completions(client, stream):
    body = {"model": "toy", "prompt": "Once", "max_tokens": 50, "temperature": 0}
    if stream:
        parts = list(client.completions.create(**body, stream=True, stream_options={"include_usage": True}))
        usage = parts.pop().usage
        text = "".join(part.choices[0].text for part in parts)
        reason = parts[-1].choices[0].finish_reason
        assert len({part.id for part in parts}) == 1
    else:
        answer = client.completions.create(**body)
        usage, text, reason = answer.usage, answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == expected("Once", 50)
    assert usage.prompt_tokens == 4 and usage.total_tokens == 4 + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client, stream):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    body = {"model": "toy", "messages": messages, "temperature": 0, "max_completion_tokens": 40}
    if stream:
        parts = list(client.chat.completions.create(**body, stream=True))
        assert parts[0].choices[0].delta.role == "assistant"
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        reason = parts[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**body).choices[0]
        text, reason = answer.message.content, answer.finish_reason
    assert (text, reason) == expected("system: Be brief.\nuser: Hi\nassistant: ", 40)


def test_several_prompts_and_choices(client):
    answer = client.completions.create(model="toy", prompt=["a", "b"], n=3, seed=5, max_tokens=20)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6)) and len(set(texts)) == 6
    again = client.completions.create(model="toy", prompt=["a", "b"], n=3, seed=5, max_tokens=20, stream=True)
    streamed = [""] * 6
    for part in again:
        for choice in part.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts
    tokens = client.completions.create(model="toy", prompt=[[97], [98]], seed=5, max_tokens=20)
    assert [choice.text for choice in tokens.choices] == [texts[0], texts[3]]


def test_stop_echo_and_bias(client):
    full, _ = expected("xyz", 30)
    answer = client.completions.create(
        model="toy", prompt="xyz", temperature=0, max_tokens=30, stop=[full[5:8], "never"], echo=True
    )
    assert answer.choices[0].text == "xyz" + full[: full.index(full[5:8])]
    assert answer.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model="toy", prompt="xyz", temperature=0, max_tokens=3, logit_bias={"65": 100}, extra_body={"top_k": 3}
    )
    assert biased.choices[0].text == "AAA"


def test_logprobs(client):
    logits = ToyModel().logits_of(list(b"Once")).astype(np.float64)
    values = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-values)[:2].tolist()
    body = {"model": "toy", "temperature": 0, "max_tokens": 3}
    logprobs = client.completions.create(prompt="Once", logprobs=2, **body).choices[0].logprobs
    assert logprobs.token_logprobs[0] == pytest.approx(values[best[0]], rel=1e-5)
    assert list(logprobs.top_logprobs[0].values()) == pytest.approx(values[best], rel=1e-5)
    assert logprobs.text_offset == [0, 1, 2]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, **body}
    complete = client.chat.completions.create(**chat).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**chat, stream=True)]
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in complete.logprobs.content]
    assert "".join(entry.token for entry in streamed) == complete.message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 2 for entry in streamed)


@pytest.mark.parametrize("stream", [False, True])
def test_structured_output(client, http, stream):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    chat = {"model": "toy", "messages": USER, "max_tokens": 100}
    answer = client.chat.completions.create(**chat, response_format=as_format(schema), stream=stream)
    choices = [part.choices[0] for part in (answer if stream else [answer])]
    text = "".join((each.delta if stream else each.message).content or "" for each in choices)
    assert choices[-1].finish_reason == "stop" and json.loads(text)["a"] in (1, 2)
    fields = [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"choices": ["yes", "no"], "ignore_eos": True}, "yes|no"),
        ({"guided_regex": "[a-c]{3}-[0-9]+"}, "[a-c]{3}-[0-9]+"),
        ({"grammar": 'root ::= "x" [yz]{1,4} "."'}, r"x[yz]{1,4}\."),
        ({"response_format": {"type": "json_object", "schema": {"const": "b"}}}, '"b"'),
    ]
    for field, expression in fields:
        body = {"prompt": "a", "max_tokens": 100, "temperature": 0, **field}
        choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
        assert re.fullmatch(expression, choice["text"]) and choice["finish_reason"] == "stop"


def test_slow_forms_do_not_block_other_prompts(monkeypatch):
    entered, released, original = threading.Semaphore(0), threading.Event(), Grammars.constraint

    def constraint(grammars, outputs):
        entered.release()
        assert released.wait(60)
        return original(grammars, outputs)

    monkeypatch.setattr(Grammars, "constraint", constraint)
    with running(Engine(ToyModel(), ToyCodec())) as server, ThreadPoolExecutor() as pool:
        url, body = server.url + COMPLETIONS, {"prompt": "a", "max_tokens": 20}
        slow = [pool.submit(httpx.post, url, json={**body, "choices": ["b"]}, timeout=60) for _ in range(4)]
        try:
            assert entered.acquire(timeout=30) and entered.acquire(timeout=30)
            assert httpx.post(url, json=body, timeout=30).status_code == 200
        finally:
            released.set()
        assert [answer.result().json()["choices"][0]["text"] for answer in slow] == ["b"] * 4


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_logprobs_of_prompts(client, max_tokens):
    """As harnesses ask for them."""
    body = {"model": "toy", "prompt": ["Once", "ab"], "temperature": 0, "max_tokens": max_tokens, "echo": True}
    for choice, prompt in zip(client.completions.create(logprobs=1, **body).choices, ("Once", "ab"), strict=True):
        logprobs, count = choice.logprobs, len(prompt) + max_tokens
        assert choice.text == prompt + (expected(prompt, max_tokens)[0] if max_tokens else "")
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == count
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None and logprobs.tokens[0] == prompt[0]
        logits = ToyModel().logits_of(list(prompt.encode())[:1]).astype(np.float64)
        value = logits[ord(prompt[1])] - np.log(np.exp(logits).sum())
        assert logprobs.token_logprobs[1] == pytest.approx(value, rel=1e-5)
        assert logprobs.text_offset == list(range(count))
    whole = client.completions.create(logprobs=1, **body).choices
    merged: list[list] = [[], []]
    texts = ["", ""]
    for part in client.completions.create(logprobs=1, stream=True, **body):
        choice = part.choices[0]
        texts[choice.index] += choice.text
        merged[choice.index] += choice.logprobs.token_logprobs if choice.logprobs else []
    assert texts == [choice.text for choice in whole]
    assert merged == [choice.logprobs.token_logprobs for choice in whole]


def test_tokens_of_texts(http):
    answer = http.post("/tokenize", json={"prompt": "a\u00e9", "return_token_strs": True}).json()
    assert answer == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [97, 195, 169],
        "token_strs": ["a", "\ufffd", "\ufffd"],
    }
    answer = http.post("/tokenize", json={"content": "ab", "with_pieces": True}).json()
    assert answer["tokens"] == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
    answer = http.post("/tokenize", json={"messages": USER}).json()
    assert bytes(answer["tokens"]).decode() == "user: a\nassistant: "
    for body, message in (
        ({"prompt": "a", "model": "other"}, "expected 'toy'"),
        ({"prompt": "\ud800"}, "surrogates"),
        ({"messages": USER, "enable_thinking": True}, "template does not know"),
        ({"messages": USER, "truncation": "auto"}, "truncation: found"),
    ):
        answer = http.post("/tokenize", content=json.dumps(body), headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 404) and message in answer.json()["error"]["message"]
    info = http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"]) == (None, None) and "m.content" in info["chat_template"]
    answer = http.post("/detokenize", json={"tokens": [97, 195, 169, EOS]}).json()
    assert answer["prompt"] == answer["content"] == "a\u00e9"


def test_tokens_without_a_template_and_of_texts_with_control_tokens():
    class Codec(ToyCodec):
        max_token_bytes = 1

        def encode(self, text, *, special=True, begin=True):
            return [EOS] if special else super().encode(text)

    async def ask(body: dict):
        transport = httpx.ASGITransport(app.make_app(engine, Settings("toy")))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            return (await http.post("/tokenize", json=body)).json()

    with Engine(ToyModel(), Codec()) as engine:
        assert "chat template" in asyncio.run(ask({"messages": USER}))["error"]["message"]
        assert asyncio.run(ask({"content": "ab", "parse_special": False}))["tokens"] == [97, 98]
        assert asyncio.run(ask({"content": "ab"}))["tokens"] == [EOS]
        assert "found 513 bytes" in asyncio.run(ask({"content": "a" * 513}))["error"]["message"]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]


def as_format(schema):
    """OpenAI's `response_format` for a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


# Fields that change nothing, and one that nobody knows.
OTHERS = {
    **{"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": True},
    **{"prediction": {"type": "content", "content": "a"}, "prompt_cache_key": "a", "safety_identifier": "a"},
    **{"priority": 1, "request_id": "a", "rid": "a", "cache_salt": "a", "cache_prompt": False, "id_slot": 1},
    **{"keep_alive": "5m", "timings_per_token": True, "n_keep": 3, "stream_options": {"include_obfuscation": False}},
    **{"nobody": {"knows": [1]}, "extra_body": {"ttl": 3}},
}
BAD = [
    (COMPLETIONS, {"prompt": "a", "model": "other"}, 404, "expected 'toy'"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "at least one"),
    (COMPLETIONS, {"prompt": ""}, 400, "no token"),
    (COMPLETIONS, {"prompt": [1, "a"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [999]}, 400, "found token 999"),
    (COMPLETIONS, {"prompt": "a" * 301}, 400, "found 301 tokens, expected at most 300"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 401}, 400, "found 401"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "n": 7}, 400, "found 7 texts"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n:"),
    (COMPLETIONS, {"prompt": "a", "n": 10**20}, 400, "n:"),
    (COMPLETIONS, {"prompt": "half \ud800"}, 400, "not a character"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 1e9}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "'x'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"700": 1}}, 400, "700"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"--1": 1}}, 400, "'--1'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"\u00b2": 1}}, 400, "expected a token id"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, 400, "17 strings"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    ("/tokenize", {}, 400, "found nothing, expected one of prompt"),
    ("/tokenize", {"prompt": "a", "content": "b"}, 400, "found prompt and content"),
    ("/tokenize", {"messages": [{"role": "nobody"}]}, 400, "found role 'nobody'"),
    ("/detokenize", {"tokens": [1, 300]}, 400, "found 300, expected 0 to 299"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, 400, "seed"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, 400, "prompt"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "no tool speaks"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, 400, "found role 'nobody', expected one of system"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, 400, "not a character"),
    (CHAT, {"messages": USER, "n": 10**9}, 400, "found 1000000000 texts"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages.0.content.0"),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": [{}]}]}, 400, "messages.1.tool_calls"),
    (CHAT, {"messages": USER, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "response_format: found"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_schema"}}, 400, "json_schema with a schema"),
    (CHAT, {"messages": USER, "response_format": as_format({"type": "nothing"})}, 400, "Invalid type: nothing"),
    (CHAT, {"messages": USER, "response_format": as_format({"uniqueItems": True})}, 400, 'keys: ["uniqueItems"]'),
    (CHAT, {"messages": USER, "guided_json": {}, "regex": "a"}, 400, "guided_json: found also regex"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"json": {}, "location": "b"}}, 400, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "("}}, 400, "unclosed group"),
    (COMPLETIONS, {"prompt": "a", "grammar": "root ::= ("}, 400, "Expected ')'"),
    (COMPLETIONS, {"prompt": "a", "choices": "yes"}, 400, "expected a list of texts"),
    (CHAT, {"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens: found 3"),
    (CHAT, {"messages": USER, "n_predict": 4}, 400, "use max_tokens"),
    (CHAT, {"messages": USER, "stream_options": {"continuous_usage_stats": True}}, 400, "stream_options.continuous"),
    (CHAT, {"messages": USER, "extra_body": {"min_tokens": 3}, "max_tokens": 2}, 400, "min_tokens: found 3"),
    (CHAT, {"messages": USER, "extra_body": {"top_k": -2}}, 400, "top_k"),
    (COMPLETIONS, {"prompt": "a", "extra_body": "min_tokens"}, 400, "extra_body"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_get_errors_with_the_reason(http, stream):
    for path, body, status, message in BAD:
        content = json.dumps({**({"stream": True} if stream else {}), **body})
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, message in error["message"]) == (status, True), (body, error)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 15_000, b'{"prompt": 1e999}', b'{"prompt": NaN}']
)
def test_bodies_that_are_not_requests(http, content):
    answer = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_embeddings_of_a_decoder(http):
    answer = http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 501 and "--embedding-model" in answer.json()["error"]["message"]


class Histogram:
    """An encoder that counts letters."""

    tokenizer, lengths, vocabulary = CODEC, (4, 9), 256

    def embed_tokens(self, tokens):
        if not tokens:
            raise RequestError("a text has 0 tokens, expected 1 to 9")
        return np.bincount(tokens, minlength=256).astype(np.float32)


def test_embeddings():
    with running(Engine(ToyModel(), CODEC), encoder=Histogram()) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            for options in ({}, {"encoding_format": "float"}):  # the client's default is base64
                answer = client.embeddings.create(model="toy", input=["aab", "b"], **options)
                assert answer.usage.prompt_tokens == 4 and [each.index for each in answer.data] == [0, 1]
                assert np.array(answer.data[0].embedding)[[97, 98]] == pytest.approx(np.array([2, 1]) / 5**0.5)
            for tokens in ([97, 98], [[97, 98]]):
                assert client.embeddings.create(model="toy", input=tokens).data[0].embedding[97] == pytest.approx(
                    0.5**0.5
                )
            for bad, message in (
                ({"input": ""}, "0 tokens"),
                ({"input": []}, "found 0 texts"),
                ({"input": "a", "dimensions": 3}, "found 3, expected the model's 256"),
                ({"input": "a", "model": "other"}, "expected 'toy'"),
                ({"input": 3}, "input"),
                ({"input": "\ud800"}, "surrogates"),
                ({"input": "a", "truncate": "END"}, "truncate: found"),
            ):
                content, header = json.dumps({"model": "toy", **bad}), {"Content-Type": "application/json"}
                answer = httpx.post(f"{server.url}/v1/embeddings", content=content, headers=header, timeout=60)
                assert answer.status_code in (400, 404) and message in answer.json()["error"]["message"]


def test_an_encoder_alone():
    with running(None, encoder=Histogram()) as server, httpx.Client(base_url=server.url, timeout=30) as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 9
        assert http.post("/v1/embeddings", json={"input": "b"}).json()["data"][0]["embedding"][98] == 1
        tokens = http.post("/tokenize", json={"prompt": "ab"}).json()
        assert (tokens["tokens"], tokens["max_model_len"]) == ([97, 98], 9)
        assert http.post("/detokenize", json={"tokens": [97, 98]}).json()["content"] == "ab"
        assert http.post("/detokenize", json={"tokens": [1 << 20]}).status_code == 400
        for path, body in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": USER})):
            answer = http.post(f"/v1/{path}", json=body)
            assert answer.status_code == 501 and "found the encoder 'toy'" in answer.json()["error"]["message"]
        assert 'answers_total{path="/v1/embeddings",status="200"} 1.0' in http.get("/metrics").text


def test_sampling_defaults():
    """Requests that state values have theirs."""
    with running(Engine(ToyModel(), CODEC), sampling_defaults={"temperature": 0.0, "top_p": 0.5}) as server:
        for path, prompt in (("completions", {"prompt": "Once"}), ("chat/completions", {"messages": USER})):
            texts = []
            for own in ({}, {"temperature": 0, "top_p": 1.0}, {"temperature": None}, {"temperature": 1.5, "seed": 1}):
                body = {**prompt, "max_tokens": 20, **own}
                choice = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=60).json()["choices"][0]
                texts.append(choice.get("text") or choice["message"]["content"])
            assert texts[0] == texts[1] == texts[2] != texts[3]


def test_embeddings_that_nobody_waits_for_end():
    released, counted = threading.Event(), []

    class Slow(Histogram):
        def embed_tokens(self, tokens):
            counted.append(tokens)
            assert released.wait(60)
            return super().embed_tokens(tokens)

    with running(Engine(ToyModel(), CODEC), encoder=Slow(), limits=Limits(seconds=0.3)) as server:
        with httpx.Client(base_url=server.url, timeout=30) as http:
            assert http.post("/v1/embeddings", json={"input": ["a"] * 9}).status_code == 504
            released.set()
            assert http.post("/v1/embeddings", json={"input": "b"}).status_code == 200
    assert counted == [[97], [98]]


def test_a_body_of_another_type_is_refused(http):
    answer = http.post(COMPLETIONS, content=b'{"prompt": "a"}')
    assert answer.status_code == 400 and "expected application/json" in answer.json()["error"]["message"]
    answer = http.post(COMPLETIONS, data={"prompt": "a"})
    assert "found 'application/x-www-form-urlencoded'" in answer.json()["error"]["message"]


def test_null_stands_for_a_default(http):
    body = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    nulls = ("n", "stream", "echo", "stop", "seed", "logit_bias", "best_of", "stream_options", "logprobs", "top_p")
    plain, with_nulls = (
        http.post(COMPLETIONS, json={**body, **more}).json() for more in ({}, {**dict.fromkeys(nulls), "top_k": -1})
    )
    assert with_nulls["choices"] == plain["choices"]


@pytest.mark.parametrize(
    "path, body, kind", [(COMPLETIONS, {"prompt": "a"}, CompletionBody), (CHAT, {"messages": USER}, ChatBody)]
)
def test_fields_that_would_change_the_answer(http, path, body, kind):
    rows = {name: values for name, values in kind.neutral_values.items() if name not in kind.model_fields}
    for name, values in rows.items():
        for value in (None, *values):
            kind.model_validate({**body, name: value}).refuse_unsupported()
        with pytest.raises(ApiError) as error:
            kind.model_validate({**body, name: ["other"]}).refuse_unsupported()
        assert error.value.body["error"]["param"] == name
    neutral = {name: values[-1] if values else None for name, values in rows.items()}
    fields = {**body, "max_tokens": 3, "temperature": 0, "seed": 1}
    plain, with_neutral = (http.post(path, json={**fields, **more}) for more in ({}, {**OTHERS, **neutral}))
    assert with_neutral.status_code == 200 and with_neutral.json()["choices"] == plain.json()["choices"]


ROLES = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content | trim }}{% endfor %}"
NAMES = "{% for m in messages %}{{ m.role }} {{ m['name'] }} {{ m.tool_calls }} {{ m.content }}{% endfor %}"
CALLS = [*USER, {"role": "assistant", "tool_calls": [{"id": 1}]}, {"role": "tool", "content": "b"}]


@pytest.mark.parametrize(
    "template, messages, refused",
    [
        (ROLES, [{"role": "developer", "content": "b"}, *USER], "messages.0.content"),
        (ROLES, [*USER, {"role": "assistant", "content": "b "}, CALLS[-1] | {"content": "c"}], "messages.2.content"),
        (ROLES, [{**USER[0], "name": "Ann"}], "messages.0.name"),
        (ROLES, [*USER, {"role": "assistant", "content": "b", "prefix": True}], "messages.1.prefix"),
        (
            "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls|length != 1 %}"
            "{{ raise_exception('one') }}{% endif %}{{ m.content }}{% endfor %}",
            [{**USER[0], "tool_calls": None, "function_call": None}, {**USER[0], "tool_calls": []}],
            None,
        ),
        (ROLES, [{**USER[0], "name": None, "tool_calls": [], "prefix": False, "id": 3, "refusal": None}], None),
        (NAMES, [{**USER[0], "name": "Ann"}], None),
        (NAMES, CALLS, None),
        ("{{ messages[-1].content }}", USER, None),
        ("{{ messages[-1].content }}", CALLS, "messages.1.tool_calls"),
        (NAMES.replace("m.role", "'model' if m.role == 'assistant' else 'user'"), CALLS, "messages.2.role"),
        ("{% for m in messages %}{{ m.role }}: {{ m.content.split('</think>')[-1] }}{% endfor %}",
         [*USER, {"role": "assistant", "content": "<think>b</think>c"}], None),
    ],
)  # fmt: skip
def test_messages_that_a_template_omits_are_refused(template, messages, refused):
    plain = [Message.model_validate(each).flatten("messages") for each in messages]
    if refused is None:
        assert render_checked(ChatTemplate(template), plain, {})
        return
    with pytest.raises(ApiError, match=refused) as error:
        render_checked(ChatTemplate(template), plain, {})
    assert error.value.body["error"]["param"] == refused


def test_a_prompt_that_does_not_fit_has_the_code_of_openai(http, server):
    limits = {"prompt": [1] * 511}, {"prompt": "a" * 9_000}
    for body in limits:
        error = http.post(COMPLETIONS, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_caller_that_does_not_read_is_given_up(monkeypatch):
    """It would count as a request in flight for ever."""
    monkeypatch.setattr(app, "GRACE_SECONDS", 0.05)
    ended = []

    async def answer() -> None:
        with Engine(ToyModel(), CODEC) as engine:
            texts = Choices([engine.submit("a")], [""], 0.05)
            stream = app.StreamedAnswer(
                texts, CompletionResponses(CODEC, "toy", False, 1), False, lambda: ended.append(1)
            )
            never = asyncio.Event().wait
            await asyncio.wait_for(stream({"type": "http"}, never, lambda message: never()), 20)
            texts.close()

    asyncio.run(answer())
    assert ended == [1]


def test_names_of_the_server_in_values_of_a_template(http):
    body = {"messages": USER, "chat_template_kwargs": {"self": 1, "add_generation_prompt": False}, "max_tokens": 1}
    assert http.post(CHAT, json=body).status_code == 200


def test_an_incomplete_body_times_out():
    with running(Engine(ToyModel(), CODEC), limits=Limits(body_seconds=0.05)) as server:
        host, port = server.url.removeprefix("http://").split(":")
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        with socket.create_connection((host, int(port)), 30) as slow:
            slow.sendall(head.encode() + b'{"prompt"')
            assert b" 408 " in slow.recv(1000).splitlines()[0]


def test_other_paths_and_methods(http):
    assert http.get("/v1/nothing").json()["error"]["message"] == "GET /v1/nothing: Not Found"
    assert http.get(COMPLETIONS).status_code == 405


def test_large_bodies(http):
    body = json.dumps({"prompt": "a" * 30_000}).encode()
    answer = http.post(COMPLETIONS, content=body)
    assert answer.status_code == 413 and "expected at most 20,000" in answer.json()["error"]["message"]

    def chunks():
        for begin in range(0, len(body), 1000):
            yield body[begin : begin + 1000]

    assert http.post(COMPLETIONS, content=chunks()).status_code == 413


def test_health_and_metrics(http):
    assert http.get("/health").json() == {"status": "ok"}
    http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5})
    text = http.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["relax_hetero_llm_tokens_total"]) >= 5
    assert float(values['relax_hetero_llm_answers_total{path="/v1/completions",status="200"}']) >= 1
    assert float(values["relax_hetero_llm_time_to_first_token_seconds_count"]) >= 1


def idle(server: Server) -> None:
    """Wait until the engine is idle, with a request after all others."""
    for _ in range(1000):
        httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1})
        statistics = server.engine.statistics()
        if statistics.running + statistics.waiting == 0:
            return
    raise AssertionError(f"still busy: {statistics}")


@pytest.mark.parametrize("stream", [False, True])
def test_texts_end_when_their_caller_goes_away(stream):
    engine = Engine(ToyModel(ends=False, slots=2, context=100_000, pages=10_000), CODEC)
    with running(engine) as server:

        async def leave() -> None:
            async with httpx.AsyncClient(base_url=server.url) as http:
                body = {"prompt": "abc", "max_tokens": 90_000, "stream": stream}
                if stream:
                    async with http.stream("POST", COMPLETIONS, json=body) as answer:
                        async for _ in answer.aiter_lines():
                            return
                task = asyncio.ensure_future(http.post(COMPLETIONS, json=body))
                while not engine.statistics().running:
                    await asyncio.sleep(0)
                task.cancel()

        asyncio.run(leave())
        idle(server)
        assert engine.statistics().finished["cancelled"] == 1


def test_keys():
    origin = {"origin": "https://chat.example"}
    with running(Engine(ToyModel(), CODEC), api_key="secret", cors_origins=(origin["origin"],)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.completions.create(model="toy", prompt="a", max_tokens=2).choices
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no valid API key"):
                client.models.list()
        models = f"{server.url}/v1/models"
        for headers in ({}, {"x-api-key": ""}, {"x-api-key": "secre"}, {"authorization": "secret"}):
            refused = httpx.get(models, headers={**headers, **origin})
            assert refused.status_code == 401 and "x-api-key" in refused.json()["error"]["message"]
            assert refused.headers["access-control-allow-origin"] == origin["origin"]
        assert httpx.get(models, headers={"x-api-key": "secret", "authorization": "Bearer none"}).status_code == 200
        sent = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
        assert httpx.options(models, headers={**origin, **sent}).headers["access-control-allow-headers"] == "x-api-key"
        assert httpx.options(models, headers={"origin": "https://other.example", **sent}).status_code == 400
        answer = httpx.get(f"{server.url}/health")
        assert answer.status_code == 200 and not {"server", "access-control-allow-origin"} & set(answer.headers)


@pytest.mark.parametrize(
    "settings", [{"api_key": ""}, {"cors_origins": ("chat.example",)}, {"cors_origins": ("https://a.example/",)}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(HeteroError, match=f"{next(iter(settings))}: found"):
        Settings("toy", **settings)


def connect(server: Server, text: bytes = b"", buffer: int | None = None) -> socket.socket:
    """A connection that has sent something; of a client that has a small `buffer` for what it reads."""
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.settimeout(30)
    if buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.connect((host, int(port)))
    connection.sendall(text)
    return connection


def read_all(client: socket.socket) -> bytes:
    """All bytes until the server closes the connection, which it may do before it has read all."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()


@pytest.fixture(scope="module")
def short_of_patience():
    limits = Limits(in_flight=4, header_seconds=0.1, body_seconds=0.1, idle_seconds=0.1, address_connections=8)
    with running(Engine(ToyModel(), CODEC), limits=limits) as server:
        yield server


@pytest.mark.parametrize(
    "text, answer",
    [
        (b"", b""),
        (GET[:-2], b"HTTP/1.1 408 "),
        (GET, b"HTTP/1.1 200 "),
        (GET + GET[:-2], b"HTTP/1.1 200 "),
        (POST + b"Content-Length: 9\r\n\r\n{", b"HTTP/1.1 408 "),
        (POST + b"Content-Length: 99999999\r\n\r\n{", b"HTTP/1.1 413 "),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nno number\r\n", b"HTTP/1.1 400 "),
        (b"\x16\x03\x01\x02\r\n\r\n", b"HTTP/1.1 400 "),
        (GET[:-2] + b"A: " + b"b" * 70_000, b"HTTP/1.1 400 "),
    ],
)
def test_connections_that_wait_for_clients_are_closed(short_of_patience, text, answer):
    with connect(short_of_patience, text) as client:
        assert read_all(client).startswith(answer)


@pytest.mark.parametrize("text", [GET[:-2] + b"A: ", POST + b"Content-Length: 99999999\r\n\r\n"])
def test_a_byte_from_time_to_time_keeps_no_connection(short_of_patience, text):
    with connect(short_of_patience, text) as client, pytest.raises(OSError):
        for _ in range(1000):
            client.sendall(b"b")
            time.sleep(0.02)


def test_requests_are_served_while_functions_are_compiled():
    model = ToyModel()
    model.is_complete = False
    with running(Engine(model, CODEC)) as server:
        assert httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        answer = httpx.get(f"{server.url}/health")
        assert (answer.status_code, answer.json()) == (200, {"status": "compiling"})
        model.is_complete = True
        assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("text", [b"", GET[:-2], POST + b"Content-Length: 9\r\n\r\n{"])
def test_silent_clients_lock_nobody_out(text):
    limits = Limits(in_flight=4, address_connections=8, connections=8)
    with running(Engine(ToyModel(), CODEC), limits=limits) as server:
        clients = [connect(server, text) for _ in range(40)]
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert all(read_all(client) == b"" for client in clients[:30])
        for client in clients:
            client.close()


def test_connections_with_requests_are_not_closed_for_others():
    engine = Engine(ToyModel(ends=False, context=100_000, pages=10_000), CODEC)
    with running(engine, limits=Limits(in_flight=2, address_connections=2)) as server:
        body = {"prompt": "abc", "max_tokens": 90_000, "stream": True}
        with httpx.Client(base_url=server.url) as http:
            with http.stream("POST", COMPLETIONS, json=body), http.stream("POST", COMPLETIONS, json=body):
                assert httpx.get(f"{server.url}/health").status_code == 503


def test_a_client_that_does_not_read_loses_its_connection(monkeypatch):
    def listen(host: str, port: int) -> socket.socket:
        listener = original(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        return listener

    original = serve._listen
    monkeypatch.setattr(serve, "_listen", listen)
    engine = Engine(ToyModel(ends=False, context=9_000, chunk=9_000, pages=10_000), CODEC)
    with running(engine, limits=Limits(in_flight=1, choices=40, read_seconds=0.1)) as server:
        # Its stream begins with 320 KB, which no buffer takes.
        content = json.dumps({"prompt": "a" * 8_000, "echo": True, "n": 40, "stream": True}).encode()
        with connect(server, POST + f"Content-Length: {len(content)}\r\n\r\n".encode() + content, 2048) as client:
            assert client.recv(12) == b"HTTP/1.1 200"
            body = {"prompt": "a", "max_tokens": 1}
            while httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60).status_code == 429:
                time.sleep(0.01)
            assert len(read_all(client)) < 320_000


@pytest.mark.parametrize("client, address", [
    ("10.0.0.1", "10.0.0.1"), ("::ffff:10.0.0.1", "10.0.0.1"), ("2001:db8::1:2:3:4", "2001:db8::/64"), ("", "")
])  # fmt: skip
def test_addresses_that_are_counted_together(client, address):
    assert serve._client_address((client, 1)) == address


def test_a_context_beyond_the_trained_one_is_reported():
    model = ToyModel(context=512)
    model.trained_context = 128
    with running(Engine(model, CODEC)) as server:
        card = httpx.get(f"{server.url}/v1/models/toy").json()
    assert (card["max_model_len"], card["trained_context"]) == (512, 128) and "trained for 128" in card["warning"]


def test_more_requests_than_are_taken_get_429():
    engine = Engine(ToyModel(ends=False, context=100_000, pages=10_000), CODEC)
    with running(engine, limits=Limits(in_flight=2)) as server:
        body = {"prompt": "abc", "max_tokens": 90_000, "stream": True}
        with httpx.Client(base_url=server.url) as http:
            with http.stream("POST", COMPLETIONS, json=body), http.stream("POST", COMPLETIONS, json=body):
                assert http.post("/tokenize", json={"prompt": "a"}).status_code == 429
                refused = http.post(COMPLETIONS, json=body)
                assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
                assert refused.json()["error"]["code"] == "rate_limit_exceeded"


def test_requests_that_take_too_long_end_with_504():
    engine = Engine(ToyModel(ends=False, context=100_000, pages=10_000), CODEC)
    with running(engine, limits=Limits(seconds=0.2)) as server:
        body = {"prompt": "abc", "max_tokens": 90_000}
        answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60)
        assert answer.status_code == 504 and "more than 0.2 s" in answer.json()["error"]["message"]
        with httpx.stream("POST", f"{server.url}{COMPLETIONS}", json={**body, "stream": True}, timeout=60) as streamed:
            events = [line for line in streamed.iter_lines() if line]
        assert events[-1] == "data: [DONE]" and "timeout_error" in events[-2]


def test_an_error_of_the_model_is_returned_and_the_server_goes_on():
    faults = [True]

    def fail(kind: str, slots: list[int]) -> None:
        if kind == "decode" and faults:
            raise HeteroError("the device is gone")

    with running(Engine(ToyModel(ends=False, on_step=fail), CODEC)) as server:
        url, body = f"{server.url}{COMPLETIONS}", {"prompt": "abc", "max_tokens": 9}
        answer = httpx.post(url, json=body)
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "the device is gone"
        with httpx.stream("POST", url, json={**body, "stream": True}) as streamed:
            assert "the device is gone" in "".join(streamed.iter_lines())
        faults.clear()
        assert httpx.post(url, json=body).status_code == 200


def test_64_clients_at_once(server):
    """Each gets the text that it gets alone: of the largest logits, or by its seed."""
    prompts = [f"client {n}: " for n in range(64)]

    async def ask(client, number: int) -> str:
        choice = {"seed": number, "top_p": 0.9} if number % 2 else {"temperature": 0}
        body = {"model": "toy", "prompt": prompts[number], "max_tokens": 30, **choice}
        return "".join([part.choices[0].text async for part in await client.completions.create(**body, stream=True)])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(64)))

    texts = asyncio.run(ask_all())
    assert texts[::2] == [expected(prompt, 30)[0] for prompt in prompts[::2]]
    with Engine(ToyModel(slots=1), CODEC) as engine:
        for number in range(1, 64, 2):
            params = SamplingParams(seed=number, top_p=0.9, max_tokens=30)
            assert engine.submit(prompts[number], params).result() == texts[number]


def test_malformed_limits():
    with pytest.raises(HeteroError, match="in_flight: found 0, expected at least 1"):
        Limits(in_flight=0)
