"""Pages of a cache as a source of keys and values, and appending a row's new key and value to its page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ....target.element_types import bytes_of
from ...core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    Masks,
    Registers,
    broadcast,
    ceil_div,
    lane_indices,
    lane_mask,
    lane_of,
    let,
    loop,
    materialize,
    minimum,
    over_lanes,
    stored,
    vector_type,
    when,
    zeros,
)
from ...math.casts import cast
from ...math.vector_math import ROUNDER, clamp, constant
from ...microkernel import amx
from ...pack.tile_transpose import riffle
from ..key_values import Factors, KeyValueSource
from .heads import emit_head
from .spec import CachedSpec, Tensors

_MAX_FLOAT16 = 65504.0


@dataclass(frozen=True)
class Page:
    """A head of a page: the offset of its keys in elements, and how many elements of these are values, too."""

    tensors: Tensors
    start: Expr
    size: int
    shared_values: int

    @property
    def values(self) -> Expr:
        """Offset of the values."""
        return self.start + (self.size - self.shared_values if self.shared_values else PAGE * self.size)

    def load(self, index: Expr, lanes: int, mask: Expr | None = None) -> Expr:
        """Elements from an index on, as float32, not yet scaled."""
        return let(self.tensors.number("pages", index, lanes, mask))

    def scale_at(self, key_or_value: int, token: Expr) -> Expr:
        """Offset in floats of the scale of a token's key (0) or value (1)."""
        if self.shared_values:
            return tirx.floordiv(self.start, 4) + PAGE * self.size // 4 + token
        return tirx.floordiv(self.start, 4) + (2 * PAGE * self.size // 4 + key_or_value * PAGE) + token

    def scales(self, key_or_value: int, token: Expr, lanes: int) -> Expr:
        """The scales of keys (0) or values (1) from a token on."""
        return self.tensors.scales[lane_indices(self.scale_at(key_or_value, token), lanes)]


def page_of(spec: CachedSpec, number: Expr, head: Expr) -> Page:
    """A head of the page with a number."""
    start = materialize((number * spec.problem.kv_heads + head) * spec.tensors.page_elements)
    return Page(spec.tensors, start, spec.problem.size, spec.problem.shared_values)


@dataclass(frozen=True)
class PagedKeyValues(KeyValueSource):
    """A page of keys and values, widened to scratch for many rows. Keys that no row sees may be undefined."""

    spec: CachedSpec
    page: Page
    following: Expr  # offset of the next page's keys, in elements, for prefetching
    # Function from a row to the first and the last position that it sees.
    positions: Callable[[Expr], tuple[Expr, Expr]]

    is_padded = True

    def limits(self, row: Expr) -> tuple[Expr | None, Expr | None]:
        """Tokens of the page before the first that a row sees, and up to the last."""
        first, last = self.positions(row)
        begin = materialize(first - self.first) if self.spec.problem.window else None
        return begin, materialize(last - self.first + 1)

    def count(self, row: Expr, rows: Expr) -> Expr:
        """Number of tokens of the page up to the last that any row sees."""
        return self.size

    def pack(self) -> None:
        """Convert the page to floats in scratch for many rows."""
        spec, plan = self.spec, self.spec.plan
        if plan.is_in_place:
            return
        columns, lanes = plan.columns, plan.lanes
        if self.page.shared_values:
            self._transpose_keys()
        else:
            with loop(PAGE // columns) as panel, loop(plan.width) as row:
                load = self._keys_in_place(panel)
                for j in range(plan.vectors):
                    spec.store("keys", (panel * plan.width + row) * columns + j * lanes, load(row, j), lanes)
        masks = spec.value_masks
        with loop(self.size) as token:
            for j, mask in enumerate(masks):
                panel, column = divmod(j, plan.vectors)
                value = self.page.load(materialize(self.page.values + token * plan.width + j * lanes), lanes, mask)
                spec.store("values", (panel * PAGE + token) * columns + column * lanes, value, lanes)

    def _transpose_keys(self) -> None:
        """Convert keys in the order of values to floats in scratch, in lanes."""
        spec, plan = self.spec, self.spec.plan
        columns, lanes, width = plan.columns, plan.lanes, plan.width
        mask = lane_mask(width, lanes)
        with loop(materialize(ceil_div(self.size, lanes))) as group, loop(ceil_div(width, lanes)) as number:
            token = materialize(group * lanes)
            # The last vector ends with the key: elements in common with the one before are copied twice.
            k = materialize(minimum(number * lanes, max(width - lanes, 0)))
            start = materialize(self.page.start + token * width + k)
            rows = [self.page.load(start + lane * width, lanes, mask) for lane in range(lanes)]
            key = materialize((token // columns * width + k) * columns + token % columns)
            for i, values in enumerate(riffle(rows, lanes)[:width]):
                spec.store("keys", key + i * columns, values, lanes)

    def keys(self, panel: Expr) -> Factors:
        """Factors of a panel of keys, in scratch or in the page."""
        return self._keys_in_place(panel) if self.spec.plan.is_in_place else super().keys(panel)

    def _keys_in_place(self, panel: Expr) -> Factors:
        plan = self.spec.plan
        start = materialize(self.page.start + panel * plan.columns)
        return lambda k, j: self.page.load(start + k * PAGE + j * plan.lanes, plan.lanes)

    def values(self, panel: Expr, masks: Masks) -> Factors:
        """Factors of a panel of elements of values, in scratch or in the page."""
        plan = self.spec.plan
        if not plan.is_in_place:
            return super().values(panel, masks)
        start = materialize(self.page.values + panel * plan.columns)
        return lambda k, j: self.page.load(start + k * plan.width + j * plan.lanes, plan.lanes, masks[j])

    def scaled_scores(self, scores: Expr, column: Expr) -> Expr:
        """Products times the scales of int8 keys."""
        lanes, is_scaled = self.spec.plan.lanes, self.spec.problem.page_type == "int8"
        return scores * self.page.scales(0, column, lanes) if is_scaled else scores

    def scaled_weights(self, weights: Expr, column: Expr) -> Expr:
        """Softmax weights times the scales of int8 values."""
        lanes = self.spec.plan.lanes
        if self.spec.problem.page_type != "int8":
            return weights
        # Scales of tokens that were never written are undefined.
        zero = zeros("float32", lanes)
        return T.Select(weights > zero, weights * self.page.scales(1, column, lanes), zero)

    def prefetch(self, panel: Expr, vectors: int, is_keys: bool) -> Callable[[Expr], None] | None:
        """Prefetches of the page's values while keys are multiplied, and of the next page's keys after that.

        The CPU prefetches keys by itself, because they are read sequentially. The computation of few rows takes no
        longer than reading a page from memory.
        """
        plan, data = self.spec.plan, self.spec.tensors.views["pages"].data
        each, line = vectors * plan.lanes, CACHE_LINE_BYTES // bytes_of(self.spec.problem.page_type)
        if not plan.is_in_place or plan.lanes == 1 or plan.queries > plan.rows or each < line:
            return None
        distance = plan.columns * (plan.width if is_keys else PAGE)
        start = materialize((self.page.values if is_keys else self.following) + panel * distance)

        def prefetch_step(k: Expr) -> None:
            for number in range(each // line):
                amx.prefetch(T.address_of(data[start + k * each + number * line]))

        return prefetch_step


def emit_append(spec: CachedSpec, row: Expr, head: Expr, slot: Expr, position: Expr) -> None:
    """Write a row's key and value of one head, unless it lacks a page."""
    problem = spec.problem
    number = materialize(T.max(position, tirx.const(0, "int64")) // PAGE)
    entry = spec.tensors.table_entry(slot, number)
    with when(tirx.all(position >= 0, entry >= 0)):
        page = page_of(spec, entry, head)
        token = materialize(position % PAGE)
        key = materialize(row * spec.tensors.row_elements + (problem.heads + head) * problem.size)
        _write(spec, page, row, key, "k_norm", token)
        if not problem.shared_values:
            _write(spec, page, row, materialize(key + problem.kv_heads * problem.size), "", token)


def _write(spec: CachedSpec, page: Page, row: Expr, start: Expr, norm: str, token: Expr) -> None:
    """Write a key (with a norm's name) or a value (without) to its page."""
    tensors, key_or_value, is_column = spec.tensors, 0 if norm else 1, bool(norm) and not page.shared_values
    step = PAGE if is_column else 1
    begin = page.start if norm else page.values
    first = materialize(begin + token * (1 if is_column else page.size))
    inverse = None
    if tensors.page_type == "int8":
        row_max = Registers(1, "float32", 1)
        row_max[0] = zeros("float32", 1)

        def update_max(_index: Expr, value: Expr, lanes: int) -> None:
            vector_max = let(over_lanes(let(T.max(value, zeros("float32", lanes) - value)), T.max, lanes))
            # Not T.max: TVM's C code would use the register's first value for all later ones.
            row_max[0] = T.Select(row_max[0] > vector_max, row_max[0], vector_max)

        emit_head(spec.problem, tensors, row, start, norm, update_max)
        scale = let(row_max[0] * tirx.const(1.0 / 127.0, "float32"))
        T.buffer_store(tensors.scales, scale, [page.scale_at(key_or_value, token)])
        zero, min_max = tirx.const(0.0, "float32"), tirx.const(1e-35, "float32")
        inverse = let(T.Select(scale > zero, tirx.const(127.0, "float32") / T.max(row_max[0], min_max), zero))

    def store(index: Expr, value: Expr, lanes: int) -> None:
        encoded, index = _encode(value, tensors.page_type, lanes, inverse), materialize(first + index * step)
        if lanes == 1 or step == 1:
            tensors.store("pages", index, encoded, lanes)
            return
        elements = stored(tensors.views["pages"].bits(cast(encoded, tensors.page_type)))
        for lane in range(lanes):
            T.buffer_store(tensors.views["pages"].data, lane_of(elements, lane), [index + lane * step])

    emit_head(spec.problem, tensors, row, start, norm, store)


def _encode(value: Expr, dtype: str, lanes: int, inverse: Expr | None) -> Expr:
    """Elements in the range of a page's type: float16 clamped, int8 rounded to the nearest."""
    if inverse is not None:
        # The sum is rounded to the nearest integer, which is then in the low bits.
        shifted = let(value * broadcast(inverse, lanes) + constant(value, ROUNDER))
        return T.cast(T.reinterpret(vector_type("int32", lanes), shifted), vector_type("int8", lanes))
    return clamp(value, -_MAX_FLOAT16, _MAX_FLOAT16) if dtype == "float16" else value
