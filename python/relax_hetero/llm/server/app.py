"""The application: OpenAI's endpoints over one engine, with Prometheus metrics."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar
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
from ..call_formats import format_named
from ..chat_template import ChatTemplate
from ..description import context_warning
from ..encoder import Encoder
from ..engine import CONTEXT_LENGTH_EXCEEDED, Engine
from ..params import SamplingParams
from ..request import Request
from ..sampling import TokenLogprob
from ..special_tokens import begin_and_end, control_tokens
from .api_errors import ApiError, api_error
from .bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from .chat_messages import render_chat
from .embeddings import EmbeddingBody, embed
from .guard import Guard
from .limits import Limits
from .responses import ChatResponses, Choices, CompletionResponses, ResponseFormat, wait_for_disconnect
from .tools import AnswerFormats

_T = TypeVar("_T")
LOG = logging.getLogger(__name__)
GRACE_SECONDS = 10.0  # time after the time limit of a stream in which its client may read the rest


async def complete_answer(choices: Choices, response_format: ResponseFormat, http: HttpRequest) -> Response:
    """Answer once all choices have ended; stop waiting if the client disconnects."""
    collect_task = asyncio.ensure_future(_collect(choices))
    disconnect_task = asyncio.ensure_future(wait_for_disconnect(http.receive))
    try:
        await asyncio.wait({collect_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not collect_task.done():
            return Response(status_code=499)  # not sent; nginx's status of clients that have disconnected
        return JSONResponse(response_format.response(collect_task.result(), choices.usage))
    finally:
        for task in (collect_task, disconnect_task):
            await _cancel(task)


async def _collect(choices: Choices) -> list[tuple[str, list[TokenLogprob], str]]:
    """Text, log-probabilities and finish reason of each choice, once all have ended."""
    texts: list[list[str]] = [[prefix] for prefix in choices.prefixes]
    logprobs: list[list[TokenLogprob]] = [[] for _ in texts]
    async for growth in choices.stream():
        if growth.delta is not None:
            texts[growth.index].append(growth.delta.text)
            logprobs[growth.index] += growth.delta.logprobs
    columns = zip(texts, logprobs, choices.requests, strict=True)
    return [
        ("".join(text), [*request.prompt_logprobs, *values], finish_reason(request))
        for text, values, request in columns
    ]


class StreamedAnswer(Response):
    """Answer as server-sent events, one for each chunk."""

    media_type = "text/event-stream"

    def __init__(
        self,
        choices: Choices,
        response_format: ResponseFormat,  # JSON of the endpoint
        includes_usage: bool,  # whether the last event has the usage
        on_end: Callable[[], None],  # called at the end, in any case
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._choices, self._format, self._includes_usage, self._on_end = (
            choices,
            response_format,
            includes_usage,
            on_end,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the answer until it ends, the client disconnects, or the client reads too slowly."""
        write_task = asyncio.ensure_future(self._write(send))
        disconnect_task = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            timeout = self._choices.seconds + GRACE_SECONDS
            await asyncio.wait({write_task, disconnect_task}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if write_task.done():
                write_task.result()
        except OSError:  # disconnected while sending
            pass
        finally:
            for task in (write_task, disconnect_task):
                await _cancel(task)
            self._on_end()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for event in self._events():
            data = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
            body = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[dict[str, Any] | str]:
        begun: set[int] = set()
        try:
            async for growth in self._choices.stream():
                if growth.index not in begun:  # the prompt is computed
                    begun.add(growth.index)
                    prompt_logprobs = self._choices.requests[growth.index].prompt_logprobs
                    first = self._format.begin(growth.index, self._choices.prefixes[growth.index], prompt_logprobs)
                    if first is not None:
                        yield first
                if growth.delta is None:
                    chunk = self._format.chunk(
                        growth.index, "", (), finish_reason(self._choices.requests[growth.index])
                    )
                else:
                    chunk = self._format.chunk(growth.index, growth.delta.text, growth.delta.logprobs, None)
                if chunk is not None:
                    yield chunk
        except Exception as error:
            yield log_defect(error).body
        else:
            if self._includes_usage:
                yield self._format.usage(self._choices.usage)
        yield "[DONE]"


def finish_reason(request: Request) -> str:
    """OpenAI's finish reason of a text."""
    return "length" if request.finish_reason == "length" else "stop"


def log_defect(error: Exception) -> ApiError:
    """Convert an exception to an error answer; log it if it is a defect of the server."""
    answer = api_error(error)
    if answer.status == 500:
        LOG.error("a request failed", exc_info=error)
    return answer


async def _cancel(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError, Exception):
        await task


_NAMESPACE = "relax_hetero_llm_"
_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
"""Upper bounds of histogram buckets of requests and of tokens, in seconds."""

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
    "drafted": "Tokens that were drafted, by prompt look-up or a draft model",
    "accepted": "Drafted tokens that were right",
    "preempted": "Requests that were preempted: an older one took their pages",
}


