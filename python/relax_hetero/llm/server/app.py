"""The application: endpoints over one engine."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Response
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import HeteroError
from ..chat_template import ChatTemplate
from ..description import context_warning
from ..engine import TOO_LONG, Engine
from ..params import SamplingParams
from ..request import Request
from ..sampling import TokenLogprob
from .api_errors import ApiError, api_error
from .bodies import Body, ChatBody, CompletionBody
from .guard import Guard, Limits
from .messages import rendered
from .texts import ChatAnswers, CompletionAnswers, ResponseFormat, Texts, wait_for_disconnect

# A call of an endpoint: its texts are asked for, and written as one answer or as a stream.

LOG = logging.getLogger(__name__)
GRACE_SECONDS = 10.0
"""Seconds that a caller gets to read the rest of a stream whose time is over."""


async def complete_answer(texts: Texts, form: ResponseFormat, http: HttpRequest) -> Response:
    """The answer when all texts have ended; they are cancelled when the caller goes away."""
    collecting = asyncio.ensure_future(_collected(texts))
    left = asyncio.ensure_future(wait_for_disconnect(http.receive))
    try:
        await asyncio.wait({collecting, left}, return_when=asyncio.FIRST_COMPLETED)
        if not collecting.done():
            return Response(status_code=499)  # nobody reads it; what proxies log for a caller that went away
        return JSONResponse(form.response(collecting.result(), texts.usage))
    finally:
        for task in (collecting, left):
            await _cancelled(task)


async def _collected(texts: Texts) -> list[tuple[str, list[TokenLogprob], str]]:
    parts: list[list[str]] = [[begin] for begin in texts.begins]
    logprobs: list[list[TokenLogprob]] = [[] for _ in parts]
    async for grown in texts.grow():
        if grown.delta is not None:
            parts[grown.index].append(grown.delta.text)
            logprobs[grown.index] += grown.delta.logprobs
    each = zip(parts, logprobs, texts.requests, strict=True)
    return [("".join(some), told, reason_of(request)) for some, told, request in each]


class StreamedAnswer(Response):
    """Server-sent events, one for each part of a text.

    Parameters
    ----------
    texts, form
    tells_usage : bool
        Whether the last event has the number of tokens.
    on_end : callable
        Called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, texts: Texts, form: ResponseFormat, tells_usage: bool, on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._texts, self._form, self._tells_usage, self._on_end = texts, form, tells_usage, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer; stop when the caller goes away, or stays but does not read."""
        writing = asyncio.ensure_future(self._write(send))
        left = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            timeout = self._texts.seconds + GRACE_SECONDS
            await asyncio.wait({writing, left}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        except OSError:  # gone while something was sent
            pass
        finally:
            for task in (writing, left):
                await _cancelled(task)
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any] | str]:
        for index, begin in enumerate(self._texts.begins):
            first = self._form.begin(index, begin)
            if first is not None:
                yield first
        try:
            async for grown in self._texts.grow():
                if grown.delta is None:
                    yield self._form.chunk(grown.index, "", (), reason_of(self._texts.requests[grown.index]))
                elif grown.delta.text or grown.delta.logprobs:
                    yield self._form.chunk(grown.index, grown.delta.text, grown.delta.logprobs, None)
        except Exception as error:
            yield logged(error).body
        else:
            if self._tells_usage:
                yield self._form.usage(self._texts.usage)
        yield "[DONE]"


def reason_of(request: Request) -> str:
    """Why a text ended, in the words of the endpoints."""
    return "length" if request.finish_reason == "length" else "stop"


def logged(error: Exception) -> ApiError:
    """The answer to an error; a defect of the server goes to its log, too."""
    answer = api_error(error)
    if answer.status == 500:
        LOG.error("a request failed", exc_info=error)
    return answer


async def _cancelled(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


# Numbers for Prometheus.

_PREFIX = "relax_hetero_llm_"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)

_GAUGES = {
    "waiting": "Requests without a slot",
    "running": "Requests with a slot",
    "cached_tokens": "Tokens in the cache",
    "tokens_per_second": "Tokens written per second, over the last ten seconds",
}
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were computed",
    "reused_tokens": "Tokens of prompts that were in the cache already",
    "tokens": "Tokens that were written",
    "preempted": "Requests that were preempted: an older one took their pages",
}


class Metrics:
    """Metrics of one server.

    Parameters
    ----------
    engine : Engine
        Its counters are read when they are asked for.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_OfEngine(engine))
        self._answers = Counter(f"{_PREFIX}answers", "Answers of HTTP", ["path", "status"], registry=self._registry)
        self._first = self._histogram("time_to_first_token_seconds", "From the request to its first token", _SECONDS)
        self._token = self._histogram(
            "time_per_output_token_seconds", "Of tokens behind the first, a request's mean", _TOKEN_SECONDS
        )
        self._duration = self._histogram("request_seconds", "From the request to its end", _SECONDS)

    def answered(self, path: str, status: int) -> None:
        """An answer was given, whose `path` is one of the server's own."""
        self._answers.labels(path, str(status)).inc()

    def ended(self, request: Request) -> None:
        """A text has ended."""
        times, tokens = request.times, request.usage.completion_tokens
        if times.finished:
            self._duration.observe(times.finished - times.submitted)
        if times.first_token:
            self._first.observe(times.first_token - times.submitted)
            if times.finished and tokens > 1:
                self._token.observe((times.finished - times.first_token) / (tokens - 1))

    def text(self) -> bytes:
        """All numbers in the form that Prometheus reads."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, help_text, buckets=buckets, registry=self._registry)


class _OfEngine(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Any]:
        found = asdict(self._engine.statistics())
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_PREFIX + name, text, value=found[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_PREFIX + name, text, value=found[name])
        finished = CounterMetricFamily(f"{_PREFIX}finished", "Requests that ended", labels=["reason"])
        for reason, count in found["finished"].items():
            finished.add_metric([reason], count)
        yield finished


_TOKENIZERS = 2
"""Threads that make tokens of prompts. Each keeps memory of its longest prompt, some 30 bytes for each of its bytes."""
_PATHS = {"/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}


@dataclass(frozen=True)
class Settings:
    """How a server answers.

    Attributes
    ----------
    name : str
        Name of the model.
    api_key : str or None
        Key that callers must have; None for none.
    limits : Limits
        Limits
    cors_origins : tuple of str
        Origins of web pages whose scripts may read answers, such as ``https://chat.example``; ``*`` for all.

    Raises
    ------
    HeteroError
        If a text in `cors_origins` is not an origin, or the key is empty.
    """

    name: str
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    cors_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise HeteroError("api_key: found an empty text, expected a key that is not empty, or none")
        for origin in self.cors_origins:
            try:
                parts = urlsplit(origin)
            except ValueError:
                parts = urlsplit("")
            if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower()):
                raise HeteroError(
                    f"cors_origins: found {origin!r}, expected such as 'https://chat.example:8080', or '*'"
                )


def make_app(engine: Engine, settings: Settings, template: ChatTemplate | None = None) -> ASGIApp:
    """The application, for any ASGI server.

    Parameters
    ----------
    engine : Engine
        Closed by its owner.
    settings : Settings
    template : ChatTemplate, optional
        Template of conversations; without one, or with one that has a `fault`, ``/v1/chat/completions`` refuses them,
        and says why.
    """
    server = _Server(engine, settings, template)
    app = FastAPI(title="relax-hetero", docs_url=None, redoc_url=None)
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/v1/completions", server.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"], response_model=None)
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", server.show_metrics, methods=["GET"])
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(Exception, _on_error)
    limits = settings.limits
    guard = Guard(app, settings.api_key, limits.body_bytes, server.answered, limits.body_seconds)
    if not settings.cors_origins:
        return guard
    # Around the guard: browsers ask without a key first, and show errors to scripts only with these headers.
    methods, headers = ["GET", "POST"], ["Retry-After"]
    return CORSMiddleware(guard, settings.cors_origins, methods, ["*"], expose_headers=headers)


class _Server:
    def __init__(self, engine: Engine, settings: Settings, template: ChatTemplate | None) -> None:
        self._engine, self._settings, self._template = engine, settings, template
        self._limits, self._metrics = settings.limits, Metrics(engine)
        self._in_flight = 0
        self._tokenizers = ThreadPoolExecutor(_TOKENIZERS, "relax_hetero.llm prompts")
        self._created = int(time.time())

    def answered(self, path: str, status: int) -> None:
        """Count an answer; paths that callers make up are one."""
        self._metrics.answered(path if path in _PATHS else "other", status)

    async def models(self) -> dict[str, Any]:
        """The model as a list."""
        return {"object": "list", "data": [self._card()]}

    async def model(self, name: str) -> dict[str, Any]:
        """The model by its name."""
        self._check_model(name)
        return self._card()

    async def health(self) -> Response:
        """Return whether requests are taken."""
        healthy = self._engine.healthy
        return JSONResponse({"status": "ok" if healthy else "closed"}, 200 if healthy else 503)

    async def show_metrics(self) -> Response:
        """Numbers for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Go on with prompts."""
        self._check_model(body.model)
        body.refuse_unsupported()
        prompts = body.prompts()
        max_tokens = self._max_tokens(body.max_tokens)
        codec = self._engine.tokenizer

        def begin() -> tuple[list[Request], list[str]]:
            tokens = [self._engine.tokens_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
            shown = [self._decoded(prompt) if body.echo else "" for prompt in prompts]
            requests = self._submit(tokens, body, lambda n: body.params(n, max_tokens, body.logprobs))
            return requests, [text for text in shown for _ in range(body.n)]

        self._check_choices(len(prompts) * body.n)
        answers = CompletionAnswers(codec, self._settings.name, body.logprobs is not None, len(prompts) * body.n)
        return await self._answer(body, http, answers, begin)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Say the next thing in a conversation."""
        self._check_model(body.model)
        body.refuse_unsupported()
        template, codec = self._template, self._engine.tokenizer
        if template is None:
            raise ApiError(400, "messages: the model's file has no chat template; use /v1/completions", "messages")
        messages = [message.plain(f"messages.{index}") for index, message in enumerate(body.messages)]
        max_tokens = self._max_tokens(body.max_answer_tokens)

        def begin() -> tuple[list[Request], list[str]]:
            # Templates take time, and all conversations wait for one: what is too long without it is refused before.
            self._engine.check_length("\n".join(message["content"] for message in messages))
            tokens = self._engine.tokens_of(rendered(template, messages, body.template_values))
            requests = self._submit([tokens], body, lambda n: body.params(n, max_tokens, body.alternatives))
            return requests, [""] * body.n

        self._check_choices(body.n)
        answers = ChatAnswers(codec, self._settings.name, bool(body.logprobs))
        return await self._answer(body, http, answers, begin)

    async def _answer(
        self,
        body: Body,
        http: HttpRequest,
        form: ResponseFormat,
        begin: Callable[[], tuple[list[Request], list[str]]],
    ) -> Response:
        if self._in_flight >= self._limits.in_flight:
            found = f"found {self._in_flight} requests in flight, expected at most {self._limits.in_flight}"
            raise ApiError(429, found, code="rate_limit_exceeded")
        self._in_flight += 1
        texts: Texts | None = None
        streams = False
        try:
            # In another thread: long prompts take a while to become tokens, and the event loop goes on.
            requests, begins = await asyncio.get_running_loop().run_in_executor(self._tokenizers, begin)
            texts = Texts(requests, begins, self._limits.seconds)
            if body.stream:
                answer = StreamedAnswer(texts, form, body.tells_usage, lambda: self._end(texts))
                streams = True  # and ends the texts when it has been written
                return answer
            return await complete_answer(texts, form, http)
        except ApiError:
            raise
        except Exception as error:
            raise logged(error) from error
        finally:
            if not streams:
                self._end(texts)

    def _end(self, texts: Texts | None) -> None:
        self._in_flight -= 1
        if texts is not None:
            texts.close()
            for request in texts.requests:
                self._metrics.ended(request)

    def _submit(
        self, prompts: Sequence[Sequence[int]], body: Body, params: Callable[[int], SamplingParams]
    ) -> list[Request]:
        """All texts, or none."""
        max_prompt_tokens = self._limits.prompt_tokens
        for tokens in prompts:
            if max_prompt_tokens and len(tokens) > max_prompt_tokens:
                message = f"prompt: found {len(tokens):,} tokens, expected at most {max_prompt_tokens:,}"
                raise ApiError(400, message, "prompt", TOO_LONG)
            self._engine.check_prompt(tokens)
        requests: list[Request] = []
        try:
            for tokens in prompts:
                requests += [self._engine.submit(tokens, params(choice)) for choice in range(body.n)]
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return requests

    def _max_tokens(self, asked: int | None) -> int | None:
        limit = self._limits.max_tokens
        if not limit:
            return asked
        if asked is not None and asked > limit:
            raise ApiError(400, f"max_tokens: found {asked}, expected at most {limit}", "max_tokens")
        return limit if asked is None else asked

    def _decoded(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(self._engine.tokenizer.piece(token) for token in prompt).decode("utf-8", "replace")

    def _check_choices(self, found: int) -> None:
        if found > self._limits.choices:
            raise ApiError(400, f"n: found {found} texts, expected at most {self._limits.choices}", "n")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.name:
            message = f"model: found {name!r}, expected {self._settings.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _card(self) -> dict[str, Any]:
        context, trained = self._engine.model.context, self._engine.model.trained_context
        warning = context_warning(context, trained)
        return {
            "id": self._settings.name,
            "object": "model",
            "created": self._created,
            "owned_by": "relax-hetero",
            "max_model_len": context,
            "trained_context": trained or None,
            **({} if warning is None else {"warning": warning}),
        }


async def _on_invalid(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    kind = http.headers.get("content-type", "")
    if "json" not in kind:
        found = f"found {kind!r}" if kind else "found none"
        return ApiError(400, f"body: {found} as its Content-Type, expected application/json", "body").response()
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"][1:]) or "body"
    return ApiError(400, f"{place}: {first['msg']}", place).response()


async def _on_http(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return api_error(error).response()
