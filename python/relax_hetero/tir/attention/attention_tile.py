"""A tile of queries against a block of keys: scores, softmax, and the sums of values."""

from __future__ import annotations

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
from ..matmul.fp16_partial_sums import MIN_SQUARE
from ..pack.tile_transpose import riffle_orders
from .attention_operands import accumulate, factors_of_scores, factors_of_values, store_weights, widen_queries
from .attention_spec import AttentionSpec

LOWEST = -3.4028234663852886e38
"""The least finite float32: what a row's maximum is raised to, so that -inf less it is -inf, not NaN."""

Span = tuple[Expr, Expr, Expr, Expr]
"""A block of keys: its first, how many, whether it is the first and whether the last."""


def emit_tile(spec: AttentionSpec, at: dict[str, Expr], row: Expr, within: Expr, rows: int, span: Span) -> None:
    """The work of `rows` queries from `row` on, those from `within` on in their block, for a block of keys."""
    tile = _QueryTile(spec, at, row, within, rows, span)
    if spec.blocks.is_widened:
        widen_queries(spec, at, row, rows)
    tile.scores()
    tile.softmax()
    tile.values()


class QueryRows:
    """Queries against a block of keys, and the arithmetic of one score and of softmax.

    Parameters
    ----------
    row, within : PrimExpr
        The first query, and its number in its block.
    rows : int or PrimExpr
        How many.
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
        """Keys of the block that at least one of the first rows sees."""
        if not self.spec.problem.causal:
            return self.size
        seen = self.row + (rows + self._ahead() - self.first)
        return materialize(T.max(minimum(seen, self.size), tirx.const(0, "int64")))

    def _ahead(self) -> Expr:
        """Keys that query 0 sees, less one."""
        sizes = self.spec.sizes
        return sizes["n"] - sizes["m"] if self.spec.problem.causal == "bottom_right" else 0

    def _score(
        self, product: Expr, i: Expr, column: Expr, exists: Expr | None, loaded: dict[tuple[int, Expr], Expr]
    ) -> Expr:
        """A vector of scores of query i: the expression, and -inf where there is no key or it is not seen."""
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
        shown = self._shown(i, column, exists)
        if shown is None:
            return let(value)
        return let(T.Select(shown, value, vector_math.constant(value, -float("inf"))))

    def _shown(self, i: Expr, column: Expr, exists: Expr | None) -> Expr | None:
        """Which keys of a vector query i sees, of those that exist; None: all."""
        if not self.spec.problem.causal:
            return exists
        seen = materialize(self.row + (i + 1 + self._ahead()) - self.first - column)
        return lane_mask(minimum(seen, self.size - column), self.lanes)

    def _score_at(self, i: Expr, column: Expr) -> Expr:
        start = self.spec.at("scores") + i * self.spec.blocks.score_distance
        return lane_indices(start + column, self.lanes)

    def _row_max(self, i: Expr, maxima: Expr) -> Expr:
        """Number that is subtracted from the scores of a row, given the maximum of each lane."""
        row_max = broadcast(let(over_lanes(maxima, T.max, self.lanes)), self.lanes)
        if self.online:
            before = self._state("maxima", i)
            row_max = let(T.Select(broadcast(self.is_first, self.lanes), row_max, T.max(row_max, before)))
        # NaN among the scores need not reach the maximum: it makes the sum NaN.
        return let(T.max(row_max, vector_math.constant(row_max, LOWEST)))

    def _total(self, powers: Expr) -> Expr:
        return broadcast(let(over_lanes(powers, lambda a, b: a + b, self.lanes)), self.lanes)

    def _factor(self, i: Expr, row_max: Expr, total: Expr) -> Expr:
        if not self.online:
            return self._average(total)
        before = self._state("maxima", i)
        shrunk = T.Select(
            broadcast(self.is_first, self.lanes), zeros("float32", self.lanes), exp_nonpositive(before - row_max)
        )
        shrunk = let(shrunk)
        kept = T.Select(
            broadcast(self.is_first, self.lanes), zeros("float32", self.lanes), self._state("sums", i) * shrunk
        )
        for name, value in (("sums", let(kept + total)), ("maxima", row_max)):
            T.buffer_store(self.spec.room, T.Shuffle([value], [0]), [self._state_at(name, i)])
        return shrunk

    def _average(self, total: Expr) -> Expr:
        one = vector_math.constant(total, 1.0)
        if not self.spec.problem.nan_to_zero:
            return one / total
        # A sum of zero: every score was -inf.
        return T.Select(total > zeros("float32", self.lanes), one / total, zeros("float32", self.lanes))

    def _state_at(self, name: str, i: Expr) -> Expr:
        return self.spec.at(name) + self.within + i

    def _state(self, name: str, i: Expr) -> Expr:
        return let(broadcast(self.spec.room[self._state_at(name, i)], self.lanes))

    def _partial_at(self, i: Expr, j: int, panel: Expr) -> Expr:
        blocks = self.spec.blocks
        row = (self.within + i) * (blocks.value_panels * blocks.columns)
        return lane_indices(self.spec.at("partial") + row + panel * blocks.columns + j * self.lanes, self.lanes)

    def _write(self, i: Expr, column: Expr, total: Expr, average: Expr, mask: Expr | None) -> None:
        """Store a vector of the result: sums of values times what makes them averages."""
        view, value = self.spec.result, total * average
        if self.spec.problem.nan_to_zero:
            value = T.Select(average > zeros("float32", self.lanes), value, zeros("float32", self.lanes))
        view.store(view.address({**self.at, "m": self.row + i, "e": column}), value, self.lanes, mask)


class _QueryTile(QueryRows):
    """One tile while its code is written."""

    def __init__(
        self, spec: AttentionSpec, at: dict[str, Expr], row: Expr, within: Expr, rows: int, span: Span
    ) -> None:
        super().__init__(spec, at, row, within, rows, span)
        self.maxima = Registers(rows, "float32", self.lanes)
        self.factors = Registers(rows, "float32", self.lanes)
        """Factors of earlier sums, or, with one block of keys, of all sums to make them averages."""

    # -- scores

    def scores(self) -> None:
        """Scores of every key of the block into scratch, and what is greatest of each lane into registers."""
        for i in range(self.rows):
            self.maxima[i] = broadcast(vector_math.constant(zeros("float32", 1), -float("inf")), self.lanes)
        columns = self.spec.blocks.columns
        if isinstance(self.count, int):
            with loop(self.count // columns) as panel:
                self._panel(panel, None)
            if self.count % columns:
                self._panel(tirx.const(self.count // columns, "int64"), self.count % columns)
            return
        whole = materialize(self.count // columns)
        with loop(whole) as panel:
            self._panel(panel, None)
        left = materialize(self.count - whole * columns)
        with when(left > 0):
            self._panel(whole, left)

    def _panel(self, panel: Expr, left: Expr | None) -> None:
        """One panel of keys, of which `left` exist (None: all)."""
        spec, blocks = self.spec, self.spec.blocks
        width, columns, accs = spec.sizes["d"], blocks.columns, spec.registers
        vectors = self.vectors if not isinstance(left, int) else ceil_div(left, self.lanes)
        if blocks.is_decode:
            for number in range(self.rows * vectors):
                i, j = divmod(number, vectors)
                column = materialize(panel * columns + j * self.lanes)
                size = None if left is None else self.size
                accs[number] = products_of_keys(spec, self.at, self.row + i, self.first, column, size)
        else:
            keys = materialize(spec.at("keys") + panel * (blocks.width // blocks.together * columns))
            factor = factors_of_scores(spec, self.at, self.row)
            accumulate(
                spec,
                (self.rows, vectors),
                width // blocks.together,
                factor,
                lambda k, j: self._in_room(keys + k * columns + j * self.lanes),
                # Scores are added to others: what is lost of small ones does not matter.
                ([None if left is None else lane_mask(left - j * self.lanes, self.lanes) for j in range(vectors)], 0.0),
            )
        for j in range(vectors):
            loaded: dict[tuple[int, Expr], Expr] = {}
            column = materialize(panel * columns + j * self.lanes)
            exists = None if left is None else lane_mask(left - j * self.lanes, self.lanes)
            for i in range(self.rows):
                value = self._score(accs[i * vectors + j], i, column, exists, loaded)
                T.buffer_store(spec.room, value, [self._score_at(i, column)])
                self.maxima[i] = T.max(self.maxima[i], value)

    def _in_room(self, start: Expr) -> Expr:
        value = self.spec.room[lane_indices(start, self.lanes)]
        return T.reinterpret(f"int32x{self.lanes}", value) if self.spec.blocks.is_paired else value

    # -- softmax

    def softmax(self) -> None:
        """Scores in scratch become powers of e, not divided by their sum yet."""
        spec = self.spec
        for i in range(self.rows):
            row_max = self._row_max(i, self.maxima[i])
            total = Registers(1, "float32", self.lanes)
            total[0] = zeros("float32", self.lanes)
            with loop(materialize(ceil_div(self.count, self.lanes))) as vector:
                where = self._score_at(i, vector * self.lanes)
                power = exp_nonpositive(spec.room[where] - row_max)
                if spec.blocks.is_paired:
                    store_weights(spec, i, materialize(vector), power)
                else:
                    T.buffer_store(spec.room, power, [where])
                total[0] = total[0] + power
            self.factors[i] = self._factor(i, row_max, self._total(total[0]))

    # -- values

    def values(self) -> None:
        """Sums of values, weighted by the powers of e; after the last block, averages into the result."""
        blocks, masks = self.spec.blocks, self.spec.value_masks
        whole = (len(masks) - (masks[-1] is not None)) // blocks.vectors
        with loop(whole) as panel:
            self._value_panel(panel, [None] * blocks.vectors)
        rest = masks[whole * blocks.vectors :]
        if rest:
            self._value_panel(tirx.const(blocks.value_panels - 1, "int64"), rest)

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
            values = materialize(spec.at("values") + panel * (blocks.keys // blocks.together * blocks.columns))
            steps = materialize(ceil_div(self.count, blocks.together))
            accumulate(
                spec,
                (self.rows, len(masks)),
                steps,
                factor,
                lambda k, j: self._in_room(values + k * blocks.columns + j * self.lanes),
                ([None] * len(masks), MIN_SQUARE),
            )

        def finish() -> None:
            for i in range(self.rows):
                average = self.factors[i] if not self.online else let(self._average(self._state("sums", i)))
                for j, mask in enumerate(masks):
                    column = materialize(panel * blocks.columns) + j * self.lanes
                    self._write(i, column, self._sum(i, j, panel, len(masks)), average, mask)

        def keep() -> None:
            for i in range(self.rows):
                for j in range(len(masks)):
                    T.buffer_store(spec.room, self._sum(i, j, panel, len(masks)), [self._partial_at(i, j, panel)])

        either(self.is_last if self.online else True, finish, keep)

    def _sum(self, i: int, j: int, panel: Expr, vectors: int) -> Expr:
        added = self.spec.registers[i * vectors + j]
        if not self.online:
            return added
        before = let(self.spec.room[self._partial_at(i, j, panel)])
        is_first = broadcast(self.is_first, self.lanes)
        return added + T.Select(is_first, zeros("float32", self.lanes), before * self.factors[i])


def products_of_keys(
    spec: AttentionSpec, at: dict[str, Expr], query: Expr, first: Expr, column: Expr, size: Expr | None
) -> Expr:
    """The products of a query with a vector of keys, which are read once, as they lie.

    This is the form for hardly a query, as of a decoder that makes one token after the other: laying keys out for one
    query would cost more than its scores, which are sums of products along the keys' own rows.

    Parameters
    ----------
    at : dict
        Batch and head.
    query : PrimExpr
        Its number.
    first : PrimExpr
        The first key of the block.
    column : PrimExpr
        The first of the vector's keys in the block.
    size : PrimExpr or None
        How many keys the block has: for what is beyond the last, the last is taken. None: all of the vector's exist.
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
        sums = [once(one if chunk == 0 else sums[lane] + one) for lane, one in enumerate(products)]
    return sums_of(sums, lanes)


def sums_of(vectors: list[Expr], lanes: int) -> Expr:
    """The vector of the sums of as many vectors as each has lanes.

    Two halves of the vectors are merged element by element and their halves added, as a transpose would go.
    """
    low, high = riffle_orders(lanes)
    while len(vectors) > 1:
        half = len(vectors) // 2
        pairs = zip(vectors[:half], vectors[half:], strict=True)
        vectors = [once(T.Shuffle([a, b], low) + T.Shuffle([a, b], high)) for a, b in pairs]
    return vectors[0]
