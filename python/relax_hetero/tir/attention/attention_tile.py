"""Attention of a tile of queries to a block of keys: scores, softmax, and sums of values."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import (
    Expr,
    Registers,
    broadcast,
    ceil_div,
    either,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    over_lanes,
    when,
    zeros,
)
from ..elementwise import expression_code
from ..math import vector_math
from ..math.vector_math import exp_nonpositive, once
from ..microkernel.fp16_partial_sums import MIN_SQUARE
from ..pack.tile_transpose import riffle_orders
from .attention_operands import accumulate, factors_of_scores, factors_of_values, store_weights, widen_queries
from .attention_spec import AttentionSpec

LOWEST = -3.4028234663852886e38
"""Lowest finite float32: lower bound of a row's maximum, so that -inf minus the maximum is -inf, not NaN."""

Span = tuple[Expr, Expr, Expr, Expr]
"""A block of keys: its first key, its size, whether it is the first block, and whether the last."""


def emit_tile(spec: AttentionSpec, at: dict[str, Expr], row: Expr, within: Expr, rows: int, span: Span) -> None:
    """Write the attention of `rows` queries from `row` on (`within` in their block) to a block of keys."""
    tile = _QueryTile(spec, at, row, within, rows, span)
    if spec.blocks.is_widened:
        widen_queries(spec, at, row, rows)
    tile.scores()
    tile.softmax()
    tile.values()


