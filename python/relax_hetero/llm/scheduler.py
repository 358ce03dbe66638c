"""Scheduler of the engine: continuous batching, chunked prefill, prefix reuse and preemption."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from ..errors import CacheError, HeteroError
from .model import DecodeStep, Model
from .prefix_cache import Prefix, PrefixCache
from .request import FinishReason
from .sequence import Sequence
from .speculation import Proposer, Speculation


@dataclass
class Counts:
    """Counts of the scheduler so far."""

    steps: int = 0  # calls of `Scheduler.step` that returned True
    prompt_tokens: int = 0  # tokens that were prefilled
    reused_tokens: int = 0  # tokens of prompts that were in the cache already
    tokens: int = 0  # tokens that were generated
    preempted: int = 0  # number of preemptions
    # Number of requests that have ended, by reason.
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(("stop", "length", "cancelled", "error"), 0)
    )


@dataclass(frozen=True)
class Load:
    """Load of the scheduler."""

    # Number of requests without and with a slot.
    waiting: int = 0
    active: int = 0
    cached_tokens: int = 0  # tokens in the cache; shared tokens count once for each sequence


@dataclass(frozen=True)
class StepAhead:
    """A decode step that was enqueued before the tokens of the last one were known."""

    sequences: list[Sequence]  # sequences of its rows; some may have ended since
    step: DecodeStep

    def tokens(self) -> dict[Sequence, int]:
        """Wait for the step's tokens."""
        return dict(zip(self.sequences, self.step.tokens(), strict=True))


