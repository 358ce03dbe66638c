"""Attention of a tile of rows to a block of keys: scores, online softmax, and sums of values.

A row is a query of one head. Scores are queries times keys; sums are softmax weights (not yet divided by their sum)
times values. A larger row maximum rescales earlier sums (Milakov and Gimelshein, "Online normalizer calculation for
softmax").
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import (
    Expr,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    over_lanes,
    vector_type,
    when,
    zeros,
)
from ..elementwise import expression_code
from ..math import vector_math
from ..math.casts import cast
from ..math.vector_math import exp_nonpositive
from ..microkernel.fp16_partial_sums import MIN_SQUARE, Fp16PartialSums
from ..microkernel.microkernel import VectorTile
from .attention_spec import AttentionSpec
from .key_values import Factors, KeyValueSource, LeftFactors

LOWEST = -3.4028234663852886e38
"""Lowest finite float32: lower bound of a row's maximum, so that -inf minus the maximum is -inf, not NaN."""

# Rows whose softmax is interleaved. Measured (Zen 5, 128 keys): 4 rows take 12 to 20 % less time than in sequence.
SOFTMAX_ROWS = 4


class AttentionRows(ABC):
    """Rows and a block of keys, with the arithmetic of scores and of softmax.

    `row`, `within`: first row, and its number in its block of rows. `rows`: number of rows.
    """

    def __init__(self, spec: AttentionSpec, source: KeyValueSource, row: Expr, within: Expr, rows: Expr) -> None:
        self.spec, self.source, self.row, self.within, self.rows = spec, source, row, materialize(within), rows
        self.lanes, self.vectors = spec.plan.lanes, spec.plan.vectors
        self.online = not spec.plan.is_single
        self.count = source.count(row, rows)

    def emit(self) -> None:
        """Write the attention of the rows to the block."""
        self.copy_queries()
        self.scores()
        self.softmax()
        self.values()

    @abstractmethod
    def copy_queries(self) -> None:
        """Copy the queries to scratch, if they are neither read in place nor there already."""

    @abstractmethod
    def scores(self) -> None:
        """Write the scores of every key to scratch."""

    @abstractmethod
    def softmax(self) -> None:
        """Replace scores by softmax weights, not yet divided by their sum."""

    @abstractmethod
    def values(self) -> None:
        """Accumulate values with their softmax weights."""

    def _score(
        self,
        product: Expr,
        i: Expr,
        column: Expr,
        # Masks of keys that exist, and of those among them that the row sees; None: all.
        masks: tuple[Expr | None, Expr | None],
        loaded: dict[tuple[int, Expr], Expr],  # vectors of operands that were loaded for other rows of these keys
    ) -> Expr:
        """A vector of scores of row i: the expression, and -inf for keys that the row does not see."""
        exists, visible = masks
        spec, source = self.spec, self.source
        values = [source.scaled_scores(product, column)]
        for number, view in enumerate(spec.masks):
            varies = view.runs_along("m") or (spec.plan.heads > 1 and view.runs_along("h"))
            key = (number, i if varies else -1)
            if key not in loaded:
                where = view.address({**source.coordinates(self.row + i), "n": source.first + column})
                loaded[key] = let(view.load(where, "n", self.lanes, exists))
            values.append(loaded[key])
        dtypes = ["float32", *(str(view.data.dtype) for view in spec.masks)]
        value = expression_code.emit(spec.scores, values, dtypes, self.lanes)
        return let(value if visible is None else T.Select(visible, value, vector_math.constant(value, -float("inf"))))

    def _score_at(self, i: Expr, column: Expr) -> Expr:
        return i * self.spec.plan.score_distance + column

    def _row_max(self, i: Expr, maxima: Expr) -> Expr:
        """The maximum that is subtracted from the scores of a row, given the maximum of each lane."""
        row_max = let(over_lanes(maxima, T.max, self.lanes))
        if self.online:
            row_max = let(T.Select(self.source.is_first, row_max, T.max(row_max, self._state("maxima", i))))
        # NaN among the scores need not reach the maximum: it makes the sum NaN.
        return let(T.max(row_max, vector_math.constant(row_max, LOWEST)))

    def _weigh(self, rows: Sequence[Expr], maxima: Sequence[Expr], vectors: Expr) -> list[Expr]:
        """Replace the rows' scores in scratch by softmax weights, not yet divided by their sum.

        The work on the rows is interleaved, because one row waits for its maximum and its sum. `maxima`: the maximum of
        each lane of each row's scores. `vectors`: number of vectors of scores. For each row the factor of earlier sums,
        or, with a single block of keys, the sum of its weights.
        """
        spec, lanes = self.spec, self.lanes
        row_max = [self._row_max(i, lane_maxima) for i, lane_maxima in zip(rows, maxima, strict=True)]
        sums = Registers(len(row_max), "float32", lanes)
        for number in range(len(row_max)):
            sums[number] = zeros("float32", lanes)
        with loop(vectors) as vector:
            column = vector * lanes
            for number, i in enumerate(rows):
                index = self._score_at(i, column)
                scores = spec.load("scores", index, lanes)
                weights = let(exp_nonpositive(scores - broadcast(row_max[number], lanes)))
                sums[number] = sums[number] + weights
                if spec.plan.pair_dtype:
                    store_weights(spec, i, materialize(vector), weights)
                else:
                    spec.store("scores", index, self.source.scaled_weights(weights, column), lanes)
        totals = [over_lanes(sums[number], lambda a, b: a + b, lanes) for number in range(len(row_max))]
        return [self._rescale(i, *state) for i, *state in zip(rows, row_max, totals, strict=True)]

    def _rescale(self, i: Expr, row_max: Expr, total: Expr) -> Expr:
        """The factor of a row's earlier sums, whose state is updated; with a single block, the sum of its weights."""
        if not self.online:
            return let(total)
        zero, is_first = tirx.const(0.0, "float32"), self.source.is_first
        rescale = let(T.Select(is_first, zero, exp_nonpositive(self._state("maxima", i) - row_max)))
        rescaled_sum = let(T.Select(is_first, zero, self._state("sums", i) * rescale))
        self.spec.store("sums", self.within + i, rescaled_sum + total)
        self.spec.store("maxima", self.within + i, row_max)
        return rescale

    def _state(self, name: str, i: Expr) -> Expr:
        return let(self.spec.load(name, self.within + i))

    def _partial_at(self, i: Expr, column: Expr) -> Expr:
        return (self.within + i) * self.spec.plan.value_distance + column


