"""The HTTP side: reads requests, calls replicas, repeats requests lost with a dead replica, and answers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from engine import Engine, RefusedError
from ray.exceptions import RayActorError
from ray.serve import metrics
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Limits:
    """Bounds of a request.

    Attributes
    ----------
    bytes : int
        Maximum size of its body.
    seconds : float
        Maximum time until it is answered, repetitions included.
    repeats : int
        Maximum number of repetitions after a replica died with it; a request that kills replicas kills
        ``repeats + 1`` of them.
    """

    bytes: int = 1 << 20
    seconds: float = 30.0
    repeats: int = 2


class Gateway:
    """The application's entry: one path for each engine, and ``/healthz``.

    Requests have no effects, so one that was lost with its replica is computed again by another replica: Ray Serve
    itself repeats only requests that no replica had accepted.
    """

    def __init__(self, engines: Sequence[Engine], replicas: Sequence[DeploymentHandle], limits: Limits) -> None:
        self._services = {engine.path: (engine, handle) for engine, handle in zip(engines, replicas, strict=True)}
        self._limits = limits
        self._answers = metrics.Counter("cluster_serving_answers", "Answers by status", tag_keys=("status",))
        self._repeats = metrics.Counter("cluster_serving_repeats", "Requests computed again after a replica died")

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request; every error is a JSON object with a text ``error``."""
        try:
            response = await asyncio.wait_for(self._answer(request), self._limits.seconds)
        except RefusedError as refusal:
            response = _error(refusal.status, str(refusal))
        except BackPressureError as error:
            response = _error(503, f"too many requests wait: {error}", {"Retry-After": "1"})
        except (RayActorError, DeploymentUnavailableError) as error:
            response = _error(503, f"no replica answers: {error}", {"Retry-After": "1"})
        except (asyncio.TimeoutError, TimeoutError):
            response = _error(504, f"not answered within {self._limits.seconds:g} s")
        except ClientDisconnect:
            response = _error(499, "the client went away")
        except Exception as error:
            logger.exception("A request failed")
            response = _error(500, f"the model failed: {type(error).__name__}")
        self._answers.inc(tags={"status": str(response.status_code)})
        return response

    async def process(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def _answer(self, request: Request) -> Response:
        path = request.url.path.rstrip("/")
        if path == "/healthz":
            _expect_method(request, "GET")
            return await self._health()
        if path not in self._services:
            paths = ", ".join([*self._services, "/healthz"])
            raise RefusedError(404, f"found path {request.url.path}, expected one of {paths}")
        _expect_method(request, "POST")
        engine, replicas = self._services[path]
        fields = _object(await self._body(request))
        items = engine.read(fields)
        if not 0 < len(items) <= engine.most_items:
            raise RefusedError(413, f"found {len(items)} items in a request, expected 1 to {engine.most_items}")
        return _json(200, engine.write(fields, await self._results(engine, replicas, items)))

    async def _results(self, engine: Engine, replicas: DeploymentHandle, items: Sequence[Any]) -> list[Any]:
        """The results of all items; a request of several batches is spread over replicas."""
        size = engine.batch_items
        batches = [items[begin : begin + size] for begin in range(0, len(items), size)]
        return list(chain.from_iterable(await asyncio.gather(*(self._batch(replicas, batch) for batch in batches))))

    async def _batch(self, replicas: DeploymentHandle, items: Sequence[Any]) -> Sequence[Any]:
        for attempt in range(self._limits.repeats + 1):
            try:
                return await replicas.answer.remote(items)
            except RayActorError as error:
                if attempt == self._limits.repeats:
                    raise
                logger.warning("A replica died with a request, which is computed again: %s", type(error).__name__)
                self._repeats.inc()
        raise AssertionError("the last attempt returns or raises")

    async def _health(self) -> Response:
        """Status 200 if each engine has a replica that answers within the time limit of a request."""
        await asyncio.gather(*(handle.process.remote() for _, handle in self._services.values()))
        return _json(200, json.dumps({"status": "ok", "paths": list(self._services)}).encode())

    async def _body(self, request: Request) -> bytes:
        """The body, read no further than its limit."""
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > self._limits.bytes:
                size = request.headers.get("content-length") or f"more than {self._limits.bytes}"
                raise RefusedError(413, f"found a body of {size} bytes, expected at most {self._limits.bytes}")
        return bytes(body)


def _expect_method(request: Request, method: str) -> None:
    if request.method != method:
        raise RefusedError(405, f"found method {request.method} for {request.url.path}, expected {method}")


def _object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"found a body that is no JSON ({error}), expected a JSON object") from error
    if not isinstance(content, dict):
        raise RefusedError(400, f"found JSON of type {type(content).__name__}, expected an object")
    return content


def _json(status: int, content: bytes, headers: Mapping[str, str] | None = None) -> Response:
    return Response(content, status, dict(headers or {}), media_type="application/json")


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return _json(status, json.dumps({"error": message}).encode(), headers)
