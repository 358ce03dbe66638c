"""Matrix products with Intel AMX: loops, blocks and stores.

The loops, outermost first: tasks, batches, blocks of rows, panels of columns, blocks of k, pairs of tiles of rows,
k-steps of 64 bytes. A step multiplies two tiles of rows by two tiles of columns: four products for four loads.
Measured on a Xeon (Sapphire Rapids, 2 MiB of L2), where such a step takes 20 ns at best:

- All tiles have the same height, and the last ones overlap those before: reconfiguring tiles costs more.
- Rows an even number of cache lines apart conflict in the L1 cache (26 ns a step). If enough panels use a block of
  rows, it is copied with an odd stride in lines, and zeros after the end of k.
- Loads of rows bypass the L1 cache, where the panel of columns stays; so a block of k is a kilobyte of a row. Between
  blocks, the accumulators are stored as tiles.
- The epilogue of a pair is interleaved, row by row, with the steps of the next: tile instructions have a long latency.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.expression import Expression
from ...target.amx_instructions import TILE_BYTES, TILE_ROWS, AmxInstruction
from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import (
    Expr,
    Masks,
    ceil_div,
    either,
    int64,
    lane_indices,
    let,
    loop,
    materialize,
    minimum,
    over_columns,
    vector_type,
    zeros,
)
from ..core.view import Coordinates, OperandView, extent_of, raw_type
from ..core.work_split import Split, split_work, unravel
from ..microkernel import amx
from ..microkernel.amx import LANES
from ..microkernel.microkernel import AmxTile, pair_heights
from ..rows.row_code import RowSpec, RowWriter
from ..rows.rows import emit_rows
from .matmul_spec import MatmulSpec

# A row-major right operand, such as an activation, is packed for AMX panel by panel, just before the product reads it.
# Its panels then stay in the L2 cache; a separate packing kernel would write all of it to memory.

# Maximum number and bytes of panels that are packed together, so that longer runs of a row are read.
MAX_PANELS = 4
MAX_PANELS_BYTES = 1 << 19


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
    """Scratch for packed panels, ``[panel, k / k0, column, k0]``."""

    spec: MatmulSpec
    k0: int  # neighbouring k of a column that are stored together, padded with zeros after the end of k
    columns: int  # number of columns of a panel
    count: int  # panels that are packed together
    buffer: Any

    @staticmethod
    def of(spec: MatmulSpec, k0: int) -> RightPanels:
        """Scratch for `count` panels; called inside of a task."""
        columns = panel_columns(spec)
        elements = ceil_div(spec.k, k0) * k0 * columns
        panels = ceil_div(spec.n, columns)
        count = max(1, min(MAX_PANELS, panels, MAX_PANELS_BYTES // (elements * bytes_of(spec.rhs.dtype))))
        return RightPanels(spec, k0, columns, count, amx.scratch(count * elements, raw_type(spec.rhs.nominal)))

    @property
    def elements(self) -> int:
        """Number of elements of a panel."""
        return ceil_div(self.spec.k, self.k0) * self.k0 * self.columns

    def pack(self, at: Coordinates, begin: Expr, end: Expr) -> None:
        """Pack the panels from `begin` up to `end`."""
        groups, k_left = divmod(self.spec.k, self.k0)
        if groups:
            with loop(groups) as group:
                self._pack_group(at, (begin, end), materialize(group), self.k0)
        if k_left:
            self._pack_group(at, (begin, end), tirx.const(groups, "int64"), k_left)

    def _pack_group(self, at: Coordinates, panels: tuple[Expr, Expr], group: Expr, size: int) -> None:
        """Pack a group of k, `size` of which exist, of every column, with zeros after them."""
        begin, end = panels
        with loop(materialize(end - begin)) as number:
            column = materialize((begin + number) * self.columns)
            target = materialize(number * self.elements + group * (self.columns * self.k0))

            def pack(masks: Masks, column: Expr = column, target: Expr = target) -> None:
                for j, mask in enumerate(masks):
                    self._pack_tile(
                        at, (group, materialize(column + j * LANES)), size, mask, target + j * (LANES * self.k0)
                    )

            over_columns(column, self.columns, self.spec.n, LANES, pack)

    def _pack_tile(self, at: Coordinates, start: tuple[Expr, Expr], size: int, mask: Expr | None, target: Expr) -> None:
        """Pack a group of k of the columns of a tile; `start` is the group and the first column."""
        rhs, (group, column) = self.spec.rhs, start
        dtype = raw_type(rhs.nominal)
        vectors = []
        for i in range(self.k0):
            if i < size:
                value = rhs.load({**at, "k": group * self.k0 + i, "n": column}, "n", LANES, mask)
                vectors.append(let(T.reinterpret(vector_type(dtype, LANES), value)))
            else:
                vectors.append(zeros(dtype, LANES))
        order = [i * LANES + lane for lane in range(LANES) for i in range(self.k0)]
        index = lane_indices(target, LANES * self.k0)
        T.buffer_store(self.buffer, T.Shuffle(vectors, order), [index])


# Maximum bytes and pairs of tiles of a block of rows (mc), which stays in the L2 cache.
MAX_ROW_BLOCK_BYTES = 1 << 20
MAX_ROW_BLOCK_PAIRS = 16
ONE_BLOCK_ROWS = 128  # maximum number of rows that are always one block

# Maximum k-steps of a block of k (kc): 128x768x3072 in bfloat16 is 6 % faster in two blocks of 12 than in one of 24.
MAX_K_BLOCK_STEPS = 16

MIN_COPY_PANELS = 4  # minimum number of panels that use a block of rows for it to be copied

# Maximum bytes of a result that tile stores write directly, if it consists of whole tiles. Tile stores of a larger one
# wait for memory; stores of rows between steps do not (1024x1024 sums of bytes: 2,369 Gop/s directly, 2,824 by rows;
# 128x768: 3,295 directly, 2,955 by rows).
MAX_DIRECT_STORE_BYTES = 1 << 21

# Right operands of more bytes are prefetched if m is larger than `PREFETCH_ROWS`; smaller ones are in the cache.
PREFETCH_BYTES = 1 << 20
PREFETCH_ROWS = 8


def supports_amx(spec: MatmulSpec, instruction: AmxInstruction) -> bool:
    """Return whether tile loads can read the operands as stored, and m is large enough."""
    lhs, rhs = spec.lhs, spec.rhs
    if not isinstance(spec.k, int) or not isinstance(spec.n, int) or 0 in (spec.k, spec.n):
        return False
    if isinstance(spec.m, int) and spec.m < instruction.min_rows:
        return False
    lhs_is_row_major = lhs.layout.is_identity and lhs.runs_along("m") and lhs.index_map[-1] == "k"
    if not lhs_is_row_major or is_row_major(rhs):
        return lhs_is_row_major
    k, n = rhs.index_map.index("k"), rhs.index_map.index("n")
    panel = rhs.layout.tile(n)
    is_packed = rhs.layout.inner_dims == (n, k) and rhs.layout.inner_tiles == (panel, instruction.k0)
    # The weight of a convolution that is a product has window dimensions of extent 1 between n and k.
    is_packed = is_packed and [d for d in rhs.layout.outer_perm if rhs.index_map[d] != "1"][-2:] == [n, k]
    return lhs_is_row_major and is_packed and panel in (LANES, 2 * LANES)


@dataclass(frozen=True)
class _ProductPlan:
    """Facts that all tasks share."""

    spec: MatmulSpec
    batch: tuple[str, ...]
    tile: AmxTile  # a pair of tiles of rows by the tiles of columns of a panel
    block_pairs: int  # maximum number of pairs of tiles in a block of rows
    copy_stride: int  # distance of copied rows in bytes; 0 if rows are not copied
    k_blocks: int  # number of blocks of k
    prefetched_lines: int  # cache lines of the next panel that a step prefetches

    @property
    def pair_height(self) -> Expr:
        """Number of rows of a pair."""
        return self.tile.heights[0] + self.tile.heights[1]

    @property
    def max_pair_height(self) -> int:
        """Maximum number of rows of a pair."""
        return self.pair_height if isinstance(self.pair_height, int) else 2 * TILE_ROWS

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of the factors."""
        return bytes_of(self.spec.lhs.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the left operand."""
        return self.spec.k * self.element_bytes

    @property
    def block_steps(self) -> int:
        """Steps of a block of k."""
        return ceil_div(self.steps, self.k_blocks)

    @property
    def steps(self) -> int:
        """Whole k-steps of a row."""
        return self.row_bytes // TILE_BYTES

    @property
    def tail_bytes(self) -> int:
        """Bytes of a row after the last whole step."""
        return self.row_bytes % TILE_BYTES

    @property
    def step_bytes(self) -> int:
        """Bytes of a panel that a step multiplies."""
        return TILE_ROWS * self.tile.vectors * TILE_BYTES


class _Task:
    """Buffers of a task: copied rows, accumulators, and pending rows."""

    def __init__(self, product: _ProductPlan) -> None:
        self.product = product
        spec = product.spec
        acc = spec.dot.types[2]
        rows = product.block_pairs * product.max_pair_height
        self.sums = amx.scratch(2 * TILE_ROWS * 2 * LANES, acc)
        self.copied_rows = amx.scratch(rows * product.copy_stride, "int8") if product.copy_stride else None
        self.tail_groups = amx.scratch(product.step_bytes, "int8") if product.tail_bytes else None
        self.partials = amx.scratch(product.block_pairs * 4 * TILE_ROWS * LANES, acc) if product.k_blocks > 1 else None
        self.panels = RightPanels.of(spec, product.tile.instruction.k0) if is_row_major(spec.rhs) else None
        self.right_data = spec.rhs.data if self.panels is None else self.panels.buffer
        # Destination: the first row, the column, batch coordinates.
        self.pending = amx.PendingRows(2 + len(product.batch))
        if self.tail_groups is not None:
            with loop(product.step_bytes // TILE_BYTES) as line:
                empty = T.broadcast(T.int8(0), TILE_BYTES)
                T.buffer_store(self.tail_groups, empty, [lane_indices(line * TILE_BYTES, TILE_BYTES)])
        product.tile.configure()


def emit_amx_product(
    spec: MatmulSpec, cpu: CpuTarget, batch: list[str], rows_code: RowSpec | None, instruction: AmxInstruction
) -> None:
    """Write the loops of a product that `supports_amx`, in a process that may use it and for a large enough `m`."""
    height, heights = _heights(spec.m)
    pairs = materialize(ceil_div(spec.m, height) if isinstance(height, int) else (spec.m + (height - 1)) // height)
    panel = panel_columns(spec)
    panels = ceil_div(spec.n, panel)
    extents = {name: extent_of([spec.result], name) for name in batch}
    batch_count = materialize(prod(extents.values()))
    max_height = height if isinstance(height, int) else 2 * TILE_ROWS
    split = split_work(cpu.cores, batch_count, pairs, panels, (max_height, panel), ceil_div(spec.k, instruction.rate))
    product = _plan_product(spec, tuple(batch), AmxTile(instruction, heights, panel // LANES, True), pairs, split)
    tasks_have_whole_rows = isinstance(split.columns, int) and split.columns == 1
    with loop(split.tasks, parallel=split.tasks > 1) as number:
        task = _Task(product)
        ranges = split.ranges(number, batch_count, pairs, panels)
        (first_b, last_b), (first_m, last_m), (first_n, last_n) = ranges
        row_writer = RowWriter(rows_code) if rows_code is not None and tasks_have_whole_rows else None
        with loop(last_b - first_b) as b, loop(materialize(ceil_div(last_m - first_m, product.block_pairs))) as block:
            batch_at = dict(zip(extents, unravel(first_b + b, list(extents.values()), place=materialize), strict=True))
            begin = materialize(first_m + block * product.block_pairs)
            end = materialize(minimum(begin + product.block_pairs, last_m))
            if product.copy_stride:
                _copy_rows(task, batch_at, begin, end)
            _sweep_panels(task, batch_at, (begin, end), (first_n, last_n))
            if row_writer is not None:
                _finish_pending(task)
                first_row = materialize(begin * height)
                with loop(materialize(minimum(end * height, spec.m)) - first_row) as r:
                    row_writer.emit({**batch_at, "m": materialize(first_row + r)})
        _finish_pending(task)
        amx.release()
    if rows_code is not None and not tasks_have_whole_rows:
        emit_rows(rows_code, [*batch, "m"], cpu)


def _heights(m: Expr) -> tuple[Expr, tuple[Expr, Expr]]:
    """Rows of a pair of tiles, and of each tile, such that all pairs are evenly filled."""
    max_height = 2 * TILE_ROWS
    if isinstance(m, int):
        height = ceil_div(m, ceil_div(m, max_height))
        return height, pair_heights(height)
    count = materialize(ceil_div(m, max_height))
    height = materialize(tirx.floordiv(m + (count - 1), count))
    first = materialize(ceil_div(height, 2))
    return height, (first, materialize(height - first))


def _plan_product(spec: MatmulSpec, batch: tuple[str, ...], tile: AmxTile, pairs: Expr, split: Split) -> _ProductPlan:
    row_bytes = spec.k * bytes_of(spec.lhs.dtype)
    steps, tail_bytes = divmod(row_bytes, TILE_BYTES)
    panel = tile.vectors * LANES
    panels = ceil_div(spec.n, panel)
    is_packed = not is_row_major(spec.rhs)
    task_panels = ceil_div(panels, split.columns) if isinstance(split.columns, int) else panels
    block_pairs = max(2, min(MAX_ROW_BLOCK_PAIRS, MAX_ROW_BLOCK_BYTES // (2 * TILE_ROWS * row_bytes)))
    if isinstance(pairs, int) and isinstance(split.rows, int):
        task_pairs = ceil_div(pairs, split.rows)
        blocks = 1 if spec.m <= ONE_BLOCK_ROWS else ceil_div(task_pairs, block_pairs)
        block_pairs = ceil_div(task_pairs, blocks)
    many_rows = not isinstance(spec.m, int) or spec.m > PREFETCH_ROWS
    conflicts = row_bytes % (2 * TILE_BYTES) != TILE_BYTES and task_panels >= MIN_COPY_PANELS and many_rows
    copy_stride = ((ceil_div(row_bytes, TILE_BYTES) | 1) * TILE_BYTES) if tail_bytes or conflicts else 0
    k_blocks = ceil_div(steps, MAX_K_BLOCK_STEPS) if steps > MAX_K_BLOCK_STEPS and block_pairs > 1 else 1
    is_prefetched = is_packed and many_rows and panels * panel * row_bytes > PREFETCH_BYTES
    prefetched_lines = ceil_div(TILE_ROWS * tile.vectors, block_pairs) if is_prefetched else 0
    return _ProductPlan(spec, batch, tile, block_pairs, copy_stride, k_blocks, prefetched_lines)


def _first_row(product: _ProductPlan, pair: Expr) -> Expr:
    """First row of a pair; the last pair ends with the last row, and may overlap the one before."""
    return materialize(T.min(int64(pair * product.pair_height), product.spec.m - product.pair_height))


def _copy_rows(task: _Task, at: Coordinates, begin: Expr, end: Expr) -> None:
    """Copy the rows of a block, each with zeros after its end."""
    product = task.product
    lhs = product.spec.lhs
    with loop(end - begin) as pair:
        first = _first_row(product, begin + pair)
        with loop(product.pair_height) as r:
            source = materialize(lhs.address({**at, "m": first + r, "k": tirx.const(0, "int64")}))
            target = materialize((pair * product.pair_height + r) * product.copy_stride)
            amx.copy_bytes((lhs.data, source), (task.copied_rows, target), product.row_bytes)


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
    if product.tail_bytes:
        with loop(ceil_div(product.tail_bytes, TILE_BYTES // TILE_ROWS) * product.tile.vectors) as line:
            position = start + (product.steps * product.step_bytes + line * TILE_BYTES) // product.element_bytes
            amx.copy_line(amx.address(task.right_data, position), amx.address(task.tail_groups, line * TILE_BYTES))
    with loop(product.k_blocks) as k_block, loop(end - begin) as number:
        pair = _Pair(task, at, materialize(begin + number), number, column, start)
        pair.multiply(k_block)


class _Pair:
    """A pair of tiles of rows and a panel.

    `pair`, `pair_in_block`: index of the pair in the matrix, and in the block of rows. `column`, `panel_start`: first
    column of the panel, and the offset of its storage.
    """

    def __init__(
        self, task: _Task, at: Coordinates, pair: Expr, pair_in_block: Expr, column: Expr, panel_start: Expr
    ) -> None:
        self.task, self.product, self.at = task, task.product, at
        self.pair, self.pair_in_block, self.column, self.panel_start = pair, pair_in_block, column, panel_start
        self.first_row = _first_row(task.product, pair)

    def multiply(self, k_block: Expr) -> None:
        """Accumulate a block of k; store the accumulators, or make the rows pending after the last block."""
        product = self.product
        has_blocks = product.k_blocks > 1
        either(k_block == 0 if has_blocks else True, product.tile.clear, self._load_partial_sums)
        first = materialize(k_block * product.block_steps) if has_blocks else 0
        if product.steps:
            end = materialize(minimum(first + product.block_steps, product.steps)) if has_blocks else product.steps
            with loop(end - first) as step:
                self._step(materialize(first + step))
                self._prefetch(first, step)
                min_steps = product.steps - (product.k_blocks - 1) * product.block_steps
                _finish_pending(self.task, ceil_div(product.max_pair_height, min_steps))
        either(k_block == product.k_blocks - 1 if has_blocks else True, self._finish, self._store_partial_sums)

    def _partial_address(self, tile: int) -> Expr:
        return amx.address(self.task.partials, (self.pair_in_block * 4 + tile) * (TILE_ROWS * LANES))

    def _load_partial_sums(self) -> None:
        for tile, _, _ in self.product.tile.sums:
            amx.load(tile, self._partial_address(tile), TILE_BYTES)

    def _store_partial_sums(self) -> None:
        for tile, _, _ in self.product.tile.sums:
            amx.store(tile, self._partial_address(tile), TILE_BYTES)

    def _left_tile(self, step: Expr, i: int) -> tuple[Expr, Expr]:
        """Address and stride of a tile of rows."""
        product, lhs = self.product, self.product.spec.lhs
        first = product.tile.first_row(i)
        if product.copy_stride:
            row = self.pair_in_block * product.pair_height + first
            start = row * product.copy_stride + step * TILE_BYTES
            return amx.address(self.task.copied_rows, start), product.copy_stride
        at = {**self.at, "m": self.first_row + first, "k": int64(step * (TILE_BYTES // product.element_bytes))}
        return amx.address(lhs.data, lhs.address(at)), lhs.stride("m") * product.element_bytes

    def _step(self, step: Expr) -> None:
        product = self.product

        def right(j: int) -> tuple[Expr, Expr]:
            offset = self.panel_start + (step * product.step_bytes + j * TILE_BYTES) // product.element_bytes
            return amx.address(self.task.right_data, offset), product.tile.vectors * TILE_BYTES

        product.tile.step(partial(self._left_tile, step), right)

    def _prefetch(self, first_step: Expr, step: Expr) -> None:
        """Prefetch this step's share of the next panel."""
        product = self.product
        if not product.prefetched_lines:
            return
        steps_before = materialize(first_step * product.block_pairs)
        line = materialize((steps_before + self.pair_in_block * product.block_steps + step) * product.prefetched_lines)
        panel = product.steps * product.step_bytes
        for i in range(product.prefetched_lines):
            position = self.panel_start + (panel + (line + i) * TILE_BYTES) // product.element_bytes
            amx.prefetch(amx.address(product.spec.rhs.data, position))

    def _finish(self) -> None:
        """Multiply the tail of k, then store the accumulators, or make their rows pending."""
        product, task, spec = self.product, self.task, self.product.spec
        if product.tail_bytes:
            product.tile.step(
                partial(self._left_tile, tirx.const(product.steps, "int64")),
                lambda j: (amx.address(task.tail_groups, j * TILE_BYTES), product.tile.vectors * TILE_BYTES),
            )
        if _stores_directly(product):
            start = spec.result.address({**self.at, "m": self.first_row, "n": self.column})
            product.tile.store(spec.result.data, start, spec.result.stride("m"))
            return
        product.tile.store(task.sums, int64(0), 2 * LANES)
        # Rows that overlap the pair before are finished with that pair.
        overlap = self.pair * product.pair_height - self.first_row
        destination = [self.first_row, self.column, *(self.at[name] for name in product.batch)]
        task.pending.put(overlap, product.pair_height, destination)
        if not product.steps:
            _finish_pending(task)


def _stores_directly(product: _ProductPlan) -> bool:
    """Return whether accumulator tiles are stored directly to the result."""
    spec = product.spec
    has_no_epilogue = spec.epilogue.expression == Expression.operand(0) and spec.result.dtype == spec.dot.types[2]
    columns = product.tile.vectors * LANES
    is_whole = isinstance(spec.m, int) and spec.m % product.pair_height == 0 and spec.n % columns == 0
    is_row_major = spec.result.layout.is_identity and spec.result.index_map[-1] == "n"
    is_cached = is_whole and spec.m * spec.n * bytes_of(spec.result.dtype) <= MAX_DIRECT_STORE_BYTES
    return has_no_epilogue and spec.init is None and is_cached and is_row_major


def _finish_pending(task: _Task, max_rows: int | None = None) -> None:
    """Finish at most `max_rows` pending rows (None: all)."""
    if not _stores_directly(task.product):
        task.pending.finish(lambda r: _finish_row(task, r), max_rows)


def _finish_row(task: _Task, r: Expr) -> None:
    """Apply the epilogue to a pending row, and store it."""
    product, spec = task.product, task.product.spec
    destination = task.pending.place
    row, column = materialize(destination[0] + r), materialize(destination[1])
    at = {name: materialize(destination[2 + i]) for i, name in enumerate(product.batch)}

    def store(masks: Masks) -> None:
        for j, mask in enumerate(masks):
            coordinates = {**at, "m": row, "n": column + j * LANES}
            value = task.sums[lane_indices(r * (2 * LANES) + j * LANES, LANES)]

            def load(view: OperandView, coordinates: Coordinates = coordinates, mask: Expr | None = mask) -> Any:
                return view.load(coordinates, "n", LANES, mask if view.runs_along("n") else None)

            if spec.init is not None:
                value = value + load(spec.init)
            spec.result.store(coordinates, "n", spec.epilogue.result(let(value), load), LANES, mask)

    over_columns(column, product.tile.vectors * LANES, spec.n, LANES, store)
