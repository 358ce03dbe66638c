"""Block of a quantized matrix product: column tiles one after another, k split among warps, then a reduction."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.problem import QuantizedMatmulProblem
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, ceil_div, int64, minimum
from ...core.view import extent_of
from ..all_reduce import send_words, word_places
from ..core import ptx
from ..core.launch import Place, SharedMemory, local
from ..core.operand import GpuOperand
from ..tile.epilogue import EpilogueWriter
from .block_fragments import WeightFragments
from .block_plan import GROUP_COLUMNS, BlockPlan, BlockWork
from .block_rows import LeftRows, RowSource
from .weight_parts import point_registers


class BlockBody:
    """Writer of a block's code.

    Attributes
    ----------
    addresses : GpuOperand or None
        Addresses of the memory of GPUs that the result is sent to.
    """

    addresses: GpuOperand | None = None

    def __init__(
        self,
        problem: QuantizedMatmulProblem,
        gpu: GpuTarget,
        plan: BlockPlan,
        lhs: GpuOperand,
        packed: list[GpuOperand],
        writer: EpilogueWriter,
    ) -> None:
        self.gpu, self.lhs, self.packed, self.writer = gpu, lhs, packed, writer
        self.work = self._work_of(problem, plan, extent_of([writer.result], "m"))

    def _work_of(self, problem: QuantizedMatmulProblem, plan: BlockPlan, m: Expr) -> BlockWork:
        return BlockWork(problem, plan, m)

    @property
    def row_step(self) -> int:
        """Rows between the first rows of neighbouring blocks."""
        return self.work.rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.work.plan.warps * WARP

    def reserve(self, shared: SharedMemory) -> None:
        """Reserve the block's shared memory, before the launch."""
        shared.reserve(self.work.shared_bytes)

    def count_row_tiles(self) -> Expr:
        """Number of row tiles."""
        return ceil_div(self.work.m, self.row_step)

    def prepare(self, row_tiles: Expr, blocks_per_sm: int) -> None:
        """Distribute the work among blocks; parameters as in `BlockWork.share`."""
        self.row_tiles = row_tiles
        self.work.share(self.gpu, row_tiles, blocks_per_sm, point_registers(self.work.problem))

    def emit(self, place: Place, shared: SharedMemory) -> None:
        """Write the block's code."""
        row_tiles = self.row_tiles
        self.shared, self.thread = shared, place.thread
        block = T.Cast("int64", place.block)
        self.first_block = T.bind(tirx.floordiv(block, int64(row_tiles)))
        self.first_row = T.bind(tirx.floormod(block, int64(row_tiles)) * self.row_step)
        self.warp = self.k_warp = T.bind(tirx.floordiv(place.thread, WARP))
        lane = T.bind(tirx.floormod(place.thread, WARP))
        self.high, self.low = T.bind(tirx.floordiv(lane, 4)), T.bind(tirx.floormod(lane, 4))
        self.lane = lane
        self._emit_block()

    def _emit_block(self) -> None:
        """Write the code after the thread's indices."""
        self._open()
        plan = self.work.plan
        self.sums, self.left_sums = local(plan.groups * 4, "float32"), local(plan.groups * 4, "float32")
        self.totals = local(plan.fragments * plan.groups * 4, "float32")
        self._work()

    def _open(self) -> None:
        """Allocate registers of both operands."""
        self.weights = WeightFragments(self.work, self.packed, self.lane, self.high)
        self.left = self._left_rows(self.lhs, self.first_row)

    def _left_rows(self, lhs: RowSource, first: Expr) -> LeftRows:
        """Loads of the block's left rows, from row `first` of `lhs` on."""
        work = self.work
        is_whole = isinstance(work.m, int) and work.held_rows == work.m and work.problem.depth % work.chunk == 0
        copies = self.gpu.bulk_copies and is_whole and work.parts == 1 and not work.problem.rounded
        return LeftRows(work, lhs, self.shared, self.thread, (self.low, self.high), first, copies)

    def _work(self) -> None:
        """Process all column tiles of the block, with the weights of the next chunks in flight."""
        work, plan = self.work, self.work.plan
        self._release()
        num_tiles: Expr = 1
        if work.is_persistent:
            num_tiles = T.bind(tirx.floordiv(work.column_tiles - 1 - self.first_block, work.stride) + 1)
        for slot in range(plan.ahead):
            self._load(slot, self.first_block, slot)
        self.left.open_copies()
        if self.left.copies:
            ptx.block_barrier()
        self._wait()
        if work.held_rows:
            self.left.hold()
            if not self.left.copies:
                ptx.block_barrier()
        self._process(num_tiles)

    def _release(self) -> None:
        """Let the next launch begin, unless the result is sent: a sum begins when the blocks have multiplied."""
        if self.gpu.overlaps_launches and self.addresses is None:
            # At once, as these kernels are too short for a later start to overlap the next launch's weight loads.
            ptx.launch_dependents()

    def _wait(self) -> None:
        """Wait for the previous launch, with the first weights in flight."""
        if self.gpu.overlaps_launches:
            ptx.griddepcontrol_wait()

    def _process(self, num_tiles: Expr) -> None:
        """Process the block's column tiles, and store their results."""
        work = self.work
        if not work.is_persistent:
            self._tile(0, num_tiles, 0)
            self._finish(int64(0), 1)
            return
        with T.serial(tirx.floordiv(num_tiles + (work.batch - 1), int64(work.batch))) as batch:
            first = T.bind(batch * work.batch)
            count = T.bind(T.min(num_tiles - first, int64(work.batch)))
            with T.serial(count) as index_in_batch:
                self._tile(first + index_in_batch, num_tiles, T.Cast("int32", index_in_batch))
            self._finish(first, T.Cast("int32", count))

    def _tile(self, index: Expr, num_tiles: Expr, index_in_batch: Expr) -> None:
        """Multiply a column tile, load ahead, and store the warp's accumulators to shared memory."""
        work, plan = self.work, self.work.plan
        iterations = -(-work.own // plan.ahead)
        tile = T.bind(self.first_block + index * work.stride)
        for number in range(plan.fragments * plan.groups * 4):
            T.buffer_store(self.totals, self._initial(number, tile), [number])
        with T.serial(int64(iterations)) as number:
            for slot in range(plan.ahead):
                self._chunk(slot, number * plan.ahead + slot)
                self._load_next(slot, (number, iterations), tile, index + 1 < num_tiles)
        self._stage_sums(index_in_batch)

    def _initial(self, number: int, tile: Expr) -> Expr:
        """Initial value of an accumulator of a column tile."""
        return T.float32(0)

    def _load_next(self, slot: int, progress: tuple[Expr, int], tile: Expr, more: Expr) -> None:
        """Load the next chunk of a slot, of this tile or of the block's next one."""
        number, rounds = progress
        if rounds > 1:
            with T.If(number + 1 < rounds), T.Then():
                self._load(slot, tile, (number + 1) * self.work.plan.ahead + slot)
        if self.work.is_persistent:
            with T.If(more if rounds == 1 else tirx.all(tirx.EQ(number + 1, int64(rounds)), more)), T.Then():
                self._load(slot, tile + self.work.stride, slot)

    def _chunk_of(self, index: Expr) -> Expr:
        """Chunk of a warp; those of a block's warps are contiguous."""
        return int64(index) * self.work.plan.k_warps + self.k_warp

    def _exists(self, index: Expr) -> Expr | None:
        """Predicate of a warp's chunk; None if it is known to exist."""
        plan, chunks = self.work.plan, self.work.chunks
        # A warp's last iteration loads as many chunks as the others, even if fewer are left.
        last = index if isinstance(index, int) else -(-self.work.own // plan.ahead) * plan.ahead - 1
        if (last + 1) * plan.k_warps <= chunks:
            return None
        return self._chunk_of(index) < chunks

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        chunk = self._chunk_of(index)
        if self._exists(index) is not None:
            chunk = minimum(chunk, int64(self.work.chunks - 1))
        self.weights.load(slot, tile_of_block, T.bind(chunk))

    def _chunk(self, slot: int, index: Expr) -> None:
        """Accumulate the products of a chunk."""
        exists = self._exists(index)
        if exists is None:
            self._products(slot, index)
        else:
            with T.If(exists), T.Then():
                self._products(slot, index)

    def _products(self, slot: int, index: Expr) -> None:
        work, plan = self.work, self.work.plan
        first_k = T.bind(self._chunk_of(index) * work.chunk)
        if not work.held_rows:
            self.left.load(first_k)
        elif plan.fragments > 1:
            self.left.load_held(first_k, range(work.scaled))
        for fragment in range(plan.fragments):
            self._multiply_fragment(slot, fragment, first_k if work.held_rows and plan.fragments == 1 else None)

    def _multiply_fragment(self, slot: int, fragment: int, loaded_k: Expr | None = None) -> None:
        """Accumulate the products of a fragment of columns; load the left operand from `loaded_k` on, if given."""
        work = self.work
        if work.is_plain:
            self._multiply_plain(slot, fragment, loaded_k)
            return
        for number in range(work.scaled):
            if loaded_k is not None:
                self.left.load_held(loaded_k, [number])
            self.weights.begin(slot, fragment, number)
            for step in range(work.steps):
                self._multiply(slot, fragment, number * work.steps + step, step > 0)
            self._add_scaled(slot, fragment, number)

    def _multiply_plain(self, slot: int, fragment: int, loaded_k: Expr | None) -> None:
        if loaded_k is not None:
            self.left.load_held(loaded_k, [0])
        left, groups = self.weights.unpack(slot, fragment, 0), self.work.plan.groups
        for group in range(groups):
            totals = [self.totals[(fragment * groups + group) * 4 + i] for i in range(4)]
            types = (self.work.type, self.work.type)
            ptx.multiply_fragments(totals, left, self.left.fragment(group, 0), types, True)

    def _multiply(self, slot: int, fragment: int, step: int, adds: bool) -> None:
        left = self.weights.unpack(slot, fragment, step)
        for group in range(self.work.plan.groups):
            right = self.left.fragment(group, step)
            operands = [(self.sums, left)]
            if self.weights.has_any_points:
                operands.append((self.left_sums, self.weights.ones))
            for sums, fragments in operands:
                types = (self.work.type, self.work.type)
                ptx.multiply_fragments([sums[group * 4 + i] for i in range(4)], fragments, right, types, adds)

    def _add_scaled(self, slot: int, fragment: int, number: int) -> None:
        groups = self.work.plan.groups
        for half in range(2):
            scale = self.weights.scale(slot, fragment, number, half)
            has_minimums = self.weights.has_minimums
            minimum = self.weights.minimum(slot, fragment, number, half, scale) if has_minimums else None
            for group in range(groups):
                for i in (2 * half, 2 * half + 1):
                    if not self._may_be_row(group, i):
                        continue
                    total = (fragment * groups + group) * 4 + i
                    value: Expr = self.sums[group * 4 + i]
                    if minimum is not None:
                        added = minimum * self.left_sums[group * 4 + i] + self.totals[total]
                        T.buffer_store(self.totals, added + scale * value, [total])
                        continue
                    if self.weights.has_any_points:
                        point = self.weights.point(slot, fragment, number, half)
                        value = value - point * self.left_sums[group * 4 + i]
                    T.buffer_store(self.totals, self.totals[total] + scale * value, [total])

    def _may_be_row(self, group: int, i: int) -> bool:
        """Return whether a lane's accumulator i of a group may belong to an existing row."""
        m, parts = self.work.m, self.work.parts
        if not isinstance(m, int):
            return True
        last_group, in_group = divmod(m - 1, GROUP_COLUMNS // parts)
        last = last_group * GROUP_COLUMNS + (in_group + 1) * parts - 1
        return group * GROUP_COLUMNS + i % 2 <= last

    # Reduction over warps, in order.

    def _stage_sums(self, index_in_batch: Expr) -> None:
        """Store a warp's accumulators of a column tile to shared memory, at the tile's index in its batch."""
        work, plan = self.work, self.work.plan
        begin = index_in_batch * work.sums if work.batch > 1 else 0
        for fragment in range(plan.fragments):
            for group in range(plan.groups):
                for i in range(4):
                    if not self._may_be_row(group, i):
                        continue
                    row = group * GROUP_COLUMNS + 2 * self.low + i % 2
                    column = fragment * FRAGMENT_COLUMNS + self.high + 8 * (i // 2)
                    offset = begin + (self.warp * work.sum_rows + row) * plan.columns + column
                    total = tirx.reinterpret("uint32", self.totals[(fragment * plan.groups + group) * 4 + i])
                    if (group + 1) * GROUP_COLUMNS <= work.sum_rows:
                        ptx.store_shared(self.shared.at(offset * 4), [total])
                        continue
                    with T.If(row < work.sum_rows), T.Then():
                        ptx.store_shared(self.shared.at(offset * 4), [total])

    def _finish(self, first_index: Expr, count: Expr) -> None:
        """Reduce and store `count` column tiles, after all warps have stored their accumulators."""
        work, plan = self.work, self.work.plan
        columns = work.product_columns
        vector = min(4, self.writer.result.vector("n"))
        rows = min(work.rows, work.m) if isinstance(work.m, int) else work.rows
        per_tile, threads = rows * columns // vector, plan.warps * WARP
        items = per_tile * work.batch
        send, sent = None, work.problem.sent
        if sent is not None and self.addresses is not None:
            ptx.launch_dependents()
            send = partial(send_words, word_places(sent, self.addresses.data))
        self._barrier()
        with T.serial(tirx.const(-(-items // threads), "int32")) as iteration:
            item = T.bind(iteration * threads + self.thread)
            index_in_batch, in_tile = tirx.floordiv(item, per_tile), tirx.floormod(item, per_tile)
            row, column = tirx.floordiv(in_tile, columns // vector), tirx.floormod(in_tile, columns // vector) * vector
            tile = self.first_block + (first_index + T.Cast("int64", index_in_batch)) * work.stride
            result_row, conditions = self._result_row(row)
            at = {"m": result_row, "n": T.bind(tile * columns + column)}
            if work.batch > 1:
                conditions.append(index_in_batch < count)
            elif items % threads:
                conditions.append(item < items)
            is_whole = work.problem.columns % columns == 0
            with T.If(tirx.all(*conditions) if conditions else tirx.const(True)), T.Then():
                vector_index = tirx.const(0, "int32")
                registers = self.writer.registers(1, vector) if is_whole else None
                if registers is not None:
                    self.writer.load(registers, vector_index, at, vector)
                totals = [
                    self._reduce_sums(index_in_batch * work.sums, row, product * columns + column, vector)
                    for product in range(work.problem.products)
                ]
                end = None if is_whole else int64(work.problem.columns)
                loaded = None if registers is None else (registers, vector_index)
                reads = [partial(_element, totals, i) for i in range(vector)]
                self.writer.write(reads, at, "n", [], end, loaded, send)
        if work.is_persistent:
            self._barrier()

    def _barrier(self) -> None:
        """Synchronize the threads that multiply."""
        ptx.block_barrier()

    def _result_row(self, row: Expr) -> tuple[Expr, list[Expr]]:
        """Row of the result of a row of the block, and predicates of its existence."""
        work = self.work
        result_row = T.bind(self.first_row + row)
        is_whole = isinstance(work.m, int) and work.m % min(work.rows, work.m) == 0
        return result_row, [] if is_whole else [result_row < work.m]

    def _reduce_sums(self, begin: Expr, row: Expr, column: Expr, vector: int) -> Any:
        """Reduce neighbouring columns of a row over warps and over the parts of the row."""
        work, plan = self.work, self.work.plan
        per = GROUP_COLUMNS // work.parts
        totals, part_sums = local(vector, "float32"), local(vector, "float32")
        for i in range(vector):
            T.buffer_store(totals, T.float32(0), [i])
        for warp in range(plan.warps):
            for part in range(work.parts):
                # With three parts per row, the last two of a group of eight rows are unused.
                first = tirx.floordiv(row, per) * GROUP_COLUMNS + tirx.floormod(row, per) * work.parts + part
                offset = begin + (warp * work.sum_rows + first) * plan.columns + column
                ptx.load_shared([part_sums[i] for i in range(vector)], self.shared.at(offset * 4), "f32")
                for i in range(vector):
                    T.buffer_store(totals, totals[i] + part_sums[i], [i])
        return totals


def _element(products: list[Any], i: int) -> tuple[Expr, ...]:
    """Accumulators of a column, of each product."""
    return tuple(totals[i] for totals in products)