class QueryRows:
    """Queries and a block of keys, with the arithmetic of scores and of softmax.

    Parameters
    ----------
    row, within : PrimExpr
        First query, and its number in its block.
    rows : int or PrimExpr
        Number of queries.
    """

    def __init__(
        self, spec: AttentionSpec, at: dict[str, Expr], row: Expr, within: Expr, rows: Expr, span: Span
    ) -> None:
        self.spec, self.at, self.row, self.within, self.rows = spec, at, row, materialize(within), rows
        self.first, self.size, self.is_first, self.is_last = span
        self.lanes, self.vectors = spec.blocks.lanes, spec.blocks.vectors
        self.online = not spec.blocks.is_single
        self.count = self._visible(self.rows)

    def _visible(self, rows: Expr) -> Expr:
        """Number of keys of the block that are visible to any of the first `rows` rows."""
        if not self.spec.problem.causal:
            return self.size
        visible = self.row + (rows + self._causal_offset() - self.first)
        return materialize(T.max(minimum(visible, self.size), tirx.const(0, "int64")))

    def _causal_offset(self) -> Expr:
        """Last key that is visible to query 0."""
        sizes = self.spec.sizes
        return sizes["n"] - sizes["m"] if self.spec.problem.causal == "bottom_right" else 0

    def _score(
        self, product: Expr, i: Expr, column: Expr, exists: Expr | None, loaded: dict[tuple[int, Expr], Expr]
    ) -> Expr:
        """A vector of scores of query i: the expression, and -inf for keys that do not exist or are masked."""
        spec, scores = self.spec, self.spec.problem.scores
        values = [product]
        for number, view in enumerate(spec.masks):
            key = (number, i if view.runs_along("m") else -1)
            if key not in loaded:
                where = view.address({**self.at, "m": self.row + i, "n": self.first + column})
                loaded[key] = let(view.load(where, "n", self.lanes, exists))
            values.append(loaded[key])
        dtypes = ["float32", *(str(view.data.dtype) for view in spec.masks)]
        value = expression_code.emit(scores.expression, values, dtypes, self.lanes)
        visible = self._visible_lanes(i, column, exists)
        if visible is None:
            return let(value)
        return let(T.Select(visible, value, vector_math.constant(value, -float("inf"))))

    def _visible_lanes(self, i: Expr, column: Expr, exists: Expr | None) -> Expr | None:
        """The mask of existing keys of a vector that are visible to query i; None: all."""
        if not self.spec.problem.causal:
            return exists
        visible = materialize(self.row + (i + 1 + self._causal_offset()) - self.first - column)
        return lane_mask(minimum(visible, self.size - column), self.lanes)

    def _score_at(self, i: Expr, column: Expr) -> Expr:
        start = self.spec.at("scores") + i * self.spec.blocks.score_distance
        return lane_indices(start + column, self.lanes)

    def _row_max(self, i: Expr, maxima: Expr) -> Expr:
        """The maximum that is subtracted from the scores of a row, given the maximum of each lane."""
        row_max = broadcast(let(over_lanes(maxima, T.max, self.lanes)), self.lanes)
        if self.online:
            before = self._state("maxima", i)
            row_max = let(T.Select(broadcast(self.is_first, self.lanes), row_max, T.max(row_max, before)))
        # NaN among the scores need not reach the maximum: it makes the sum NaN.
        return let(T.max(row_max, vector_math.constant(row_max, LOWEST)))

    def _weigh(self, rows: Sequence[Expr], maxima: Sequence[Expr], vectors: Expr) -> list[Expr]:
        """Replace the rows' scores in scratch by softmax weights, not yet divided by their sum.

        The work on the rows is interleaved, because one row waits for its maximum and its sum.

        Parameters
        ----------
        maxima : sequence of PrimExpr
            The maximum of each lane of each row's scores.
        vectors : PrimExpr or int
            Number of vectors of scores.

        Returns
        -------
        list of PrimExpr
            For each row the factor of earlier sums, or, with a single block of keys, the reciprocal of its sum.
        """
        spec, lanes = self.spec, self.lanes
        row_max = [self._row_max(i, lane_maxima) for i, lane_maxima in zip(rows, maxima, strict=True)]
        sums = Registers(len(row_max), "float32", lanes)
        for number in range(len(row_max)):
            sums[number] = zeros("float32", lanes)
        with loop(vectors) as vector:
            for number, i in enumerate(rows):
                index = self._score_at(i, vector * lanes)
                weights = let(exp_nonpositive(spec.scratch[index] - row_max[number]))
                if spec.blocks.is_paired:
                    store_weights(spec, i, materialize(vector), weights)
                else:
                    T.buffer_store(spec.scratch, weights, [index])
                sums[number] = sums[number] + weights
        factors = []
        for number, i in enumerate(rows):
            total = broadcast(let(over_lanes(sums[number], lambda a, b: a + b, lanes)), lanes)
            factors.append(self._rescale(i, row_max[number], total))
        return factors

    def _rescale(self, i: Expr, row_max: Expr, total: Expr) -> Expr:
        if not self.online:
            return self._average(total)
        before = self._state("maxima", i)
        rescale = T.Select(
            broadcast(self.is_first, self.lanes), zeros("float32", self.lanes), exp_nonpositive(before - row_max)
        )
        rescale = let(rescale)
        rescaled_sum = T.Select(
            broadcast(self.is_first, self.lanes), zeros("float32", self.lanes), self._state("sums", i) * rescale
        )
        for name, value in (("sums", let(rescaled_sum + total)), ("maxima", row_max)):
            T.buffer_store(self.spec.scratch, T.Shuffle([value], [0]), [self._state_at(name, i)])
        return rescale

    def _average(self, total: Expr) -> Expr:
        one = vector_math.constant(total, 1.0)
        if not self.spec.problem.nan_to_zero:
            return one / total
        # The sum is zero if every score is -inf.
        return T.Select(total > zeros("float32", self.lanes), one / total, zeros("float32", self.lanes))

    def _state_at(self, name: str, i: Expr) -> Expr:
        return self.spec.at(name) + self.within + i

    def _state(self, name: str, i: Expr) -> Expr:
        return let(broadcast(self.spec.scratch[self._state_at(name, i)], self.lanes))

    def _partial_at(self, i: Expr, j: int, panel: Expr) -> Expr:
        blocks = self.spec.blocks
        row = (self.within + i) * (blocks.value_panels * blocks.columns)
        return lane_indices(self.spec.at("partial") + row + panel * blocks.columns + j * self.lanes, self.lanes)

    def _write(self, i: Expr, column: Expr, total: Expr, average: Expr, mask: Expr | None) -> None:
        """Store a vector of the result: sums of values times the reciprocal of the sum of weights."""
        view, value = self.spec.result, total * average
        if self.spec.problem.nan_to_zero:
            value = T.Select(average > zeros("float32", self.lanes), value, zeros("float32", self.lanes))
        view.store(view.address({**self.at, "m": self.row + i, "e": column}), value, self.lanes, mask)


