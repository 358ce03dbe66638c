"""Draft model: a small model of the same vocabulary, which writes what a large one verifies."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from ..errors import CacheError
from .model import DecodeStep, Model
from .prefix_cache import PrefixCache
from .sequence import Sequence
from .speculation import Proposer, StepTimes

_log = logging.getLogger("relax_hetero")

_PREFIXES = 4  # number of texts that have ended to keep in the cache
_MAX_LENGTH = 16  # number of missing tokens up to which their cost is that of a draft
_UNKNOWN_SECONDS = 1e-9  # time of a chunk before any was measured: some, so that it counts as a beginning


@dataclass
class _Cached:
    """Slot of a text in the draft model's cache, the tokens there, and how many of them are known to be the text's.

    The last token of a text is not counted: its logits are needed.
    """

    slot: int
    tokens: list[int] = field(default_factory=list)
    verified: int = 0

    def verify(self, tokens: list[int]) -> None:
        """Update `verified`, given the tokens of the text."""
        end = min(len(self.tokens), len(tokens) - 1)
        while self.verified < end and self.tokens[self.verified] == tokens[self.verified]:
            self.verified += 1


class DraftModel(Proposer):
    """Proposer of the tokens that a small model writes.

    A greedy text gets the draft model's greedy tokens. A sampled one gets tokens that are sampled with the random
    numbers of its next tokens: where both models have the same distribution, they sample the same tokens. `model`:
    draft model, used by this proposer only; `vocabulary`: number of logits of the model that verifies.
    """

    name = "draft"

    def __init__(self, model: Model, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._prefixes = PrefixCache(model.cache, _PREFIXES)
        self._texts: dict[Sequence, _Cached] = {}
        self._step_times, self._chunk_times = StepTimes(), StepTimes()
        self._failed = False

    def limit(self, text: Sequence) -> int:
        """See `Proposer`."""
        is_possible = not self._failed and max(text.request.params.logit_bias, default=0) < self._model.vocabulary
        longest = self._model.context if self._step_times.nearest(1) else 1  # short ones until their cost is known
        return min(longest, self._model.context - len(text.tokens)) if is_possible else 0

    def seconds(self, text: Sequence, texts: int, length: int) -> tuple[float, float]:
        """See `Proposer`."""
        step = self._step_times.nearest(texts) or 0.0
        chunk = self._chunk_times.nearest(1) or step or _UNKNOWN_SECONDS
        missing = len(text.tokens) - (self._texts[text].verified if text in self._texts else 0)
        chunks = missing / self._model.chunk if missing > _MAX_LENGTH else 0
        return length * step, chunks * chunk

    def draft(self, lengths: Mapping[Sequence, int]) -> Mapping[Sequence, list[int]]:
        """See `Proposer`; a text whose tokens are not in the cache yet may get a chunk of them instead of a draft."""
        try:
            rows = max(self._model.decode_rows // len(lengths), 1)
            ready = {text: length for text, length in lengths.items() if self._is_ready(text, rows)}
            write = self._write if any(text.needs_logits for text in ready) else self._write_greedily
            drafts = write(ready) if ready else {}
        except CacheError:  # the next step tries again, with more pages
            if not self._prefixes.evict_oldest():
                self._model.cache.free(self._texts.popitem()[1].slot)
            return {}
        except Exception as error:
            self._failed = True
            _log.warning("the draft model has failed, and drafts no more: %s: %s", type(error).__name__, error)
            return {}
        return {text: list(takewhile(lambda token: token < self._vocabulary, draft)) for text, draft in drafts.items()}

    def release(self, text: Sequence) -> None:
        """See `Proposer`."""
        cached = self._texts.pop(text, None)
        if cached is not None:
            cached.verify(text.tokens)
            self._prefixes.store(cached.slot, cached.tokens[: cached.verified])

    def close(self) -> None:
        """See `Proposer`."""
        while self._prefixes.evict_oldest():
            pass

    def _is_ready(self, text: Sequence, rows: int) -> bool:
        """Remove wrong tokens from the cache, and compute a chunk of missing ones; False after a part of a prompt."""
        try:
            cached = self._texts.get(text) or self._begin(text)
            cached.verify(text.tokens)
            if self._model.cache.length(cached.slot) > cached.verified:
                self._model.cache.truncate(cached.slot, cached.verified)
                del cached.tokens[cached.verified :]
        except CacheError:  # no slot, or its window was freed
            self.release(text)
            return False
        missing = text.tokens[cached.verified :]
        if max(missing) >= self._model.vocabulary:
            return False
        if len(missing) <= rows:
            return True
        chunk, begin = missing[: min(self._model.chunk, len(missing) - 1)], time.perf_counter()
        self._model.prefill(cached.slot, np.asarray(chunk, np.int32))
        if 2 * len(chunk) > self._model.chunk:
            self._chunk_times.update(1, time.perf_counter() - begin)
        cached.tokens += chunk
        return len(missing) <= _MAX_LENGTH

    def _begin(self, text: Sequence) -> _Cached:
        """Take a slot, with the longest beginning of the text that another has left."""
        match = self._prefixes.find_longest(np.asarray(text.tokens[:-1], np.int32))
        slot = None if match is None else self._prefixes.begin(*match)
        cached = None if match is None or slot is None else _Cached(slot, text.tokens[: match[1]], match[1])
        while cached is None:
            try:
                cached = _Cached(self._model.cache.add())
            except CacheError:
                if not self._prefixes.evict_oldest():
                    raise
        self._texts[text] = cached
        return cached

    def _write(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Draft step by step, with the sampling parameters of each text."""
        drafts: dict[Sequence, list[int]] = {text: [] for text in lengths}
        fed = {text: self._missing(text) for text in lengths}
        for index in range(max(lengths.values())):
            begin, logits = time.perf_counter(), self._decode(fed)
            for text, row in logits.items():
                drafts[text].append(text.sample_ahead(row, index))
            self._step_times.update(sum(map(len, fed.values())), time.perf_counter() - begin)
            fed = {text: drafts[text][-1:] for text in fed if lengths[text] > index + 1}
        return drafts

    def _write_greedily(self, lengths: Mapping[Sequence, int]) -> dict[Sequence, list[int]]:
        """Draft without logits; steps on a GPU follow each other without waiting."""
        model, fed = self._model, {text: self._missing(text) for text in lengths}
        if not model.looks_ahead or any(len(tokens) > 1 for tokens in fed.values()):
            return self._write(lengths)
        begin, slots = time.perf_counter(), [self._texts[text].slot for text in fed]
        count = min(max(lengths.values()), *(model.context - len(text.tokens) for text in lengths))
        steps: list[DecodeStep] = []
        try:
            for _ in range(count):
                steps.append(model.begin_decode(slots, steps[-1] if steps else [token for (token,) in fed.values()]))
        finally:  # also those before one that found no page
            results = [step.tokens() for step in steps]
        self._step_times.update(len(slots), (time.perf_counter() - begin) / count)
        drafts = {text: [tokens[row] for tokens in results] for row, text in enumerate(fed)}
        for text, draft in drafts.items():
            self._texts[text].tokens += fed[text] + draft[:-1]
        return {text: draft[: lengths[text]] for text, draft in drafts.items()}

    def _missing(self, text: Sequence) -> list[int]:
        return text.tokens[len(self._texts[text].tokens) :]

    def _decode(self, fed: Mapping[Sequence, list[int]]) -> dict[Sequence, np.ndarray]:
        """Logits after the last token of each text."""
        slots = [self._texts[text].slot for text, tokens in fed.items() for _ in tokens]
        logits = self._model.decode(slots, [token for tokens in fed.values() for token in tokens])
        for text, tokens in fed.items():
            self._texts[text].tokens += tokens
        return dict(zip(fed, logits[np.cumsum([len(tokens) for tokens in fed.values()]) - 1], strict=True))
