"""Sources of keys and values: a block of one head at a time, packed to scratch in panels or read in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.amx_instructions import TILE_ROWS
from ..core.builder import (
    Expr,
    Masks,
    ceil_div,
    either,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    vector_type,
    zeros,
)
from ..math.vector_math import once
from ..pack.tile_transpose import riffle, riffle_orders
from .attention_spec import AttentionSpec, DenseSpec

Factors = Callable[[Expr, int], Expr]
LeftFactors = Callable[..., Expr]
"""The factor of a step k of row i, or those of ``lanes`` steps from k on: ``(k, i, lanes=1)``."""
"""Function of a k-step and a vector of a panel: a vector of keys' or values' elements, or of pairs as int32."""


@dataclass(frozen=True)
class KeyValueSource(ABC):
    """A block of keys and values of one head."""

    spec: AttentionSpec
    # First key of the block, and number of its keys.
    first: Expr
    size: Expr
    is_first: Expr  # whether the online softmax of rows begins with the block

    is_padded = False  # True if panels are read as a whole, keys that no row sees included

    @abstractmethod
    def pack(self) -> None:
        """Copy the block to scratch, in panels."""

    @abstractmethod
    def limits(self, row: Expr) -> tuple[Expr | None, Expr | None]:
        """Keys of the block before the first that a row sees (None: 0), and keys up to the last (None: all)."""

    def count(self, row: Expr, rows: Expr) -> Expr:
        """Number of keys of the block up to the last that any of some rows sees."""
        _, end = self.limits(row + (rows - 1))
        return self.size if end is None else materialize(T.max(end, tirx.const(0, "int64")))

    def coordinates(self, row: Expr) -> dict[str, Expr]:
        """Batch, head and query of a row, as coordinates of masks."""
        return {}

    def keys(self, panel: Expr) -> Factors:
        """Factors of the keys of a panel of `AttentionPlan.columns`; a k-step is an element of each, or a pair."""
        plan = self.spec.plan
        return self._packed("keys", panel * (plan.width // plan.word_elements))

    def values(self, panel: Expr, masks: Masks) -> Factors:
        """Factors of a panel of elements of values, with masks of its vectors; a k-step is a value, or a pair."""
        plan = self.spec.plan
        return self._packed("values", panel * (plan.keys // plan.word_elements))

    def _packed(self, name: str, row: Expr) -> Factors:
        spec, plan = self.spec, self.spec.plan
        start = materialize(spec.at(name, row * plan.columns))

        def factor(k: Expr, j: int) -> Expr:
            value = spec.scratch[lane_indices(start + k * plan.columns + j * plan.lanes, plan.lanes)]
            return T.reinterpret(f"int32x{plan.lanes}", value) if plan.pair_dtype else value

        return factor

    def scaled_scores(self, scores: Expr, column: Expr) -> Expr:
        """Products of a vector of keys from `column` on, times the keys' scales."""
        return scores

    def scaled_weights(self, weights: Expr, column: Expr) -> Expr:
        """Softmax weights of a vector of keys from `column` on, times the values' scales."""
        return weights

    def prefetch(self, panel: Expr, vectors: int, is_keys: bool) -> Callable[[Expr], None] | None:
        """Function that writes the prefetches of a k-step of a panel of keys or of values; None: it has none."""
        return None


