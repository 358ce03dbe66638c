"""Scores of a warp's queries against a tile of keys: expressions, masks, and the softmax that goes on over tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....encoding.problem import AttentionProblem
from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, when
from ...core.view import Coordinates
from ..core.expression import emit
from ..core.launch import local, unrolled
from ..tile.register_tile import RegisterTile, first_column, row_of
from ..tile.softmax import OnlineSoftmax, average_factor, averaged
from .heads import GpuHeads, Rows


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
    scores : RegisterTile
        Scores; after `update` the probabilities.
    weights : Buffer
        ``keys / 4`` registers: probabilities as a left operand, after `pack`.
    softmax : OnlineSoftmax
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
        self.scores, self.weights = RegisterTile(self.keys), local(self.keys // 4, "uint32")
        self.softmax = OnlineSoftmax(self.scores, 1.0 if self.scale is None else self.scale)
        self.held = [local(self._held_count(view), view.dtype) for view in self.masks]

    def begin(self, at: Coordinates, row: Expr, visible: Sequence[Expr], min_visible: Expr) -> None:
        """Begin with a block of rows.

        Parameters
        ----------
        at : Coordinates
            Batch and group.
        row : PrimExpr
            int32: the lane's first row; it has another one 8 further on.
        visible : sequence of PrimExpr
            int32, of both rows: number of keys that they see.
        min_visible : PrimExpr
            int32: number of keys that every row of the warp sees.
        """
        self.at, self.row, self.visible, self.min_visible = at, row, visible, min_visible
        self.softmax.begin()

    # -- masks

    def _depends_on_row(self, view: GpuHeads) -> bool:
        return view.runs_along("m") or (self.rows.heads_per_tile > 1 and view.runs_along("h"))

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

    def update(self, first: Expr) -> None:
        """Turn the scores of the tile from key `first` on into probabilities."""
        if self.scale is None:
            dtypes = ["float32", *(view.nominal for view in self.masks)]

            def score(value: Expr, i: Expr) -> Expr:
                masks = [held[self._place(view, i)] for view, held in zip(self.masks, self.held, strict=True)]
                return emit(self.problem.scores.expression, [value, *masks], dtypes)

            self.scores.map(score)
        if self.is_masked:
            with when(first + self.keys > self.min_visible):
                begin = T.bind(first + first_column(self.lane))
                self.scores.keep_columns(-math.inf, [T.bind(visible - begin) for visible in self.visible])
        self.softmax.update()

    def pack(self, dtype: str) -> None:
        """Round the probabilities into `weights`."""
        self.scores.to_operand(self.weights, dtype)

    def average(self, sums: RegisterTile) -> None:
        """Divide weighted sums of values by their rows' sums, after `softmax.finish`."""
        softmax, nan_to_zero = self.softmax, self.problem.nan_to_zero
        for h in range(2):
            T.buffer_store(softmax.rescale, average_factor(softmax.row_sum[h], nan_to_zero), [h])
        sums.map(lambda value, i: averaged(value, softmax.rescale[row_of(i)], nan_to_zero))


def _divides(unit: int, extent: Expr) -> bool:
    return isinstance(extent, int) and extent % unit == 0
