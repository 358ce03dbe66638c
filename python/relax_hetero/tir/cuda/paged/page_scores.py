"""Scores of a warp's 16 rows against keys of a page, and their softmax, which goes on from page to page.

Fragments are as in `attention.score_tile`: register ``4 * j + 2 * h + c`` of lane l is row ``l // 4 + 8 * h``, key
``8 * j + 2 * (l % 4) + c``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....target.gpu_target import WARP
from ...core.builder import Expr, when
from ..attention.score_tile import LOG2_E
from ..core import ptx
from ..core.launch import SharedMemory, local, unrolled
from .paged_work import CHUNK, PagedWork

_EVERYONE = 0xFFFFFFFF
_ROW_BYTES = CHUNK * 2


class PageScores:
    """A warp's queries against keys, and its sums of values, while code is written.

    Parameters
    ----------
    work : PagedWork
    keys : int
        Number of keys of a page that the warp takes: a multiple of 16.
    shared : SharedMemory
    lane : PrimExpr
    query : PrimExpr
        Offset of the queries in shared memory: ``(size / 8, height, 8)`` elements; and the warp's first row of them.
    height : int
        Rows of queries in shared memory.

    Attributes
    ----------
    sums : Buffer
        ``size / 2`` float32 of a thread: weighted values of 16 rows.
    row_max, totals : Buffer
        Greatest score of both rows of a lane, and the sum of powers of its lane.
    """

    def __init__(
        self, work: PagedWork, keys: int, shared: SharedMemory, lane: Expr, query: int, first_row: Expr, height: int
    ) -> None:
        self.work, self.keys, self.shared, self.lane = work, keys, shared, lane
        self.query, self.first_row, self.height = query, first_row, height
        self.types = (work.page_dtype, work.page_dtype)
        self.scores, self.weights = local(keys // 2, "float32"), local(keys // 4, "uint32")
        self.sums = local(work.size // 2, "float32")
        self.row_max, self.totals = local(2, "float32"), local(2, "float32")
        self._shrink, self._new, self._base = (local(2, "float32") for _ in range(3))
        self._left, self._right = local(4, "uint32"), local(4, "uint32")
        self.factor = LOG2_E * (1.0 if work.softcap else work.scale)
        """Factor that makes a score an exponent of two."""

    def begin(self) -> None:
        """No keys so far."""
        for h in range(2):
            T.buffer_store(self.row_max, T.float32(-math.inf), [h])
            T.buffer_store(self.totals, T.float32(0), [h])
        with unrolled(self.work.size // 2) as i:
            T.buffer_store(self.sums, T.float32(0), [i])

    def multiply_keys(self, tile: Expr, first: Expr) -> None:
        """Scores of keys from number `first` of a page on, whose keys lie at an offset of shared memory."""
        lane, scores = self.lane, self.scores
        with unrolled(self.keys // 2) as i:
            T.buffer_store(scores, T.float32(0), [i])
        own = T.bind(self.first_row + tirx.floormod(lane, 16))
        key = T.bind(first + tirx.floordiv(lane, 16) * 8 + tirx.floormod(lane, 8))
        with unrolled(self.work.size // 16) as step:
            chunk = step * 2 + tirx.floordiv(lane, 16)
            self._load(self._left, self.query + (chunk * self.height + own) * _ROW_BYTES, False)
            with unrolled(self.keys // 16) as pair:
                chunk = step * 2 + tirx.floormod(tirx.floordiv(lane, 8), 2)
                self._load(self._right, tile + (chunk * PAGE + key + pair * 16) * _ROW_BYTES, False)
                for block in range(2):
                    ptx.multiply_fragments(
                        [scores[pair * 8 + block * 4 + i] for i in range(4)],
                        [self._left[i] for i in range(4)],
                        [self._right[block * 2 + i] for i in range(2)],
                        self.types,
                    )

    def _load(self, registers: Any, at: Expr, transposed: bool) -> None:
        ptx.load_matrices([registers[i] for i in range(4)], self.shared.at(at), transposed)

    def softmax(self, first: Expr, limits: Sequence[Expr], least: Expr, lows: Sequence[Expr] | None) -> None:
        """Scores become powers; sums go on.

        Parameters
        ----------
        first : PrimExpr
            int32: position of the first key.
        limits : sequence of PrimExpr
            int32, of both rows: positions of keys that they see are less.
        least : PrimExpr
            int32: the least limit of all rows of the warp, or less: keys below it need no test.
        lows : sequence of PrimExpr, optional
            int32, of both rows: the first position that they see.
        """
        count, scores, work = self.keys // 2, self.scores, self.work
        if work.softcap:
            cap = T.float32(work.softcap)
            with unrolled(count) as i:
                value = cap * T.tanh(scores[i] * T.float32(work.scale / work.softcap))
                T.buffer_store(scores, value, [i])
        begin = T.bind(first + tirx.floormod(self.lane, 4) * 2)

        def column(i: Expr) -> Expr:
            return tirx.floordiv(i, 4) * 8 + tirx.floormod(i, 2)

        with when(first + self.keys > least):
            left = [T.bind(limit - begin) for limit in limits]
            with unrolled(count) as i:
                seen = column(i) < T.Select(_half(i) == 0, left[0], left[1])
                T.buffer_store(scores, T.if_then_else(seen, scores[i], T.float32(-math.inf)), [i])
        if lows is not None:
            missed = [T.bind(low - begin) for low in lows]
            with unrolled(count) as i:
                seen = column(i) >= T.Select(_half(i) == 0, missed[0], missed[1])
                T.buffer_store(scores, T.if_then_else(seen, scores[i], T.float32(-math.inf)), [i])
        self._powers()

    def go_on(self) -> None:
        """After `softmax`: sums of earlier values become those of the new maxima, and powers weights."""
        with unrolled(self.work.size // 2) as i:
            T.buffer_store(self.sums, self.sums[i] * self._shrink[_half(i)], [i])
        with unrolled(self.keys // 4) as i:
            ptx.pack_pair(self.weights[i], self.scores[2 * i], self.scores[2 * i + 1], self.work.page_dtype)

    def _powers(self) -> None:
        count, scores = self.keys // 2, self.scores
        for h in range(2):
            T.buffer_store(self._new, self.row_max[h], [h])
        with unrolled(count) as i:
            T.buffer_store(self._new, T.max(self._new[_half(i)], scores[i]), [_half(i)])
        factor = T.float32(self.factor)
        for h in range(2):
            for distance in (1, 2):
                other = T.tvm_warp_shuffle_xor(T.uint32(_EVERYONE), self._new[h], distance, WARP, WARP)
                T.buffer_store(self._new, T.max(self._new[h], other), [h])
            is_none = self._new[h] == T.float32(-math.inf)
            T.buffer_store(self._base, T.Select(is_none, T.float32(0), self._new[h] * factor), [h])
            ptx.power_of_two(self._shrink[h], self.row_max[h] * factor - self._base[h])
            T.buffer_store(self.totals, self.totals[h] * self._shrink[h], [h])
            T.buffer_store(self.row_max, self._new[h], [h])
        with unrolled(count) as i:
            ptx.power_of_two(scores[i], scores[i] * factor - self._base[_half(i)])
            T.buffer_store(self.totals, self.totals[_half(i)] + scores[i], [_half(i)])

    def add_values(self, tile: Expr, first: Expr) -> None:
        """Weighted values of the keys of the last `softmax`; values of the page lie at an offset of shared memory."""
        lane = self.lane
        key = T.bind(first + tirx.floormod(lane, 16))
        with unrolled(self.keys // 16) as step, unrolled(self.work.size // 16) as pair:
            chunk = pair * 2 + tirx.floordiv(lane, 16)
            self._load(self._right, tile + (chunk * PAGE + key + step * 16) * _ROW_BYTES, True)
            for block in range(2):
                ptx.multiply_fragments(
                    [self.sums[pair * 8 + block * 4 + i] for i in range(4)],
                    [self.weights[step * 4 + i] for i in range(4)],
                    [self._right[block * 2 + i] for i in range(2)],
                    self.types,
                )

    def add_lanes(self) -> None:
        """Totals of the lanes that share a row, after the last page."""
        for h in range(2):
            for distance in (1, 2):
                other = T.tvm_warp_shuffle_xor(T.uint32(_EVERYONE), self.totals[h], distance, WARP, WARP)
                T.buffer_store(self.totals, self.totals[h] + other, [h])


def _half(i: Expr) -> Expr:
    """Which of a lane's two rows register i is of."""
    return tirx.floormod(tirx.floordiv(i, 2), 2)