class VectorRows(AttentionRows):
    """Code of a register tile. `rows`: number of rows."""

    rows: int

    def __init__(self, spec: AttentionSpec, source: KeyValueSource, row: Expr, within: Expr, rows: int) -> None:
        super().__init__(spec, source, row, within, rows)
        self.limits = [source.limits(row + i) for i in range(rows)]
        self.maxima = Registers(rows, "float32", self.lanes)
        self.factors = Registers(rows, "float32", 1)
        """Rescaling factors of earlier sums, or, with a single block of keys, the sums of weights."""

    def copy_queries(self) -> None:
        """Copy nothing."""

    def _accumulate(
        self,
        vectors: int,
        steps: Expr,
        left: LeftFactors,
        right: Factors,
        exact: tuple[Masks | None, float],
        prefetch: Callable[[Expr], None] | None,
    ) -> None:
        """Accumulate ``left(k, i) * right(k, j)`` over steps k, from zeros, for all rows i and `vectors` vectors j.

        For fp16 partial sums, `exact` has the relevant lanes of each vector (None: all), and the minimum mean square of
        products (`is_out_of_range`).
        """
        dot = self.spec.dot
        tile = VectorTile(dot, self.spec.registers, self.rows, vectors, self.lanes)
        tile.clear()
        if dot.form == "fma" and self.spec.plan.left_steps > 1:
            tile.multiply_by_lanes(steps, self.spec.plan.left_steps, left, right, prefetch)
            return
        if not dot.short:
            tile.multiply(steps, left, right, prefetch_step=prefetch)
            return
        partial_sums = Fp16PartialSums(dot, tile.sums, tile.count, tile.lanes)
        partial_sums.add(
            steps,
            partial_sums.length,
            lambda first, count, sums: replace(tile, sums=sums).multiply(count, left, right, first),
        )
        tile.again_if_out_of_range(steps * dot.k0, lambda wide: wide.multiply(steps, left, right), *exact)

    # -- scores

    def scores(self) -> None:
        """Write the scores of every key of the block to scratch, and the maximum of each lane to registers."""
        for i in range(self.rows):
            self.maxima[i] = broadcast(vector_math.constant(zeros("float32", 1), -float("inf")), self.lanes)
        columns, count = self.spec.plan.columns, self.count
        if self.source.is_padded:
            count = materialize(ceil_div(count, columns) * columns)
        whole_panels = materialize(count // columns)
        with loop(whole_panels) as panel:
            self._panel(panel, None)
        if isinstance(count, int):
            if count % columns:
                self._panel(tirx.const(whole_panels, "int64"), count % columns)
        elif not self.source.is_padded:
            left = materialize(count - whole_panels * columns)
            with when(left > 0):
                self._panel(whole_panels, left)

    def _panel(self, panel: Expr, left: Expr | None) -> None:
        """Write the scores of a panel of keys, `left` of which exist (None: all)."""
        spec, lanes = self.spec, self.lanes
        vectors = self.vectors if not isinstance(left, int) else ceil_div(left, lanes)
        masks = [None if left is None else lane_mask(left - j * lanes, lanes) for j in range(vectors)]
        columns = [materialize(panel * spec.plan.columns + j * lanes) for j in range(vectors)]
        self._multiply_keys(panel, columns, masks)
        for j, column in enumerate(columns):
            loaded: dict[tuple[int, Expr], Expr] = {}
            for i in range(self.rows):
                visible = masks[j], self._visible_lanes(i, column, masks[j])
                value = self._score(spec.registers[i * vectors + j], i, column, visible, loaded)
                spec.store("scores", self._score_at(i, column), value, lanes)
                self.maxima[i] = T.max(self.maxima[i], value)

    def _visible_lanes(self, i: int, column: Expr, exists: Expr | None) -> Expr | None:
        """The mask of existing keys of a vector that row i sees; None: all."""
        begin, end = self.limits[i]
        visible = exists if end is None else lane_mask(materialize(end - column), self.lanes)
        if begin is None:
            return visible
        seen = tirx.Not(lane_mask(materialize(begin - column), self.lanes))
        return seen if visible is None else tirx.And(visible, seen)

    def _multiply_keys(self, panel: Expr, columns: Sequence[Expr], masks: Masks) -> None:
        """Accumulate the products of a panel of keys, given the number and the mask of each vector's keys."""
        plan, source = self.spec.plan, self.source
        steps = plan.width // plan.word_elements
        # Lost small products do not matter: scores are sums.
        exact, prefetch = (masks, 0.0), source.prefetch(panel, len(columns), is_keys=True)
        self._accumulate(len(columns), steps, self._queries(), source.keys(panel), exact, prefetch)

    def _queries(self) -> LeftFactors:
        """The left factors of scores."""
        return self._scratch_queries(self.within)

    def _scratch_queries(self, first: Expr) -> LeftFactors:
        spec, width = self.spec, self.spec.plan.width
        start = materialize(spec.at("queries", first * width))
        return lambda k, i, lanes=1: spec.scratch[lane_indices(start + i * width + k, lanes)]

    # -- softmax

    def softmax(self) -> None:
        """Replace the scores in scratch by softmax weights, not yet divided by their sum."""
        vectors = materialize(ceil_div(self.count, self.lanes))
        for first in range(0, self.rows, SOFTMAX_ROWS):
            rows = range(first, min(first + SOFTMAX_ROWS, self.rows))
            factors = self._weigh(rows, [self.maxima[i] for i in rows], vectors)
            for i, factor in zip(rows, factors, strict=True):
                self.factors[i] = factor

    # -- values

    def values(self) -> None:
        """Accumulate values with their softmax weights; after the last block, finish the rows."""
        plan, masks = self.spec.plan, self.spec.value_masks
        whole_panels = (len(masks) - (masks[-1] is not None)) // plan.vectors
        with loop(whole_panels) as panel:
            self._value_panel(panel, [None] * plan.vectors)
        tail_masks = masks[whole_panels * plan.vectors :]
        if tail_masks:
            self._value_panel(tirx.const(plan.value_panels - 1, "int64"), tail_masks)

    def _value_panel(self, panel: Expr, masks: list[Expr | None]) -> None:
        spec = self.spec
        panel, vectors = materialize(panel), len(masks)
        first = materialize(panel * spec.plan.columns)
        steps = materialize(ceil_div(self.count, spec.plan.word_elements))
        values, prefetch = self.source.values(panel, masks), self.source.prefetch(panel, vectors, is_keys=False)
        self._accumulate(vectors, steps, self._weights(), values, (None, MIN_SQUARE), prefetch)
        self._end_panel(first, masks)

    def _end_panel(self, first: Expr, masks: Masks) -> None:
        """Store the sums of a panel of values from an element on, with those of the blocks before."""
        for i in range(self.rows):
            for j in range(len(masks)):
                index = self._partial_at(i, first + j * self.lanes)
                self.spec.store("partial", index, self._sum(i, j, first, len(masks)), self.lanes)

    def _weights(self) -> LeftFactors:
        """The left factors of values: the softmax weights of the tile."""
        spec, plan = self.spec, self.spec.plan
        if plan.pair_dtype:
            weights = materialize(spec.at("weights"))
            return lambda k, i, lanes=1: T.reinterpret("int32", spec.scratch[weights + i * plan.weight_distance + k])
        scores = materialize(spec.at("scores"))
        return lambda k, i, lanes=1: spec.scratch[lane_indices(scores + i * plan.score_distance + k, lanes)]

    def _sum(self, i: int, j: int, first: Expr, vectors: int) -> Expr:
        block_sum, lanes = self.spec.registers[i * vectors + j], self.lanes
        if not self.online:
            return block_sum
        before = let(self.spec.load("partial", self._partial_at(i, first + j * lanes), lanes))
        is_first = broadcast(self.source.is_first, lanes)
        return block_sum + T.Select(is_first, zeros("float32", lanes), before * broadcast(self.factors[i], lanes))


def store_weights(spec: AttentionSpec, i: Expr, vector: Expr, weights: Expr) -> None:
    """Store a vector of softmax weights of row i, rounded, as pairs."""
    lanes = spec.plan.lanes // 2
    pairs = T.reinterpret(vector_type("float32", lanes), cast(weights, spec.plan.pair_dtype))
    spec.store("weights", i * spec.plan.weight_distance + vector * lanes, pairs, lanes)
