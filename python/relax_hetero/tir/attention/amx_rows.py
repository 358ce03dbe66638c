"""Attention with Intel AMX: scores and sums of values are products of tiles, softmax works on rows.

A pair of tiles holds up to 32 queries. Keys and values of a block are packed as for vectors that multiply pairs of
bfloat16 (`key_values`), which is also the layout of right tiles; queries are copied, with zeros after their width.
Products have whole k-steps: after the end of k one factor, a key or a softmax weight, is zero and the other is finite.
"""

from __future__ import annotations

from functools import partial

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_BYTES, TILE_ROWS
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    Registers,
    broadcast,
    ceil_div,
    either,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    when,
    zeros,
)
from ..math.vector_math import constant
from ..microkernel import amx
from ..microkernel.microkernel import AmxTile, pair_heights
from .attention_spec import DenseSpec
from .attention_tile import SOFTMAX_ROWS, AttentionRows, store_weights
from .key_values import DenseKeyValues

_WORD_BYTES = 4  # an element of scratch: a float32, or a pair of bfloat16


def begin_amx_task(spec: DenseSpec) -> None:
    """Begin a task: configure tiles, and clear packed keys after their width, up to a whole k-step."""
    _amx_tile(spec).configure()
    plan = spec.plan
    padded_pairs, pairs = plan.width // 2, spec.sizes["d"] // 2
    if padded_pairs == pairs:
        return
    with loop(plan.keys // plan.columns) as panel, loop((padded_pairs - pairs) * plan.vectors) as vector:
        index = (panel * padded_pairs + pairs) * plan.columns + vector * plan.lanes
        spec.store("keys", index, zeros("float32", plan.lanes), plan.lanes)


def _amx_tile(spec: DenseSpec) -> AmxTile:
    """The accumulators of queries by keys, or by elements of values."""
    assert spec.plan.amx is not None
    return AmxTile(spec.plan.amx, pair_heights(spec.plan.rows), spec.plan.vectors)


class AmxRows(AttentionRows):
    """Code of a pair of tiles of queries, or of one tile."""

    spec: DenseSpec
    source: DenseKeyValues

    def __init__(self, spec: DenseSpec, source: DenseKeyValues, row: Expr, within: Expr, rows: Expr) -> None:
        super().__init__(spec, source, row, 0 if spec.plan.is_single else within, rows)
        self.tile = _amx_tile(spec)
        self.steps = materialize(ceil_div(self.count, spec.plan.columns))
        """Number of pairs of tiles of keys, and of k-steps along keys."""

    def _multiply(self, left: Expr, distance: int, right: Expr) -> None:
        """Write a k-step of 64 bytes: left factors, with rows `distance` elements apart, times right factors."""
        columns, scratch = self.spec.plan.columns, self.spec.scratch

        def address(start: Expr, distance: int) -> tuple[Expr, Expr]:
            return amx.address(scratch, start), distance * _WORD_BYTES

        self.tile.step(
            lambda i: address(left + self.tile.first_row(i) * distance, distance),
            lambda j: address(right + j * self.lanes, columns),
        )

    # -- scores

    def copy_queries(self) -> None:
        """Copy the queries to scratch, with zeros after their width."""
        spec, view = self.spec, self.spec.query
        width_bytes = spec.sizes["d"] * bytes_of(view.nominal)
        with loop(self.rows) as r:
            source = materialize(view.address(self.source.coordinates(self.row + r)))
            target = materialize(spec.at("queries") + r * spec.plan.query_distance)
            amx.copy_bytes((view.data, source), (spec.scratch, target), width_bytes)

    def scores(self) -> None:
        """Write products of queries and keys to scratch."""
        spec, plan = self.spec, self.spec.plan
        depth = plan.width // 2
        queries, scores = materialize(spec.at("queries")), materialize(spec.at("scores"))
        with loop(self.steps) as panel:
            keys = materialize(spec.at("keys") + panel * (depth * plan.columns))
            self.tile.clear()
            for step in range(depth // TILE_ROWS):
                left = queries + step * (TILE_BYTES // _WORD_BYTES)
                self._multiply(left, plan.query_distance, keys + step * (TILE_ROWS * plan.columns))
            self.tile.store(spec.scratch, scores + panel * plan.columns, plan.score_distance)

    # -- softmax

    def softmax(self) -> None:
        """Replace scores by softmax weights in pairs, with zeros up to a whole k-step."""
        groups = materialize(self.rows // SOFTMAX_ROWS)
        with loop(groups) as group:
            self._softmax_of_rows(materialize(group * SOFTMAX_ROWS), SOFTMAX_ROWS)
        with loop(materialize(self.rows - groups * SOFTMAX_ROWS)) as r:
            self._softmax_of_rows(materialize(groups * SOFTMAX_ROWS + r), 1)

    def _softmax_of_rows(self, first: Expr, count: int) -> None:
        spec, lanes = self.spec, self.lanes
        rows = [first + i for i in range(count)]
        visible = [self.source.count(self.row, r + 1) for r in rows]
        row_maxima = Registers(count, "float32", lanes)
        for i in range(count):
            row_maxima[i] = constant(zeros("float32", lanes), -float("inf"))

        def emit_scores(column: Expr, masks: list[Expr | None]) -> None:
            cache: dict[tuple[int, Expr], Expr] = {}
            for i, r in enumerate(rows):
                index = self._score_at(r, column)
                product = let(spec.load("scores", index, lanes))
                value = self._score(product, r, column, (masks[i], masks[i]), cache if masks[i] is None else {})
                spec.store("scores", index, value, lanes)
                row_maxima[i] = T.max(row_maxima[i], value)

        whole_vectors, vectors = materialize(visible[0] // lanes), materialize(ceil_div(visible[-1], lanes))
        with loop(whole_vectors) as vector:
            emit_scores(materialize(vector * lanes), [None] * count)
        if not isinstance(whole_vectors, int) or whole_vectors != vectors:
            with loop(materialize(vectors - whole_vectors)) as vector:
                column = materialize((whole_vectors + vector) * lanes)
                emit_scores(column, [lane_mask(minimum(end - column, lanes), lanes) for end in visible])
        factors = self._weigh(rows, [row_maxima[i] for i in range(count)], vectors)
        with loop(materialize(self.steps * self.vectors - vectors)) as vector:
            for r in rows:
                store_weights(spec, r, materialize(vectors + vector), zeros("float32", lanes))
        for factor, r in zip(factors, rows, strict=True):
            spec.store("factors", r, factor)

    # -- values

    def values(self) -> None:
        """Accumulate values with their softmax weights; after the last block, write averages to the result."""
        spec, plan, masks = self.spec, self.spec.plan, self.spec.value_masks
        lanes, distance, is_first = self.lanes, plan.value_distance, self.source.is_first
        if self.online:
            with when(tirx.Not(is_first)), loop(self.rows) as r:
                factor = let(broadcast(spec.load("factors", r), lanes))
                for j in range(len(masks)):
                    index = self._partial_at(r, j * lanes)
                    spec.store("partial", index, spec.load("partial", index, lanes) * factor, lanes)
        weights = materialize(spec.at("weights"))
        with loop(plan.value_panels) as panel:
            values = materialize(spec.at("values") + panel * (plan.keys // 2 * plan.columns))
            start = materialize(spec.at("partial", self._partial_at(0, panel * plan.columns)))
            if self.online:
                either(is_first, self.tile.clear, partial(self.tile.load, spec.scratch, start, distance))
            else:
                self.tile.clear()
            with loop(self.steps) as step:
                left = materialize(weights + step * (TILE_BYTES // _WORD_BYTES))
                self._multiply(left, plan.weight_distance, materialize(values + step * (TILE_ROWS * plan.columns)))
            self.tile.store(spec.scratch, start, distance)
        with when(self.source.is_last if self.online else True), loop(self.rows) as r:
            total = self._state("sums", r) if self.online else let(spec.load("factors", r))
            row_sums = [let(spec.load("partial", self._partial_at(r, j * lanes), lanes)) for j in range(len(masks))]
            spec.write(self.source.coordinates(self.row + r), total, 0, row_sums, masks)
