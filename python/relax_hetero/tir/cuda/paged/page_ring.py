"""Pages on their way to shared memory: a ring of stages that one thread asks for by bulk copies."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.pages import PAGE
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory
from ..tile.ring import Ring
from .paged_work import CHUNK, PagedTensors


class PageRing:
    """Keys and values of one head of keys, of the pages of one sequence.

    Parameters
    ----------
    tensors : PagedTensors
    shared : SharedMemory
        From which the ring takes its stages, before it is opened.
    stages : int
        Pages that are asked for before the first is needed.
    consumers : int
        Arrivals that make a stage free, as of `Ring`.
    """

    def __init__(self, tensors: PagedTensors, shared: SharedMemory, stages: int, consumers: int = 0) -> None:
        self.tensors, self.shared, self.stages = tensors, shared, stages
        self.stage_bytes = 2 * tensors.work.tile_bytes
        self.at = shared.reserve(stages * self.stage_bytes, 128)
        self.ring = Ring(shared, stages, producers=1, consumers=consumers)

    def init(self) -> None:
        """Initialize the barriers, in one thread, before a barrier of the block."""
        self.ring.initialize()
        ptx.barrier_init_fence()

    def ask(self, turn: Expr, page: Expr, kv_head: Expr) -> None:
        """Ask for a page, the turn's; one thread does it, when all are done with the page of `stages` turns before.

        A page that is not there (-1) is the first one, whatever it has.
        """
        stage = self.ring.stage(turn)
        barrier = self.ring.full(stage)
        ptx.barrier_expect(barrier, self.stage_bytes)
        source = T.address_of(self.tensors.pages[self.tensors.tile(T.max(page, 0), kv_head, 0)])
        ptx.bulk_load(self.shared.at(self.at + stage * self.stage_bytes), source, self.stage_bytes, barrier)

    def wait(self, turn: Expr) -> Expr:
        """Wait for a turn's page; the offset of its keys in shared memory, behind which its values lie."""
        stage = self.ring.wait(turn)
        return T.bind(self.at + stage * self.stage_bytes)

    def clear_values(self, tile: Expr, first: Expr, thread: Expr, threads: int) -> None:
        """Zeros for values of tokens from `first` on, which nobody has written: their weight 0 times NaN is NaN.

        All threads do it; a barrier of the block follows.
        """
        zero = [T.uint32(0)] * 4
        items = PAGE * (self.tensors.work.size // CHUNK)
        with T.serial(tirx.const(-(-items // threads), "int32")) as turn:
            item = T.bind(turn * threads + thread)
            exists = tirx.floormod(item, PAGE) >= first
            with T.If(exists if items % threads == 0 else tirx.all(exists, item < items)), T.Then():
                ptx.store_shared(self.shared.at(tile + self.tensors.work.tile_bytes + item * (CHUNK * 2)), zero)
