"""Sources of keys and values: where the rows of a tile are in shared memory, how they come there, and who sees them.

Kernels ask a source for tiles, and do not know whether keys are dense or paged. A tile of `DenseKeyValues` is copied
by all threads (`CopiedKeyValues`), or by a warpgroup of producers (`ProducedKeyValues`); one of `PagedKeyValues` is a
page, which one thread loads by a bulk copy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.pages import PAGE
from ....target.gpu_target import WARP, WARPGROUP
from ...core.builder import Expr, ceil_div, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, local
from ..tile.operand_tiles import PRODUCERS, OperandTile, Source, arrive, source_of
from ..tile.register_tile import reduce_lanes
from ..tile.ring import Ring
from ..tile.shared_tile import ChunkedTile, MatrixOperand, SharedTile, SwizzledTile
from .attention_tensors import CHUNK, DenseTensors, PagedTensors
from .queries import DenseQueries
from .score_tile import Visible

Append = Callable[[Expr, Expr, Expr], None]
"""Callback that writes the token of a page: given the page's offset in shared memory, its number, and the token."""


class KeyValueSource(ABC):
    """Tiles of the keys and values that a block reads, in this order.

    Attributes
    ----------
    keys : int
        Keys of a tile.
    count : PrimExpr or int
        Tiles of the block, after `locate`.
    thread : PrimExpr
        Index of the thread, after `locate`.
    rings : sequence of Ring
        Barriers of shared memory.
    """

    keys: int
    count: Expr
    thread: Expr
    rings: Sequence[Ring] = ()

    def __init__(self, shared: SharedMemory) -> None:
        self.shared = shared

    def initialize(self, thread: Expr) -> None:
        """Initialize barriers, before the wait for previous launches."""
        if self.rings:
            with when(thread == 0):
                for ring in self.rings:
                    ring.initialize()
                ptx.barrier_init_fence()

    @abstractmethod
    def locate(self, thread: Expr) -> None:
        """Compute the range of the block's tiles."""

    @abstractmethod
    def first_key(self, index: Expr) -> Expr:
        """First key of a tile, int32."""

    @abstractmethod
    def wait(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Wait for the keys of a tile, for the values of a tile, or for both; first for the keys of a tile."""

    @abstractmethod
    def release(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Release the keys, or the values, of a tile, by all consumers."""

    @abstractmethod
    def begin_rows(self, row: Expr, warp_row: Expr) -> None:
        """Compute the keys visible to a lane's rows, `row` and 8 rows further on, of the warp's from `warp_row` on."""

    @abstractmethod
    def visible(self) -> Visible | None:
        """Keys visible to the rows, after `wait` for the keys of a tile; None: all keys, in every tile."""

    @abstractmethod
    def key_tile(self, index: Expr) -> SharedTile:
        """Keys of a tile."""

    @abstractmethod
    def value_tile(self, index: Expr) -> SharedTile:
        """Values of a tile, transposed."""

    @abstractmethod
    def matrices(self) -> tuple[MatrixOperand, MatrixOperand]:
        """Operands of wgmma for the offsets of tiles of keys and of values."""


class DenseKeyValues(KeyValueSource):
    """Tiles of tensors: at least one, whose keys may all be masked.

    Parameters
    ----------
    threads : int
        Threads that copy tiles.
    keys : int
        Keys of a tile; 0: those of the plan.
    may_transpose : bool
        Whether the kernel supports transposed tiles of keys.
    """

    def __init__(
        self, tensors: DenseTensors, shared: SharedMemory, threads: int, keys: int = 0, may_transpose: bool = False
    ) -> None:
        super().__init__(shared)
        self.tensors, plan, sizes = tensors, tensors.plan, tensors.sizes
        self.keys = keys = keys or plan.keys
        n, d, e = sizes["n"], sizes["d"], sizes["e"]
        self.k = OperandTile.of(tensors.key, "n", keys, n, d, threads, may_transpose)
        self.v = OperandTile.of(tensors.value, "n", keys, n, e, threads, may_transpose=False)
        self.k_size, self.v_size = self.k.size * ceil_div(d, self.k.step), self.v.size * ceil_div(e, self.v.step)
        self.k_at = shared.reserve(plan.stages * self.k_size, SWIZZLED_ALIGN)
        self.v_at = shared.reserve(plan.stages * self.v_size, SWIZZLED_ALIGN)
        is_whole = isinstance(n, int) and n % keys == 0
        self.is_masked = bool(tensors.causal) or plan.split_keys > 1 or not is_whole

    def locate(self, thread: Expr) -> None:
        """Compute the range of the block's tiles, and its number of visible keys."""
        self.thread, tensors, split, rank = thread, self.tensors, self.tensors.plan.split_keys, self.tensors.rank
        visible = tensors.visible()
        tiles = tiles_of(visible, self.keys)
        self.begin: Expr = 0
        if split > 1:
            tiles = tiles if isinstance(tiles, int) else T.bind(tiles)
            self.begin = T.bind(T.truncdiv(rank * tiles, split))
            tiles = T.truncdiv((rank + 1) * tiles, split) - self.begin
            visible = T.min(visible, (self.begin + tiles) * self.keys)
        self.count = max(tiles, 1) if isinstance(tiles, int) else T.bind(T.max(tiles, 1))
        self.end = visible if isinstance(visible, int) else T.bind(visible)

    def begin_rows(self, row: Expr, warp_row: Expr) -> None:
        """Compute the keys visible to a lane's rows, and to all rows of the warp."""
        tensors, ends = self.tensors, local(2, "int32")
        for h in range(2):
            T.buffer_store(ends, tensors.visible_to(row + 8 * h, self.end), [h])
        lowest = tensors.visible_to(warp_row if tensors.rows.heads_per_tile == 1 else 0, self.end)
        self._visible = Visible([ends[h] for h in range(2)], lowest if isinstance(lowest, int) else T.bind(lowest))

    def visible(self) -> Visible | None:
        """Keys visible to the rows; None: all, in every tile."""
        return self._visible if self.is_masked else None

    def _stage(self, index: Expr) -> Expr:
        """Stage of a tile: there is one."""
        return 0

    def key_tile(self, index: Expr) -> SharedTile:
        """Keys of a tile."""
        return SwizzledTile(self.shared, self.k_at + self._stage(index) * self.k_size, self.k.size)

    def value_tile(self, index: Expr) -> SharedTile:
        """Values of a tile, transposed."""
        offset = self.v_at + self._stage(index) * self.v_size
        return SwizzledTile(self.shared, offset, self.v.size, is_transposed=True)

    def matrices(self) -> tuple[MatrixOperand, MatrixOperand]:
        """Operands of wgmma for keys and for values."""
        leading, line = self.v.size // 16, SWIZZLED_BYTES // 16
        values = MatrixOperand(self.shared, self.v_at, leading, lambda step: step * 16 * line, is_transposed=True)
        return MatrixOperand.of(self.shared, self.k_at, self.k), values

    def _load(self, tile: OperandTile, begin: int, size: int, index: Expr, stage: Expr = 0) -> None:
        """Copy keys or values of a tile to a stage of `size` bytes, the first of which is at `begin`."""
        first, target = self.first_key(index), begin + stage * size
        first = tirx.IntImm("int64", first) if isinstance(first, int) else T.bind(T.Cast("int64", first))
        for step in range(size // tile.size):
            tile.load(self.shared, target + step * tile.size, self.tensors.at_keys, first, step, self.thread)


class CopiedKeyValues(DenseKeyValues):
    """One tile of keys and one of values: each is copied by all threads while the other one is used."""

    def first_key(self, index: Expr) -> Expr:
        """First key of a tile, int32, from the first tile on."""
        return (self.begin + index) * self.keys

    def start(self) -> None:
        """Issue the copy of the first keys, which the caller commits."""
        self._load(self.k, self.k_at, self.k_size, 0)

    def wait(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Wait for the keys or values of a tile, and until all warps have read those before; copy the next ones."""
        ptx.copy_wait(0)
        ptx.block_barrier()
        if keys is not None:
            self._load(self.v, self.v_at, self.v_size, keys)
        if values is not None:
            with when(values + 1 < self.count):
                self._load(self.k, self.k_at, self.k_size, values + 1)
        ptx.copy_commit()

    def release(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Release nothing: `wait` does it."""


class ProducedKeyValues(DenseKeyValues):
    """Rings of keys and of values, filled by a warpgroup of producers after the queries, for wgmma.

    Tiles are processed from the last to the first, so that masked tiles come first.

    Parameters
    ----------
    scratch_bytes : int
        Bytes of shared memory, from its begin on, that the kernel reuses after the last tile.
    """

    def __init__(self, tensors: DenseTensors, shared: SharedMemory, scratch_bytes: int) -> None:
        plan, self.queries = tensors.plan, DenseQueries(tensors, shared, PRODUCERS, may_transpose=True)
        is_copied = all(source_of(view, "n")[0] is Source.LINES for view in (tensors.key, tensors.value))
        keys = plan.keys if is_copied else max(plan.keys // 64, 1) * 64
        super().__init__(tensors, shared, PRODUCERS, keys, may_transpose=True)
        shared.size = max(shared.size, scratch_bytes)
        self.query_ring = Ring(shared, 1, PRODUCERS)
        self.key_ring, self.value_ring = (Ring(shared, plan.stages, PRODUCERS, plan.warpgroups) for _ in range(2))
        self.rings = self.query_ring, self.key_ring, self.value_ring

    def initialize(self, thread: Expr) -> None:
        """Initialize barriers, before the wait for previous launches."""
        super().initialize(thread)
        ptx.block_barrier()

    def first_key(self, index: Expr) -> Expr:
        """First key of a tile, int32, from the last tile to the first."""
        return (self.begin + (self.count - 1) - index) * self.keys

    def produce(self) -> None:
        """Load the queries, then all tiles, by the producers."""
        self.queries.load(self.thread)
        arrive(self.query_ring.full(0), self.queries.operand.source is Source.GATHER)
        with T.serial(self.count) as index:
            for ring, tile, begin, size in (
                (self.key_ring, self.k, self.k_at, self.k_size),
                (self.value_ring, self.v, self.v_at, self.v_size),
            ):
                stage = ring.acquire(index)
                self._load(tile, begin, size, index, stage)
                arrive(ring.full(stage), tile.source is Source.GATHER)

    def _stage(self, index: Expr) -> Expr:
        return self.key_ring.stage(index)

    def wait(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Wait for the keys of a tile, for the values of a tile, or for both."""
        for ring, index in ((self.key_ring, keys), (self.value_ring, values)):
            if index is not None:
                ring.wait(index)
        # Writes of cp.async belong to the generic proxy, wgmma reads by the async proxy.
        ptx.async_proxy_fence()

    def release(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Release the keys, or the values, of a tile, by a thread of each warpgroup."""
        for ring, index in ((self.key_ring, keys), (self.value_ring, values)):
            if index is not None:
                with when(tirx.floormod(self.thread, WARPGROUP) == 0):
                    ring.release(index)


class PagedKeyValues(KeyValueSource):
    """Pages of the sequence of a block's rows, in a ring of stages that one thread fills by bulk copies.

    The pages are distributed round-robin over the blocks of a cluster. Sequence lengths are read on the device, so that
    the launch has one shape for all lengths.

    Parameters
    ----------
    threads : int
        Threads of a block.
    warps : int
        Warps that release a stage; 0: block barriers order reads and writes.
    append : callable, optional
        Writer of the token of a decode step to its page.
    for_wgmma : bool
        Whether wgmma reads the pages, by the async proxy.

    Attributes
    ----------
    share : tuple of (int, PrimExpr) or None
        Number of parts of the pages, and the part that is read; None: each block of the cluster reads one.
    barrier : callable
        Function that synchronizes the threads that read the pages, by default those of the block.
    """

    keys = PAGE
    share: tuple[int, Expr] | None = None

    def __init__(
        self,
        tensors: PagedTensors,
        shared: SharedMemory,
        threads: int,
        warps: int = 0,
        append: Append | None = None,
        for_wgmma: bool = False,
    ) -> None:
        super().__init__(shared)
        self.for_wgmma = for_wgmma
        self.tensors, self.threads, self.append, self.stages = tensors, threads, append, tensors.plan.stages
        self.page_bytes = tensors.page_bytes
        self._value_bytes = PAGE * tensors.problem.value_size * 2
        self.offset = shared.reserve(self.stages * self.page_bytes, 128)
        self.barrier: Callable[[], None] = ptx.block_barrier
        self._numbers_at = shared.reserve(self.stages * 4)
        self.ring = Ring(shared, self.stages, producers=1, consumers=warps)
        self.rings = (self.ring,)

    def locate(self, thread: Expr) -> None:
        """Compute the sequence of the rows, their last position, and the pages that they see."""
        tensors, plan, window = self.tensors, self.tensors.plan, self.tensors.problem.window
        self.thread, self.lane = thread, T.bind(tirx.floormod(thread, WARP))
        if tensors.problem.is_decode:
            sequence = T.bind(tensors.sequences[tensors.at["b"]])
            position = T.bind(tensors.positions[tensors.at["b"]])  # read with the sequence, not afterwards
            self.last = first = T.bind(T.Select(sequence < 0, -1, position))
        else:
            sequence, last = tensors.sequences[0], local(1, "int32")
            T.buffer_store(last, T.int32(-1), [0])
            for iteration in range(ceil_div(plan.rows, WARP)):
                T.buffer_store(last, T.max(last[0], self._position(tensors.row + iteration * WARP + self.lane)), [0])
            reduce_lanes(last, 0, T.max)
            self.last = T.bind(last[0])
            first = T.bind(self._position(tensors.row)) if window else 0
        self.sequence = T.bind(T.max(sequence, 0))
        self.first_page: Expr = T.bind(T.truncdiv(T.max(first - (window - 1), 0), PAGE)) if window else 0
        # The last page of padding rows, at position -1, is -1.
        self._split, self._part = self.share or (plan.split_keys, tensors.rank)
        pages = T.max(tirx.floordiv(self.last, PAGE) - self.first_page + self._split - self._part, 0)
        # wgmma has at least one page, whose keys may all be masked.
        self.count = T.bind(T.max(T.truncdiv(pages, self._split), int(self.ring.consumers > 0)))

    def _position(self, row: Expr) -> Expr:
        """Position of a row of a chunk; -1 for padding."""
        tensors, last = self.tensors, self.tensors.num_rows - 1
        clamped = T.min(row, last)
        is_token = tirx.all(row <= last, tensors.sequences[clamped] >= 0)
        return T.if_then_else(is_token, tensors.positions[clamped], -1)

    def _number(self, index: Expr) -> Expr:
        """Number of a page in the sequence."""
        return self.first_page + self._part + index * self._split

    def first_key(self, index: Expr) -> Expr:
        """First key of a page, int32."""
        return self._number(index) * PAGE

    def start(self) -> None:
        """Issue the loads of the first pages."""
        with when(self.thread == 0), T.serial(T.min(self.count, self.stages)) as index:
            self._load(index)

    def _load(self, index: Expr) -> None:
        """Issue the bulk copy of a page, by one thread. Page 0 stands for a missing page (-1)."""
        tensors, stage = self.tensors, self.ring.stage(index)
        barrier = self.ring.full(stage)
        page = T.bind(tensors.page_of(self.sequence, self._number(index)))
        # Unlike a read of the table, consumers read the number without a trip to L2.
        ptx.store_shared(self.shared.at(self._numbers_at + stage * 4), [tirx.reinterpret("uint32", page)])
        ptx.barrier_expect(barrier, self.page_bytes)
        source = T.address_of(tensors.pages[tensors.tile(T.max(page, 0), tensors.at_keys["g"], 0)])
        ptx.bulk_load(self.shared.at(self._stage_at(stage)), source, self.page_bytes, barrier)

    def _stage_at(self, stage: Expr) -> Expr:
        return self.offset + stage * self.page_bytes

    def wait(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Wait for a page, whose values need no wait of their own, and complete it."""
        if keys is None:
            return
        # Uninitialized values become zeros, as probability 0 times NaN would be NaN; the token is appended.
        stage, register = self.ring.wait(keys), local(1, "uint32")
        tile = T.bind(self._stage_at(stage))
        ptx.load_shared([register[0]], self.shared.at(self._numbers_at + stage * 4))
        page = T.bind(tirx.reinterpret("int32", register[0]))
        num_tokens = T.bind(T.Select(page < 0, 0, self.last + 1 - self.first_key(keys)))
        with when(num_tokens < PAGE if self.append is None else num_tokens <= PAGE):
            self._clear_values(tile, num_tokens)
            if self.append is not None:
                with when(num_tokens > 0):
                    self.append(tile, page, num_tokens - 1)
            if self.for_wgmma:
                ptx.async_proxy_fence()
            self.barrier()
        self._page_mask = T.bind(T.Select(page < 0, 0, -1))

    def _clear_values(self, tile: Expr, first: Expr) -> None:
        """Zero the values of tokens from `first` on, by all threads."""
        items = self._value_bytes // (CHUNK * 2)
        with T.serial(tirx.const(ceil_div(items, self.threads), "int32")) as iteration:
            item = T.bind(iteration * self.threads + self.thread)
            exists = tirx.floormod(item, PAGE) >= first
            with T.If(exists if items % self.threads == 0 else tirx.all(exists, item < items)), T.Then():
                target = self.shared.at(tile + (self.page_bytes - self._value_bytes) + item * (CHUNK * 2))
                ptx.store_shared(target, [T.uint32(0)] * 4)

    def release(self, keys: Expr | None = None, values: Expr | None = None) -> None:
        """Release a page with its values; without empty barriers, load the next page to its stage."""
        if values is None:
            return
        if self.ring.consumers:
            ptx.warp_barrier()  # all lanes have read the page's number
            with when(self.lane == 0):
                self.ring.release(values)
        else:
            self.barrier()
            with when(tirx.all(self.thread == 0, values + self.stages < self.count)):
                self._load(values + self.stages)

    def advance(self, index: Expr) -> None:
        """Load a page to the stage of the page before `index`, once all warps have released that."""
        with when(tirx.all(self.thread == 0, index > 0, index + (self.stages - 1) < self.count)):
            next_index = T.bind(index + (self.stages - 1))
            self.ring.acquire(next_index)
            self._load(next_index)

    def begin_rows(self, row: Expr, warp_row: Expr) -> None:
        """Compute the keys visible to a lane's rows, and to all rows of the warp."""
        window = self.tensors.problem.window
        if self.tensors.problem.is_decode:
            self._min_end = T.bind(self.last + 1)
            self._ends = [self._min_end] * 2
        else:
            self._ends = [T.bind(self._position(row + 8 * h) + 1) for h in range(2)]
            # Padding rows are the last of a chunk, so a warp's first row sees the fewest keys, unless some are padding.
            min_end = T.bind(T.max(self._position(warp_row) + 1, 0))
            self._min_end = T.bind(T.Select(self._position(warp_row + 15) >= 0, min_end, 0))
        self._begins = [T.bind(end - window) for end in self._ends] if window else None

    def visible(self) -> Visible:
        """Keys visible to the rows: none of a missing page."""
        ends = [T.bitwise_and(end, self._page_mask) for end in self._ends]
        return Visible(ends, T.bitwise_and(self._min_end, self._page_mask), self._begins)

    def key_tile(self, index: Expr) -> SharedTile:
        """Keys of a page."""
        return ChunkedTile(self.shared, T.bind(self._stage_at(self.ring.stage(index))), PAGE)

    def value_tile(self, index: Expr) -> SharedTile:
        """Values of a page, transposed."""
        offset = T.bind(self._stage_at(self.ring.stage(index)) + (self.page_bytes - self._value_bytes))
        return ChunkedTile(self.shared, offset, PAGE, is_transposed=True)

    def matrices(self) -> tuple[MatrixOperand, MatrixOperand]:
        """Operands of wgmma for keys and for values: pages have its layout without swizzle."""

        def operand(leading: int, stride: int, advance: int, **options: Any) -> MatrixOperand:
            at = lambda step: step * advance  # noqa: E731
            return MatrixOperand(self.shared, 0, leading, at, stride, is_swizzled=False, **options)

        return operand(PAGE, 8, 2 * PAGE), operand(8, PAGE, 16, is_transposed=True)


def tiles_of(extent: Expr, size: int) -> Expr:
    """Number of tiles of an int32 extent."""
    return ceil_div(extent, size) if isinstance(extent, int) else T.truncdiv(extent + (size - 1), size)
