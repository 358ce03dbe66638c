"""Scores of a warp's queries for a tile of keys, and its results: score expressions, masks, and online softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression, Term
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div, int64, when
from ..core.expression import emit
from ..core.launch import local, unrolled
from ..core.operand import divides
from ..tile.register_tile import RegisterTile, first_column, row_of
from ..tile.softmax import LOW, OnlineSoftmax, average_factor, averaged
from .attention_tensors import AttentionTensors
from .heads import GpuHeads
from .team import Team


@dataclass(frozen=True)
class Visible:
    """Keys that a lane's two rows see, int32."""

    ends: Sequence[Expr]  # ends of the keys visible to both rows
    # Lower bound of the ends of all rows of the warp: tiles up to it have no hidden keys, except those of `begins`.
    min_end: Expr
    begins: Sequence[Expr] | None = None  # first keys visible to both rows


def plain_scale(expression: Expression) -> float | None:
    """Positive factor of an expression that only scales its operand; None for any other expression."""
    scale = _factor(expression.term)
    return scale if scale is not None and 0 < scale < math.inf else None


def score_bound(term: Term) -> float:
    """Bound of the magnitude of a term's values: that of a softcap, or infinity."""
    if term.op in ("multiply", "divide") and term.args[1].op == "number":
        number, inner = float(term.args[1].params[0]), score_bound(term.args[0])
        return inner * abs(number) if term.op == "multiply" else inner / abs(number) if number else math.inf
    return 1.0 if term.op == "tanh" else math.inf


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
    """Writer of the scores and results of a warp's 16 rows for a tile of keys; construct it within the launch.

    Parameters
    ----------
    tensors : AttentionTensors
        Opened.
    keys : int
        Keys of a tile, a multiple of 16.
    thread : PrimExpr
        Index of the thread.
    columns : int
        Columns of the results, a multiple of 16; 0: all.
    team : Team, optional
        Warpgroups that have other keys of the same rows.

    Attributes
    ----------
    scores : RegisterTile
        Scores; after `update` the probabilities.
    weights : Buffer
        ``keys / 4`` registers: probabilities as a left operand fragment, after `pack`; those of all keys of a team.
    sums : RegisterTile
        Accumulators of values.
    """

    def __init__(
        self, tensors: AttentionTensors, keys: int, thread: Expr, columns: int = 0, team: Team | None = None
    ) -> None:
        self.tensors, self.keys, self.masks, self.rows = tensors, keys, tensors.masks, tensors.rows
        self.scale = plain_scale(tensors.scores)
        """Scale fused into the softmax; None if the expression is evaluated score by score."""
        self.lane = T.bind(tirx.floormod(thread, WARP))
        self.scores, self.weights = RegisterTile(keys), local(keys // 4 * (team.size if team else 1), "uint32")
        self._team, self._own_weights = team, local(keys // 4, "uint32") if team else self.weights
        self.sums = RegisterTile(columns or ceil_div(int(tensors.sizes["e"]), 16) * 16)
        may_be_low = self.scale is None and score_bound(tensors.scores.term) > -LOW
        self.softmax = OnlineSoftmax(self.scores, self.scale or 1.0, may_be_low, team.combine if team else None)
        self.loaded = [local(self._num_mask_registers(view), view.dtype) for view in self.masks]

    def begin(self, row: Expr, has_sinks: Expr = True) -> None:
        """Initialize for a block of rows.

        Parameters
        ----------
        row : PrimExpr
            The lane's first row, int32; its second one is 8 rows further on.
        has_sinks : PrimExpr
            Whether the warp's keys are those that count sinks, of all splits of the keys.
        """
        self.row, sinks = row, self.tensors.sinks
        if sinks is None:
            self.softmax.begin()
        else:
            heads = [self._place(h)["h"] for h in range(2)]
            scores = [T.bind(sinks[head] * T.float32(1 / (self.scale or 1.0))) for head in heads]
            self.softmax.begin(scores, tirx.all(has_sinks, first_column(self.lane) == 0))
        self.sums.fill(0)

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
                at: dict[str, Expr] = {"b": self.tensors.at["b"], "h": self.tensors.at["group"]}
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
                    at.update(self._place(half))
                value = view.data[view.address(at)]
                if by_key and not isinstance(sizes["n"], int):
                    value = T.if_then_else(sizes["n"] > 0, value, tirx.const(0, view.dtype))
                T.buffer_store(registers, value, [number])

    def _place(self, half: Expr) -> dict[str, Expr]:
        """Head and query of the lane's first or second row; rows beyond the last are clamped."""
        row = T.min(T.Cast("int64", self.row + half * 8), int64(self.rows.count - 1))
        return self.rows.place(row, self.tensors.at["group"])

    def _column(self, pair: Expr) -> Expr:
        """Column in the tile of a register, counted within a row."""
        return tirx.floordiv(pair, 2) * 8 + tirx.floormod(self.lane, 4) * 2 + tirx.floormod(pair, 2)

    # -- softmax

    def update(self, first: Expr, visible: Visible | None) -> None:
        """Turn the scores of the tile from key `first` on into probabilities.

        Parameters
        ----------
        first : PrimExpr
            Position of the tile's first key, int32.
        visible : Visible, optional
            Keys that rows see; None: all.
        """
        if self.scale is None:
            dtypes = ["float32", *(view.nominal for view in self.masks)]

            def score(value: Expr, i: Expr) -> Expr:
                masks = [mask[self._mask_index(view, i)] for view, mask in zip(self.masks, self.loaded, strict=True)]
                return emit(self.tensors.scores, [value, *masks], dtypes)

            self.scores.map(score)
        if visible is not None:
            begin = T.bind(first + first_column(self.lane))
            with when(first + self.keys > visible.min_end):
                self.scores.keep_columns([T.bind(end - begin) for end in visible.ends])
            if visible.begins is not None:
                limits = [T.bind(key - begin) for key in visible.begins]
                self.scores.keep_columns(limits, is_below=False)
        self.softmax.update()

    def pack(self) -> None:
        """Round the probabilities to weights, if they are multiplied in 16 bits."""
        if self.tensors.dtype in HALF_TYPES:
            self.scores.to_operand(self._own_weights, self.tensors.dtype)
        if self._team is not None:
            self._team.gather(self.weights, self._own_weights)

    def rescale(self) -> None:
        """Rescale the accumulators of earlier tiles by the last `update`."""
        self.sums.scale_rows(self.softmax.rescale)

    def weight_fragment(self, step: int) -> list[Expr]:
        """Left operand registers of 16 keys, after `pack`."""
        return [self.weights[4 * step + r] for r in range(4)]

    def average(self) -> None:
        """Normalize accumulators of values by row sums, after `softmax.finish`."""
        softmax, nan_to_zero = self.softmax, self.tensors.nan_to_zero
        for h in range(2):
            T.buffer_store(softmax.rescale, average_factor(softmax.row_sum[h], nan_to_zero), [h])
        self.sums.map(lambda value, i: averaged(value, softmax.rescale[row_of(i)], nan_to_zero))
