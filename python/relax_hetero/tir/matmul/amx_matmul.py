"""Matrix products by Intel AMX: the loops, blocks and stores of `matmul`.

The loops, outermost first: tasks, batches, blocks of rows, panels of columns, blocks of k, pairs of tiles of rows,
k-steps of 64 bytes. A step multiplies two tiles of rows by two of columns: four products for four loads. Measured on a
Xeon (Sapphire Rapids, 2 MiB of L2), where such a step takes 20 ns at best:

- All tiles have the same height, and the last ones overlap those before: reconfiguring tiles costs more.
- Rows an even number of cache lines apart conflict in the L1 cache (26 ns a step). If enough panels meet a block of
  rows, it is copied with an odd stride in lines, and zeros after the end of k.
- Loads of rows bypass the L1 cache, where the panel of columns stays; so a block of k is a kilobyte of a row. Between
  blocks, the accumulators are stored as tiles.
- The epilogue of a pair is interleaved, row by row, with the steps of the next: tile instructions have a long latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    ceil_div,
    either,
    int64,
    lane_indices,
    lane_mask,
    let,
    loop,
    materialize,
    minimum,
    vector_type,
    zeros,
)
from ..core.view import Coordinates, OperandView, extent_of, raw_type
from ..core.work_split import Split, part, split_work, unravel
from ..rows.row_code import RowSpec, RowWriter
from ..rows.rows import emit_rows
from . import amx
from .amx import LANES, LEFT_TILES, RIGHT_TILES
from .matmul_spec import MatmulSpec

# A row-major right operand, such as an activation, is packed for AMX panel by panel, just before the product reads it.
# Its panels then stay in the L2 cache; a separate packing kernel would write all of it to memory.

# Panels that are packed together, so that longer runs of a row are read: their maximum number and size.
MAX_PANELS = 4
PANEL_BYTES = 1 << 19


def is_row_major(rhs: OperandView) -> bool:
    """Return whether the right operand is row-major ``(k, n)``, which tile loads cannot read."""
    return rhs.layout.is_identity and tuple(rhs.index_map[-2:]) == ("k", "n")


def panel_columns(spec: MatmulSpec) -> int:
    """Columns of a panel: those of packed storage, else two tiles, or one if n is not wider."""
    if not is_row_major(spec.rhs):
        return spec.rhs.layout.tile(spec.rhs.index_map.index("n"))
    return LANES if spec.n <= LANES else 2 * LANES


@dataclass(frozen=True)
class RightPanels:
    """Memory of packed panels, ``[panel, k / k0, column, k0]``.

    Attributes
    ----------
    k0 : int
        Neighbouring k of a column that are stored together, padded with zeros after the end of k.
    columns : int
        Number of columns of a panel.
    count : int
        Panels that are packed together.
    """

    spec: MatmulSpec
    k0: int
    columns: int
    count: int
    memory: Any

    @staticmethod
    def of(spec: MatmulSpec, k0: int) -> RightPanels:
        """Memory for some panels; called inside of a task."""
        columns = panel_columns(spec)
        elements = ceil_div(spec.k, k0) * k0 * columns
        panels = ceil_div(spec.n, columns)
        count = max(1, min(MAX_PANELS, panels, PANEL_BYTES // (elements * bytes_of(spec.rhs.dtype))))
        return RightPanels(spec, k0, columns, count, amx.scratch(count * elements, raw_type(spec.rhs.nominal)))

    @property
    def elements(self) -> int:
        """Number of elements of a panel."""
        return ceil_div(self.spec.k, self.k0) * self.k0 * self.columns

    def pack(self, at: Coordinates, begin: Expr, end: Expr) -> None:
        """Pack the panels from `begin` up to `end`."""
        whole, left = divmod(self.spec.k, self.k0)
        if whole:
            with loop(whole) as group:
                self._pack_group(at, (begin, end), materialize(group), self.k0)
        if left:
            self._pack_group(at, (begin, end), tirx.const(whole, "int64"), left)

    def _pack_group(self, at: Coordinates, panels: tuple[Expr, Expr], group: Expr, rows: int) -> None:
        """Pack `rows` neighbouring k of every column, and zeros after them."""
        begin, end = panels
        left = self.spec.n % self.columns
        with loop(materialize(end - begin)) as number:
            column = materialize((begin + number) * self.columns)
            target = materialize(number * self.elements + group * (self.columns * self.k0))

            def pack(masks: list[Expr | None], column: Expr = column, target: Expr = target) -> None:
                for j, mask in enumerate(masks):
                    self._pack_tile(
                        at, (group, materialize(column + j * LANES)), rows, mask, target + j * (LANES * self.k0)
                    )

            whole: list[Expr | None] = [None] * (self.columns // LANES)
            last = [lane_mask(left - first, LANES) for first in range(0, left, LANES)]
            if left == 0:
                pack(whole)
            elif self.spec.n < self.columns:
                pack(last)
            else:
                either(column + self.columns <= self.spec.n, lambda: pack(whole), lambda: pack(last))

    def _pack_tile(self, at: Coordinates, place: tuple[Expr, Expr], rows: int, mask: Expr | None, target: Expr) -> None:
        """Pack a group of k, `rows` of which exist, of the columns of a tile."""
        rhs, (group, column) = self.spec.rhs, place
        dtype = raw_type(rhs.nominal)
        vectors = []
        for i in range(self.k0):
            if i < rows:
                value = rhs.load({**at, "k": group * self.k0 + i, "n": column}, "n", LANES, mask)
                vectors.append(let(T.reinterpret(vector_type(dtype, LANES), value)))
            else:
                vectors.append(zeros(dtype, LANES))
        order = [i * LANES + lane for lane in range(LANES) for i in range(self.k0)]
        index = lane_indices(target, LANES * self.k0)
        T.buffer_store(self.memory, T.Shuffle(vectors, order), [index])


# A block of rows (mc) stays in the L2 cache: its maximum bytes and pairs of tiles. At most so many rows are one block.
ROW_BLOCK_BYTES = 1 << 20
ROW_BLOCK_PAIRS = 16
ONE_BLOCK_ROWS = 128

# Maximum k-steps of a block (kc): 128x768x3072 in bfloat16 is 6 % faster in two blocks of 12 than in one of 24.
BLOCK_STEPS = 16

# Minimum number of panels for which a block of rows is copied.
COPY_PANELS = 4

# Maximum bytes of a result of whole tiles that is stored by tile stores: larger ones wait for memory, which interleaved
# stores of rows do not (1024x1024 sums of bytes: 2,369 Gop/s, interleaved 2,824; 128x768: 3,295, interleaved 2,955).
DIRECT_BYTES = 1 << 21

# Right operands of more bytes are prefetched, for more rows than this: smaller ones are in the cache.
PREFETCH_BYTES = 1 << 20
PREFETCH_ROWS = 8


def supports_amx(spec: MatmulSpec, instruction: AmxInstruction) -> bool:
    """Return whether tile loads can read the operands as stored, and m is large enough."""
    lhs, rhs = spec.lhs, spec.rhs
    if not isinstance(spec.k, int) or not isinstance(spec.n, int) or 0 in (spec.k, spec.n):
        return False
    if isinstance(spec.m, int) and spec.m < instruction.min_rows:
        return False
    rows_are_plain = lhs.layout.is_identity and lhs.runs_along("m") and lhs.index_map[-1] == "k"
    if not rows_are_plain or is_row_major(rhs):
        return rows_are_plain
    k, n = rhs.index_map.index("k"), rhs.index_map.index("n")
    panel = rhs.layout.tile(n)
    is_packed = rhs.layout.inner_dims == (n, k) and rhs.layout.inner_tiles == (panel, instruction.k0)
    # In a convolution that is a product, the dimensions of its window stand between the two.
    is_packed = is_packed and [d for d in rhs.layout.outer_perm if rhs.index_map[d] != "1"][-2:] == [n, k]
    return rows_are_plain and is_packed and panel in (LANES, 2 * LANES)


@dataclass(frozen=True)
class _Product:
    """Facts that all tasks share.

    Attributes
    ----------
    heights : tuple of (PrimExpr or int)
        Rows of the two tiles of a pair; the second is 0 for a single tile.
    vectors : int
        Tiles of columns in a panel.
    size : int
        Bytes of an element of the factors.
    steps, tail : int
        Whole k-steps, and the remaining bytes of a row.
    pairs : int
        Maximum number of pairs of tiles in a block of rows.
    distance : int
        Bytes between copied rows; 0 if rows are not copied.
    blocks, block : int
        Blocks of k, and the steps of a block.
    prefetched_lines : int
        Cache lines of the next panel that a step prefetches.
    """

    spec: MatmulSpec
    instruction: AmxInstruction
    batch: tuple[str, ...]
    heights: tuple[Expr, Expr]
    vectors: int
    size: int
    steps: int
    tail: int
    pairs: int
    distance: int
    blocks: int
    block: int
    prefetched_lines: int

    @property
    def height(self) -> Expr:
        """Rows of a pair."""
        return self.heights[0] + self.heights[1]

    @property
    def max_rows(self) -> int:
        """Maximum number of rows of a pair."""
        return self.height if isinstance(self.height, int) else 2 * TILE_ROWS

    @property
    def lefts(self) -> tuple[int, ...]:
        """The tiles of a pair that exist."""
        return (0,) if isinstance(self.heights[1], int) and self.heights[1] == 0 else (0, 1)

    @property
    def sums(self) -> list[tuple[int, int, int]]:
        """Accumulator tiles: the number of each, of its left and of its right tile."""
        return [(2 * i + j, i, j) for j in range(self.vectors) for i in self.lefts]

    @property
    def step_bytes(self) -> int:
        """Bytes of a panel that a step multiplies."""
        return TILE_ROWS * self.vectors * TILE_BYTES


class _Task:
    """Buffers of a task: copied rows, accumulators, and pending rows."""

    def __init__(self, product: _Product) -> None:
        self.product = product
        spec = product.spec
        acc = spec.dot.types[2]
        rows = product.pairs * product.max_rows
        self.sums = amx.scratch(2 * TILE_ROWS * 2 * LANES, acc)
        self.rows = amx.scratch(rows * product.distance, "int8") if product.distance else None
        self.last_groups = amx.scratch(product.step_bytes, "int8") if product.tail else None
        self.partial = amx.scratch(product.pairs * 4 * TILE_ROWS * LANES, acc) if product.blocks > 1 else None
        self.panels = RightPanels.of(spec, product.instruction.k0) if is_row_major(spec.rhs) else None
        self.right = spec.rhs.data if self.panels is None else self.panels.memory
        # Destination: the first row, the column, batch coordinates.
        self.pending = amx.PendingRows(2 + len(product.batch))
        if self.last_groups is not None:
            with loop(product.step_bytes // TILE_BYTES) as line:
                empty = T.broadcast(T.int8(0), TILE_BYTES)
                T.buffer_store(self.last_groups, empty, [lane_indices(line * TILE_BYTES, TILE_BYTES)])
        low, high = product.heights
        second = high if len(product.lefts) > 1 else 1
        amx.configure([low, low, second, second, low, second, TILE_ROWS, TILE_ROWS])


def emit_amx_product(
    spec: MatmulSpec, cpu: CpuTarget, batch: list[str], rows_code: RowSpec | None, instruction: AmxInstruction
) -> None:
    """Write the loops of a product that `supports_amx`, in a process that may use it and for a large enough `m`."""
    height, heights = _heights(spec.m)
    pairs = materialize(ceil_div(spec.m, height) if isinstance(height, int) else (spec.m + (height - 1)) // height)
    panel = panel_columns(spec)
    panels = ceil_div(spec.n, panel)
    extents = {name: extent_of([spec.result], name) for name in batch}
    count: Expr = 1
    for extent in extents.values():
        count = count * extent
    count = materialize(count)
    max_height = height if isinstance(height, int) else 2 * TILE_ROWS
    split = split_work(cpu.cores, count, pairs, panels, (max_height, panel), ceil_div(spec.k, instruction.rate))
    product = _product(spec, instruction, tuple(batch), heights, panel, pairs, split)
    in_task = isinstance(split.columns, int) and split.columns == 1
    with loop(split.tasks, parallel=split.tasks > 1) as number:
        task = _Task(product)
        place = split.parts_of(number)
        first_b, last_b = part(count, split.batch, place[0])
        first_m, last_m = part(pairs, split.rows, place[1])
        first_n, last_n = part(panels, split.columns, place[2])
        row = RowWriter(rows_code) if rows_code is not None and in_task else None
        with loop(last_b - first_b) as b, loop(materialize(ceil_div(last_m - first_m, product.pairs))) as block:
            at = dict(zip(extents, unravel(first_b + b, list(extents.values()), place=materialize), strict=True))
            begin = materialize(first_m + block * product.pairs)
            end = materialize(minimum(begin + product.pairs, last_m))
            if product.distance:
                _copy_rows(task, at, begin, end)
            _sweep_panels(task, at, (begin, end), (first_n, last_n))
            if row is not None:
                _finish_pending(task)
                first_row = materialize(begin * height)
                with loop(materialize(minimum(end * height, spec.m)) - first_row) as r:
                    row.emit({**at, "m": materialize(first_row + r)})
        _finish_pending(task)
        amx.release()
    if rows_code is not None and not in_task:
        emit_rows(rows_code, [*batch, "m"], cpu)


def _heights(m: Expr) -> tuple[Expr, tuple[Expr, Expr]]:
    """Rows of a pair of tiles, and of each tile, such that all pairs are evenly filled."""
    max_height = 2 * TILE_ROWS
    if isinstance(m, int):
        height = ceil_div(m, ceil_div(m, max_height))
        return height, ((ceil_div(height, 2), height // 2) if height > TILE_ROWS else (height, 0))
    count = materialize(ceil_div(m, max_height))
    height = materialize(tirx.floordiv(m + (count - 1), count))
    low = materialize(ceil_div(height, 2))
    return height, (low, materialize(height - low))


def _product(
    spec: MatmulSpec,
    instruction: AmxInstruction,
    batch: tuple[str, ...],
    heights: tuple[Expr, Expr],
    panel: int,
    pairs: Expr,
    split: Split,
) -> _Product:
    size = bytes_of(spec.lhs.dtype)
    row = spec.k * size
    steps, tail = divmod(row, TILE_BYTES)
    panels = ceil_div(spec.n, panel)
    is_packed = not is_row_major(spec.rhs)
    task_panels = ceil_div(panels, split.columns) if isinstance(split.columns, int) else panels
    in_block = max(2, min(ROW_BLOCK_PAIRS, ROW_BLOCK_BYTES // (2 * TILE_ROWS * row)))
    if isinstance(pairs, int) and isinstance(split.rows, int):
        task_pairs = ceil_div(pairs, split.rows)
        in_block = task_pairs if spec.m <= ONE_BLOCK_ROWS else ceil_div(task_pairs, ceil_div(task_pairs, in_block))
    many_rows = not isinstance(spec.m, int) or spec.m > PREFETCH_ROWS
    conflicts = row % (2 * TILE_BYTES) != TILE_BYTES and task_panels >= COPY_PANELS and many_rows
    distance = ((ceil_div(row, TILE_BYTES) | 1) * TILE_BYTES) if tail or conflicts else 0
    blocks = ceil_div(steps, BLOCK_STEPS) if steps > BLOCK_STEPS and in_block > 1 else 1
    is_prefetched = is_packed and many_rows and panels * panel * row > PREFETCH_BYTES
    vectors = panel // LANES
    prefetched_lines = ceil_div(TILE_ROWS * vectors, in_block) if is_prefetched else 0
    return _Product(
        spec, instruction, batch, heights, vectors, size, steps, tail, in_block, distance,
        blocks, ceil_div(steps, blocks), prefetched_lines,
    )  # fmt: skip


def _first_row(product: _Product, pair: Expr) -> Expr:
    """First row of a pair; the last one ends with the last row."""
    return materialize(T.min(int64(pair * product.height), product.spec.m - product.height))


def _copy_rows(task: _Task, at: Coordinates, begin: Expr, end: Expr) -> None:
    """Copy the rows of a block, with zeros after their end."""
    product = task.product
    lhs, line = product.spec.lhs, TILE_BYTES // product.size
    with loop(end - begin) as pair:
        first = _first_row(product, begin + pair)
        with loop(product.height) as r:
            source = materialize(lhs.address({**at, "m": first + r, "k": tirx.const(0, "int64")}))
            target = materialize((pair * product.height + r) * product.distance)

            def copy(s: Expr, count: int, source: Expr = source, target: Expr = target) -> None:
                place = amx.address(task.rows, target + s * TILE_BYTES)
                amx.copy_line(amx.address(lhs.data, source + s * line), place, count)

            if product.steps:
                with loop(product.steps) as s:
                    copy(s, TILE_BYTES)
            if product.tail:
                copy(product.steps, product.tail)


def _sweep_panels(task: _Task, at: Coordinates, pairs: tuple[Expr, Expr], panels: tuple[Expr, Expr]) -> None:
    """Multiply a block of rows by some panels, which are packed first if needed."""
    columns = panel_columns(task.product.spec)
    first, last = panels
    if task.panels is None:
        with loop(last - first) as n:
            column = materialize((first + n) * columns)
            start = task.product.spec.rhs.address({**at, "k": tirx.const(0, "int64"), "n": column})
            _sweep_panel(task, at, pairs, column, materialize(start))
        return
    count = task.panels.count
    with loop(materialize(ceil_div(last - first, count))) as group:
        begin = materialize(first + group * count)
        end = materialize(minimum(begin + count, last))
        task.panels.pack(at, begin, end)
        with loop(materialize(end - begin)) as n:
            column = materialize((begin + n) * columns)
            _sweep_panel(task, at, pairs, column, materialize(n * task.panels.elements))


def _sweep_panel(task: _Task, at: Coordinates, pairs: tuple[Expr, Expr], column: Expr, start: Expr) -> None:
    """Multiply a block of rows by a panel, whose storage begins at `start`."""
    product = task.product
    begin, end = pairs
    if product.tail:
        with loop(ceil_div(product.tail, TILE_BYTES // TILE_ROWS) * product.vectors) as line:
            position = start + (product.steps * product.step_bytes + line * TILE_BYTES) // product.size
            amx.copy_line(
                amx.address(task.right, position),
                amx.address(task.last_groups, line * TILE_BYTES),
            )
    with loop(product.blocks) as kb, loop(end - begin) as number:
        pair = _Pair(task, at, materialize(begin + number), number, column, start)
        pair.multiply(kb)


class _Pair:
    """A pair of tiles of rows and a panel.

    Parameters
    ----------
    pair, number : PrimExpr
        Number of the pair in the matrix and in the block of rows.
    column, start : PrimExpr
        First column of the panel, and the offset of its storage.
    """

    def __init__(self, task: _Task, at: Coordinates, pair: Expr, number: Expr, column: Expr, start: Expr) -> None:
        self.task, self.product, self.at = task, task.product, at
        self.pair, self.number, self.column, self.start = pair, number, column, start
        self.row = _first_row(task.product, pair)

    def multiply(self, kb: Expr) -> None:
        """Accumulate a block of k; store the accumulators, or make the rows pending after the last block."""
        product = self.product
        has_blocks = product.blocks > 1
        either(kb == 0 if has_blocks else True, self._clear, self._resume)
        first = materialize(kb * product.block) if has_blocks else 0
        if product.steps:
            with loop(
                materialize(minimum(first + product.block, product.steps)) - first if has_blocks else product.steps
            ) as s:
                self._step(materialize(first + s))
                self._prefetch(first, s)
                min_steps = product.steps - (product.blocks - 1) * product.block
                _finish_pending(self.task, ceil_div(product.max_rows, min_steps))
        either(kb == product.blocks - 1 if has_blocks else True, self._end, self._suspend)

    def _clear(self) -> None:
        for tile, _, _ in self.product.sums:
            amx.clear(tile)

    def _partial(self, tile: int) -> Expr:
        return amx.address(self.task.partial, (self.number * 4 + tile) * (TILE_ROWS * LANES))

    def _resume(self) -> None:
        for tile, _, _ in self.product.sums:
            amx.load(tile, self._partial(tile), TILE_BYTES)

    def _suspend(self) -> None:
        for tile, _, _ in self.product.sums:
            amx.store(tile, self._partial(tile), TILE_BYTES)

    def _left(self, i: int, step: Expr) -> tuple[Expr, Expr]:
        """Address and stride of a tile of rows."""
        product, lhs = self.product, self.product.spec.lhs
        first = product.heights[0] if i else 0
        if product.distance:
            row = self.number * product.height + first
            return amx.address(self.task.rows, row * product.distance + step * TILE_BYTES), product.distance
        at = {**self.at, "m": self.row + first, "k": int64(step * (TILE_BYTES // product.size))}
        return amx.address(lhs.data, lhs.address(at)), lhs.stride("m") * product.size

    def _right(self, j: int, step: Expr) -> Expr:
        product = self.product
        position = self.start + (step * product.step_bytes + j * TILE_BYTES) // product.size
        return amx.address(self.task.right, position)

    def _products(self, rights: list[Expr], step: Expr) -> None:
        """Write a k-step: all loads, then all products."""
        product = self.product
        for j, right in enumerate(rights):
            amx.load(RIGHT_TILES[j], right, product.vectors * TILE_BYTES)
            for i in product.lefts if j == 0 else ():
                amx.load(LEFT_TILES[i], *self._left(i, step), streamed=True)
        for tile, i, j in product.sums:
            amx.multiply(product.instruction, tile, LEFT_TILES[i], RIGHT_TILES[j])

    def _step(self, step: Expr) -> None:
        self._products([self._right(j, step) for j in range(self.product.vectors)], step)

    def _prefetch(self, first: Expr, s: Expr) -> None:
        """Prefetch this step's share of the next panel."""
        product = self.product
        if not product.prefetched_lines:
            return
        pairs = materialize(first * product.pairs)
        line = materialize((pairs + self.number * product.block + s) * product.prefetched_lines)
        panel = product.steps * product.step_bytes
        for i in range(product.prefetched_lines):
            position = self.start + (panel + (line + i) * TILE_BYTES) // product.size
            amx.prefetch(amx.address(product.spec.rhs.data, position))

    def _end(self) -> None:
        """Multiply the tail of k, then store the accumulators, or make their rows pending."""
        product, task, spec = self.product, self.task, self.product.spec
        if product.tail:
            groups = [amx.address(task.last_groups, j * TILE_BYTES) for j in range(product.vectors)]
            self._products(groups, tirx.const(product.steps, "int64"))
        if _is_direct(product):
            distance = spec.result.stride("m") * bytes_of(spec.result.dtype)
            for tile, i, j in product.sums:
                at = {**self.at, "m": self.row + (product.heights[0] if i else 0), "n": self.column + j * LANES}
                amx.store(tile, amx.address(spec.result.data, spec.result.address(at)), distance)
            return
        for tile, i, j in product.sums:
            begin = (product.heights[0] if i else 0) * (2 * LANES) + j * LANES
            amx.store(tile, amx.address(task.sums, begin), 2 * TILE_BYTES)
        # Rows in common with the pair before are finished by that pair.
        nominal = self.pair * product.height
        place = [self.row, self.column, *(self.at[name] for name in product.batch)]
        task.pending.put(nominal - self.row, product.height, place)
        if not product.steps:
            _finish_pending(task)


