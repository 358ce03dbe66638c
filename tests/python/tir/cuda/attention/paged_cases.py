"""Attention over pages on GPUs: random caches, and what comes out in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from relax_hetero.encoding.packed_layout import PackedLayout
from relax_hetero.encoding.pages import PAGE, page_shape
from relax_hetero.encoding.problem import APPEND, CachedAttentionProblem, Operand
from relax_hetero.target.element_types import numpy_dtype

UNITS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-23}


@dataclass(frozen=True)
class PagedWork:
    """Sizes and options of a paged attention, of `rows` of the projection; `rotated` elements of a head are rotated."""

    rows: int
    heads: int
    kv_heads: int
    size: int
    scale: float
    slots: int
    max_pages: int
    pages: int
    window: int = 0
    softcap: float = 0.0
    rotary: str = ""
    rotated: int = 0
    eps: float = 1e-6
    has_q_norm: bool = False
    has_k_norm: bool = False
    dtype: str = "float16"
    page_dtype: str = "float16"
    is_chunk: bool = False
    verify: int = 0  # rows of each sequence
    sinks: bool = False
    shared_values: int = 0

    @property
    def kinds(self) -> int:
        return 1 if self.shared_values else 2

    @property
    def value_size(self) -> int:
        return self.shared_values or self.size

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def width(self) -> int:
        return (self.heads + self.kinds * self.kv_heads) * self.size

    @property
    def problem(self) -> CachedAttentionProblem:
        def operand(shape: tuple[int, ...], dtype: str, *names: str) -> Operand:
            return Operand(shape, dtype, names, PackedLayout.identity(len(shape)))

        norms = "q" * self.has_q_norm + "k" * self.has_k_norm
        pages = page_shape(self.pages, self.kv_heads, self.size, self.page_dtype, bool(self.shared_values))
        operands = [
            operand((self.rows, self.width), self.dtype, "m", "k"),
            operand(pages, self.page_dtype, "p", "h", "e"),
            operand((self.slots, self.max_pages), "int32", "s", "t"),
            *[operand((self.rows,), "int32", "m")] * 2,
            *[operand((self.rows, self.rotated), "float32", "m", "r")] * bool(self.rotary),
            *[operand((self.size,), "float32", "d")] * len(norms),
            *[operand((self.heads,), "float32", "h")] * self.sinks,
        ]
        return CachedAttentionProblem(
            operands=tuple(operands),
            out=operand((self.rows, self.heads * self.value_size), self.dtype, "m", "n"),
            heads=self.heads,
            kv_heads=self.kv_heads,
            size=self.size,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            rotary=self.rotary,
            norms=norms,
            eps=self.eps,
            rows=self.kind,
            order="chunks",
            sinks=self.sinks,
            shared_values=self.shared_values,
        )

    @property
    def kind(self) -> str:
        return "chunk" if self.is_chunk else "verify" if self.verify else "decode"

    @property
    def append_problem(self) -> CachedAttentionProblem:
        return replace(self.problem, rows=APPEND)


@dataclass(frozen=True)
class Case:
    """A problem, and what a call finds.

    Attributes
    ----------
    lengths : tuple of int
        Tokens before the rows of each sequence; of a chunk there is one.
    padded : int
        Rows at the end that are of no sequence.
    """

    work: PagedWork
    lengths: tuple[int, ...]
    padded: int = 0


def case(lengths, heads=4, kv_heads=2, size=32, padded=0, chunk=0, verify=0, **attributes) -> Case:
    """A case with as few pages as sequences need, and some that are nobody's."""
    rows = (chunk or len(lengths) * (verify or 1)) + padded
    max_pages = max((length + (chunk or verify or 1) - 1) // PAGE + 1 for length in lengths) + 1
    attributes["verify"] = verify
    defaults = {"scale": size**-0.5, "slots": len(lengths) + 1, "max_pages": max_pages, "is_chunk": bool(chunk)}
    pages = 2 + max_pages * len(lengths)
    return Case(PagedWork(rows, heads, kv_heads, size, pages=pages, **{**defaults, **attributes}), lengths, padded)


class Call:
    """Arguments of a call, on a cache that is full of NaN where nothing was written."""

    def __init__(self, case: Case, rng: np.random.Generator) -> None:
        work = self.work = case.work
        count = work.rows - case.padded
        self.valid = count
        one, page_type = numpy_dtype(work.dtype), numpy_dtype(work.page_dtype)
        self.qkv = rng.standard_normal((work.rows, work.width)).astype(one)
        self.table = np.full((work.slots, work.max_pages), -1, "int32")
        self.sequences = np.full(work.rows, -1, "int32")
        self.positions = rng.integers(0, 1000, work.rows).astype("int32")
        own = np.arange(count)
        rows_of_each = count if work.is_chunk else work.verify or 1
        self.sequences[:count] = own // rows_of_each + 1
        self.positions[:count] = np.repeat(case.lengths, rows_of_each) + own % rows_of_each
        shuffled = iter(rng.permutation(work.pages))
        for slot, length in enumerate(case.lengths, start=1):
            for page in range((length + rows_of_each - 1) // PAGE + 1):
                self.table[slot, page] = next(shuffled)
        shape = page_shape(work.pages, work.kv_heads, work.size, work.page_dtype, bool(work.shared_values))
        self.pages = np.full(shape, np.nan, page_type)
        self.history = []
        for slot, length in enumerate(case.lengths, start=1):
            both = rng.standard_normal((work.kinds, length, work.kv_heads, work.size)).astype(page_type)
            both = np.concatenate([both, both]) if work.shared_values else both
            self.history.append(both.astype("float64"))
            for position in range(length):
                self.put(self.pages, slot, position, both[:, position])
        angles = rng.uniform(0, 6, (work.rows, max(work.rotated // 2, 1)))
        self.rotation = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype("float32")
        self.norms = [rng.uniform(0.5, 1.5, work.size).astype("float32") for _ in range(2)]
        self.sinks = rng.uniform(-1, 3, work.heads).astype("float32")

    def put(self, pages: np.ndarray, slot: int, position: int, both: np.ndarray) -> None:
        """A token's keys and values, ``(2, kv_heads, size)``, into its page."""
        work, page = self.work, self.table[slot, position // PAGE]
        tiles = pages.reshape(len(pages), work.kv_heads, work.kinds, -1, PAGE, 8)
        stored = both[: work.kinds].transpose(1, 0, 2)
        tiles[page, :, :, :, position % PAGE] = stored.reshape(work.kv_heads, work.kinds, -1, 8)

    def arguments(self) -> list[np.ndarray]:
        """Arguments of the kernels, without the result."""
        work = self.work
        arrays = [self.qkv, self.pages, self.table, self.sequences, self.positions]
        arrays += [self.rotation] if work.rotary else []
        arrays += [self.norms[0]] if work.has_q_norm else []
        arrays += [self.norms[1]] if work.has_k_norm else []
        return arrays + ([self.sinks] if work.sinks else [])

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        """The result of the rows that are of a sequence, in float64, and the pages afterwards."""
        work = self.work
        parts = np.split(
            self.qkv.astype("float64").reshape(work.rows, -1, work.size), [work.heads, work.heads + work.kv_heads], 1
        )
        queries, keys, values = parts
        queries = self._prepared(queries, self.norms[0] if work.has_q_norm else None)
        keys = self._prepared(keys, self.norms[1] if work.has_k_norm else None)
        values = keys if work.shared_values else values
        page_type, pages = numpy_dtype(work.page_dtype), self.pages.copy()
        keys, values, queries = (a.astype("float32").astype(page_type) for a in (keys, values, queries))
        out = np.zeros((self.valid, work.heads, work.value_size))
        for row in range(self.valid):
            slot, position = int(self.sequences[row]), int(self.positions[row])
            self.put(pages, slot, position, np.stack([keys[row], values[row]]))
        keys, values, queries = (a.astype("float64") for a in (keys, values, queries))
        for row in range(self.valid):
            slot, position = int(self.sequences[row]), int(self.positions[row])
            own = np.flatnonzero(self.sequences[: row + 1] == slot)
            past = self.history[slot - 1]
            k, v = (np.concatenate([past[i], new[own]]) for i, new in enumerate((keys, values)))
            first = max(0, position - work.window + 1) if work.window else 0
            for head in range(work.heads):
                kv_head = head // work.group
                scores = k[first:, kv_head] @ queries[row, head] * work.scale
                if work.softcap:
                    scores = work.softcap * np.tanh(scores / work.softcap)
                sink = float(self.sinks[head]) if work.sinks else -np.inf
                row_max = max(scores.max(), sink)
                powers = np.exp(scores - row_max)
                out[row, head] = (
                    powers @ v[first:, kv_head, -work.value_size :] / (powers.sum() + np.exp(sink - row_max))
                )
        return out.reshape(self.valid, -1), pages

    def _prepared(self, heads: np.ndarray, norm: np.ndarray | None) -> np.ndarray:
        work = self.work
        if norm is not None:
            heads = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + work.eps) * norm.astype("float64")
        if not work.rotary:
            return heads
        half, heads = work.rotated // 2, heads.copy()
        cosine, sine = (part[:, None] for part in np.split(self.rotation.astype("float64"), 2, axis=1))
        pairs = work.rotary == "pairs"
        one = slice(0, work.rotated, 2) if pairs else slice(0, half)
        two = slice(1, work.rotated, 2) if pairs else slice(half, work.rotated)
        first, second = heads[..., one].copy(), heads[..., two].copy()
        heads[..., one], heads[..., two] = first * cosine - second * sine, first * sine + second * cosine
        return heads


def check(call: Call, out: np.ndarray, pages: np.ndarray) -> None:
    """A result and the pages after a call, against float64."""
    want, want_pages = call.expected()
    work = call.work
    unit = max(UNITS[work.dtype], UNITS[work.page_dtype])
    assert np.isfinite(out.astype("float32")).all()
    np.testing.assert_allclose(out[: call.valid].astype("float64"), want, rtol=4 * unit, atol=8 * unit)
    np.testing.assert_allclose(
        pages.astype("float32"), want_pages.astype("float32"), rtol=2 * UNITS[work.page_dtype], atol=1e-6
    )


__all__ = ["Call", "Case", "case", "check", "replace"]