class Metrics:
    """Prometheus metrics of one server. `engine`: engine, whose statistics are read when metrics are requested."""

    def __init__(self, engine: Engine | None) -> None:
        self._registry = CollectorRegistry()
        if engine is not None:
            self._registry.register(_EngineCollector(engine))
        self._answers = Counter(f"{_NAMESPACE}answers", "HTTP answers", ["path", "status"], registry=self._registry)
        self._ttft = self._histogram("time_to_first_token_seconds", "Time from a request to its first token", _BUCKETS)
        self._time_per_token = self._histogram(
            "time_per_output_token_seconds", "Mean time of a request's tokens after the first", _TOKEN_BUCKETS
        )
        self._duration = self._histogram("request_seconds", "Time from a request to its end", _BUCKETS)

    def count_answer(self, path: str, status: int) -> None:
        """Count an answer; `path` is one of `_PATHS` or "other"."""
        self._answers.labels(path, str(status)).inc()

    def observe(self, request: Request) -> None:
        """Record the times of a request that has ended."""
        times, tokens = request.times, request.usage.completion_tokens
        if times.finished:
            self._duration.observe(times.finished - times.submitted)
        if times.first_token:
            self._ttft.observe(times.first_token - times.submitted)
            if times.finished and tokens > 1:
                self._time_per_token.observe((times.finished - times.first_token) / (tokens - 1))

    def text(self) -> bytes:
        """Metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_NAMESPACE + name, help_text, buckets=buckets, registry=self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Any]:
        statistics = asdict(self._engine.statistics())
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(_NAMESPACE + name, text, value=statistics[name])
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(_NAMESPACE + name, text, value=statistics[name])
        finished = CounterMetricFamily(f"{_NAMESPACE}finished", "Requests that ended", labels=["reason"])
        for reason, count in statistics["finished"].items():
            finished.add_metric([reason], count)
        yield finished


_TOKENIZER_THREADS = 2
"""Threads that encode prompts. Each holds about 30 bytes per byte of its longest prompt."""
_PATHS = {
    *("/health", "/metrics", "/tokenize", "/detokenize", "/tokenizer_info"),
    *("/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/embeddings"),
}


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Raises HeteroError if `cors_origins` has a text that is not an origin, the key is empty, or there is no such
    `tool_format`.
    """

    name: str  # name of the model in the API
    api_key: str | None = None  # key that clients must send; None for none
    limits: Limits = field(default_factory=Limits)  # limits of requests and connections
    cors_origins: tuple[str, ...] = ()  # origins that CORS allows, such as ``https://chat.example``; ``*`` for all
    # Name of a row of `call_formats.FORMATS`; None for the one that the chat template has.
    tool_format: str | None = None
    # `SamplingParams` of requests that state none, such as those of a `Tokenizer`.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.api_key == "":
            raise HeteroError("api_key: found an empty text, expected a key that is not empty, or none")
        if self.tool_format is not None:
            format_named(self.tool_format)
        for origin in self.cors_origins:
            try:
                parts = urlsplit(origin)
            except ValueError:
                parts = urlsplit("")
            if origin != "*" and (not parts.netloc or origin != f"{parts.scheme}://{parts.netloc}".lower()):
                raise HeteroError(
                    f"cors_origins: found {origin!r}, expected an origin such as 'https://chat.example:8080', or '*'"
                )


