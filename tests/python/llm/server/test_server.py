"""The server as its callers see it: the clients of OpenAI, and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import socket

import numpy as np
import pytest

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")

from llm.server.running import Server, running  # noqa: E402
from llm.toy_model import EOS, ToyCodec, ToyModel, alone  # noqa: E402
from relax_hetero.errors import HeteroError  # noqa: E402
from relax_hetero.llm import Engine  # noqa: E402
from relax_hetero.llm.server import calls  # noqa: E402
from relax_hetero.llm.server.answers import CompletionAnswers  # noqa: E402
from relax_hetero.llm.server.limits import Limits  # noqa: E402
from relax_hetero.llm.server.texts import Texts  # noqa: E402

CODEC = ToyCodec()
LIMITS = Limits(prompt_tokens=300, max_tokens=400, in_flight=80, choices=6, body_bytes=20_000, seconds=60)


@pytest.fixture(scope="module")
def server():
    engine = Engine(ToyModel(slots=16, pages=400), CODEC)
    with running(engine, limits=LIMITS) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=60) as made:
        yield made


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
    asked = {"model": "toy", "prompt": "Once", "max_tokens": 50, "temperature": 0}
    if stream:
        parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        usage = parts.pop().usage
        text = "".join(part.choices[0].text for part in parts)
        reason = parts[-1].choices[0].finish_reason
        assert len({part.id for part in parts}) == 1
    else:
        answer = client.completions.create(**asked)
        usage, text, reason = answer.usage, answer.choices[0].text, answer.choices[0].finish_reason
    assert (text, reason) == expected("Once", 50)
    assert usage.prompt_tokens == 4 and usage.total_tokens == 4 + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_chat(client, stream):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    asked = {"model": "toy", "messages": messages, "temperature": 0, "max_completion_tokens": 40}
    if stream:
        parts = list(client.chat.completions.create(**asked, stream=True))
        assert parts[0].choices[0].delta.role == "assistant"
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        reason = parts[-1].choices[0].finish_reason
    else:
        answer = client.chat.completions.create(**asked).choices[0]
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
    whole, _ = expected("xyz", 30)
    answer = client.completions.create(
        model="toy", prompt="xyz", temperature=0, max_tokens=30, stop=[whole[5:8], "never"], echo=True
    )
    assert answer.choices[0].text == "xyz" + whole[: whole.index(whole[5:8])]
    assert answer.choices[0].finish_reason == "stop"
    biased = client.completions.create(
        model="toy", prompt="xyz", temperature=0, max_tokens=3, logit_bias={"65": 100}, extra_body={"top_k": 3}
    )
    assert biased.choices[0].text == "AAA"


def test_logprobs(client):
    logits = ToyModel().logits_of(list(b"Once")).astype(np.float64)
    values = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-values)[:2].tolist()
    asked = {"model": "toy", "temperature": 0, "max_tokens": 3}
    told = client.completions.create(prompt="Once", logprobs=2, **asked).choices[0].logprobs
    assert told.token_logprobs[0] == pytest.approx(values[best[0]], rel=1e-5)
    assert list(told.top_logprobs[0].values()) == pytest.approx(values[best], rel=1e-5)
    assert told.text_offset == [0, 1, 2]
    chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, **asked}
    whole = client.chat.completions.create(**chat).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**chat, stream=True)]
    streamed = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert "".join(entry.token for entry in streamed) == whole.message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 2 for entry in streamed)


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]
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
    (COMPLETIONS, {"prompt": "half \ud800"}, 400, "no character"),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 1e9}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "'x'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"700": 1}}, 400, "700"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"--1": 1}}, 400, "'--1'"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"\u00b2": 1}}, 400, "expected the number of a token"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, 400, "stream"),
    (COMPLETIONS, {"prompt": "a", "stop": ["a"] * 17}, 400, "17 strings"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}, 400, "of new tokens only"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, 400, "top_k"),
    (COMPLETIONS, {"prompt": "a", "seed": 2**64}, 400, "seed"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, 400, "prompt"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": "hello"}, 400, "messages"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, 400, "no tool speaks"),
    (CHAT, {"messages": [{"role": "nobody", "content": "a"}]}, 400, "found role 'nobody', expected one of system"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": [{"role": "user", "content": "\udc00"}]}, 400, "no character"),
    (CHAT, {"messages": USER, "n": 10**9}, 400, "found 1000000000 texts"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, 400, "json_object"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, 400, "logprobs"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_bodies_are_told_what_is_wrong(http, stream):
    for path, body, status, message in BAD:
        content = json.dumps({**({"stream": True} if stream else {}), **body})
        answer = http.post(path, content=content, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, message in error["message"]) == (status, True), (body, error)
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'"text"', b"\xff\xfe", b"[" * 15_000, b'{"prompt": 1e999}', b'{"prompt": NaN}']
)
def test_bodies_that_are_no_requests(http, content):
    answer = http.post(COMPLETIONS, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_body_of_another_type_is_told_so(http):
    answer = http.post(COMPLETIONS, content=b'{"prompt": "a"}')
    assert answer.status_code == 400 and "expected application/json" in answer.json()["error"]["message"]
    answer = http.post(COMPLETIONS, data={"prompt": "a"})
    assert "found 'application/x-www-form-urlencoded'" in answer.json()["error"]["message"]


def test_null_stands_for_a_default(http):
    asked = {"prompt": "a", "max_tokens": 3, "temperature": 0}
    nulls = ("n", "stream", "echo", "stop", "seed", "logit_bias", "best_of", "stream_options", "logprobs", "top_p")
    plain, given = (
        http.post(COMPLETIONS, json={**asked, **more}).json() for more in ({}, {**dict.fromkeys(nulls), "top_k": -1})
    )
    assert given["choices"] == plain["choices"]


def test_a_prompt_that_does_not_fit_has_the_code_of_openai(http, server):
    limits = {"prompt": [1] * 511}, {"prompt": "a" * 9_000}
    for body in limits:
        error = http.post(COMPLETIONS, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


def test_a_caller_that_does_not_read_is_given_up(monkeypatch):
    """It would be one of the requests in flight for ever."""
    monkeypatch.setattr(calls, "GRACE", 0.05)
    ended = []

    async def answer() -> None:
        with Engine(ToyModel(), CODEC) as engine:
            texts = Texts([engine.submit("a")], [""], 0.05)
            stream = calls.StreamedAnswer(
                texts, CompletionAnswers(CODEC, "toy", False, 1), False, lambda: ended.append(1)
            )
            never = asyncio.Event().wait
            await asyncio.wait_for(stream({"type": "http"}, never, lambda message: never()), 20)
            texts.close()

    asyncio.run(answer())
    assert ended == [1]


def test_names_of_the_server_in_values_of_a_template(http):
    body = {"messages": USER, "chat_template_kwargs": {"self": 1, "add_generation_prompt": False}, "max_tokens": 1}
    assert http.post(CHAT, json=body).status_code == 200


def test_a_body_that_does_not_come_whole_is_given_up():
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
    assert float(values["relax_hetero_llm_seconds_to_first_token_count"]) >= 1


def idle(server: Server) -> None:
    """Wait until the engine has nothing to do; by a request behind all others."""
    for _ in range(1000):
        httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a", "max_tokens": 1})
        found = server.engine.statistics()
        if found.running + found.waiting == 0:
            return
    raise AssertionError(f"still busy: {found}")


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
    with running(Engine(ToyModel(), CODEC), api_key="secret") as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            assert client.completions.create(model="toy", prompt="a", max_tokens=2).choices
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError, match="no valid API key"):
                client.models.list()
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_more_requests_than_are_taken_get_429():
    engine = Engine(ToyModel(ends=False, context=100_000, pages=10_000), CODEC)
    with running(engine, limits=Limits(in_flight=2)) as server:
        body = {"prompt": "abc", "max_tokens": 90_000, "stream": True}
        with httpx.Client(base_url=server.url) as http:
            with http.stream("POST", COMPLETIONS, json=body), http.stream("POST", COMPLETIONS, json=body):
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


def test_an_error_of_the_model_is_told_and_the_server_goes_on():
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
    prompts = [f"client {n}: " for n in range(64)]

    async def ask(client, prompt: str) -> str:
        asked = {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 30}
        return "".join([part.choices[0].text async for part in await client.completions.create(**asked, stream=True)])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, prompt) for prompt in prompts))

    assert asyncio.run(ask_all()) == [expected(prompt, 30)[0] for prompt in prompts]


def test_limits_that_are_none():
    with pytest.raises(HeteroError, match="in_flight: found 0, expected at least 1"):
        Limits(in_flight=0)
