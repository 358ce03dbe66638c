"""Tiled SIMT products (without tensor cores).

A block computes a tile of the result. In each k-step, its threads load the next tiles of both operands, converted to
the accumulators' type and with the result's dimensions innermost, while they multiply the current ones (double
buffering in shared memory). Where the language has dot products of bytes (`core.dialect.has_byte_dots`), bytes are
stored as words of four along k. Where shared memory is a part of global memory, threads read operands in place.
Accumulators are in registers. Where tiles are few, slices of threads, and the blocks of a
cluster, split k, and add their accumulators in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES, WARP
from ...core.builder import Expr, ceil_div, int64, lane_indices, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.dialect import BYTES_OF_WORD, byte_dot, has_byte_dots, shared_scope
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand, divides, is_multiple
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from .simt_plan import SimtPlan


def barrier() -> None:
    """Synchronize the block by TVM's barrier, which TVM considers when it inserts barriers between accesses."""
    T.evaluate(T.tvm_storage_sync(shared_scope()))


def known(extent: Expr) -> int | None:
    """Return a static extent; None if it is symbolic."""
    return extent if isinstance(extent, int) else None


_MAX_LOADED_ELEMENTS = 32  # elements of an epilogue operand that a thread loads before it stores results


class Taps(Protocol):
    """Interface of the addresses of an implicit GEMM's left operand (`conv.filter_taps`)."""

    @property
    def kind(self) -> str:
        """Integer type of offsets."""

    @property
    def vector(self) -> int:
        """Contiguous, aligned elements along k."""

    def pixel(self, at: Coordinates, row: Expr) -> tuple[Expr, Expr]:
        """Offset and mask of an existing row."""

    def element(self, k: Expr, inner: Expr = 0, depth: int = 0) -> tuple[Expr, Expr]:
        """Offset of an existing ``k + inner``, and its bits of the row's mask, None without padding.

        `inner` is less than `depth`, of which k is a multiple.
        """


@dataclass(frozen=True)
class SimtOperand:
    """One operand: its dimension of the result, and the extents of a tile and of all tiles along it.

    `taps` are the addresses of the left operand of an implicit GEMM.
    """

    view: GpuOperand
    along: str
    size: int
    extent: Expr
    taps: Taps | None = None


@dataclass(frozen=True)
class _Group:
    """Neighbouring results: registers of their accumulators, the first one's index, row and column."""

    sums: Any
    begin: Expr
    row: Expr
    column: Expr


