"""Products by tiles of the result, without tensor cores.

A block computes a tile. Step by step along k, its threads bring tiles of both operands into shared memory, converted to
the type of the sums and with the result's dimensions innermost, while they multiply the tiles brought before (two
buffers). A thread keeps its sums in registers; several slices of threads share k where there are few tiles, and add
their sums in shared memory.
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
from ..core.epilogue import EpilogueWriter
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand
from .simt_plan import SimtPlan

# Batches, extents that may be empty, and the barrier, which products without tensor cores share.

SHARED = "shared.dyn"
"""Where tiles are: one allocation, of a size that the launch says, since 48 KB are all that others may have."""

_RASTER_ROWS = 8
"""Tiles of rows that neighbouring blocks take before the next tile of columns: what they read stays in the cache."""


@dataclass(frozen=True)
class Batches:
    """The batch dimensions of a product.

    Attributes
    ----------
    extents : dict of str to (PrimExpr or int)
        Extents by name, outermost first.
    """

    extents: dict[str, Expr]

    @property
    def count(self) -> Expr:
        """How many products there are."""
        count: Expr = 1
        for extent in self.extents.values():
            count = count * extent
        return count

    @property
    def exists(self) -> Expr | None:
        """True if there is any product; None where that is known."""
        return None if isinstance(self.count, int) and self.count > 0 else int64(self.count) > 0

    def place(self, number: Expr) -> Coordinates:
        """Coordinates of a product by its number."""
        at: dict[str, Expr] = {}
        for name, extent in reversed(self.extents.items()):
            whole = at_least_one(extent)
            at[name] = T.bind(tirx.floormod(number, whole))
            number = tirx.floordiv(number, whole)
        return at

    def tile(self, block: Expr, row_tiles: Expr, column_tiles: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Coordinates of the product, and numbers of the tile among its rows and its columns, by a block's number."""
        tiles = row_tiles * column_tiles
        number = T.bind(tirx.floormod(block, tiles))
        at = self.place(tirx.floordiv(block, tiles))
        band = tirx.floordiv(number, column_tiles * _RASTER_ROWS)
        within = T.bind(number - band * (column_tiles * _RASTER_ROWS))
        height = T.bind(tirx.min(int64(_RASTER_ROWS), row_tiles - band * _RASTER_ROWS))
        return at, band * _RASTER_ROWS + tirx.floormod(within, height), tirx.floordiv(within, height)


def barrier() -> None:
    """All threads of the block meet, and see what the others wrote to shared memory.

    TVM's own barrier, which it takes into account where it adds barriers between accesses to shared memory.
    """
    T.evaluate(T.tvm_storage_sync(SHARED))


def known(extent: Expr) -> int | None:
    """An extent, None where it is symbolic."""
    return extent if isinstance(extent, int) else None


def divides(extent: Expr, size: int) -> bool:
    """Return whether tiles of a size are known to be whole, and that there are any."""
    return isinstance(extent, int) and extent > 0 and extent % size == 0


_MAX_READ = 32  # elements of an operand that a thread has asked for before it stores a result


class Places(Protocol):
    """Where elements of an operand are that its storage does not say: those of an implicit product in a map."""

    @property
    def kind(self) -> str:
        """Type of an element's place."""

    @property
    def vector(self) -> int:
        """Neighbours along k that lie side by side, aligned."""

    def pixel(self, at: Coordinates, row: Expr) -> tuple[Expr, Expr]:
        """Offset part and bits of an existing row."""

    def element(self, k: Expr, inner: Expr = 0, depth: int = 0) -> tuple[Expr, Expr]:
        """Offset part of an existing ``k + inner``, and the bits of the row that say that it is not zero.

        None for no bits. `inner` is less than `depth`, of which k is a multiple.
        """


@dataclass(frozen=True)
class Side:
    """One operand as blocks read it: its dimension of the result, and the tile's rows along that.

    Its elements are found by `places` where there are any.
    """

    view: GpuOperand
    along: str
    size: int
    extent: Expr
    places: Places | None = None


