"""Pipeline of pages: a ring of stages in shared memory that one thread fills by bulk copies."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local
from ..tile.ring import Ring
from .paged_work import CHUNK, PagedTensors


class PageRing(Ring):
    """Ring of the keys and values of one key head, in the pages of one sequence.

    Parameters
    ----------
    tensors : PagedTensors
    shared : SharedMemory
        Not yet opened: the ring reserves its stages.
    stages : int
        Pages in flight.
    consumers : int
        Arrivals that complete an empty barrier; see `Ring`.
    """

    def __init__(self, tensors: PagedTensors, shared: SharedMemory, stages: int, consumers: int = 0) -> None:
        self.tensors = tensors
        self.stage_bytes = 2 * tensors.work.tile_bytes
        self.offset = shared.reserve(stages * self.stage_bytes, 128)
        self._numbers_at = shared.reserve(stages * 4)
        super().__init__(shared, stages, producers=1, consumers=consumers)

    def initialize(self) -> None:
        """Initialize the barriers, by one thread, before a block barrier."""
        super().initialize()
        ptx.barrier_init_fence()

    def tile(self, index: Expr) -> Expr:
        """Offset in shared memory of the keys of a page, which its values follow."""
        return T.bind(self.offset + self.stage(index) * self.stage_bytes)

    def load(self, index: Expr, page: Expr, kv_head: Expr) -> None:
        """Issue the bulk copy of page number `index`, by one thread, when all threads have read the stage's last page.

        Page 0 stands for a missing page (-1).
        """
        stage = self.stage(index)
        barrier = self.full(stage)
        ptx.store_shared(self.shared.at(self._numbers_at + stage * 4), [tirx.reinterpret("uint32", page)])
        ptx.barrier_expect(barrier, self.stage_bytes)
        source = T.address_of(self.tensors.pages[self.tensors.tile(T.max(page, 0), kv_head, 0)])
        ptx.bulk_load(self.shared.at(self.offset + stage * self.stage_bytes), source, self.stage_bytes, barrier)

    def page(self, index: Expr) -> Expr:
        """Page number that was given to `load`, after `wait`: unlike a read of the table, it takes no trip to L2."""
        number = local(1, "uint32")
        ptx.load_shared([number[0]], self.shared.at(self._numbers_at + self.stage(index) * 4))
        return T.bind(tirx.reinterpret("int32", number[0]))

    def wait(self, index: Expr) -> Expr:
        """Wait for a page; the offset of its keys in shared memory, which its values follow."""
        stage = super().wait(index)
        return T.bind(self.offset + stage * self.stage_bytes)

    def clear_values(self, tile: Expr, first: Expr, thread: Expr, threads: int) -> None:
        """Zero uninitialized values, of tokens from `first` on, as probability 0 times NaN would be NaN.

        All threads take part; a block barrier must follow.
        """
        zero = [T.uint32(0)] * 4
        items = PAGE * (self.tensors.work.size // CHUNK)
        with T.serial(tirx.const(-(-items // threads), "int32")) as iteration:
            item = T.bind(iteration * threads + thread)
            exists = tirx.floormod(item, PAGE) >= first
            with T.If(exists if items % threads == 0 else tirx.all(exists, item < items)), T.Then():
                ptx.store_shared(self.shared.at(tile + self.tensors.work.tile_bytes + item * (CHUNK * 2)), zero)
