"""Attention by tile registers (Intel AMX): scores and values are products of tiles, softmax is done row by row.

A pair of tiles holds up to 32 queries. Keys and values of a block are packed as for vectors that multiply pairs of
bfloat16 (`attention_operands`), which is how tiles want right factors; queries are copied, with zeros behind their
width. What tiles multiply along k goes on to whole steps: there, keys and the powers of e are zeros, and nothing that
they meet is a NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    Registers,
    ceil_div,
    either,
    int64,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from ..math.vector_math import constant, exp_nonpositive
from ..matmul import amx
from .attention_operands import store_weights
from .attention_spec import AttentionSpec
from .attention_tile import QueryRows, Span

# Rows whose softmax goes on at once: each alone waits for its maximum and its sum. Measured without tiles (Zen 5, 128
# keys): 4 rows take 12 to 20 % less than one after the other.
_TOGETHER = 4

_WORD = 4  # bytes of an element of scratch: a float32, or a pair
_LEFT, _RIGHT = (4, 5), (6, 7)  # tiles of factors; those of sums are 0 to 3, two for each of the left ones


def begin_tiles(spec: AttentionSpec) -> None:
    """Begin a task: tiles get their shapes, and elements that no key writes become zero."""
    low, high = _heights(spec)
    second = high or 1
    amx.configure([low, low, second, second, low, second, TILE_ROWS, TILE_ROWS])
    blocks = spec.blocks
    depth, width = blocks.width // 2, spec.sizes["d"] // 2
    if depth == width:
        return
    with loop(blocks.keys // blocks.columns) as panel, loop((depth - width) * blocks.vectors) as vector:
        start = spec.at("keys") + (panel * depth + width) * blocks.columns + vector * blocks.lanes
        T.buffer_store(spec.room, zeros("float32", blocks.lanes), [lane_indices(start, blocks.lanes)])


def pad_values(spec: AttentionSpec, size: Expr) -> None:
    """Zeros behind the last value of a block, up to a whole step."""
    blocks = spec.blocks
    step = TILE_ROWS
    if isinstance(size, int) and size % (2 * step) == 0:
        return
    pairs = materialize(ceil_div(size, 2))
    left = materialize(ceil_div(pairs, step) * step - pairs)
    with loop(blocks.value_panels) as panel, loop(left) as row, loop(blocks.vectors) as vector:
        start = (panel * (blocks.keys // 2) + pairs + row) * blocks.columns + vector * blocks.lanes
        index = lane_indices(spec.at("values") + start, blocks.lanes)
        T.buffer_store(spec.room, zeros("float32", blocks.lanes), [index])


def emit_query_tiles(
    spec: AttentionSpec, instruction: AmxInstruction, at: dict[str, Expr], queries: tuple[Expr, Expr], span: Span
) -> None:
    """The work of a block of queries, from the first to the last, for a block of keys."""
    begin, end = queries
    rows = spec.blocks.rows
    with loop(materialize(ceil_div(end - begin, rows))) as pair:
        within = materialize(pair * rows)
        count = materialize(T.min(end - begin - within, int64(rows)))
        tiles = _QueryTiles(spec, instruction, at, materialize(begin + within), within, count, span)
        tiles.copy_queries()
        tiles.scores()
        tiles.softmax()
        tiles.values()


def _heights(spec: AttentionSpec) -> tuple[int, int]:
    rows = spec.blocks.rows
    return (ceil_div(rows, 2), rows // 2) if rows > TILE_ROWS else (rows, 0)


class _QueryTiles(QueryRows):
    """A pair of tiles of queries, or one, while its code is written."""

    def __init__(
        self,
        spec: AttentionSpec,
        instruction: AmxInstruction,
        at: dict[str, Expr],
        row: Expr,
        within: Expr,
        rows: Expr,
        span: Span,
    ) -> None:
        super().__init__(spec, at, row, 0 if spec.blocks.is_single else within, rows, span)
        self.instruction = instruction
        self.heights = _heights(spec)
        self.lefts = (0, 1) if self.heights[1] else (0,)
        self.sums = [(2 * i + j, i, j) for j in range(self.vectors) for i in self.lefts]
        self.steps = materialize(ceil_div(self.count, spec.blocks.columns))
        """Tiles of keys in pairs, and steps along keys."""

    def _place(self, start: Expr) -> Expr:
        return amx.address(self.spec.room, start)

    def _multiply(self, left: Expr, distance: int, right: Expr) -> None:
        """Add a step of 64 bytes: left factors from `left` on, rows so many elements apart, right ones from `right`."""
        columns = self.spec.blocks.columns
        for j in range(self.vectors):
            amx.load(_RIGHT[j], self._place(right + j * self.lanes), columns * _WORD)
        for i in self.lefts:
            skipped = self.heights[0] * distance if i else 0
            amx.load(_LEFT[i], self._place(left + skipped), distance * _WORD)
        for tile, i, j in self.sums:
            amx.multiply(self.instruction, tile, _LEFT[i], _RIGHT[j])

    def _clear(self) -> None:
        for tile, _, _ in self.sums:
            amx.clear(tile)

    def _each_sum(self, start: Expr, distance: int, move: Callable[[int, Expr, Expr], None]) -> None:
        """Load or store the tiles of sums, whose rows are so many elements apart."""
        for tile, i, j in self.sums:
            skipped = self.heights[0] * distance if i else 0
            move(tile, self._place(start + (skipped + j * self.lanes)), distance * _WORD)

    # -- scores

    def copy_queries(self) -> None:
        """The rows into scratch, zeros behind their width."""
        spec, view = self.spec, self.spec.query
        line = TILE_BYTES // bytes_of(view.nominal)
        whole, left = divmod(spec.sizes["d"], line)
        distance = spec.blocks.query_distance
        with loop(self.rows) as r:
            source = materialize(view.address({**self.at, "m": self.row + r}))
            target = materialize(spec.at("queries") + r * distance)
            for number in range(whole + (left > 0)):
                count = TILE_BYTES if number < whole else left * bytes_of(view.nominal)
                place = self._place(target + number * (TILE_BYTES // _WORD))
                amx.copy_line(amx.address(view.data, source + number * line), place, count)

    def scores(self) -> None:
        """Products of queries and keys into scratch."""
        spec, blocks = self.spec, self.spec.blocks
        depth = blocks.width // 2
        queries, scores = materialize(spec.at("queries")), materialize(spec.at("scores"))
        with loop(self.steps) as panel:
            keys = materialize(spec.at("keys") + panel * (depth * blocks.columns))
            self._clear()
            for step in range(depth // TILE_ROWS):
                left = queries + step * (TILE_BYTES // _WORD)
                self._multiply(left, blocks.query_distance, keys + step * (TILE_ROWS * blocks.columns))
            self._each_sum(scores + panel * blocks.columns, blocks.score_distance, amx.store)

    def _shown(self, i: Expr, column: Expr, exists: Expr | None) -> Expr | None:
        # Of a row, only keys that its query sees are looked at.
        return exists

    # -- softmax

    def softmax(self) -> None:
        """Products become scores, and these powers of e in pairs, with zeros up to a whole step."""
        groups = materialize(self.rows // _TOGETHER)
        with loop(groups) as group:
            self._softmax_of_rows(materialize(group * _TOGETHER), _TOGETHER)
        with loop(materialize(self.rows - groups * _TOGETHER)) as r:
            self._softmax_of_rows(materialize(groups * _TOGETHER + r), 1)

    def _softmax_of_rows(self, first: Expr, count: int) -> None:
        spec, lanes = self.spec, self.lanes
        rows = [first + i for i in range(count)]
        causal = bool(spec.problem.causal)
        seen = [self._visible(r + 1) for r in rows] if causal else [self.size] * count
        top, total = Registers(count, "float32", lanes), Registers(count, "float32", lanes)
        for i in range(count):
            top[i] = constant(zeros("float32", lanes), -float("inf"))
            total[i] = zeros("float32", lanes)

        def score(column: Expr, masks: list[Expr | None]) -> None:
            loaded: dict[tuple[int, Expr], Expr] = {}
            for i, r in enumerate(rows):
                where = self._score_at(r, column)
                value = self._score(let(spec.room[where]), r, column, masks[i], loaded if masks[i] is None else {})
                T.buffer_store(spec.room, value, [where])
                top[i] = T.max(top[i], value)

        whole, vectors = materialize(seen[0] // lanes), materialize(ceil_div(seen[-1], lanes))
        with loop(whole) as vector:
            score(materialize(vector * lanes), [None] * count)
        if not isinstance(whole, int) or whole != vectors:
            with loop(materialize(vectors - whole)) as vector:
                column = materialize((whole + vector) * lanes)
                score(column, [lane_mask(minimum(end - column, lanes), lanes) for end in seen])
        row_max = [self._row_max(r, top[i]) for i, r in enumerate(rows)]
        with loop(vectors) as vector:
            for i, r in enumerate(rows):
                power = let(exp_nonpositive(spec.room[self._score_at(r, vector * lanes)] - row_max[i]))
                store_weights(spec, r, materialize(vector), power)
                total[i] = total[i] + power
        with loop(materialize(self.steps * self.vectors - vectors)) as vector:
            for r in rows:
                store_weights(spec, r, materialize(vectors + vector), zeros("float32", lanes))
        for i, r in enumerate(rows):
            factor = self._factor(r, row_max[i], self._total(total[i]))
            T.buffer_store(spec.room, T.Shuffle([factor], [0]), [self._factor_at(r)])

    def _factor_at(self, r: Expr) -> Expr:
        return self.spec.at("factors") + r

    # -- values

    def values(self) -> None:
        """Sums of values, weighted by the powers of e; after the last block, averages into the result."""
        spec, blocks = self.spec, self.spec.blocks
        if self.online:
            with when(tirx.Not(self.is_first)), loop(self.rows) as r:
                factor = self._row_factor(r)
                for j in range(len(spec.value_masks)):
                    where = self._sums_at(r, j)
                    T.buffer_store(spec.room, spec.room[where] * factor, [where])
        distance = blocks.value_panels * blocks.columns
        weights = materialize(spec.at("weights"))
        with loop(blocks.value_panels) as panel:
            values = materialize(spec.at("values") + panel * (blocks.keys // 2 * blocks.columns))
            start = materialize(spec.at("partial") + self.within * distance + panel * blocks.columns)

            if self.online:
                either(self.is_first, self._clear, partial(self._each_sum, start, distance, amx.load))
            else:
                self._clear()
            with loop(self.steps) as step:
                left = materialize(weights + step * (TILE_BYTES // _WORD))
                self._multiply(left, blocks.weight_distance, materialize(values + step * (TILE_ROWS * blocks.columns)))
            self._each_sum(start, distance, amx.store)
        with when(self.is_last if self.online else True), loop(self.rows) as r:
            average = self._row_factor(r) if not self.online else let(self._average(self._state("sums", r)))
            for j, mask in enumerate(spec.value_masks):
                total = let(spec.room[self._sums_at(r, j)])
                self._write(r, tirx.const(j * self.lanes, "int64"), total, average, mask)

    def _row_factor(self, r: Expr) -> Expr:
        return let(T.broadcast(self.spec.room[self._factor_at(r)], self.lanes))

    def _sums_at(self, r: Expr, j: int) -> Expr:
        """Sums of vector j of row r."""
        panel, within = divmod(j, self.vectors)
        return self._partial_at(r, within, tirx.const(panel, "int64"))
