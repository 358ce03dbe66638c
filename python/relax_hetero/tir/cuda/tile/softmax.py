"""Online softmax over tiles, and the combination of split results.

A row's running maximum and sum are updated for every tile; accumulators of earlier tiles are multiplied by `rescale`.
Exponentials are powers of two, for which GPUs have an instruction.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...attention.attention_tile import LOWEST
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import local, unrolled
from .register_tile import ROW_LANES, RegisterTile, add, reduce_lanes, row_of

LOG2_E = math.log2(math.e)
LOW = -(2.0**28)  # scores below it differ by at least 32, or are equal; products with `LOG2_E` round by as much


class OnlineSoftmax:
    """Softmax of the scores in a register tile; construct it within the launch.

    Parameters
    ----------
    scores : RegisterTile
        Scores of a tile; after `update` the probabilities, not yet divided by the row's sum.
    scale : float
        Factor of the scores, fused into the exponents.
    may_be_low : bool
        Whether scores may be below `LOW`, as where a mask adds -1e30 or float32's minimum. A fused product of them and
        `LOG2_E` minus the rounded product of their maximum is any number, so rows of such scores have a factor of 1:
        scores other than their maximum are too far from it to matter.
    combine_rows : callable, optional
        Function that combines a lane's row maxima or sums, given how, with those of warps that have other scores of the
        same rows.

    Attributes
    ----------
    row_max, row_sum, rescale : Buffer
        Maximum score, sum of probabilities (over the lane's columns, until `finish`), and factor of accumulators from
        before the last `update`; for a lane's two rows.
    """

    def __init__(
        self,
        scores: RegisterTile,
        scale: float,
        may_be_low: bool = False,
        combine_rows: Callable[[Any, Callable[[Expr, Expr], Expr]], None] | None = None,
    ) -> None:
        self.scores, self.factor, self._combine_rows = scores, scale * LOG2_E, combine_rows
        self._row_factor = local(2, "float32") if may_be_low else None
        self.row_max, self.row_sum, self.rescale = (local(2, "float32") for _ in range(3))
        self._new_max, self._base = local(2, "float32"), local(2, "float32")

    def begin(self, sinks: Sequence[Expr] | None = None, has_sinks: Expr = True) -> None:
        """Initialize the state for new rows.

        `sinks`: scores of a lane's rows that have no value, float32 and not yet multiplied by `scale`. `has_sinks`:
        whether the lane counts the sinks: one of those that share a row, of one split of the keys, does.
        """
        for h in range(2):
            row_max, row_sum = T.float32(-math.inf), T.float32(0)
            if sinks is not None:
                row_max, row_sum = T.Select(has_sinks, sinks[h], row_max), T.Select(has_sinks, T.float32(1), row_sum)
            T.buffer_store(self.row_max, row_max, [h])
            T.buffer_store(self.row_sum, row_sum, [h])

    def update(self) -> None:
        """Turn the scores of the next tile into probabilities; hidden scores are -inf."""
        for h in range(2):
            T.buffer_store(self._new_max, self.row_max[h], [h])
        self.scores.row_max(self._new_max)
        for h in range(2):
            reduce_lanes(self._new_max, h, T.max, ROW_LANES)
        if self._combine_rows is not None:
            self._combine_rows(self._new_max, T.max)
        for h in range(2):
            # Rows whose scores are all -inf subtract 0, as -inf - -inf is NaN.
            is_empty = self._new_max[h] == T.float32(-math.inf)
            if self._row_factor is not None:
                is_low = self._new_max[h] < T.float32(LOW)
                T.buffer_store(self._row_factor, T.Select(is_low, T.float32(1), T.float32(self.factor)), [h])
            factor = self._factor(h)
            T.buffer_store(self._base, T.Select(is_empty, T.float32(0), self._new_max[h] * factor), [h])
            ptx.power_of_two(self.rescale[h], self.row_max[h] * factor - self._base[h])
            T.buffer_store(self.row_sum, self.row_sum[h] * self.rescale[h], [h])
            T.buffer_store(self.row_max, self._new_max[h], [h])
        with unrolled(self.scores.columns // 2) as i:
            ptx.power_of_two(self.scores[i], self.scores[i] * self._factor(row_of(i)) - self._base[row_of(i)])
            T.buffer_store(self.row_sum, self.row_sum[row_of(i)] + self.scores[i], [row_of(i)])

    def _factor(self, row: Expr) -> Expr:
        return self._row_factor[row] if self._row_factor is not None else T.float32(self.factor)

    def finish(self) -> None:
        """Reduce row sums over the lanes of a row, after the last tile."""
        for h in range(2):
            reduce_lanes(self.row_sum, h, add, ROW_LANES)
        if self._combine_rows is not None:
            self._combine_rows(self.row_sum, add)


class SplitSums:
    """Combination of attention results over splits of the keys, for four neighbouring columns of a row.

    Construct it within the launch.

    Parameters
    ----------
    parts : int
        Number of splits; they are added in order, so results are deterministic.
    factor : float
        Factor from scores to exponents of two; `OnlineSoftmax.factor`.

    Attributes
    ----------
    state : Buffer
        Greatest score and sum of probabilities, after `add`.
    total : Buffer
        Four weighted sums of values, after `add`.
    """

    def __init__(self, parts: int, factor: float) -> None:
        self.parts, self.factor = parts, factor
        self._stats, self._sums = local(2 * parts, "uint32"), local(4 * parts, "uint32")
        self.state, self.total = local(2, "float32"), local(4, "float32")
        self._weight = local(1, "float32")

    def add(self, splits: Sequence[tuple[Any, Any]], read: Callable[[Sequence[Expr], Any], None]) -> None:
        """Combine the splits.

        `splits`: addresses of each split's maximum and row sum, and of its four sums. `read`: function that loads
        registers from an address.
        """
        for part, (stats, sums) in enumerate(splits):
            read([self._stats[2 * part + i] for i in range(2)], stats)
            read([self._sums[4 * part + i] for i in range(4)], sums)
        row_max: Expr = T.float32(LOWEST)
        for part in range(self.parts):
            row_max = T.max(row_max, as_float(self._stats[2 * part]))
        T.buffer_store(self.state, row_max, [0])
        T.buffer_store(self.state, T.float32(0), [1])
        for i in range(4):
            T.buffer_store(self.total, T.float32(0), [i])
        for part in range(self.parts):
            exponent = (as_float(self._stats[2 * part]) - self.state[0]) * T.float32(self.factor)
            ptx.power_of_two(self._weight[0], exponent)
            T.buffer_store(self.state, self.state[1] + as_float(self._stats[2 * part + 1]) * self._weight[0], [1])
            for i in range(4):
                T.buffer_store(self.total, self.total[i] + as_float(self._sums[4 * part + i]) * self._weight[0], [i])

    def average(self, nan_to_zero: bool) -> None:
        """Normalize `total`, after `add`; see `average_factor`."""
        T.buffer_store(self._weight, average_factor(self.state[1], nan_to_zero), [0])
        for i in range(4):
            T.buffer_store(self.total, averaged(self.total[i], self._weight[0], nan_to_zero), [i])


def average_factor(row_sum: Expr, nan_to_zero: bool) -> Expr:
    """Factor from a weighted sum to an average; for a row without keys NaN, or 0 if `nan_to_zero`."""
    inverse = T.float32(1) / row_sum
    return T.if_then_else(row_sum > T.float32(0), inverse, T.float32(0)) if nan_to_zero else inverse


def averaged(value: Expr, factor: Expr, nan_to_zero: bool) -> Expr:
    """Multiply a weighted sum by its `average_factor`."""
    product = value * factor
    return T.if_then_else(factor > T.float32(0), product, T.float32(0)) if nan_to_zero else product


def as_bits(value: Expr) -> Expr:
    """Reinterpret a float32 as uint32."""
    return tirx.reinterpret("uint32", value)


def as_float(bits: Expr) -> Expr:
    """Reinterpret bits as a float32."""
    return tirx.reinterpret("float32", bits)
