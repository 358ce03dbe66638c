"""Numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..engine import Engine
from ..request import Request

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