class TiledProduct:
    """Writer of a tiled product.

    Parameters
    ----------
    left, right : SimtOperand
        Operands of the rows and of the columns of a tile; columns are contiguous in the result.
    """

    def __init__(
        self,
        left: SimtOperand,
        right: SimtOperand,
        k: Expr,
        dtype: str,
        writer: EpilogueWriter,
        batches: Batches,
        plan: SimtPlan,
    ) -> None:
        self.left, self.right, self.k, self.dtype, self.plan = left, right, k, dtype, plan
        self.writer, self.batches = writer, batches
        has_words = has_byte_dots() and dtype == "int32" and all(map(_has_words, (left, right)))
        self.word = BYTES_OF_WORD if has_words else 1  # elements along k of an element in shared memory

    def emit(self) -> None:
        """Write the launch."""
        plan = self.plan
        # The grid must not be empty; a block without a tile stores nothing.
        tiles_m, tiles_n = (at_least_one(ceil_div(side.extent, side.size)) for side in (self.left, self.right))
        count = at_least_one(self.batches.count)
        with launch(int64(count * tiles_m * tiles_n * plan.cluster), plan.threads, plan.cluster) as place:
            self.rank = place.rank
            tile = int64(place.block) if plan.cluster == 1 else tirx.floordiv(int64(place.block), plan.cluster)
            self._tile(*self._tile_origin(tile, tiles_m, tiles_n), place.thread)

    def _tile_origin(self, block: Expr, tiles_m: Expr, tiles_n: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch coordinates, first row and first column of a block's tile."""
        at, tile_m, tile_n = self.batches.tile(block, tiles_m, tiles_n)
        return at, T.bind(tile_m * self.left.size), T.bind(tile_n * self.right.size)

    def _tile(self, at: Coordinates, row: Expr, column: Expr, thread: Expr) -> None:
        plan = self.plan
        if not plan.staged:
            self._tile_in_place(at, row, column, _ThreadTile(plan, thread))
            return
        depth = plan.depth * plan.slices * self.word
        self.shared = T.alloc_buffer((plan.shared_elements,), self.dtype, scope=shared_scope())
        loaders = [
            _TileLoader(
                operand,
                first,
                at,
                self.batches.exists,
                self.k,
                depth,
                self.shared,
                offset,
                self.dtype,
                thread,
                plan,
                self.word,
            )
            for operand, first, offset in ((self.left, row, 0), (self.right, column, plan.left_elements))
        ]
        sums = local(plan.thread_rows * plan.thread_columns, self.dtype)
        with unrolled(plan.thread_rows * plan.thread_columns) as i:
            T.buffer_store(sums, tirx.const(0, self.dtype), [i])
        first, steps = self._steps(depth)
        for loader in loaders:
            loader.fetch(first * depth)
            loader.put(tirx.const(0, "int32"))
        barrier()
        thread_tile = _ThreadTile(plan, thread)
        with T.serial(steps) as step:
            buffer = T.cast(tirx.floormod(step, 2), "int32")
            has_next = step + 1 < steps
            with T.If(has_next), T.Then():
                for loader in loaders:
                    loader.fetch((first + step + 1) * depth)
            self._multiply(sums, loaders, buffer, thread_tile)
            with T.If(has_next), T.Then():
                for loader in loaders:
                    loader.put(1 - buffer)
            barrier()
        self._store(sums, at, row, column, thread_tile)

    def _tile_in_place(self, at: Coordinates, row: Expr, column: Expr, thread_tile: _ThreadTile) -> None:
        """Compute a tile of operands that threads read from global memory, whose caches neighbours share."""
        plan = self.plan
        sums = local(plan.thread_rows * plan.thread_columns, self.dtype)
        with unrolled(plan.thread_rows * plan.thread_columns) as i:
            T.buffer_store(sums, tirx.const(0, self.dtype), [i])
        depth = _DEPTH_IN_PLACE if is_multiple(self.k, _DEPTH_IN_PLACE) else 1
        left, right = (
            _Fragment(operand, first, at, group_start, count, plan.group, depth, self.dtype)
            for operand, first, group_start, count in (
                (self.left, row, thread_tile.row_of_group, plan.thread_rows),
                (self.right, column, thread_tile.column_of_group, plan.thread_columns),
            )
        )
        exists = [] if self.batches.exists is None else [self.batches.exists]
        exists += [first < side.extent for first, side in ((row, self.left), (column, self.right))]
        with T.If(tirx.all(*exists)), T.Then(), T.serial(int64(ceil_div(self.k, depth))) as step:
            for fragment in (left, right):
                fragment.load(step * depth)
            with unrolled(depth) as k, unrolled(plan.thread_rows) as i, unrolled(plan.thread_columns) as j:
                index = i * plan.thread_columns + j
                T.buffer_store(sums, sums[index] + left.element(k, i) * right.element(k, j), [index])
        self._store(sums, at, row, column, thread_tile)

    def _steps(self, depth: int) -> tuple[Expr, Expr]:
        """First k-step and number of k-steps of this block; blocks of a cluster split k."""
        steps, cluster = ceil_div(self.k, depth), self.plan.cluster
        if cluster == 1:
            return int64(0), int64(steps)
        assert isinstance(steps, int), "only a static k is split"
        each, more = divmod(steps, cluster)
        rank = T.bind(T.cast(self.rank, "int64"))
        if more == 0:
            return T.bind(rank * each), int64(each)
        return T.bind(rank * each + T.min(rank, int64(more))), T.bind(each + T.Select(rank < more, int64(1), int64(0)))

    def _multiply(self, sums: Expr, loaders: list[_TileLoader], buffer: Expr, thread_tile: _ThreadTile) -> None:
        plan = self.plan
        group = plan.group
        sizes = (plan.thread_rows, plan.thread_columns)
        fragments = [local(size, self.dtype) for size in sizes]
        with unrolled(plan.depth) as k:
            for loader, fragment, size, group_start in zip(
                loaders, fragments, sizes, (thread_tile.row_of_group, thread_tile.column_of_group), strict=True
            ):
                for g in range(size // group):
                    offset = loader.offset(buffer, thread_tile.slice * plan.depth + k, group_start(g))
                    T.buffer_store(
                        fragment,
                        loader.shared[lane_indices(offset, group)],
                        [lane_indices(tirx.const(g * group, "int32"), group)],
                    )
            with unrolled(plan.thread_rows) as i, unrolled(plan.thread_columns) as j:
                index = i * plan.thread_columns + j
                one, other = fragments[0][i], fragments[1][j]
                if self.word > 1:
                    total = byte_dot(self.left.view.nominal, self.right.view.nominal, one, other, sums[index])
                else:
                    total = sums[index] + one * other
                T.buffer_store(sums, total, [index])

    def _store(self, sums: Expr, at: Coordinates, row: Expr, column: Expr, thread_tile: _ThreadTile) -> None:
        plan = self.plan
        groups = plan.thread_columns // plan.group
        if plan.slices == plan.cluster == 1:

            def group_of(number: Expr) -> _Group:
                i, g = number // groups, number % groups
                begin = i * plan.thread_columns + g * plan.group
                return _Group(sums, begin, row + thread_tile.row_at(i), column + thread_tile.column_at(g))

            self._write(plan.thread_rows * groups, group_of, at)
            return
        self._store_shared_sums(sums, at, row, column, thread_tile)

    def _store_shared_sums(self, sums: Expr, at: Coordinates, row: Expr, column: Expr, tile: _ThreadTile) -> None:
        """Add the accumulators of slices and blocks, in order; each stores a part of the tile."""
        plan = self.plan
        groups, threads = plan.thread_columns // plan.group, plan.slice_threads
        slice_size = plan.thread_rows * plan.thread_columns
        partials = self.shared  # reuses the tiles' memory
        with unrolled(slice_size) as i:
            T.buffer_store(partials, sums[i], [(tile.slice * slice_size + i) * threads + tile.own])
        barrier()
        own_groups = plan.thread_rows * groups // plan.slices
        totals = local(own_groups * plan.group, self.dtype)
        with unrolled(own_groups) as q, unrolled(plan.group) as e:
            total: Expr = tirx.const(0, self.dtype)
            for slice_ in range(plan.slices):
                first = slice_ * slice_size + (q * plan.slices + tile.slice) * plan.group + e
                total = total + partials[first * threads + tile.own]
            T.buffer_store(totals, total, [q * plan.group + e])
        if plan.cluster > 1:
            own_groups = self._add_blocks(totals, partials, tile)

        def group_of(q: Expr) -> _Group:
            own_group = q if plan.cluster == 1 else self.rank * own_groups + q
            number = T.bind(own_group * plan.slices + tile.slice)
            i, g = tirx.floordiv(number, groups), tirx.floormod(number, groups)
            return _Group(totals, q * plan.group, row + tile.row_at(i), column + tile.column_at(g))

        self._write(own_groups, group_of, at)

    def _add_blocks(self, totals: Expr, partials: Expr, thread_tile: _ThreadTile) -> int:
        """Reduce totals over the cluster; return the number of a thread's groups of results."""
        plan = self.plan
        count = plan.thread_rows * plan.thread_columns // plan.slices
        own = count // plan.cluster
        barrier()  # all threads have read the memory that is overwritten
        with unrolled(count) as i:
            T.buffer_store(partials, totals[i], [i * plan.threads + thread_tile.thread])
        ptx.cluster_arrive()
        ptx.cluster_wait()
        local_address = T.bind(ptx.shared_address(T.address_of(partials[thread_tile.thread])))
        first = T.cast(self.rank, "uint32") * T.uint32(own * plan.threads * bytes_of(self.dtype))
        remote, loaded = local(1, "uint32"), local(1, self.dtype)
        with unrolled(own) as i:
            T.buffer_store(totals, tirx.const(0, self.dtype), [i])
        name = {"float32": "f32", "int32": "s32", "uint32": "u32"}[self.dtype]
        for block in range(plan.cluster):
            ptx.remote_address(remote[0], local_address, block)
            with unrolled(own) as i:
                offset = first + T.cast(i, "uint32") * T.uint32(plan.threads * bytes_of(self.dtype))
                ptx.load_remote([loaded[0]], remote[0] + offset, name)
                T.buffer_store(totals, totals[i] + loaded[0], [i])
        # No block may exit before others have read its shared memory.
        ptx.cluster_arrive()
        ptx.cluster_wait()
        return own // plan.group

    def _write(self, count: int, group_of: Callable[[Expr], _Group], at: Coordinates) -> None:
        """Store groups of neighbours; loads of large epilogue operands for several groups are in flight together."""
        left, right, writer, width = self.left, self.right, self.writer, self.plan.group
        max_groups = max(1, _MAX_LOADED_ELEMENTS // width) if writer.reads_in_vectors(width, right.along) else 1
        per_pass = next(each for each in range(min(count, max_groups), 0, -1) if count % each == 0)
        registers = writer.registers(per_pass, width, right.along) if per_pass > 1 else []
        end = None if divides(right.extent, right.size) else right.extent
        with unrolled(count // per_pass) as group_pass:
            groups = [group_of(group_pass * per_pass + i) for i in range(per_pass)]
            positions = [{**at, left.along: group.row, right.along: group.column} for group in groups]
            rows = [None if divides(left.extent, left.size) else group.row < left.extent for group in groups]
            sums = [
                [lambda group=group, e=e: group.sums[group.begin + e] for e in range(width)]  # type: ignore[misc]
                for group in groups
            ]
            if per_pass == 1:
                writer.write(sums[0], positions[0], right.along, [self.batches.exists, rows[0]], end)
                return
            for i, (position, row) in enumerate(zip(positions, rows, strict=True)):
                with self._existing(position, row, end):
                    writer.load(registers, tirx.const(i, "int32"), position, width, right.along)
            for i, (position, row) in enumerate(zip(positions, rows, strict=True)):
                with self._existing(position, row, end):
                    writer.write(sums[i], position, right.along, loaded=(registers, tirx.const(i, "int32")))

    @contextmanager
    def _existing(self, position: Coordinates, row: Expr | None, end: Expr | None) -> Iterator[None]:
        """Context of code that is predicated on the existence of a group."""
        conditions = [self.batches.exists, row, None if end is None else position[self.right.along] < end]
        with when(tirx.all(tirx.const(True, "bool"), *[each for each in conditions if each is not None])):
            yield


class _ThreadTile:
    """Rows and columns of a thread in the block tile.

    A thread has groups of neighbouring rows and columns, interleaved with those of other lanes of its warp, to avoid
    bank conflicts.
    """

    def __init__(self, plan: SimtPlan, thread: Expr) -> None:
        self.plan = plan
        across, down = plan.columns // plan.thread_columns, plan.rows // plan.thread_rows
        self.lanes_across = min(8, across)
        self.lanes_down = min(WARP // self.lanes_across, down)
        if self.lanes_down * self.lanes_across < WARP:
            self.lanes_across = WARP // self.lanes_down
        self.slice: Expr = tirx.const(0, "int32")
        self.thread = self.own = thread
        if plan.slices > 1:
            self.slice = T.bind(tirx.floordiv(thread, plan.slice_threads))
            self.own = T.bind(tirx.floormod(thread, plan.slice_threads))
        warp, lane = tirx.floordiv(self.own, WARP), tirx.floormod(self.own, WARP)
        warps_across = across // self.lanes_across
        warp_row, warp_column = tirx.floordiv(warp, warps_across), tirx.floormod(warp, warps_across)
        group = plan.group
        self.row = T.bind(
            warp_row * (self.lanes_down * plan.thread_rows) + tirx.floordiv(lane, self.lanes_across) * group
        )
        self.column = T.bind(
            warp_column * (self.lanes_across * plan.thread_columns) + tirx.floormod(lane, self.lanes_across) * group
        )

    def row_of_group(self, g: int) -> Expr:
        """First row of the thread's group `g` of rows."""
        return self.row + g * (self.lanes_down * self.plan.group)

    def column_of_group(self, g: int) -> Expr:
        """First column of the thread's group `g` of columns."""
        return self.column + g * (self.lanes_across * self.plan.group)

    def row_at(self, i: Expr) -> Expr:
        """Row in the block tile of the thread's row i."""
        group = self.plan.group
        return self.row + tirx.floordiv(i, group) * (self.lanes_down * group) + tirx.floormod(i, group)

    def column_at(self, g: Expr) -> Expr:
        """First column in the block tile of the thread's group g."""
        return self.column + g * (self.lanes_across * self.plan.group)


_DEPTH_IN_PLACE = 4
"""Elements along k that a thread loads from global memory at a time."""


class _Fragment:
    """Elements of an operand that a thread multiplies, loaded from global memory.

    Elements beyond the extent are copies of the last ones, and are not stored.
    """

    def __init__(
        self,
        operand: SimtOperand,
        first: Expr,
        at: Coordinates,
        group_start: Callable[[Expr], Expr],
        count: int,
        group: int,
        depth: int,
        dtype: str,
    ) -> None:
        self.operand, self.first, self.at, self.group_start = operand, first, at, group_start
        self.count, self.group, self.depth, self.dtype = count, group, depth, dtype
        view = operand.view
        self.along_k = view.is_contiguous("k")
        self.vector = view.vector("k" if self.along_k else operand.along, bytes_of(view.nominal) * group)
        self.vector = min(self.vector, depth if self.along_k else group)
        self.registers = local(count * depth, view.dtype)

    def load(self, k: Expr) -> None:
        """Load the elements at `k` and the following ones."""
        for group in range(self.count // self.group):
            begin = self.first + self.group_start(tirx.const(group, "int32"))
            if self.along_k:
                for element in range(self.group):
                    for inner in range(0, self.depth, self.vector):
                        self._load(begin + element, k + inner, (group * self.group + element) * self.depth + inner)
            else:
                for inner in range(self.depth):
                    for element in range(0, self.group, self.vector):
                        self._load(begin + element, k + inner, inner * self.count + group * self.group + element)

    def _load(self, index: Expr, k: Expr, register: int) -> None:
        view, width = self.operand.view, self.vector
        if not divides(self.operand.extent, self.operand.size):
            index = T.min(index, int64(self.operand.extent - (1 if self.along_k else width)))
        value = view.data[lane_indices(view.address({**self.at, self.operand.along: index, "k": k}), width)]
        T.buffer_store(self.registers, value, [lane_indices(tirx.const(register, "int32"), width)])

    def element(self, k: Expr, index: Expr) -> Expr:
        """An element, as the accumulators' type."""
        register = index * self.depth + k if self.along_k else k * self.count + index
        return self.operand.view.converted(self.registers[register], self.dtype)


def _has_words(operand: SimtOperand) -> bool:
    """Return whether an operand is of bytes, of which vectors along k, or across it, are words of four along k."""
    view, taps = operand.view, operand.taps
    if view.nominal not in ("int8", "uint8"):
        return False
    vector = taps.vector if taps is not None else view.vector("k") if view.is_contiguous("k") else BYTES_OF_WORD
    return vector % BYTES_OF_WORD == 0


class _TileLoader:
    """Loader of an operand's tiles, through registers to shared memory.

    Parameters
    ----------
    depth : int
        Extent of k in a tile.
    word : int
        Elements along k that an element of shared memory consists of.
    """

    def __init__(
        self,
        operand: SimtOperand,
        first: Expr,
        batch: Coordinates,
        batch_exists: Expr | None,
        k: Expr,
        depth: int,
        shared: Expr,
        begin: int,
        dtype: str,
        thread: Expr,
        plan: SimtPlan,
        word: int,
    ) -> None:
        self.operand, self.first, self.batch, self.k, self.depth, self.dtype = operand, first, batch, k, depth, dtype
        self.batch_exists, self.word = batch_exists, word
        view, taps = operand.view, operand.taps
        self.along_k = taps is not None or view.is_contiguous("k")
        max_vector = max(1, VECTOR_BYTES // max(bytes_of(view.nominal), 1))
        vector = min(max_vector, operand.size * depth // plan.threads or 1)
        if taps is not None:
            self.vector = min(taps.vector, vector)
        else:
            self.vector = view.vector("k" if self.along_k else operand.along, vector * bytes_of(view.nominal))
        while self.along_k and depth % self.vector:
            self.vector //= 2
        # Loads along k are stored transposed: the pitch is padded by a group to avoid bank conflicts.
        self.pitch = operand.size + plan.group
        self.shared, self.begin = shared, begin
        self.unit_rows = 1 if self.along_k else word  # vectors along k of a unit
        units = operand.size * depth // (self.vector * self.unit_rows)
        self.units, self.threads, self.thread = units, plan.threads, thread
        self.num_loads = -(-units // plan.threads)
        self.registers = local(self.num_loads * self.unit_rows * self.vector, view.dtype)
        if taps is not None:
            self._find_rows(taps)

    def _find_rows(self, taps: Taps) -> None:
        """Compute offsets and masks of the thread's rows, for all k-steps."""
        self.row_offsets, self.masks = local(self.num_loads, taps.kind), local(self.num_loads, "uint32")
        with unrolled(self.num_loads) as load:
            _, row, _ = self._unit(load)
            # Rows beyond the extent are copies of the last one, and are not stored.
            offset, mask = taps.pixel(self.batch, T.min(self.first + row, int64(self.operand.extent - 1)))
            # In units of vectors: TVM vectorizes only accesses that it can prove to be aligned.
            T.buffer_store(self.row_offsets, tirx.floordiv(offset, self.vector), [load])
            T.buffer_store(self.masks, mask, [load])

    def offset(self, buffer: Expr, k: Expr, index: Expr) -> Expr:
        """Offset of a tile's element in shared memory."""
        return self.begin + (buffer * (self.depth // self.word) + k) * self.pitch + index

    def _unit(self, load: Expr) -> tuple[Expr, Expr, Expr]:
        """Number of a thread's load, and row and k in the tile of its first element."""
        number = load * self.threads + self.thread
        if self.along_k:
            vectors = self.depth // self.vector
            return number, tirx.floordiv(number, vectors), tirx.floormod(number, vectors) * self.vector
        vectors = self.operand.size // self.vector
        return number, tirx.floormod(number, vectors) * self.vector, tirx.floordiv(number, vectors) * self.unit_rows

    def fetch(self, k: Expr) -> None:
        """Load the tile at `k` into registers, zeros beyond the extents."""
        with unrolled(self.num_loads) as unit:
            number, row, inner = self._unit(unit)
            for unit_row in range(self.unit_rows):
                self._fetch(k, unit * self.unit_rows + unit_row, number, row, inner + unit_row)

    def _fetch(self, k: Expr, load: Expr, number: Expr, row: Expr, inner: Expr) -> None:
        """Load a vector."""
        view, width = self.operand.view, self.vector
        position = {**self.batch, self.operand.along: self.first + row, "k": k + inner}
        conditions = [] if self.batch_exists is None else [self.batch_exists]
        if self.units % self.threads:
            conditions.append(number < self.units)
        if not divides(self.operand.extent, self.operand.size) and self.operand.taps is None:
            conditions.append(position[self.operand.along] < self.operand.extent)
        if not divides(self.k, self.depth):
            conditions.append(position["k"] < self.k)
        if self.operand.taps is None:
            address = view.address(position)
        else:
            if divides(self.k, self.depth):
                tap_offset, bits = self.operand.taps.element(k, inner, self.depth)
            else:
                tap_offset, bits = self.operand.taps.element(T.min(position["k"], int64(self.k - width)))
            address = (self.row_offsets[load] + T.bind(tirx.floordiv(tap_offset, width))) * width
            if bits is not None:
                conditions.append(T.bitwise_and(self.masks[load], bits) == bits)
        value = view.data[lane_indices(address, width)]
        if not conditions:
            T.buffer_store(self.registers, value, [lane_indices(load * width, width)])
        else:
            with T.If(tirx.all(*conditions)):
                with T.Then():
                    T.buffer_store(self.registers, value, [lane_indices(load * width, width)])
                with T.Else(), unrolled(width) as v:  # TVM vectorizes int64 zeros as int32
                    T.buffer_store(self.registers, tirx.const(0, view.dtype), [load * width + v])

    def put(self, buffer: Expr) -> None:
        """Convert the registers to the accumulators' type, and store them to a buffer in shared memory."""
        width = self.vector
        with unrolled(self.num_loads) as load:
            number, row, inner = self._unit(load)

            def store_load() -> None:
                offset = self.offset(buffer, tirx.floordiv(inner, self.word) if self.word > 1 else inner, row)
                if self.word > 1:
                    self._store_words(load, offset)
                    return
                direct = not self.along_k and self.operand.view.dtype == self.dtype and width > 1
                if direct:
                    value = self.registers[lane_indices(load * width, width)]
                    T.buffer_store(self.shared, value, [lane_indices(offset, width)])
                    return
                with unrolled(width) as v:
                    value = self.operand.view.converted(self.registers[load * width + v], self.dtype)
                    T.buffer_store(self.shared, value, [offset + v * (self.pitch if self.along_k else 1)])

            if self.units % self.threads:
                with T.If(number < self.units), T.Then():
                    store_load()
            else:
                store_load()

    def _store_words(self, unit: Expr, offset: Expr) -> None:
        """Store words of four bytes along k."""
        begin = unit * self.unit_rows * self.vector
        count, step, apart, pitch = (
            (self.vector // self.word, self.word, 1, self.pitch) if self.along_k else (self.vector, 1, self.vector, 1)
        )
        with unrolled(count) as number:
            word: Expr = tirx.const(0, "int32")
            for byte in range(self.word):
                value = T.cast(self.registers[begin + number * step + byte * apart], "int32")
                word = T.bitwise_or(word, T.shift_left(T.bitwise_and(value, 255), 8 * byte))
            T.buffer_store(self.shared, word, [offset + number * pitch])
