"""A language model loaded by `rh.llm.load` with one sequence for each text of a batch, called as an engine calls it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import relax_hetero as rh
from relax_hetero.llm.calibrate import STEPS, decode_steps, prompt

Call = Callable[[], object]


class LoadedModel:
    """A loaded model with as many sequences as slots, by default the largest batch, of different tokens.

    Parameters
    ----------
    path : Path
        GGUF file.
    vdevices, placement
        As for `rh.llm.load`.
    context : int
        Tokens of a sequence in a decode step.
    batches, chunks : sequence of int
        Sizes of calls; the largest prefill that is timed has `max(chunks)` tokens.
    options : object
        Further ones of `rh.llm.load`.
    """

    def __init__(
        self,
        path: Path,
        vdevices: Sequence[str],
        placement: Mapping[str, str] | None,
        context: int,
        batches: Sequence[int],
        chunks: Sequence[int],
        **options: Any,
    ) -> None:
        begin = time.perf_counter()
        options |= {"batches": batches, "chunks": chunks, "context": max(context, *chunks) + 64}
        self.model, _ = rh.llm.load(path, vdevices, placement, background=False, **options)
        self.seconds = time.perf_counter() - begin
        shape = options.get("slots", max(batches)), context
        self.tokens = np.random.default_rng(0).integers(3, self.model.vocabulary, shape).astype("int32")
        self.slots = [self.model.cache.add() for _ in self.tokens]
        for slot, text in zip(self.slots, self.tokens, strict=True):
            for first in range(0, context - 1, max(chunks)):
                self.model.prefill(slot, text[first : min(first + max(chunks), context - 1)])

    def step(self, batch: int, steps: int = STEPS) -> Call:
        """Greedy decode steps of `batch` sequences, one ahead of the tokens that are read."""
        tokens = self.tokens[:batch]
        return decode_steps(self.model, self.slots[:batch], tokens[:, -1].tolist(), tokens.shape[1] - 1, steps)

    def prefill(self, rows: int) -> Call:
        """A prefill of an empty sequence, to logits in the host's memory."""
        return prompt(self.model, self.slots[0], np.resize(self.tokens, rows))