class _QueryTile(QueryRows):
    """Code of a register tile."""

    def __init__(
        self, spec: AttentionSpec, at: dict[str, Expr], row: Expr, within: Expr, rows: int, span: Span
    ) -> None:
        super().__init__(spec, at, row, within, rows, span)
        self.maxima = Registers(rows, "float32", self.lanes)
        self.factors = Registers(rows, "float32", self.lanes)
        """Rescaling factors of earlier sums, or, with a single block of keys, reciprocals of the sums of weights."""

    # -- scores

    def scores(self) -> None:
        """Write the scores of every key of the block to scratch, and the maximum of each lane to registers."""
        for i in range(self.rows):
            self.maxima[i] = broadcast(vector_math.constant(zeros("float32", 1), -float("inf")), self.lanes)
        columns = self.spec.blocks.columns
        if isinstance(self.count, int):
            with loop(self.count // columns) as panel:
                self._panel(panel, None)
            if self.count % columns:
                self._panel(tirx.const(self.count // columns, "int64"), self.count % columns)
            return
        whole_panels = materialize(self.count // columns)
        with loop(whole_panels) as panel:
            self._panel(panel, None)
        left = materialize(self.count - whole_panels * columns)
        with when(left > 0):
            self._panel(whole_panels, left)

    def _panel(self, panel: Expr, left: Expr | None) -> None:
        """Write the scores of a panel of keys, `left` of which exist (None: all)."""
        spec, blocks = self.spec, self.spec.blocks
        width, columns, accs = spec.sizes["d"], blocks.columns, spec.registers
        vectors = self.vectors if not isinstance(left, int) else ceil_div(left, self.lanes)
        if blocks.is_decode:
            for acc in range(self.rows * vectors):
                i, j = divmod(acc, vectors)
                column = materialize(panel * columns + j * self.lanes)
                size = None if left is None else self.size
                accs[acc] = products_of_keys(spec, self.at, self.row + i, self.first, column, size)
        else:
            keys = materialize(spec.at("keys") + panel * (blocks.width // blocks.word_elements * columns))
            factor = factors_of_scores(spec, self.at, self.row)
            accumulate(
                spec,
                (self.rows, vectors),
                width // blocks.word_elements,
                factor,
                lambda k, j: self._load_scratch(keys + k * columns + j * self.lanes),
                # Lost small products do not matter: scores are sums.
                ([None if left is None else lane_mask(left - j * self.lanes, self.lanes) for j in range(vectors)], 0.0),
            )
        for j in range(vectors):
            loaded: dict[tuple[int, Expr], Expr] = {}
            column = materialize(panel * columns + j * self.lanes)
            exists = None if left is None else lane_mask(left - j * self.lanes, self.lanes)
            for i in range(self.rows):
                value = self._score(accs[i * vectors + j], i, column, exists, loaded)
                T.buffer_store(spec.scratch, value, [self._score_at(i, column)])
                self.maxima[i] = T.max(self.maxima[i], value)

    def _load_scratch(self, start: Expr) -> Expr:
        value = self.spec.scratch[lane_indices(start, self.lanes)]
        return T.reinterpret(f"int32x{self.lanes}", value) if self.spec.blocks.is_paired else value

    # -- softmax

    def softmax(self) -> None:
        """Replace the scores in scratch by softmax weights, not yet divided by their sum."""
        vectors = materialize(ceil_div(self.count, self.lanes))
        for i in range(self.rows):
            (self.factors[i],) = self._weigh([i], [self.maxima[i]], vectors)

    # -- values

    def values(self) -> None:
        """Accumulate values with their softmax weights; after the last block, write averages to the result."""
        blocks, masks = self.spec.blocks, self.spec.value_masks
        whole_panels = (len(masks) - (masks[-1] is not None)) // blocks.vectors
        with loop(whole_panels) as panel:
            self._value_panel(panel, [None] * blocks.vectors)
        tail_masks = masks[whole_panels * blocks.vectors :]
        if tail_masks:
            self._value_panel(tirx.const(blocks.value_panels - 1, "int64"), tail_masks)

    def _value_panel(self, panel: Expr, masks: list[Expr | None]) -> None:
        spec, blocks = self.spec, self.spec.blocks
        panel = materialize(panel)
        factor = factors_of_values(spec)
        if blocks.is_decode:
            view = spec.value
            start = materialize(view.address({**self.at, "n": self.first, "e": materialize(panel * blocks.columns)}))
            steps = view.stride("n"), view.stride("e") * self.lanes
            accumulate(
                spec,
                (self.rows, len(masks)),
                self.count,
                factor,
                lambda k, j: view.load(start + k * steps[0] + j * steps[1], "e", self.lanes, masks[j]),
            )
        else:
            values = materialize(spec.at("values") + panel * (blocks.keys // blocks.word_elements * blocks.columns))
            steps = materialize(ceil_div(self.count, blocks.word_elements))
            accumulate(
                spec,
                (self.rows, len(masks)),
                steps,
                factor,
                lambda k, j: self._load_scratch(values + k * blocks.columns + j * self.lanes),
                (None, MIN_SQUARE),
            )

        def finish() -> None:
            for i in range(self.rows):
                average = self.factors[i] if not self.online else let(self._average(self._state("sums", i)))
                for j, mask in enumerate(masks):
                    column = materialize(panel * blocks.columns) + j * self.lanes
                    self._write(i, column, self._sum(i, j, panel, len(masks)), average, mask)

        def store_partial() -> None:
            for i in range(self.rows):
                for j in range(len(masks)):
                    T.buffer_store(spec.scratch, self._sum(i, j, panel, len(masks)), [self._partial_at(i, j, panel)])

        either(self.is_last if self.online else True, finish, store_partial)

    def _sum(self, i: int, j: int, panel: Expr, vectors: int) -> Expr:
        block_sum = self.spec.registers[i * vectors + j]
        if not self.online:
            return block_sum
        before = let(self.spec.scratch[self._partial_at(i, j, panel)])
        is_first = broadcast(self.is_first, self.lanes)
        return block_sum + T.Select(is_first, zeros("float32", self.lanes), before * self.factors[i])


def products_of_keys(
    spec: AttentionSpec, at: dict[str, Expr], query: Expr, first: Expr, column: Expr, size: Expr | None
) -> Expr:
    """The products of a query with a vector of keys, which are read in place.

    This is the form for one or two queries, as in decoding: packing keys for one query would cost more than its scores,
    which are sums of products along the keys' rows.

    Parameters
    ----------
    at : dict
        Batch and head.
    query : PrimExpr
        Number of the query.
    first : PrimExpr
        First key of the block.
    column : PrimExpr
        First key of the vector in the block.
    size : PrimExpr or None
        Number of keys of the block, to which keys are clamped; None if all keys of the vector exist.
    """
    lanes, width = spec.blocks.lanes, spec.sizes["d"]
    keys = materialize(spec.key.address({**at, "n": first}))
    start = materialize(spec.query.address({**at, "m": query}))
    step = spec.key.stride("n")
    if size is None:
        begin = materialize(keys + column * step)
        rows = [begin + step * lane for lane in range(lanes)]
    else:
        rows = [materialize(keys + minimum(column + lane, size - 1) * step) for lane in range(lanes)]
    sums: list[Expr] = []
    for chunk in range(0, width, lanes):
        mask = lane_mask(width - chunk, lanes)
        factor = let(spec.query.load(start + spec.query.stride("d") * chunk, "d", lanes, mask))
        products = [factor * spec.key.load(row + chunk, "d", lanes, mask) for row in rows]
        sums = [
            once(lane_product if chunk == 0 else sums[lane] + lane_product)
            for lane, lane_product in enumerate(products)
        ]
    return sum_vectors(sums, lanes)


def sum_vectors(vectors: list[Expr], lanes: int) -> Expr:
    """The vector of the lane sums of `lanes` vectors.

    Every stage interleaves two halves of the vectors as in a transpose, and adds the results.
    """
    low, high = riffle_orders(lanes)
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [once(T.Shuffle([a, b], low) + T.Shuffle([a, b], high)) for a, b in pairs]
    return vectors[0]
