"""A process that holds one engine's model, and gathers requests into batches for it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain, pairwise
from typing import Any

from engine import Engine
from ray import serve
from ray.serve import metrics

# Bounds of the histogram of items per batch.
ITEMS = [1, 2, 4, 8, 16, 32, 64, 128, 256]


def items_of(requests: Sequence[Sequence[Any]]) -> int:
    """The size of a batch: the number of its items, not of its requests."""
    return sum(len(request) for request in requests)


class Replica:
    """One copy of a model with a queue of requests.

    The model runs in a thread of its own: meanwhile the event loop takes requests, which become the next batch, and
    answers health checks.

    Parameters
    ----------
    engine : Engine
        Engine whose model is loaded.
    wait_s : float
        Seconds that a batch waits for more requests, also while another batch runs.
    """

    def __init__(self, engine: Engine, wait_s: float = 0.0) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._full = engine.batch_items
        self._model = self._thread.submit(engine.load).result()
        self._items = metrics.Histogram("cluster_serving_batch_items", "Items of a batch", boundaries=ITEMS)
        self._batch.set_max_batch_size(engine.batch_items)  # type: ignore[attr-defined]
        self._batch.set_batch_wait_timeout_s(wait_s)  # type: ignore[attr-defined]

    async def answer(self, items: Sequence[Any]) -> Sequence[Any]:
        """The results of a request's items, at most as many as fill a batch."""
        if len(items) > self._full:  # Ray Serve would refuse it, and never answer the others of its batch
            raise ValueError(f"found {len(items)} items, expected at most {self._full}")
        return await self._batch(items)  # type: ignore[arg-type]

    @serve.batch(batch_size_fn=items_of)
    async def _batch(self, requests: list[Sequence[Any]]) -> list[Sequence[Any]]:
        # Ray Serve collects several requests into a list.
        self._items.observe(items_of(requests))
        results = await self._in_thread(self._model.run, list(chain.from_iterable(requests)))
        ends = accumulate((len(request) for request in requests), initial=0)
        return [results[begin:end] for begin, end in pairwise(ends)]

    async def check_health(self) -> None:
        """Check the model; Ray Serve calls this, and replaces a replica that raises or does not answer."""
        await self._in_thread(self._model.check)

    async def process(self) -> int:
        """The id of this process."""
        return os.getpid()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
