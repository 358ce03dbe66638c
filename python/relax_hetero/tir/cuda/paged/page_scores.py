"""Attention of a warp's 16 rows over pages: scores, online softmax, and accumulation of values."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ...core.builder import Expr, when
from ..core.launch import SharedMemory, local
from ..tile.register_tile import RegisterTile, first_column
from ..tile.shared_tile import ChunkedTile, add_by_columns, multiply_by_rows
from ..tile.softmax import OnlineSoftmax
from .paged_work import PagedWork


class PageScores:
    """Writer of a warp's scores and accumulators.

    Parameters
    ----------
    work : PagedWork
    keys : int
        Keys of a page per warp: a multiple of 16.
    shared : SharedMemory
    lane : PrimExpr
    query : int
        Offset of queries in shared memory: ``(size / 8, height, 8)`` elements.
    first_row : PrimExpr
        First row of the warp.
    height : int
        Rows of queries in shared memory.

    Attributes
    ----------
    sums : RegisterTile
        Accumulators of values, 16 rows.
    softmax : OnlineSoftmax
    """

    def __init__(
        self, work: PagedWork, keys: int, shared: SharedMemory, lane: Expr, query: int, first_row: Expr, height: int
    ) -> None:
        self.work, self.keys, self.shared, self.lane = work, keys, shared, lane
        self.query, self.first_row, self.height = query, first_row, height
        self.types = (work.page_dtype, work.page_dtype)
        self.scores, self.weights = RegisterTile(keys), local(keys // 4, "uint32")
        self.sums = RegisterTile(work.size)
        self.softmax = OnlineSoftmax(self.scores, 1.0 if work.softcap else work.scale)

    def begin(self) -> None:
        """Initialize for new rows."""
        self.softmax.begin()
        self.sums.fill(0)

    def multiply_keys(self, tile: Expr, first: Expr) -> None:
        """Compute scores for keys from `first` on of the page at an offset of shared memory."""
        queries = ChunkedTile(self.shared, self.query, self.height)
        keys = ChunkedTile(self.shared, tile, PAGE)
        width = self.work.size * 2
        multiply_by_rows(self.scores, (queries, self.first_row), (keys, first), width, self.types, self.lane)

    def update(self, first: Expr, limits: Sequence[Expr], min_limit: Expr, lows: Sequence[Expr] | None) -> None:
        """Turn scores into probabilities.

        Parameters
        ----------
        first : PrimExpr
            Position of the first key, int32.
        limits : sequence of PrimExpr
            End of the key positions visible to both rows, int32.
        min_limit : PrimExpr
            Lower bound of the limits of all rows of the warp, int32: keys below it are not masked.
        lows : sequence of PrimExpr, optional
            First key position visible to both rows, int32.
        """
        work, scores = self.work, self.scores
        if work.softcap:
            cap, scale = T.float32(work.softcap), T.float32(work.scale / work.softcap)
            scores.map(lambda value, _: cap * T.tanh(value * scale))
        begin = T.bind(first + first_column(self.lane))
        with when(first + self.keys > min_limit):
            scores.keep_columns(-math.inf, [T.bind(limit - begin) for limit in limits])
        if lows is not None:
            scores.keep_columns(-math.inf, [T.bind(low - begin) for low in lows], is_below=False)
        self.softmax.update()

    def rescale(self) -> None:
        """Rescale accumulators and round probabilities to weights, after `update`."""
        self.sums.scale_rows(self.softmax.rescale)
        self.scores.to_operand(self.weights, self.work.page_dtype)

    def add_values(self, tile: Expr, first: Expr) -> None:
        """Accumulate values of the keys of the last `update`, at an offset of shared memory."""
        values = ChunkedTile(self.shared, tile, PAGE, is_transposed=True)
        add_by_columns(self.sums, self.weights, (values, first), self.keys, self.types, self.lane)
