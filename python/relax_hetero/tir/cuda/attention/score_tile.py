"""Scores of a warp's queries for a tile of keys: score expressions, masks, and online softmax."""

from __future__ import annotations

import math
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....target.gpu_target import WARP
from ...core.builder import Expr, int64, when
from ...core.view import Coordinates
from ..core.expression import emit
from ..core.launch import local, unrolled
from ..core.operand import divides
from ..tile.register_tile import RegisterTile, first_column, row_of
from ..tile.softmax import OnlineSoftmax, average_factor, averaged
from .attention_tensors import AttentionTensors
from .heads import GpuHeads


def plain_scale(expression: Expression) -> float | None:
    """Positive factor of an expression that only scales its operand; None for any other expression."""
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
    """Writer of the scores of a warp's 16 rows for a tile of keys.

    Parameters
    ----------
    tensors : AttentionTensors
        Opened.
    keys : int
        Keys of a tile, a multiple of 16.
    is_masked : bool
        Whether some tiles have hidden keys.

    Attributes
    ----------
    scores : RegisterTile
        Scores; after `update` the probabilities.
    weights : Buffer
        ``keys / 4`` registers: probabilities as a left operand fragment, after `pack`.
    softmax : OnlineSoftmax
    """

    def __init__(self, tensors: AttentionTensors, keys: int, is_masked: bool) -> None:
        self.tensors, self.keys, self.is_masked = tensors, keys, is_masked
        self.problem, self.masks, self.rows = tensors.problem, tensors.masks, tensors.rows
        self.scale = plain_scale(self.problem.scores.expression)
        """Scale fused into the softmax; None if the expression is evaluated score by score."""
        self.loaded: list[Any] = []

    def declare(self, thread: Expr) -> None:
        """Allocate registers, within the launch."""
        self.lane = T.bind(tirx.floormod(thread, WARP))
        self.scores, self.weights = RegisterTile(self.keys), local(self.keys // 4, "uint32")
        self.visible = local(2, "int32")
        self.softmax = OnlineSoftmax(self.scores, self.scale or 1.0, may_overflow=self.scale is None)
        self.loaded = [local(self._num_mask_registers(view), view.dtype) for view in self.masks]

    def begin(self, at: Coordinates, row: Expr, first_row: Expr, end: Expr) -> None:
        """Initialize for a block of rows.

        Parameters
        ----------
        at : Coordinates
            Batch and group.
        row : PrimExpr
            The lane's first row, int32; its second one is 8 rows further on.
        first_row : PrimExpr
            First row of the warp, or of its warpgroup, int32.
        end : PrimExpr
            Number of keys of the thread block, int32.
        """
        self.at, self.row = at, row
        for h in range(2):
            T.buffer_store(self.visible, self.tensors.visible_to(row + 8 * h, end), [h])
        lowest = self.tensors.visible_to(first_row if self.rows.heads_per_tile == 1 else 0, end)
        self.min_visible = lowest if isinstance(lowest, int) else T.bind(lowest)
        self.softmax.begin()

    # -- masks

    def _depends_on_row(self, view: GpuHeads) -> bool:
        return view.runs_along("m") or (self.rows.heads_per_tile > 1 and view.runs_along("h"))

    def _num_mask_registers(self, view: GpuHeads) -> int:
        return (2 if self._depends_on_row(view) else 1) * (self.keys // 4 if view.runs_along("n") else 1)

    def _mask_index(self, view: GpuHeads, i: Expr) -> Expr:
        """Register index of a mask's element for score i."""
        by_row, by_key = self._depends_on_row(view), view.runs_along("n")
        if by_key:
            return i if by_row else tirx.floordiv(i, 4) * 2 + tirx.floormod(i, 2)
        return tirx.floormod(tirx.floordiv(i, 2), 2) if by_row else 0

    def load_masks(self, first: Expr) -> None:
        """Load masks of the tile from key `first` on (int32), early enough to hide the latency."""
        sizes = self.rows.sizes
        for view, registers in zip(self.masks, self.loaded, strict=True):
            by_row, by_key = self._depends_on_row(view), view.runs_along("n")
            with unrolled(self._num_mask_registers(view)) as number:
                at: dict[str, Expr] = {"b": self.at["b"], "h": self.at["group"]}
                half: Expr = 0
                if by_key:
                    column = number
                    if by_row:
                        half = tirx.floormod(tirx.floordiv(number, 2), 2)
                        column = tirx.floordiv(number, 4) * 2 + tirx.floormod(number, 2)
                    key = T.Cast("int64", first + self._column(column))
                    at["n"] = key if divides(sizes["n"], self.keys) else T.min(key, int64(sizes["n"] - 1))
                elif by_row:
                    half = number
                if by_row:
                    row = T.min(T.Cast("int64", self.row + half * 8), int64(self.rows.count - 1))
                    at.update(self.rows.place(row, self.at["group"]))
                value = view.data[view.address(at)]
                if by_key and not isinstance(sizes["n"], int):
                    value = T.if_then_else(sizes["n"] > 0, value, tirx.const(0, view.dtype))
                T.buffer_store(registers, value, [number])

    def _column(self, pair: Expr) -> Expr:
        """Column in the tile of a register, counted within a row."""
        return tirx.floordiv(pair, 2) * 8 + tirx.floormod(self.lane, 4) * 2 + tirx.floormod(pair, 2)

    # -- softmax

    def update(self, first: Expr) -> None:
        """Turn the scores of the tile from key `first` on into probabilities."""
        if self.scale is None:
            dtypes = ["float32", *(view.nominal for view in self.masks)]

            def score(value: Expr, i: Expr) -> Expr:
                masks = [mask[self._mask_index(view, i)] for view, mask in zip(self.masks, self.loaded, strict=True)]
                return emit(self.problem.scores.expression, [value, *masks], dtypes)

            self.scores.map(score)
        if self.is_masked:
            with when(first + self.keys > self.min_visible):
                begin = T.bind(first + first_column(self.lane))
                self.scores.keep_columns(-math.inf, [T.bind(self.visible[h] - begin) for h in range(2)])
        self.softmax.update()

    def pack(self, dtype: str) -> None:
        """Round the probabilities into `weights`."""
        self.scores.to_operand(self.weights, dtype)

    def average(self, sums: RegisterTile) -> None:
        """Normalize accumulators of values by row sums, after `softmax.finish`."""
        softmax, nan_to_zero = self.softmax, self.problem.nan_to_zero
        for h in range(2):
            T.buffer_store(softmax.rescale, average_factor(softmax.row_sum[h], nan_to_zero), [h])
        sums.map(lambda value, i: averaged(value, softmax.rescale[row_of(i)], nan_to_zero))
