"""A language model that computes nothing: its logits are a hash of the last tokens, its cache counts pages.

Its text depends on the whole content of the cache, so that a wrong number of tokens there changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from relax_hetero.encoding.token_masks import tokens_of_mask
from relax_hetero.errors import CacheError, HeteroError
from relax_hetero.llm import Model

BYTES = 256
EOS = 256
DECODED = 1 << 20
"""Offset of tokens that decode steps write into the cache, in models where these differ from prefill's."""


class ToyCache:
    """Sequences of tokens in pages; forked ones share full pages, and a `window` frees pages before it."""

    def __init__(self, slots: int, pages: int, page: int = 16, window: int = 0) -> None:
        self.slots, self.pages, self.page, self.window = slots, pages, page, window
        self.tokens: dict[int, list[int]] = {}
        self.room: dict[int, list[int]] = {}  # pages of a slot, by number
        self.first: dict[int, int] = {}  # the first position that a slot still has
        self.users: dict[int, int] = {}
        self.next_page = 0

    @property
    def used(self) -> int:
        return len(self.users)

    def add(self) -> int:
        free = [slot for slot in range(self.slots) if slot not in self.tokens]
        if not free:
            raise CacheError(f"found {self.slots} slots in use, expected a free one")
        self.tokens[free[0]], self.room[free[0]], self.first[free[0]] = [], [], 0
        return free[0]

    def extend(self, slot: int, count: int) -> None:
        needed = -(-(len(self.tokens[slot]) + count) // self.page) - len(self.room[slot])
        if needed > self.pages - self.used:
            raise CacheError(f"found {self.pages - self.used} free pages, expected {needed}")
        for _ in range(needed):
            self.room[slot].append(self.next_page)
            self.users[self.next_page] = 1
            self.next_page += 1

    def append(self, slot: int, tokens: Sequence[int]) -> None:
        self.extend(slot, len(tokens))
        self.tokens[slot] += [int(token) for token in tokens]
        if self.window:
            self.first[slot] = max(self.first[slot], len(self.tokens[slot]) - self.window)

    def fork(self, slot: int) -> int:
        full_pages = len(self.tokens[slot]) // self.page
        tail = len(self.room[slot]) - full_pages
        if tail > self.pages - self.used:
            raise CacheError("found no page for the last tokens of a fork")
        child = self.add()
        self.tokens[child], self.first[child] = list(self.tokens[slot]), self.first[slot]
        self.room[child] = self.room[slot][:full_pages]
        for page in self.room[child]:
            self.users[page] += 1
        self.extend(child, 0)
        return child

    def truncate(self, slot: int, length: int) -> None:
        assert 0 <= length <= len(self.tokens[slot])
        if self.window and self.first[slot] > max(0, length - self.window):
            raise CacheError(f"found position {self.first[slot]} as the first, expected {length - self.window}")
        del self.tokens[slot][length:]
        while len(self.room[slot]) > -(-length // self.page):
            self._release(self.room[slot].pop())

    def free(self, slot: int) -> None:
        for page in self.room.pop(slot):
            self._release(page)
        del self.tokens[slot], self.first[slot]

    def length(self, slot: int) -> int:
        return len(self.tokens[slot])

    def _release(self, page: int) -> None:
        self.users[page] -= 1
        if not self.users[page]:
            del self.users[page]


class ToyModel(Model):
    """Model that writes letters, and sometimes the end; `on_step` is called with the slots of each call.

    Its text repeats itself every `period` tokens, mostly; a call of `decode` may have `decode_rows` of one slot.
    """

    decode_rows, is_complete = 0, True

    def __init__(
        self,
        slots: int = 4,
        context: int = 512,
        chunk: int = 32,
        pages: int = 1000,
        window: int = 0,
        vocabulary: int = 300,
        ends: bool = True,
        cache_slots: int | None = None,
        decodes_like_prefill: bool = True,
        decode_rows: int = 0,
        period: int = 0,
        on_step: Callable[[str, Sequence[int]], None] | None = None,
    ) -> None:
        self.slots, self.context, self.chunk, self.vocabulary = slots, context, chunk, vocabulary
        self.cache = ToyCache(cache_slots or slots + 4, pages, window=window)
        self.decodes_like_prefill, self.decode_rows, self._period = decodes_like_prefill, decode_rows, period
        self._ends, self._on_step = ends, on_step or (lambda kind, slots: None)

    def logits_of(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits after a text."""
        state = len(tokens)
        for token in tokens:
            state = (state * 1_000_003 + token + 1) % (1 << 61)
        logits = np.random.Generator(np.random.PCG64(state)).standard_normal(self.vocabulary).astype(np.float32)
        logits[97:123] += 4
        if self._period and len(tokens) % 29 > 3:  # repeats itself, with exceptions
            logits[97 + len(tokens) % self._period] += 12
        logits[EOS] = 6 if self._ends and state % 37 == 0 else -20
        return logits

    def decoded(self, token: int) -> int:
        """A token as a decode step writes it into the cache."""
        return token if self.decodes_like_prefill else token + DECODED

    def prefill(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        assert 1 <= len(tokens) <= self.chunk and tokens.dtype == np.int32
        self._on_step("prefill", [slot])
        self.cache.append(slot, tokens.tolist())
        return self.logits_of(self.cache.tokens[slot])

    prompt_chunk = 3

    def prefill_logits(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        assert 1 <= len(tokens) <= self.prompt_chunk
        return np.stack([self.prefill(slot, tokens[index : index + 1]) for index in range(len(tokens))])

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> np.ndarray:
        assert 1 <= len(slots) == len(tokens) <= max(self.slots, self.decode_rows)
        assert self.decode_rows or len(set(slots)) == len(slots)
        self._on_step("decode", slots)
        rows = []
        for slot, token in zip(slots, tokens, strict=True):
            self.cache.append(slot, [self.decoded(token)])
            rows.append(self.logits_of(self.cache.tokens[slot]))
        return np.stack(rows)


class ScriptModel(ToyModel):
    """Model that wants to write a script after the last `begin` of a text, then the end."""

    script: str | list[int] = ""
    begin = b""

    def logits_of(self, tokens: Sequence[int]) -> np.ndarray:
        logits = super().logits_of(tokens)
        script = list(self.script.encode()) if isinstance(self.script, str) else self.script
        data = bytes(token % BYTES for token in tokens)
        written = len(data) - data.rfind(self.begin) - len(self.begin)
        logits[[*script, EOS][min(written, len(script))]] += 100
        return logits


class ToyStep:
    """A decode step of `LookAheadToyModel`, with the greedy token of each sequence."""

    def __init__(self, model: LookAheadToyModel, greedy: list[int], logits: np.ndarray) -> None:
        self.greedy, self._logits, self._model = greedy, logits, model

    def tokens(self) -> list[int]:
        self._model.in_flight.remove(self)
        if -1 in self.greedy:
            raise HeteroError("a logit is NaN")
        return self.greedy

    def masked_tokens(self, masks: np.ndarray) -> list[int]:
        assert self._model.masks_tokens
        self._model.in_flight.remove(self)
        allowed = [tokens_of_mask(mask, self._logits.shape[1]) for mask in masks]
        return [int(own[row[own].argmax()]) for own, row in zip(allowed, self._logits, strict=True)]


class LookAheadToyModel(ToyModel):
    """Model whose decode steps begin before the previous one has ended: at most `max_ahead` are ahead.

    Attributes
    ----------
    in_flight : list of ToyStep
        Steps whose tokens were not read yet.
    ahead : int
        Number of steps that began before the tokens of the previous one were read.
    """

    has_decode_steps, looks_ahead = True, True

    def __init__(self, max_ahead: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.max_ahead = max_ahead
        self.in_flight: list[ToyStep] = []
        self.ahead = 0

    def begin_decode(self, slots: Sequence[int], tokens: Sequence[int] | ToyStep) -> ToyStep:
        if isinstance(tokens, ToyStep):
            assert self.in_flight[-1] is tokens and len(self.in_flight) <= self.max_ahead
            self.ahead += 1
            tokens = tokens.greedy
        else:
            assert not self.in_flight
        lengths = [self.cache.length(slot) for slot in slots]
        try:
            for slot in slots:
                self.cache.extend(slot, 1)
            logits = self.decode(slots, tokens)
        except Exception:
            for slot, length in zip(slots, lengths, strict=True):
                self.cache.truncate(slot, length)
            raise
        greedy = np.where(np.isnan(logits).any(axis=1), -1, logits.argmax(axis=1))
        self.in_flight.append(ToyStep(self, greedy.tolist(), logits))
        return self.in_flight[-1]


class ToyCodec:
    """Tokens are bytes; 256 is the end of a text, others are names in angle brackets."""

    stop_ids = frozenset({EOS})

    def encode(self, text: str, *, special: bool = True, begin: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.piece(token) for token in tokens).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < BYTES else b"" if token == EOS else f"<{token}>".encode()


def alone(model: ToyModel, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy continuation of a prompt by a plain loop, up to the end token, which is its last."""
    cached, tokens = list(prompt), [int(np.argmax(model.logits_of(prompt)))]
    while len(tokens) < count and tokens[-1] != EOS:
        cached.append(model.decoded(tokens[-1]))
        tokens.append(int(np.argmax(model.logits_of(cached))))
    return tokens
