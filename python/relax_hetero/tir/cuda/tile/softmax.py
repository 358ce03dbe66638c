"""Softmax of rows that come tile by tile, and its results of several parts put together.

A row's running maximum and sum go on from tile to tile; sums of values that were weighted with an older maximum are
multiplied by `rescale`. Exponents are powers of two, which GPUs have an instruction for.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.attention_tile import LOWEST
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import local, unrolled
from .register_tile import ROW_LANES, RegisterTile, add, reduce_lanes, row_of

LOG2_E = math.log2(math.e)


class OnlineSoftmax:
    """Softmax of the scores in a register tile; made within the launch.

    Parameters
    ----------
    scores : RegisterTile
        Scores of a tile; after `update` the probabilities, before they are divided by the row's sum.
    scale : float
        Factor of the scores; it is multiplied into the exponents.

    Attributes
    ----------
    row_max, row_sum, rescale : Buffer
        Greatest score, sum of probabilities (of the lane's columns, until `finish`), and factor of what was summed
        before the last `update`, of a lane's two rows.
    """

    def __init__(self, scores: RegisterTile, scale: float) -> None:
        self.scores, self.factor = scores, scale * LOG2_E
        self.row_max, self.row_sum, self.rescale = (local(2, "float32") for _ in range(3))
        self._new_max, self._base = local(2, "float32"), local(2, "float32")

    def begin(self) -> None:
        """Begin with new rows."""
        for h in range(2):
            T.buffer_store(self.row_max, T.float32(-math.inf), [h])
            T.buffer_store(self.row_sum, T.float32(0), [h])

    def update(self) -> None:
        """Turn the scores of the next tile into probabilities; hidden scores are -inf."""
        factor = T.float32(self.factor)
        for h in range(2):
            T.buffer_store(self._new_max, self.row_max[h], [h])
        self.scores.row_max(self._new_max)
        for h in range(2):
            reduce_lanes(self._new_max, h, T.max, ROW_LANES)
            # -inf less -inf is not a number: a row that has seen nothing subtracts 0.
            is_empty = self._new_max[h] == T.float32(-math.inf)
            T.buffer_store(self._base, T.Select(is_empty, T.float32(0), self._new_max[h] * factor), [h])
            ptx.power_of_two(self.rescale[h], self.row_max[h] * factor - self._base[h])
            T.buffer_store(self.row_sum, self.row_sum[h] * self.rescale[h], [h])
            T.buffer_store(self.row_max, self._new_max[h], [h])
        with unrolled(self.scores.columns // 2) as i:
            ptx.power_of_two(self.scores[i], self.scores[i] * factor - self._base[row_of(i)])
            T.buffer_store(self.row_sum, self.row_sum[row_of(i)] + self.scores[i], [row_of(i)])

    def finish(self) -> None:
        """Add up the sums of the lanes that share a row, after the last tile."""
        for h in range(2):
            reduce_lanes(self.row_sum, h, add, ROW_LANES)


class SplitSums:
    """Weighted sums of values of which each part saw other keys: four neighbouring columns of a row, put together.

    Made within the launch.

    Parameters
    ----------
    parts : int
        Number of parts; they are added in order, so that equal inputs give equal bits.
    factor : float
        Factor that makes a score an exponent of two; `OnlineSoftmax.factor`.

    Attributes
    ----------
    row_sum, total : Buffer
        Sum of probabilities (one element, after the greatest score), and four weighted sums, after `add`.
    """

    COLUMNS = 4

    def __init__(self, parts: int, factor: float) -> None:
        self.parts, self.factor = parts, factor
        self._facts, self._sums = local(2 * parts, "uint32"), local(4 * parts, "uint32")
        self.state, self.total = local(2, "float32"), local(4, "float32")
        self._weight = local(1, "float32")

    @property
    def row_sum(self) -> Expr:
        """Sum of probabilities of all parts, after `add`."""
        return self.state[1]

    def load(self, part: int, read: Callable[[Sequence[Expr], Sequence[Expr]], None]) -> None:
        """Load a part: `read` gets the registers of its greatest score and its sum, and those of its four sums."""
        read([self._facts[2 * part + i] for i in range(2)], [self._sums[4 * part + i] for i in range(4)])

    def add(self) -> None:
        """Put the parts together."""
        row_max: Expr = T.float32(LOWEST)
        for part in range(self.parts):
            row_max = T.max(row_max, as_float(self._facts[2 * part]))
        T.buffer_store(self.state, row_max, [0])
        T.buffer_store(self.state, T.float32(0), [1])
        for i in range(4):
            T.buffer_store(self.total, T.float32(0), [i])
        for part in range(self.parts):
            exponent = (as_float(self._facts[2 * part]) - self.state[0]) * T.float32(self.factor)
            ptx.power_of_two(self._weight[0], exponent)
            T.buffer_store(self.state, self.state[1] + as_float(self._facts[2 * part + 1]) * self._weight[0], [1])
            for i in range(4):
                T.buffer_store(self.total, self.total[i] + as_float(self._sums[4 * part + i]) * self._weight[0], [i])


def average_factor(row_sum: Expr, nan_to_zero: bool) -> Expr:
    """Factor that makes a weighted sum an average; NaN for a row without scores, or zero."""
    inverse = T.float32(1) / row_sum
    return T.if_then_else(row_sum > T.float32(0), inverse, T.float32(0)) if nan_to_zero else inverse


def averaged(value: Expr, factor: Expr, nan_to_zero: bool) -> Expr:
    """A weighted sum times its `average_factor`."""
    product = value * factor
    return T.if_then_else(factor > T.float32(0), product, T.float32(0)) if nan_to_zero else product


def as_bits(value: Expr) -> Expr:
    """A float32 as the uint32 with the same bits."""
    return tirx.reinterpret("uint32", value)


def as_float(bits: Expr) -> Expr:
    """A float32 from its bits."""
    return tirx.reinterpret("float32", bits)