@dataclass(frozen=True)
class DenseKeyValues(KeyValueSource):
    """A block of tensors of keys and values, read in place for few queries."""

    spec: DenseSpec
    is_last: Expr  # whether it is the last block
    at: dict[str, Expr]  # batch and head, the first of `AttentionPlan.heads`

    def limits(self, row: Expr) -> tuple[Expr | None, Expr | None]:
        """Keys up to the last that a query sees."""
        causal, sizes = self.spec.problem.causal, self.spec.sizes
        if not causal:
            return None, None
        offset = sizes["n"] - sizes["m"] if causal == "bottom_right" else 0
        return None, materialize(minimum(row // self.spec.plan.heads + (1 + offset - self.first), self.size))

    def coordinates(self, row: Expr) -> dict[str, Expr]:
        """Batch, head and query of a row."""
        heads = self.spec.plan.heads
        return {**self.at, "h": self.at["h"] + row % heads, "m": row // heads} if heads > 1 else {**self.at, "m": row}

    def pack(self) -> None:
        """Copy the block to scratch in panels, or nothing for few queries."""
        if not self.spec.plan.is_in_place:
            self._pack_keys()
            self._pack_values()
        if self.spec.plan.amx:
            self._pad_values()

    def _pack_keys(self) -> None:
        """Pack keys to panels ``[n / columns, d, columns]``; padding repeats the last key.

        If elements are paired, ``d`` counts words of two elements, as in memory.
        """
        spec, plan, view = self.spec, self.spec.plan, self.spec.key
        lanes, columns, word_elements = plan.lanes, plan.columns, plan.word_elements
        width, depth = spec.sizes["d"] // word_elements, plan.width // word_elements
        base = materialize(view.address({**self.at, "n": self.first}) // word_elements)
        key_stride, element_stride = view.stride("n") // word_elements, view.stride("d")
        words = view.pairs() if plan.pair_dtype else None

        def store(column: Expr, k: Expr, values: Expr) -> None:
            spec.store("keys", column // columns * (depth * columns) + k * columns + column % columns, values, lanes)

        def vector(start: Expr) -> Expr:
            return view.load(start, "d", lanes) if words is None else words[lane_indices(start, lanes)]

        def transpose_columns(column: Expr, rows: list[Expr]) -> None:
            with loop(ceil_div(width, lanes)) as number:
                # The last vector ends with the row: elements in common with the one before are copied twice.
                k = materialize(minimum(number * lanes, width - lanes))
                loaded = [T.bind(vector(base + row * key_stride + k)) for row in rows]
                for i, values in enumerate(riffle(loaded, lanes)):
                    store(column, k + i, values)

        def gather_columns(column: Expr, rows: list[Expr]) -> None:
            with loop(width) as k:
                element = view.element if words is None else lambda index: words[index]
                elements = [element(base + row * key_stride + k * element_stride) for row in rows]
                store(column, k, T.Shuffle(elements, list(range(lanes))))

        is_row = isinstance(element_stride, int) and element_stride == 1 and width >= lanes
        with loop(materialize(ceil_div(self.size, lanes))) as number:
            column = materialize(number * lanes)
            rows = [materialize(minimum(column + lane, self.size - 1)) for lane in range(lanes)]
            (transpose_columns if is_row else gather_columns)(column, rows)

    def _pack_values(self) -> None:
        """Pack values to panels ``[e / columns, n, columns]``, with zeros after the last column.

        If elements are paired, ``n`` counts words of two neighbours of a column; a missing last one is zero.
        """
        spec, plan, view, size = self.spec, self.spec.plan, self.spec.value, self.size
        lanes = plan.lanes
        base = materialize(view.address({**self.at, "n": self.first}))

        def store_row(row: Expr, load: Callable[[Expr, Expr | None], Expr]) -> None:
            for number, mask in enumerate(spec.value_masks):
                panel, column = divmod(number * lanes, plan.columns)
                index = (panel * (plan.keys // plan.word_elements) + row) * plan.columns + column
                spec.store("values", index, load(number * lanes * view.stride("e"), mask), lanes)

        def start_of(row: Expr) -> Expr:
            return base + row * view.stride("n")

        if not plan.pair_dtype:
            with loop(size) as row:
                store_row(row, lambda offset, mask: view.load(start_of(row) + offset, "e", lanes, mask))
            return

        def pair(row: Expr, is_whole: bool) -> None:
            def load(offset: Expr, mask: Expr | None) -> Expr:
                even = view.load_bits(start_of(row * 2) + offset, "e", lanes, mask)
                odd = zeros(view.dtype, lanes)
                if is_whole:
                    odd = view.load_bits(start_of(row * 2 + 1) + offset, "e", lanes, mask)
                order = [lane + half * lanes for lane in range(lanes) for half in range(2)]
                return T.reinterpret(vector_type("float32", lanes), T.Shuffle([even, odd], order))

            store_row(row, load)

        with loop(materialize(size // 2)) as row:
            pair(row, True)
        either(size % 2 > 0, lambda: pair(materialize(size // 2), False), lambda: None)

    def _pad_values(self) -> None:
        """Write zeros after the last value of a block, up to a whole k-step."""
        spec, plan, size = self.spec, self.spec.plan, self.size
        step_pairs = TILE_ROWS
        if isinstance(size, int) and size % (2 * step_pairs) == 0:
            return
        pairs = materialize(ceil_div(size, 2))
        rows_left = materialize(ceil_div(pairs, step_pairs) * step_pairs - pairs)
        with loop(plan.value_panels) as panel, loop(rows_left) as row, loop(plan.vectors) as vector:
            index = (panel * (plan.keys // 2) + pairs + row) * plan.columns + vector * plan.lanes
            spec.store("values", index, zeros("float32", plan.lanes), plan.lanes)

    def values(self, panel: Expr, masks: Masks) -> Factors:
        """Factors of a panel of elements of values, packed or in place."""
        spec, view, lanes = self.spec, self.spec.value, self.spec.plan.lanes
        if not spec.plan.is_in_place:
            return super().values(panel, masks)
        element = materialize(panel * spec.plan.columns)
        start = materialize(view.address({**self.at, "n": self.first, "e": element}))
        steps = view.stride("n"), view.stride("e") * lanes
        return lambda k, j: view.load(start + k * steps[0] + j * steps[1], "e", lanes, masks[j])

    def products(self, row: Expr, column: Expr, is_whole: bool) -> Expr:
        """The products of a query and a vector of keys, which are read in place.

        Packing keys for one query would cost more than its scores, which are sums of products along the keys' rows.
        `column`: first key of the vector in the block. `is_whole`: whether all keys of the vector exist; else their
        numbers are clamped.
        """
        spec, query, key = self.spec, self.spec.query, self.spec.key
        lanes, width = spec.plan.lanes, spec.sizes["d"]
        keys = materialize(key.address({**self.at, "n": self.first}))
        start = materialize(query.address(self.coordinates(row)))
        step = key.stride("n")
        if is_whole:
            begin = materialize(keys + column * step)
            rows = [begin + step * lane for lane in range(lanes)]
        else:
            rows = [materialize(keys + minimum(column + lane, self.size - 1) * step) for lane in range(lanes)]
        sums: list[Expr] = []
        for chunk in range(0, width, lanes):
            mask = lane_mask(width - chunk, lanes)
            factor = let(query.load(start + query.stride("d") * chunk, "d", lanes, mask))
            products = [factor * key.load(row + chunk, "d", lanes, mask) for row in rows]
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