@dataclass(frozen=True)
class _Group:
    """Neighbours of the result: where their sums begin, and the place of the first."""

    sums: Any
    begin: Expr
    row: Expr
    column: Expr


class TiledProduct:
    """A product by tiles of the result.

    Parameters
    ----------
    left, right : Side
        Sides that the rows and the columns of a tile run along; the columns lie side by side in the result.
    """

    def __init__(
        self, left: Side, right: Side, k: Expr, dtype: str, writer: EpilogueWriter, batches: Batches, plan: SimtPlan
    ) -> None:
        self.left, self.right, self.k, self.dtype, self.plan = left, right, k, dtype, plan
        self.writer, self.batches = writer, batches

    def emit(self) -> None:
        """Write the launch."""
        plan = self.plan
        # Never none, so that a launch of an empty result is one that stores nothing.
        tiles_m, tiles_n = (at_least_one(ceil_div(side.extent, side.size)) for side in (self.left, self.right))
        count = at_least_one(self.batches.count)
        with launch(int64(count * tiles_m * tiles_n * plan.cluster), plan.threads, plan.cluster) as place:
            self.rank = place.rank
            tile = int64(place.block) if plan.cluster == 1 else tirx.floordiv(int64(place.block), plan.cluster)
            self._tile(*self._place(tile, tiles_m, tiles_n), place.thread)

    def _place(self, block: Expr, tiles_m: Expr, tiles_n: Expr) -> tuple[Coordinates, Expr, Expr]:
        """Batch coordinates and first row and column of a block's tile."""
        at, tile_m, tile_n = self.batches.tile(block, tiles_m, tiles_n)
        return at, T.bind(tile_m * self.left.size), T.bind(tile_n * self.right.size)

    def _tile(self, at: Coordinates, row: Expr, column: Expr, thread: Expr) -> None:
        plan = self.plan
        depth = plan.depth * plan.slices
        self.shared = T.alloc_buffer((plan.shared_elements,), self.dtype, scope=SHARED)
        brought = [
            _Brought(side, first, at, self.batches.exists, self.k, depth, self.shared, offset, self.dtype, thread, plan)
            for side, first, offset in ((self.left, row, 0), (self.right, column, plan.left_elements))
        ]
        sums = local(plan.thread_rows * plan.thread_columns, self.dtype)
        with unrolled(plan.thread_rows * plan.thread_columns) as i:
            T.buffer_store(sums, tirx.const(0, self.dtype), [i])
        first, steps = self._steps(depth)
        for operand in brought:
            operand.fetch(first * depth)
            operand.put(tirx.const(0, "int32"))
        barrier()
        where = _Threads(plan, thread)
        with T.serial(steps) as step:
            buffer = T.cast(tirx.floormod(step, 2), "int32")
            more = step + 1 < steps
            with T.If(more), T.Then():
                for operand in brought:
                    operand.fetch((first + step + 1) * depth)
            self._multiply(sums, brought, buffer, where)
            with T.If(more), T.Then():
                for operand in brought:
                    operand.put(1 - buffer)
            barrier()
        self._store(sums, at, row, column, where)

    def _steps(self, depth: int) -> tuple[Expr, Expr]:
        """The first step of k of this block, and how many it has: blocks of a cluster share them."""
        steps, cluster = ceil_div(self.k, depth), self.plan.cluster
        if cluster == 1:
            return int64(0), int64(steps)
        assert isinstance(steps, int), "k is shared only where it is known"
        each, more = divmod(steps, cluster)
        rank = T.bind(T.cast(self.rank, "int64"))
        if more == 0:
            return T.bind(rank * each), int64(each)
        return T.bind(rank * each + T.min(rank, int64(more))), T.bind(each + T.Select(rank < more, int64(1), int64(0)))

    def _multiply(self, sums: Expr, brought: list[_Brought], buffer: Expr, where: _Threads) -> None:
        plan = self.plan
        group = plan.group
        sizes = (plan.thread_rows, plan.thread_columns)
        held = [local(size, self.dtype) for size in sizes]
        with unrolled(plan.depth) as k:
            for operand, own, size, of_group in zip(
                brought, held, sizes, (where.row_of_group, where.column_of_group), strict=True
            ):
                for g in range(size // group):
                    offset = operand.offset(buffer, where.slice * plan.depth + k, of_group(g))
                    T.buffer_store(
                        own,
                        operand.shared[lane_indices(offset, group)],
                        [lane_indices(tirx.const(g * group, "int32"), group)],
                    )
            with unrolled(plan.thread_rows) as i, unrolled(plan.thread_columns) as j:
                at = i * plan.thread_columns + j
                T.buffer_store(sums, sums[at] + held[0][i] * held[1][j], [at])

    def _store(self, sums: Expr, at: Coordinates, row: Expr, column: Expr, where: _Threads) -> None:
        plan = self.plan
        groups = plan.thread_columns // plan.group
        if plan.slices == plan.cluster == 1:

            def own(number: Expr) -> _Group:
                i, g = number // groups, number % groups
                begin = i * plan.thread_columns + g * plan.group
                return _Group(sums, begin, row + where.row_at(i), column + where.column_at(g))

            self._write(plan.thread_rows * groups, own, at)
            return
        self._store_shared_sums(sums, at, row, column, where)

    def _store_shared_sums(self, sums: Expr, at: Coordinates, row: Expr, column: Expr, where: _Threads) -> None:
        """The sums of slices and of the cluster's blocks, added in their order; each stores a part of the tile."""
        plan = self.plan
        groups, threads = plan.thread_columns // plan.group, plan.slice_threads
        each = plan.thread_rows * plan.thread_columns
        parts = self.shared  # whose tiles have been read
        with unrolled(each) as i:
            T.buffer_store(parts, sums[i], [(where.slice * each + i) * threads + where.own])
        barrier()
        own_groups = plan.thread_rows * groups // plan.slices
        totals = local(own_groups * plan.group, self.dtype)
        with unrolled(own_groups) as q, unrolled(plan.group) as e:
            total: Expr = tirx.const(0, self.dtype)
            for part in range(plan.slices):
                first = part * each + (q * plan.slices + where.slice) * plan.group + e
                total = total + parts[first * threads + where.own]
            T.buffer_store(totals, total, [q * plan.group + e])
        if plan.cluster > 1:
            own_groups = self._add_blocks(totals, parts, where)

        def shared(q: Expr) -> _Group:
            mine = q if plan.cluster == 1 else self.rank * own_groups + q
            number = T.bind(mine * plan.slices + where.slice)
            place = (tirx.floordiv(number, groups), tirx.floormod(number, groups))
            return _Group(totals, q * plan.group, row + where.row_at(place[0]), column + where.column_at(place[1]))

        self._write(own_groups, shared, at)

    def _add_blocks(self, totals: Expr, parts: Expr, where: _Threads) -> int:
        """Add a thread's totals over the blocks of the cluster; of these it gets a part, whose groups are returned."""
        plan = self.plan
        count = plan.thread_rows * plan.thread_columns // plan.slices
        own = count // plan.cluster
        barrier()  # what the parts are overwritten by, others have read
        with unrolled(count) as i:
            T.buffer_store(parts, totals[i], [i * plan.threads + where.thread])
        ptx.cluster_arrive()
        ptx.cluster_wait()
        begin = T.bind(ptx.shared_address(T.address_of(parts[where.thread])))
        first = T.cast(self.rank, "uint32") * T.uint32(own * plan.threads * bytes_of(self.dtype))
        remote, loaded = local(1, "uint32"), local(1, self.dtype)
        with unrolled(own) as i:
            T.buffer_store(totals, tirx.const(0, self.dtype), [i])
        name = {"float32": "f32", "int32": "s32", "uint32": "u32"}[self.dtype]
        for block in range(plan.cluster):
            ptx.remote_address(remote[0], begin, block)
            with unrolled(own) as i:
                offset = first + T.cast(i, "uint32") * T.uint32(plan.threads * bytes_of(self.dtype))
                ptx.load_remote([loaded[0]], remote[0] + offset, name)
                T.buffer_store(totals, totals[i] + loaded[0], [i])
        # No block ends before all have read its sums.
        ptx.cluster_arrive()
        ptx.cluster_wait()
        return own // plan.group

    def _write(self, count: int, group_of: Callable[[Expr], _Group], at: Coordinates) -> None:
        """Store groups of neighbours; of operands as large as the result, those of several groups are read at once."""
        left, right, writer, width = self.left, self.right, self.writer, self.plan.group
        most = max(1, _MAX_READ // width) if writer.reads_in_vectors(width, right.along) else 1
        per_pass = next(each for each in range(min(count, most), 0, -1) if count % each == 0)
        held = writer.registers(per_pass, width, right.along) if per_pass > 1 else []
        end = None if divides(right.extent, right.size) else right.extent
        with unrolled(count // per_pass) as part:
            groups = [group_of(part * per_pass + i) for i in range(per_pass)]
            places = [{**at, left.along: group.row, right.along: group.column} for group in groups]
            rows = [None if divides(left.extent, left.size) else group.row < left.extent for group in groups]
            sums = [
                [lambda group=group, e=e: group.sums[group.begin + e] for e in range(width)]  # type: ignore[misc]
                for group in groups
            ]
            if per_pass == 1:
                writer.write(sums[0], places[0], right.along, [self.batches.exists, rows[0]], end)
                return
            for i, (place, row) in enumerate(zip(places, rows, strict=True)):
                with self._existing(place, row, end):
                    writer.load(held, tirx.const(i, "int32"), place, width, right.along)
            for i, (place, row) in enumerate(zip(places, rows, strict=True)):
                with self._existing(place, row, end):
                    writer.write(sums[i], place, right.along, loaded=(held, tirx.const(i, "int32")))

    @contextmanager
    def _existing(self, place: Coordinates, row: Expr | None, end: Expr | None) -> Iterator[None]:
        """Guard code that needs a group of neighbours to exist."""
        conditions = [self.batches.exists, row, None if end is None else place[self.right.along] < end]
        with when(tirx.all(tirx.const(True, "bool"), *[each for each in conditions if each is not None])):
            yield


class _Threads:
    """Where a thread's sums are: lanes of a warp beside each other, so that it reads shared memory without conflicts.

    A thread has groups of neighbouring rows and columns; between them lie the groups of its warp's other lanes.
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
        """The first row of the thread's group of rows."""
        return self.row + g * (self.lanes_down * self.plan.group)

    def column_of_group(self, g: int) -> Expr:
        """The first column of the thread's group of columns."""
        return self.column + g * (self.lanes_across * self.plan.group)

    def row_at(self, i: Expr) -> Expr:
        """Row of the tile of the thread's row i."""
        group = self.plan.group
        return self.row + tirx.floordiv(i, group) * (self.lanes_down * group) + tirx.floormod(i, group)

    def column_at(self, g: Expr) -> Expr:
        """Column of the tile of the first of the thread's group g of columns."""
        return self.column + g * (self.lanes_across * self.plan.group)


class _Brought:
    """Tiles of an operand on their way to shared memory."""

    def __init__(
        self,
        side: Side,
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
    ) -> None:
        self.side, self.first, self.batch, self.k, self.depth, self.dtype = side, first, batch, k, depth, dtype
        self.batch_exists = batch_exists
        view, places = side.view, side.places
        self.along_k = places is not None or view.is_contiguous("k")
        most = max(1, VECTOR_BYTES // max(bytes_of(view.nominal), 1))
        fitting = min(most, side.size * depth // plan.threads or 1)
        if places is not None:
            self.vector = min(places.vector, fitting)
        else:
            self.vector = view.vector("k" if self.along_k else side.along, fitting * bytes_of(view.nominal))
        while self.along_k and depth % self.vector:
            self.vector //= 2
        # Threads that read along k write apart in shared memory: a pitch of a group more spreads them over the banks.
        self.pitch = side.size + plan.group
        self.shared, self.begin = shared, begin
        units = side.size * depth // self.vector
        self.units, self.threads, self.thread = units, plan.threads, thread
        self.turns = -(-units // plan.threads)
        self.held = local(self.turns * self.vector, view.dtype)
        if places is not None:
            self._find_rows(places)

    def _find_rows(self, places: Places) -> None:
        """Compute facts about the rows that the thread loads, for all steps."""
        self.rows, self.seen = local(self.turns, places.kind), local(self.turns, "uint32")
        with unrolled(self.turns) as turn:
            _, row, _ = self._unit(turn)
            # Rows beyond the last are copies of it, which are not stored.
            begin, seen = places.pixel(self.batch, T.min(self.first + row, int64(self.side.extent - 1)))
            # Counted in vectors: TVM reads as one what it can prove to be aligned.
            T.buffer_store(self.rows, tirx.floordiv(begin, self.vector), [turn])
            T.buffer_store(self.seen, seen, [turn])

    def offset(self, buffer: Expr, k: Expr, at: Expr) -> Expr:
        """Where an element of the tile is in shared memory."""
        return self.begin + (buffer * self.depth + k) * self.pitch + at

    def _unit(self, turn: Expr) -> tuple[Expr, Expr, Expr]:
        """Load of a thread in a turn: its number, and the row and k of its first element within the tile."""
        number = turn * self.threads + self.thread
        if self.along_k:
            across = self.depth // self.vector
            return number, tirx.floordiv(number, across), tirx.floormod(number, across) * self.vector
        across = self.side.size // self.vector
        return number, tirx.floormod(number, across) * self.vector, tirx.floordiv(number, across)

    def fetch(self, k: Expr) -> None:
        """Bring the tile at `k` into registers, zeros where it leaves the operand."""
        view, width = self.side.view, self.vector
        with unrolled(self.turns) as turn:
            number, row, inner = self._unit(turn)
            place = {**self.batch, self.side.along: self.first + row, "k": k + inner}
            conditions = [] if self.batch_exists is None else [self.batch_exists]
            if self.units % self.threads:
                conditions.append(number < self.units)
            if not divides(self.side.extent, self.side.size) and self.side.places is None:
                conditions.append(place[self.side.along] < self.side.extent)
            if not divides(self.k, self.depth):
                conditions.append(place["k"] < self.k)
            if self.side.places is None:
                address = view.address(place)
            else:
                if divides(self.k, self.depth):
                    moved, bits = self.side.places.element(k, inner, self.depth)
                else:
                    moved, bits = self.side.places.element(T.min(place["k"], int64(self.k - width)))
                address = (self.rows[turn] + T.bind(tirx.floordiv(moved, width))) * width
                if bits is not None:
                    conditions.append(T.bitwise_and(self.seen[turn], bits) == bits)
            value = view.data[lane_indices(address, width)]
            if not conditions:
                T.buffer_store(self.held, value, [lane_indices(turn * width, width)])
            else:
                with T.If(tirx.all(*conditions)):
                    with T.Then():
                        T.buffer_store(self.held, value, [lane_indices(turn * width, width)])
                    with T.Else(), unrolled(width) as v:  # TVM makes vectors of int64 zeros ones of int32
                        T.buffer_store(self.held, tirx.const(0, view.dtype), [turn * width + v])

    def put(self, buffer: Expr) -> None:
        """Store the registers as numbers of the sums' type in a buffer of shared memory."""
        width = self.vector
        with unrolled(self.turns) as turn:
            number, row, inner = self._unit(turn)

            def stores() -> None:
                offset = self.offset(buffer, inner, row)
                direct = not self.along_k and self.side.view.dtype == self.dtype and width > 1
                if direct:
                    value = self.held[lane_indices(turn * width, width)]
                    T.buffer_store(self.shared, value, [lane_indices(offset, width)])
                    return
                with unrolled(width) as v:
                    value = self.side.view.converted(self.held[turn * width + v], self.dtype)
                    T.buffer_store(self.shared, value, [offset + v * (self.pitch if self.along_k else 1)])

            if self.units % self.threads:
                with T.If(number < self.units), T.Then():
                    stores()
            else:
                stores()
