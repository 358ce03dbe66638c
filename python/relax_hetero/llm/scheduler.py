"""Which requests the model works on, one step after the other."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from ..errors import CacheError, HeteroError
from .model import Model
from .prefixes import Prefix, Prefixes
from .request import FinishReason
from .sequence import Sequence


@dataclass
class Counts:
    """Counts of the scheduler so far.

    Attributes
    ----------
    steps : int
        Calls of `Scheduler.step` that did something.
    prompt_tokens : int
        Tokens that were prefilled.
    reused_tokens : int
        Tokens whose keys and values were found in the cache instead.
    tokens : int
        Tokens that were written.
    preempted : int
        How often a request had to give its pages to an older one, and begin again later.
    finished
        Requests that ended, by reason.
    """

    steps: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    tokens: int = 0
    preempted: int = 0

    def __post_init__(self) -> None:
        self.finished: dict[FinishReason, int] = dict.fromkeys(("stop", "length", "cancelled", "error"), 0)


@dataclass(frozen=True)
class Load:
    """Load of the scheduler.

    Attributes
    ----------
    waiting, active : int
        Requests without and with a slot.
    cached_tokens : int
        Tokens in the cache; those that sequences share count for each.
    """

    waiting: int = 0
    active: int = 0
    cached_tokens: int = 0


class Scheduler:
    """Shares a model among requests.

    In a step one request at most gets a chunk of its tokens into the cache, and all that are behind that get one token.
    Requests begin in their order. Where the cache is full, sequences of finished requests go first, then the youngest
    request is put back: it keeps its text, and its tokens go into the cache again when others have ended. So the
    oldest request always goes on, and none is lost.

    A request's text is what the model writes for it alone. Where a token's keys and values have other bits by prefill
    than by decode (`Model.decodes_like_prefill`), each token comes into the cache in the way that it would alone: those
    of the prompt by prefill, or from another prompt, and those of the text by decode steps, which a request that was
    put back takes again without choosing a token.

    All methods are called by one thread.

    Parameters
    ----------
    model : Model
        Its cache is the scheduler's alone.
    prefixes : int
        How many sequences of finished requests are kept for requests that begin alike.
    """

    def __init__(self, model: Model, prefixes: int = 8) -> None:
        self.counts = Counts()
        self._model, self._cache = model, model.cache
        self._prefixes = Prefixes(model.cache, prefixes)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._filling: Sequence | None = None
        self._full = False  # nothing begins before something has ended

    def load(self) -> Load:
        """Present load."""
        cached = sum(sequence.cached for sequence in self._holders()) + self._prefixes.tokens
        return Load(len(self._waiting), len(self._holders()), cached)

    def add(self, sequence: Sequence) -> None:
        """A request comes."""
        self._waiting.append(sequence)

    def step(self) -> bool:
        """Work on the requests; False if there are none."""
        self._drop_cancelled()
        self._admit()
        self._fill()
        self._decode()
        busy = bool(self._waiting or self._holders())
        self.counts.steps += busy
        return busy

    def end_all(self, reason: FinishReason, error: HeteroError | None = None) -> None:
        """End every request, and free the cache."""
        for sequence in [*self._waiting, *self._holders()]:
            self._end(sequence, reason, error)
        while self._prefixes.drop_oldest():
            pass

    def _holders(self) -> list[Sequence]:
        return [*self._running, *([] if self._filling is None else [self._filling])]

    def _drop_cancelled(self) -> None:
        for sequence in [*self._waiting, *self._holders()]:
            if sequence.request.cancelled:
                self._end(sequence, "cancelled")

    def _admit(self) -> None:
        """Give a slot to the first request that waits."""
        if self._filling is not None or not self._waiting or len(self._running) >= self._model.slots:
            return
        if self._full and self._running:
            return
        sequence = self._waiting[0]
        try:
            slot, cached = self._slot_for(sequence)
        except CacheError as error:
            self._full = bool(self._running)
            if not self._full:  # not even an empty cache has a slot
                self._end(sequence, "error", error)
            return
        except Exception as error:
            self._end(sequence, "error", _as_hetero(error))
            return
        self._full = False
        self._waiting.popleft()
        sequence.begin(slot, cached)
        self.counts.reused_tokens += cached
        self._filling = sequence

    def _slot_for(self, sequence: Sequence) -> tuple[int, int]:
        """A slot, and how many of the sequence's tokens it has already."""
        known = min(self._prefilled(sequence), len(sequence.tokens) - 1)  # the last one's logits are wanted
        tokens = np.asarray(sequence.tokens[:known], np.int32)
        running = [
            Prefix(other.slot, np.asarray(other.tokens[: min(other.cached, self._prefilled(other))], np.int32))
            for other in self._running
            if other.slot is not None
        ]
        found = self._prefixes.longest(tokens, running)
        if found is not None:
            slot = self._prefixes.begin(*found)
            if slot is not None:
                return slot, found[1]
        while True:
            try:
                return self._cache.add(), 0
            except CacheError:
                if not self._prefixes.drop_oldest():
                    raise

    def _prefilled(self, sequence: Sequence) -> int:
        """How many of a sequence's tokens come into the cache by prefill."""
        return len(sequence.tokens if self._model.decodes_like_prefill else sequence.request.prompt)

    def _fill(self) -> None:
        """Put the next tokens of one request into the cache."""
        sequence = self._filling
        if sequence is None or sequence.slot is None:
            return
        end = self._prefilled(sequence)
        chunk = np.asarray(sequence.tokens[sequence.cached : min(sequence.cached + self._model.chunk, end)], np.int32)
        logits = None  # nothing is left to fill of a prompt that was there
        try:
            if chunk.size:
                logits = self._model.prefill(sequence.slot, chunk)
        except CacheError as error:
            self._reserve_pages([sequence], error)
            return
        except Exception as error:
            self._end(sequence, "error", _as_hetero(error))
            return
        sequence.cached += chunk.size
        self.counts.prompt_tokens += chunk.size
        if sequence.cached == end:
            self._filling = None
            self._running.append(sequence)
            self._accept(sequence, logits)

    def _decode(self) -> None:
        """Every running request gets a token."""
        while self._running:
            batch = list(self._running)
            try:
                logits = self._decoded(batch)
            except CacheError as error:
                self._reserve_pages(batch, error)
                continue
            except Exception:
                self._restore(batch)
                self._decode_each(batch)
                return
            for sequence, row in zip(batch, logits, strict=True):
                sequence.cached += 1
                self._accept(sequence, row)
            return

    def _decode_each(self, batch: list[Sequence]) -> None:
        """After an error: one request after the other, so that it ends only those that have it alone, too."""
        for sequence in batch:
            try:
                row = self._decoded([sequence])[0]
            except CacheError:
                self._restore([sequence])  # goes on in the next step
            except Exception as error:
                self._end(sequence, "error", _as_hetero(error))
            else:
                sequence.cached += 1
                self._accept(sequence, row)

    def _decoded(self, batch: list[Sequence]) -> np.ndarray:
        slots = [sequence.slot for sequence in batch if sequence.slot is not None]
        return self._model.decode(slots, [sequence.tokens[sequence.cached] for sequence in batch])

    def _accept(self, sequence: Sequence, logits: np.ndarray | None) -> None:
        """Choose the next token of a sequence, unless it is known."""
        if logits is None or sequence.cached < len(sequence.tokens):
            return
        try:
            reason = sequence.accept(logits)
        except Exception as error:
            self._end(sequence, "error", _as_hetero(error))
            return
        self.counts.tokens += 1
        if reason is not None:
            self._end(sequence, reason)

    def _reserve_pages(self, sequences: list[Sequence], error: CacheError) -> None:
        """After a call for which the cache had no room: take back what it did, and free some pages."""
        if not self._restore(sequences):
            self._free_pages(error)

    def _restore(self, sequences: list[Sequence]) -> bool:
        """Take back what a call that failed may have appended for some of its sequences; whether that freed some."""
        freed = False
        for sequence in sequences:
            if sequence.slot is None or self._cache.length(sequence.slot) == sequence.cached:
                continue
            try:
                self._cache.cut(sequence.slot, sequence.cached)
            except CacheError:  # its window has moved on
                self._preempt(sequence)
                freed = True
        return freed

    def _free_pages(self, error: CacheError) -> None:
        """Make room in the cache: a kept sequence goes, else the youngest request waits again.

        A request that has the cache to itself ends: with the text that it has, or with the error if it has none.
        """
        if self._prefixes.drop_oldest():
            return
        holders = self._holders()
        youngest = max(holders, key=lambda sequence: sequence.arrival)
        if len(holders) > 1:
            self._preempt(youngest)
        else:
            self._end(youngest, "length" if youngest.written else "error", None if youngest.written else error)

    def _preempt(self, sequence: Sequence) -> None:
        """A request waits again, and gives its pages to others."""
        self._remove(sequence)
        self._cache.free(sequence.release())
        place = sum(other.arrival < sequence.arrival for other in self._waiting)
        self._waiting.insert(place, sequence)
        self.counts.preempted += 1
        self._full = True

    def _end(self, sequence: Sequence, reason: FinishReason, error: HeteroError | None = None) -> None:
        self._remove(sequence)
        if sequence.slot is not None:
            kept = sequence.tokens[: min(sequence.cached, self._prefilled(sequence))]
            slot = sequence.release()
            if reason in ("stop", "length"):
                self._prefixes.keep(slot, kept)
            else:
                self._cache.free(slot)
        self._full = False
        self.counts.finished[reason] += 1
        sequence.finish(reason, error)

    def _remove(self, sequence: Sequence) -> None:
        if sequence is self._filling:
            self._filling = None
        elif sequence in self._running:
            self._running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)


def _as_hetero(error: Exception) -> HeteroError:
    """An error of the library stays as it is; any other gets its kind as a part of its text."""
    if isinstance(error, HeteroError):
        return error
    wrapped = HeteroError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