class Scheduler:
    """Shares a model among requests.

    A step prefills a chunk of at most one request, and decodes one token of all running requests. Requests begin in
    order of arrival. If the cache is full, sequences of the prefix cache are evicted first, then the youngest request
    is preempted: it keeps its text, and its tokens are recomputed after others have ended. So the oldest request
    always makes progress, and none is lost.

    A request's text does not depend on other requests. If prefill and decode do not write the same bits into the cache
    (`Model.decodes_like_prefill`), prompt tokens are always prefilled, or reused from another prompt, and generated
    tokens always decoded: a preempted request repeats its decode steps without sampling.

    If all running requests are greedy and no other can begin, the next decode step is enqueued before the tokens of the
    last one are awaited and handed out (`Model.looks_ahead`). Only requests that are still running get its tokens.

    Steps of few requests may have rows for drafts of their next tokens (`Speculation`). Rows after a wrong one are
    dropped.

    Not thread-safe.
    """

    def __init__(
        self,
        model: Model,  # model, whose cache only this scheduler uses
        prefixes: int = 8,  # maximum number of finished sequences in the prefix cache
        proposers: Iterable[Proposer] = (),  # sources of drafts, if the model can verify them (`Model.decode_rows`)
    ) -> None:
        self.counts = Counts()  # counts so far
        self._model, self._cache = model, model.cache
        self._prefix_cache = PrefixCache(model.cache, prefixes)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._prefilling: Sequence | None = None
        self._cache_full = False  # no request is admitted until one has ended
        self._ahead: StepAhead | None = None
        self._is_growing, self._decode_rows = not model.is_complete, model.decode_rows
        self.speculation = Speculation(list(proposers) if self._decode_rows else [])  # choice of drafts
        self._step_end = 0.0  # of the decode step before, if nothing was done since

    def load(self) -> Load:
        """Return the current load."""
        cached = sum(sequence.cached for sequence in self._active()) + self._prefix_cache.tokens
        return Load(len(self._waiting), len(self._active()), cached)

    def add(self, sequence: Sequence) -> None:
        """Queue a request; one without anything to compute ends at once."""
        self._waiting.append(sequence)
        if sequence.remaining <= 0 and not sequence.needs_prompt_logits:
            self._end(sequence, "length")

    def step(self) -> bool:
        """Run one step; False if no requests are left."""
        self._end_cancelled()
        is_ahead = self._ahead is not None
        if is_ahead:
            self._decode()
        self._admit()
        self._prefill()
        if not is_ahead:
            self._decode()
        if not self._running:
            self._drop_step_ahead()
            self._step_end = 0.0
        busy = bool(self._waiting or self._active())
        self.counts.steps += busy
        return busy

    def end_all(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """End all requests, and free the cache."""
        self._drop_step_ahead()
        for sequence in [*self._waiting, *self._active()]:
            self._end(sequence, reason, error)
        while self._prefix_cache.evict_oldest():
            pass
        self.speculation.close()

    def _active(self) -> list[Sequence]:
        return [*self._running, *([] if self._prefilling is None else [self._prefilling])]

    def _end_cancelled(self) -> None:
        for sequence in [*self._waiting, *self._active()]:
            if sequence.request.cancelled:
                self._end(sequence, "cancelled")

    def _admit(self) -> None:
        """Give a slot to the first waiting request."""
        if self._ahead is not None or not self._can_admit():
            return
        sequence = self._waiting[0]
        try:
            slot, cached = self._allocate_slot(sequence)
        except CacheError as error:
            self._cache_full = bool(self._running)
            if not self._cache_full:  # not even an empty cache has a slot
                self._end(sequence, "error", error)
            return
        except Exception as error:
            self._end(sequence, "error", _wrap_error(error))
            return
        self._cache_full = False
        self._waiting.popleft()
        sequence.begin(slot, cached)
        self.counts.reused_tokens += cached
        self._prefilling = sequence

    def _can_admit(self) -> bool:
        if self._prefilling is not None or not self._waiting or len(self._running) >= self._model.slots:
            return False
        return not (self._cache_full and self._running)

    def _allocate_slot(self, sequence: Sequence) -> tuple[int, int]:
        """Return a slot, and the number of the sequence's tokens that it holds already."""
        count = min(self._prefill_length(sequence), len(sequence.tokens) - 1)  # its last token must have logits
        tokens = np.asarray(sequence.tokens[:count], np.int32)
        running_prefixes = [
            Prefix(other.slot, np.asarray(other.tokens[: min(other.cached, self._prefill_length(other))], np.int32))
            for other in self._running
            if other.slot is not None and self._can_share(other)
        ]
        match = None
        if not sequence.needs_prompt_logits:
            match = self._prefix_cache.find_longest(tokens, running_prefixes)
        if match is not None:
            prefix, length = match
            slot = self._prefix_cache.begin(prefix, length)
            if slot is not None:
                return slot, length
        while True:
            try:
                return self._cache.add(), 0
            except CacheError:
                if not self._prefix_cache.evict_oldest():
                    raise

    def _prefill_length(self, sequence: Sequence) -> int:
        """Number of a sequence's tokens that are prefilled rather than decoded."""
        return len(sequence.tokens if self._model.decodes_like_prefill else sequence.request.prompt)

    def _can_share(self, sequence: Sequence) -> bool:
        """Return whether other requests may use the cached prompt of a sequence, which `prefill_logits` may decode."""
        return self._model.decodes_like_prefill or not sequence.needs_prompt_logits

    def _prefill(self) -> None:
        """Prefill the next chunk of a request."""
        sequence = self._prefilling
        if sequence is None or sequence.slot is None:
            return
        self._step_end = 0.0
        end, model = self._prefill_length(sequence), self._model
        needs_all = sequence.needs_prompt_logits
        size = model.prompt_chunk if needs_all else model.chunk
        chunk = np.asarray(sequence.tokens[sequence.cached : min(sequence.cached + size, end)], np.int32)
        logits = None  # stays so for a preempted request whose whole prompt was in the prefix cache
        try:
            if chunk.size and needs_all:
                all_logits = model.prefill_logits(sequence.slot, chunk)
                sequence.observe(all_logits)
                logits = all_logits[-1]
            elif chunk.size:
                logits = model.prefill(sequence.slot, chunk)
        except CacheError as error:
            self._recover_from_full_cache([sequence], error)
            return
        except Exception as error:
            self._end(sequence, "error", _wrap_error(error))
            return
        sequence.cached += chunk.size
        self.counts.prompt_tokens += chunk.size
        if sequence.cached == end:
            self._prefilling = None
            self._running.append(sequence)
            if sequence.remaining <= 0:
                self._end(sequence, "length")
            else:
                self._accept(sequence, logits)

    def _decode(self) -> None:
        """Decode one token of each running request, or more where drafts are right."""
        if self._ahead is None and self._has_grown():  # this step uses all functions
            self._is_growing = False
            self.speculation.forget_times()
        may_draft, begin = True, self._step_end or time.perf_counter()
        while self._running:
            batch = list(self._running)
            fed = self._fed_tokens(batch, may_draft)
            try:
                results = self._decode_batch(batch, fed)
                self._step_end = time.perf_counter()
                self.speculation.update(len(batch), sum(map(len, fed)), self._step_end - begin)
            except CacheError as error:
                if any(len(tokens) > 1 for tokens in fed):  # drafts must not cost anybody's pages
                    self._roll_back(batch)
                    may_draft = False
                else:
                    self._recover_from_full_cache(batch, error)
                continue
            except Exception as error:
                self._drop_step_ahead()
                self._roll_back(batch)
                self._decode_each(batch, _wrap_error(error))
                return
            rows = iter(results)
            for sequence, tokens in zip(batch, fed, strict=True):
                self._accept_rows(sequence, tokens, list(islice(rows, len(tokens))), len(batch))
            return

    def _has_grown(self) -> bool:
        """Return whether functions were compiled meanwhile, which a step ahead does not use."""
        return self._is_growing and self._model.is_complete

    def _fed_tokens(self, batch: list[Sequence], may_draft: bool) -> list[list[int]]:
        """Tokens of each sequence that a decode step computes: the first that is not in the cache, and a draft."""
        fed = [[sequence.tokens[sequence.cached]] for sequence in batch]
        limit = self._draft_limit(len(batch))
        if may_draft and limit and self._ahead is None:
            limits = [
                min(limit, sequence.remaining - 1) if sequence.cached + 1 == len(sequence.tokens) else 0
                for sequence in batch
            ]
            for tokens, draft in zip(fed, self.speculation.draft(batch, limits), strict=True):
                tokens += draft
        return fed

    def _draft_limit(self, sequences: int) -> int:
        """Maximum number of tokens of a draft in a step of several sequences."""
        return max(self._decode_rows // sequences - 1, 0)

    def _accept_rows(self, sequence: Sequence, tokens: list[int], rows: list[np.ndarray | int], sequences: int) -> None:
        """Accept the results of tokens up to the first that is not the sequence's, and drop those after it."""
        before = sequence.cached
        for token, row in zip(tokens, rows, strict=True):
            is_next = sequence.cached < len(sequence.tokens) and sequence.tokens[sequence.cached] == token
            if sequence.slot is None or not is_next:
                break
            sequence.cached += 1
            self._accept(sequence, row)
        if len(tokens) > 1:
            self.speculation.accept(sequence, len(tokens) - 1, max(sequence.cached - before - 1, 0), sequences)
            if sequence.slot is not None:
                self._roll_back([sequence])

    def _decode_batch(self, batch: list[Sequence], fed: list[list[int]]) -> Iterable[np.ndarray | int]:
        """Logits of a decode step, or its tokens if all sequences are greedy and the model computes them."""
        slots, tokens = _decode_arguments(batch, fed)
        model, has_masks = self._model, any(sequence.has_mask for sequence in batch)
        needs_logits = any(sequence.needs_logits for sequence in batch)
        applies_masks = model.masks_tokens and len(tokens) == len(batch)
        if not model.has_decode_steps or needs_logits or (has_masks and not applies_masks):
            return model.decode(slots, tokens)
        if has_masks:
            return self._masked_tokens(batch, slots, tokens)
        if len(tokens) > len(batch) or not model.looks_ahead:
            return model.begin_decode(slots, tokens).tokens()
        step = self._ahead or StepAhead(batch, model.begin_decode(slots, tokens))
        self._ahead = None
        if step.sequences == batch and self._will_repeat(batch):
            with suppress(Exception):  # the next call begins this step again, and raises the error
                self._ahead = StepAhead(batch, model.begin_decode(slots, step.step))
        next_tokens = step.tokens()
        return [next_tokens[sequence] for sequence in batch]

    def _masked_tokens(self, batch: list[Sequence], slots: list[int], tokens: list[int]) -> list[int]:
        """Greedy tokens of a decode step among those that masks allow, which are made while the device computes."""
        step = self._model.begin_decode(slots, tokens)
        try:
            masks = np.stack([sequence.mask(self._model.vocabulary) for sequence in batch])
        except Exception:
            step.tokens()
            raise
        return step.masked_tokens(masks)

    def _will_repeat(self, batch: list[Sequence]) -> bool:
        """Return whether the next decode step will have the same requests, unless stop tokens or texts end some."""
        if self._prefilling is not None or self._can_admit() or self._has_grown():
            return False
        if any(sequence.has_mask for sequence in batch):
            return False
        if self.speculation.wants(batch, self._draft_limit(len(batch))):
            return False
        return all(
            sequence.remaining > 1 and sequence.cached + 1 == len(sequence.tokens) and not sequence.request.cancelled
            for sequence in batch
        )

    def _drop_step_ahead(self) -> None:
        """Wait for the step ahead, and drop its result or error."""
        step, self._ahead = self._ahead, None
        if step is not None:
            with suppress(Exception):
                step.tokens()

    def _decode_each(self, batch: list[Sequence], failure: HeteroError) -> None:
        """Decode one by one after an error, so that only requests that cause it or cannot be rolled back end."""
        for sequence in batch:
            if sequence.slot is None:
                self._end(sequence, "error", failure)
                continue
            try:
                row = self._model.decode(*_decode_arguments([sequence], self._fed_tokens([sequence], False)))[0]
            except CacheError:
                self._roll_back([sequence])  # the next step tries again
            except Exception as error:
                self._end(sequence, "error", _wrap_error(error))
            else:
                sequence.cached += 1
                self._accept(sequence, row)

    def _accept(self, sequence: Sequence, result: np.ndarray | int | None) -> None:
        """Append the next token, given itself or its logits, unless it was appended before a preemption."""
        if result is None or sequence.cached < len(sequence.tokens):
            return
        try:
            reason = sequence.append(result) if isinstance(result, int) else sequence.accept(result)
        except Exception as error:
            self._end(sequence, "error", _wrap_error(error))
            return
        self.counts.tokens += 1
        if reason is not None:
            self._end(sequence, reason)

    def _recover_from_full_cache(self, sequences: list[Sequence], error: CacheError) -> None:
        """Roll back a call that ran out of pages, and free some."""
        if not self._roll_back(sequences):
            self._free_pages(error)

    def _roll_back(self, sequences: list[Sequence]) -> bool:
        """Truncate sequences that a failed call may have extended; return whether any was preempted."""
        preempted = False
        for sequence in sequences:
            if sequence.slot is None or self._cache.length(sequence.slot) == sequence.cached:
                continue
            try:
                self._cache.truncate(sequence.slot, sequence.cached)
            except CacheError:  # pages have left its window
                self._preempt(sequence)
                preempted = True
        return preempted

    def _free_pages(self, error: CacheError) -> None:
        """Free pages: evict a sequence of the prefix cache, or preempt the youngest request.

        The only request ends: with its text so far, or with the error if it has none.
        """
        if self._prefix_cache.evict_oldest():
            return
        active = self._active()
        youngest = max(active, key=lambda sequence: sequence.arrival)
        if len(active) > 1:
            self._preempt(youngest)
        else:
            self._end(youngest, "length" if youngest.generated else "error", None if youngest.generated else error)

    def _preempt(self, sequence: Sequence) -> None:
        """Free the pages of a request, and put it back into the queue."""
        self._remove(sequence)
        self.speculation.release(sequence)
        self._cache.free(sequence.release())
        index = sum(other.arrival < sequence.arrival for other in self._waiting)
        self._waiting.insert(index, sequence)
        self.counts.preempted += 1
        self._cache_full = True

    def _end(self, sequence: Sequence, reason: FinishReason, error: HeteroError | None = None) -> None:
        self._remove(sequence)
        self.speculation.release(sequence)
        if sequence.slot is not None:
            reusable = sequence.tokens[: min(sequence.cached, self._prefill_length(sequence))]
            slot = sequence.release()
            if reason in ("stop", "length") and self._can_share(sequence):
                self._prefix_cache.store(slot, reusable)
            else:
                self._cache.free(slot)
        self._cache_full = False
        self.counts.finished[reason] += 1
        sequence.finish(reason, error)

    def _remove(self, sequence: Sequence) -> None:
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)


def _decode_arguments(batch: list[Sequence], fed: list[list[int]]) -> tuple[list[int], list[int]]:
    """Slots and tokens of the rows of a step, of which a sequence has as many as `fed` has tokens of it."""
    pairs = zip(batch, fed, strict=True)
    slots = [sequence.slot for sequence, tokens in pairs for _ in tokens if sequence.slot is not None]
    return slots, [token for tokens in fed for token in tokens]


def _wrap_error(error: Exception) -> HeteroError:
    """Wrap an error that is not the library's, with its type in the message."""
    if isinstance(error, HeteroError):
        return error
    wrapped = HeteroError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