def make_app(
    # Engine; not closed. None for an encoder alone: endpoints that generate texts then answer with an error.
    engine: Engine | None,
    settings: Settings,
    # Chat template; without one, or if it has a `fault`, ``/v1/chat/completions`` answers with an error.
    template: ChatTemplate | None = None,
    # Model of ``/v1/embeddings``, such as an `Encoder`; without one, it answers with an error.
    encoder: Encoder | None = None,
) -> ASGIApp:
    """Make the application, for any ASGI server."""
    server = _Server(engine, settings, template, encoder)
    app = FastAPI(title="relax-hetero", docs_url=None, redoc_url=None)
    app.add_api_route("/v1/models", server.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", server.model, methods=["GET"])
    app.add_api_route("/v1/completions", server.complete, methods=["POST"], response_model=None)
    app.add_api_route("/v1/chat/completions", server.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/embeddings", server.embed, methods=["POST"], response_model=None)
    app.add_api_route("/tokenize", server.tokenize, methods=["POST"], response_model=None)
    app.add_api_route("/detokenize", server.detokenize, methods=["POST"], response_model=None)
    app.add_api_route("/tokenizer_info", server.tokenizer_info, methods=["GET"])
    app.add_api_route("/health", server.health, methods=["GET"])
    app.add_api_route("/metrics", server.show_metrics, methods=["GET"])
    app.add_exception_handler(RequestValidationError, _answer_invalid_body)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(Exception, _answer_error)
    limits = settings.limits
    guard = Guard(app, settings.api_key, limits.body_bytes, server.count_answer, limits.body_seconds)
    if not settings.cors_origins:
        return guard
    # Outside of the guard: preflight requests lack a key, and scripts see errors only with CORS headers.
    methods, headers = ["GET", "POST"], ["Retry-After"]
    return CORSMiddleware(guard, settings.cors_origins, methods, ["*"], expose_headers=headers)


class _Server:
    def __init__(
        self, engine: Engine | None, settings: Settings, template: ChatTemplate | None, encoder: Encoder | None
    ) -> None:
        if engine is not None:
            self._tokenizer, model = engine.tokenizer, engine.model
            self._context, self._trained_context, self._vocabulary = (
                model.context,
                model.trained_context,
                model.vocabulary,
            )
        else:
            assert encoder is not None
            self._tokenizer, self._vocabulary = encoder.tokenizer, encoder.vocabulary
            self._context, self._trained_context = encoder.lengths[-1], 0
        self._encoder, self._encoder_thread = encoder, ThreadPoolExecutor(1, "relax_hetero.llm embeddings")
        self._engine_or_none, self._settings, self._template = engine, settings, template
        self._limits, self._metrics = settings.limits, Metrics(engine)
        self._formats = (
            None if template is None else AnswerFormats(template, control_tokens(self._tokenizer), settings.tool_format)
        )
        self._in_flight = 0
        self._tokenizer_threads = ThreadPoolExecutor(_TOKENIZER_THREADS, "relax_hetero.llm prompts")
        self._form_threads = ThreadPoolExecutor(_TOKENIZER_THREADS, "relax_hetero.llm forms")
        self._created = int(time.time())

    @property
    def _engine(self) -> Engine:
        """Engine; ApiError if the model is an encoder."""
        if self._engine_or_none is None:
            found = f"found the encoder {self._settings.name!r}, which answers /v1/embeddings"
            raise ApiError(501, f"model: {found}, expected a language model", "model", "not_supported")
        return self._engine_or_none

    def count_answer(self, path: str, status: int) -> None:
        """Count an answer; unknown paths share one count."""
        self._metrics.count_answer(path if path in _PATHS else "other", status)

    async def models(self) -> dict[str, Any]:
        """List of the one model."""
        return {"object": "list", "data": [self._describe_model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """Description of the model."""
        self._check_model(name)
        return self._describe_model()

    async def health(self) -> Response:
        """Answer 200 if the engine accepts requests, else 503; the status says whether it still compiles."""
        engine = self._engine_or_none
        state = "ok" if engine is None or engine.ready else "compiling"
        if engine is not None and not engine.healthy:
            state = "closed"
        return JSONResponse({"status": state}, 503 if state == "closed" else 200)

    async def show_metrics(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        """Complete prompts."""
        self._check_model(body.model)
        body.refuse_unsupported()
        prompts = body.prompts()
        max_tokens = self._max_tokens(body.max_tokens)
        tokenizer, engine = self._tokenizer, self._engine

        def submit() -> tuple[list[Request], list[str]]:
            tokens = [engine.tokens_of(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
            prefixes = [self._decode(prompt) if body.echo else "" for prompt in prompts]
            defaults = self._settings.sampling_defaults
            requests = self._submit(
                tokens, body, lambda choice: body.params(choice, max_tokens, body.logprobs, defaults)
            )
            return requests, [prefix for prefix in prefixes for _ in range(body.n)]

        self._check_choices(len(prompts) * body.n)
        count = len(prompts) * body.n
        response_format = CompletionResponses(tokenizer, self._settings.name, body.logprobs is not None, count)
        return await self._answer(body, http, response_format, submit)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        """Answer a conversation."""
        self._check_model(body.model)
        body.refuse_unsupported()
        engine, formats = self._engine, self._check_chat(body)
        max_tokens = self._max_tokens(body.max_answer_tokens)
        response_format = ChatResponses(self._tokenizer, self._settings.name, bool(body.logprobs))

        def submit() -> tuple[list[Request], list[str]]:
            messages, prompt = self._render(body)
            continued = messages[-1]["content"] if body.continues else None
            answers = formats.answers(body.answer_tools, prompt, continued, body.reasoning_format != "none")
            response_format.answers = [answers.messages() for _ in range(body.n)]
            tokens = engine.tokens_of(prompt)

            def params_of_choice(choice: int) -> SamplingParams:
                params = body.params(choice, max_tokens, body.alternatives, self._settings.sampling_defaults)
                form = answers.form(params.structured_outputs)
                return replace(params, structured_outputs=form, visible_tokens=formats.visible_tokens)

            return self._submit([tokens], body, params_of_choice), [""] * body.n

        self._check_choices(body.n)
        return await self._answer(body, http, response_format, submit)

    def _check_chat(self, body: ChatBody) -> AnswerFormats:
        """Format of the model's answers; ApiError if it lacks what a conversation needs."""
        if self._formats is None:
            raise ApiError(400, "messages: the model's file lacks a chat template; use /v1/completions", "messages")
        self._formats.check(body.tool_use)
        for name, value in body.template_switches.items():
            if self._template is not None and name not in self._template.source:
                found = f"found {value!r:.100}, which the model's chat template does not know"
                raise ApiError(400, f"{name}: {found}, expected nothing", name)
        return self._formats

    def _render(self, body: ChatBody) -> tuple[list[dict[str, Any]], str]:
        """Messages of a conversation and its prompt."""
        assert self._template is not None and body.messages is not None
        messages = [message.flatten(f"messages.{index}") for index, message in enumerate(body.messages)]
        # Templates render one prompt at a time: refuse too long ones beforehand.
        self._engine.check_length("\n".join(message["content"] for message in messages))
        values = {**body.tool_use.template_values, **body.template_values}
        return messages, render_chat(self._template, messages, values, body.continues)

    async def embed(self, body: EmbeddingBody, http: HttpRequest) -> dict[str, Any]:
        """Embeddings of texts, one request at a time."""
        encoder = self._encoder
        if encoder is None:
            message = "embeddings: found no encoder, expected the server's option --embedding-model"
            raise ApiError(501, message, code="not_supported")
        self._check_model(body.model)
        body.refuse_unsupported()
        is_over = threading.Event()
        threads = self._encoder_thread
        return await self._in_thread(http, lambda: embed(encoder, body, self._settings.name, is_over), threads, is_over)

    async def tokenize(self, body: TokenizeBody, http: HttpRequest) -> dict[str, Any]:
        """Tokens of a text or a conversation, in the forms of vLLM and of llama.cpp's server."""
        self._check_model(body.model)
        body.refuse_unsupported()
        body.check()
        if body.messages is not None:
            self._check_chat(body)
        tokens = await self._in_thread(http, lambda: self._tokens_of(body))
        answer = {"count": len(tokens), "max_model_len": self._context, "tokens": tokens}
        if body.return_token_strs or body.with_pieces:
            texts = [self._decode([token]) for token in tokens]
            if body.return_token_strs:
                return {**answer, "token_strs": texts}
            pairs = zip(tokens, texts, strict=True)
            return {**answer, "tokens": [{"id": token, "piece": text} for token, text in pairs]}
        return answer

    async def tokenizer_info(self) -> dict[str, Any]:
        """Names of special tokens and the chat template, by vLLM's names, as evaluation harnesses ask for them."""
        names = {name: text or None for name, text in begin_and_end(self._tokenizer).items()}
        template = self._template and (self._template.source or None)
        return {"tokenizer_class": type(self._tokenizer).__name__, **names, "chat_template": template}

    async def detokenize(self, body: DetokenizeBody, http: HttpRequest) -> dict[str, Any]:
        """Text of tokens, without control tokens."""
        self._check_model(body.model)
        invalid = next((token for token in body.tokens if not 0 <= token < self._vocabulary), None)
        if invalid is not None:
            raise ApiError(400, f"tokens: found {invalid}, expected 0 to {self._vocabulary - 1}", "tokens")
        text = await self._in_thread(http, lambda: self._decode(body.tokens))
        return {"prompt": text, "content": text}

    def _tokens_of(self, body: TokenizeBody) -> list[int]:
        text, begin, special = body.text, body.adds_special, body.parse_special
        if body.messages is not None:
            (_, text), begin, special = self._render(body), True, True
        if self._engine_or_none is not None:
            self._engine.check_length(text)
        return self._tokenizer.encode(text, special=special, begin=begin)

    async def _in_thread(
        self,
        http: HttpRequest,
        function: Callable[[], _T],
        threads: ThreadPoolExecutor | None = None,
        is_over: threading.Event | None = None,
    ) -> _T:
        """Run a function that would block the event loop; set `is_over` when nobody waits for it any more."""
        self._begin()
        task = asyncio.get_running_loop().run_in_executor(threads or self._tokenizer_threads, function)
        disconnect_task = asyncio.ensure_future(wait_for_disconnect(http.receive))
        tasks: list[asyncio.Future[Any]] = [task, disconnect_task]
        try:
            seconds = self._limits.seconds
            await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ApiError(499 if disconnect_task.done() else 504, f"the request took more than {seconds:g} s")
            return task.result()
        except ApiError:
            raise
        except Exception as error:
            raise log_defect(error) from error
        finally:
            if is_over is not None:
                is_over.set()
            for each in tasks:
                await _cancel(each)
            self._in_flight -= 1

    def _begin(self) -> None:
        """Count a request; raise ApiError if there are too many."""
        if self._in_flight >= self._limits.in_flight:
            message = f"found {self._in_flight} requests in flight, expected at most {self._limits.in_flight}"
            raise ApiError(429, message, code="rate_limit_exceeded")
        self._in_flight += 1

    async def _answer(
        self,
        body: Body,
        http: HttpRequest,
        response_format: ResponseFormat,
        submit: Callable[[], tuple[list[Request], list[str]]],
    ) -> Response:
        self._begin()
        choices: Choices | None = None
        is_streaming = False
        try:
            # Rendering and encoding long prompts takes time, and must not block the event loop; forms take more.
            threads = self._form_threads if body.may_have_form else self._tokenizer_threads
            requests, prefixes = await asyncio.get_running_loop().run_in_executor(threads, submit)
            choices = Choices(requests, prefixes, self._limits.seconds)
            if body.stream:
                answer = StreamedAnswer(choices, response_format, body.includes_usage, lambda: self._end(choices))
                is_streaming = True  # the streamed answer calls `_end` when it has been written
                return answer
            return await complete_answer(choices, response_format, http)
        except ApiError:
            raise
        except Exception as error:
            raise log_defect(error) from error
        finally:
            if not is_streaming:
                self._end(choices)

    def _end(self, choices: Choices | None) -> None:
        self._in_flight -= 1
        if choices is not None:
            choices.close()
            for request in choices.requests:
                self._metrics.observe(request)

    def _submit(
        self, prompts: Sequence[Sequence[int]], body: Body, params_of_choice: Callable[[int], SamplingParams]
    ) -> list[Request]:
        """Submit all choices, or none."""
        max_prompt_tokens = self._limits.prompt_tokens
        for tokens in prompts:
            if max_prompt_tokens and len(tokens) > max_prompt_tokens:
                message = f"prompt: found {len(tokens):,} tokens, expected at most {max_prompt_tokens:,}"
                raise ApiError(400, message, "prompt", CONTEXT_LENGTH_EXCEEDED)
            self._engine.check_prompt(tokens)
        requests: list[Request] = []
        try:
            for tokens in prompts:
                requests += [self._engine.submit(tokens, params_of_choice(choice)) for choice in range(body.n)]
        except BaseException:
            for request in requests:
                request.cancel()
            raise
        return requests

    def _max_tokens(self, requested: int | None) -> int | None:
        limit = self._limits.max_tokens
        if not limit:
            return requested
        if requested is not None and requested > limit:
            raise ApiError(400, f"max_tokens: found {requested}, expected at most {limit}", "max_tokens")
        return limit if requested is None else requested

    def _decode(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(self._tokenizer.piece(token) for token in prompt).decode("utf-8", "replace")

    def _check_choices(self, count: int) -> None:
        if count > self._limits.choices:
            raise ApiError(400, f"n: found {count} texts, expected at most {self._limits.choices}", "n")

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._settings.name:
            message = f"model: found {name!r}, expected {self._settings.name!r}"
            raise ApiError(404, message, "model", "model_not_found")

    def _describe_model(self) -> dict[str, Any]:
        context, trained = self._context, self._trained_context
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


async def _answer_invalid_body(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    content_type = http.headers.get("content-type", "")
    if "json" not in content_type:
        problem = f"found {content_type!r}" if content_type else "found none"
        return ApiError(400, f"body: {problem} as its Content-Type, expected application/json", "body").response()
    first_error = error.errors()[0]
    location = ".".join(str(part) for part in first_error["loc"][1:]) or "body"
    return ApiError(400, f"{location}: {first_error['msg']}", location).response()


async def _answer_http_error(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}").response()


async def _answer_error(http: HttpRequest, error: Exception) -> Response:
    return api_error(error).response()
