"""Scores of a tile of keys in the registers of warps, and their softmax, which goes on from tile to tile.

Tensor cores leave sums in one form ("fragments"), whether of wgmma or of ``mma.sync``: a warp has 16 rows; register
``4 * j + 2 * h + c`` of lane l is row ``l // 4 + 8 * h``, column ``8 * j + 2 * (l % 4) + c``. Four lanes share a row.
Powers, rounded to 16 bits and taken two at a time, are in the form that a left operand has: they stay where they are
for the product with values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....encoding.problem import AttentionProblem
from ....target.gpu_target import WARP
from ...attention.attention_tile import LOWEST
from ...core.builder import Expr, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.expression import emit
from ..core.launch import local, unrolled
from .heads import GpuHeads, Rows

LOG2_E = math.log2(math.e)
_EVERYONE = 0xFFFFFFFF


def plain_scale(expression: Expression) -> float | None:
    """The positive number that an expression only multiplies its operand by; None for any other expression."""
    scale = _factor(expression.term)
    return scale if scale is not None and 0 < scale < math.inf else None


def _factor(term: Term) -> float | None:
    if term.op == "operand":
        return 1.0 if term.params[0] == 0 else None
    if term.op not in ("multiply", "divide"):
        return None
    left, right = term.args
    if left.op == "number" and term.op == "multiply":
        left, right = right, left
    inner = _factor(left)
    if inner is None or right.op != "number" or not right.params[0]:
        return None
    number = float(right.params[0])
    return inner * number if term.op == "multiply" else inner / number


class ScoreTile:
    """The scores of a warp's 16 rows against a tile of keys, while code is written.

    Parameters
    ----------
    masks : sequence of GpuHeads
        Operands of the scores' expression, opened.
    keys : int
        Number of keys of a tile, a multiple of 16.
    is_masked : bool
        Whether some tile has keys that a row does not see.

    Attributes
    ----------
    scores : Buffer
        ``keys / 2`` float32 of a thread; after `softmax` the powers.
    weights : Buffer
        ``keys / 4`` pairs, of `pack`.
    shrink : Buffer
        Factors of both rows for earlier sums.
    """

    def __init__(
        self,
        problem: AttentionProblem,
        masks: Sequence[GpuHeads],
        rows: Rows,
        keys: int,
        is_masked: bool,
    ) -> None:

        self.problem, self.masks, self.rows, self.keys, self.is_masked = problem, masks, rows, keys, is_masked
        self.scale = plain_scale(problem.scores.expression)
        """Scale of the exponent; None where the expression is computed, score by score."""
        self.held: list[Any] = []

    def declare(self, thread: Expr) -> None:
        """Registers of a thread; within the launch."""
        self.lane = T.bind(tirx.floormod(thread, WARP))
        self.scores, self.weights = local(self.keys // 2, "float32"), local(self.keys // 4, "uint32")
        self.row_max, self.shrink, self.sums = (local(2, "float32") for _ in range(3))
        self._new, self._base, self._value = local(2, "float32"), local(2, "float32"), local(1, "float32")
        self.held = [local(self._held_count(view), view.dtype) for view in self.masks]

    def begin(self, at: Coordinates, row: Expr, seen: Sequence[Expr], least: Expr) -> None:
        """Begin with a block of rows.

        Parameters
        ----------
        at : Coordinates
            Batch and group.
        row : PrimExpr
            int32: the lane's first row; it has another one 8 further on.
        seen : sequence of PrimExpr
            int32, of both rows: keys that they see.
        least : PrimExpr
            int32: keys that every row of the warp sees.
        """
        self.at, self.row, self.seen, self.least = at, row, seen, least
        for h in range(2):
            T.buffer_store(self.row_max, T.float32(-math.inf), [h])
            T.buffer_store(self.sums, T.float32(0), [h])

    # -- masks

    def _depends_on_row(self, view: GpuHeads) -> bool:
        return view.runs_along("m") or (self.rows.together > 1 and view.runs_along("h"))

    def _held_count(self, view: GpuHeads) -> int:
        return (2 if self._depends_on_row(view) else 1) * (self.keys // 4 if view.runs_along("n") else 1)

    def _place(self, view: GpuHeads, i: Expr) -> Expr:
        """Where what a mask has for score i is held."""
        by_row, by_key = self._depends_on_row(view), view.runs_along("n")
        if by_key:
            return i if by_row else tirx.floordiv(i, 4) * 2 + tirx.floormod(i, 2)
        return tirx.floormod(tirx.floordiv(i, 2), 2) if by_row else 0

    def load_masks(self, first: Expr) -> None:
        """Ask for what masks have for the tile from key `first` on (int32): early, for it takes long to come."""
        sizes = self.rows.sizes
        for view, held in zip(self.masks, self.held, strict=True):
            by_row, by_key = self._depends_on_row(view), view.runs_along("n")
            with unrolled(self._held_count(view)) as number:
                at: dict[str, Expr] = {"b": self.at["b"], "h": self.at["group"]}
                half: Expr = 0
                if by_key:
                    column = number
                    if by_row:
                        half = tirx.floormod(tirx.floordiv(number, 2), 2)
                        column = tirx.floordiv(number, 4) * 2 + tirx.floormod(number, 2)
                    key = T.Cast("int64", first + self._column(column))
                    at["n"] = key if _divides(self.keys, sizes["n"]) else T.min(key, int64(sizes["n"] - 1))
                elif by_row:
                    half = number
                if by_row:
                    row = T.min(T.Cast("int64", self.row + half * 8), int64(self.rows.count - 1))
                    at.update(self.rows.place(row, self.at["group"]))
                value = view.data[view.address(at)]
                if by_key and not isinstance(sizes["n"], int):
                    value = T.if_then_else(sizes["n"] > 0, value, tirx.const(0, view.dtype))
                T.buffer_store(held, value, [number])

    def _column(self, pair: Expr) -> Expr:
        """The column of the tile that pairs of registers, counted within a row, stand for."""
        return tirx.floordiv(pair, 2) * 8 + tirx.floormod(self.lane, 4) * 2 + tirx.floormod(pair, 2)

    # -- softmax

    def softmax(self, first: Expr) -> None:
        """Scores of the tile from key `first` on become powers; sums and maxima go on.

        The earlier sums of values are to be multiplied by `shrink`.
        """
        count, scores = self.keys // 2, self.scores
        if self.scale is None:
            dtypes = ["float32", *(view.nominal for view in self.masks)]
            with unrolled(count) as i:
                found = [held[self._place(view, i)] for view, held in zip(self.masks, self.held, strict=True)]
                value = emit(self.problem.scores.expression, [scores[i], *found], dtypes)
                T.buffer_store(scores, value, [i])
        if self.is_masked:
            with when(first + self.keys > self.least):
                # Columns that a row sees, counted from the lane's first: the compiler compares it with constants.
                begin = T.bind(first + tirx.floormod(self.lane, 4) * 2)
                left = [T.bind(seen - begin) for seen in self.seen]
                with unrolled(count) as i:
                    column = tirx.floordiv(i, 4) * 8 + tirx.floormod(i, 2)
                    limit = T.Select(tirx.floormod(tirx.floordiv(i, 2), 2) == 0, left[0], left[1])
                    T.buffer_store(scores, T.if_then_else(column < limit, scores[i], T.float32(-math.inf)), [i])
        for h in range(2):
            T.buffer_store(self._new, self.row_max[h], [h])
        with unrolled(count) as i:
            half = tirx.floormod(tirx.floordiv(i, 2), 2)
            T.buffer_store(self._new, T.max(self._new[half], scores[i]), [half])
        for h in range(2):
            self._over_lanes(self._new, h, T.max)
            T.buffer_store(self._base, self._base_of(self._new[h]), [h])
            self._power(self.row_max[h], h)
            T.buffer_store(self.shrink, self._value[0], [h])
            T.buffer_store(self.sums, self.sums[h] * self.shrink[h], [h])
            T.buffer_store(self.row_max, self._new[h], [h])
        with unrolled(count) as i:
            half = tirx.floormod(tirx.floordiv(i, 2), 2)
            self._power(scores[i], half)
            T.buffer_store(scores, self._value[0], [i])
            T.buffer_store(self.sums, self.sums[half] + scores[i], [half])

    def rescale_sums(self, sums: Any, count: int) -> None:
        """Earlier sums of values become those that the row's new maximum wants."""
        with unrolled(count) as i:
            half = tirx.floormod(tirx.floordiv(i, 2), 2)
            T.buffer_store(sums, sums[i] * self.shrink[half], [i])

    def _base_of(self, row_max: Expr) -> Expr:
        """Number that is subtracted from exponents: never -inf, since -inf less -inf is not a number."""
        if self.scale is None:
            return T.max(row_max, T.float32(LOWEST))
        is_none = row_max == T.float32(-math.inf)
        return T.Select(is_none, T.float32(0), row_max * T.float32(self.scale * LOG2_E))

    def _power(self, score: Expr, half: Expr) -> None:
        """``e ** (score - greatest)`` of a row into `_value`."""
        if self.scale is None:
            exponent = (score - self._base[half]) * T.float32(LOG2_E)
        else:
            exponent = score * T.float32(self.scale * LOG2_E) - self._base[half]
        ptx.power_of_two(self._value[0], exponent)

    def _over_lanes(self, buffer: Any, h: int, apply: Any) -> None:
        """An element combined over the four lanes of a row."""
        for distance in (1, 2):
            other = T.tvm_warp_shuffle_xor(T.uint32(_EVERYONE), buffer[h], distance, WARP, WARP)
            T.buffer_store(buffer, apply(buffer[h], other), [h])

    def pack(self, dtype: str) -> None:
        """Powers into `weights`."""
        with unrolled(self.keys // 4) as i:
            ptx.pack_pair(self.weights[i], self.scores[2 * i], self.scores[2 * i + 1], dtype)

    def add_lanes(self) -> None:
        """Sums of the lanes that share a row, after the last tile."""
        for h in range(2):
            self._over_lanes(self.sums, h, lambda a, b: a + b)

    def factors(self) -> None:
        """Compute the factors that make sums averages, into `shrink`, after `add_lanes`."""
        for h in range(2):
            T.buffer_store(self.shrink, average(self.sums[h], self.problem.nan_to_zero), [h])


def average(total: Expr, nan_to_zero: bool) -> Expr:
    """Factor that makes a sum of weighted values an average; of a row without scores NaN comes out, or zero."""
    inverse = T.float32(1) / total
    return T.if_then_else(total > T.float32(0), inverse, T.float32(0)) if nan_to_zero else inverse


def averaged(value: Expr, factor: Expr, nan_to_zero: bool) -> Expr:
    """A sum times its `average`."""
    product = value * factor
    return T.if_then_else(factor > T.float32(0), product, T.float32(0)) if nan_to_zero else product


def _divides(unit: int, extent: Expr) -> bool:
    return isinstance(extent, int) and extent % unit == 0