def _is_direct(product: _Product) -> bool:
    """Return whether accumulator tiles are stored directly to the result."""
    spec = product.spec
    is_plain = spec.epilogue.expression == Expression.operand(0) and spec.result.dtype == spec.dot.types[2]
    is_whole = isinstance(spec.m, int) and spec.m % product.height == 0 and spec.n % (product.vectors * LANES) == 0
    is_row_major = spec.result.layout.is_identity and spec.result.index_map[-1] == "n"
    is_cached = is_whole and spec.m * spec.n * bytes_of(spec.result.dtype) <= DIRECT_BYTES
    return is_plain and spec.init is None and is_cached and is_row_major


def _finish_pending(task: _Task, max_rows: int | None = None) -> None:
    """Finish at most `max_rows` pending rows (None: all)."""
    if not _is_direct(task.product):
        task.pending.finish(lambda r: _finish_row(task, r), max_rows)


def _finish_row(task: _Task, r: Expr) -> None:
    """Apply the epilogue to a pending row, and store it."""
    product, spec = task.product, task.product.spec
    columns = product.vectors * LANES
    place = task.pending.place
    row, column = materialize(place[0] + r), materialize(place[1])
    at = {name: materialize(place[2 + i]) for i, name in enumerate(product.batch)}

    def store(masks: list[Expr | None]) -> None:
        for j, mask in enumerate(masks):
            coordinates = {**at, "m": row, "n": column + j * LANES}
            value = task.sums[lane_indices(r * (2 * LANES) + j * LANES, LANES)]

            def load(view: OperandView, coordinates: Coordinates = coordinates, mask: Expr | None = mask) -> Any:
                return view.load(coordinates, "n", LANES, mask if view.runs_along("n") else None)

            if spec.init is not None:
                value = value + load(spec.init)
            spec.result.store(coordinates, "n", spec.epilogue.result(let(value), load), LANES, mask)

    left = spec.n % columns
    last = [lane_mask(left - j * LANES, LANES) for j in range(ceil_div(left, LANES))]
    whole: list[Expr | None] = [None] * product.vectors
    if left == 0:
        store(whole)
    elif spec.n < columns:
        store(last)
    else:
        either(column + columns <= spec.n, lambda: store(whole), lambda: store(last))
