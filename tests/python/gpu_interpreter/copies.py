"""Asynchronous copies: ``cp.async`` of each thread, and bulk copies of whole blocks of bytes.

Data moves as late as a wait allows, and the target counts as never written in between: whoever reads too early finds
out. A copy's effects on the search for races come twice, when it is issued (others must have finished with the target)
and when it is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import KernelFault
from .mbarriers import Mbarrier, _by_barrier, barrier_at
from .memory import ADDRESS_BITS, memory_of, shared_place
from .ptx import Instruction, instruction, pointer


class ThreadCopies:
    """``cp.async`` of one instruction: bytes that each active lane brings to shared memory."""

    def __init__(
        self, lanes: Any, mask: np.ndarray, target: Any, source: np.ndarray, size: int, valid: np.ndarray
    ) -> None:
        self.lanes, self.mask, self.size, self.valid = lanes, mask.copy(), size, valid
        self.instance, self.target = target
        self.memory = lanes.blocks.shared
        active = np.flatnonzero(mask)
        number = np.unique(source[active] >> np.uint64(ADDRESS_BITS))
        if len(number) != 1:
            raise NotImplementedError("copies of one instruction from several memories")
        self.source_memory = memory_of(lanes, int(number[0]))
        self.source = (source & np.uint64((1 << ADDRESS_BITS) - 1)).astype(np.int64)
        if ((self.target[active] % size) | (self.source[active] % size)).any():
            raise KernelFault(f"an address of a copy of {size} bytes is not a multiple of that")
        end = self.source[active] + valid[active]
        if ((end > self.source_memory.size) & (valid[active] > 0)).any():
            lane = int(active[np.flatnonzero((end > self.source_memory.size) & (valid[active] > 0))[0]])
            raise KernelFault(
                f"out of range: a copy reads up to byte {int(end.max())} of {self.source_memory.name}, which has "
                f"{self.source_memory.size}, in {lanes.name(lane)}"
            )
        if (self.target[active] + size > self.memory.size).any() or (self.source[active] < 0).any():
            raise KernelFault("out of range: a copy to or from bytes that do not exist")
        uids, cells = self._cells(active)
        self.memory.accesses.write(lanes.clocks, uids, cells, begins=True)
        self.memory.written[self.instance[active, None], self.target[active, None] + np.arange(size)] = 0

    def _cells(self, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        per = max(1, self.size // self.memory.cell)
        first = self.instance[active] * self.memory.cells + self.target[active] // self.memory.cell
        cells = first[:, None] + np.arange(per)
        return np.repeat(self.lanes.uid[active], per), cells.reshape(-1)

    def complete(self, which: np.ndarray, when: np.ndarray | None = None) -> None:
        """Complete the copies of some lanes; `when`: the lanes' clocks at the issue."""
        active = np.flatnonzero(self.mask & which)
        if not len(active):
            return
        self.mask[active] = False
        source = self.source_memory
        if source.accesses is not None:
            for lane in active[self.valid[active] > 0]:
                cells = source.cells_of(0, int(self.source[lane]), int(self.valid[lane]))
                source.accesses.read(self.lanes.clocks, np.full(len(cells), self.lanes.uid[lane]), cells)
        step = np.arange(self.size)
        offsets = self.source[active, None] + step
        exists = step < self.valid[active, None]
        data = np.zeros(offsets.shape, np.uint8)
        data[exists] = source.bytes[0, offsets[exists]]
        uids, cells = self._cells(active)
        per = len(cells) // len(active)
        stamps = None if when is None else np.repeat(when[active], per)
        self.memory.accesses.write(self.lanes.clocks, uids, cells, when=stamps)
        where = self.instance[active, None], self.target[active, None] + step
        self.memory.bytes[where] = data
        self.memory.written[where] = 1


def _pending(lanes: Any) -> dict[str, Any]:
    return lanes.state.setdefault("copies", {"open": [], "groups": []})


@instruction(r"cp\.async\.(ca|cg)\.shared(::cta)?\.global.*")
def _copy_async(expressions: Any, one: Instruction) -> Any:
    target, source = pointer(expressions, one.operands[0]), pointer(expressions, one.operands[1])
    size = int(one.operands[2])
    expressions.names.accessed(size)
    valid = expressions.compiled(one.operands[3]) if len(one.operands) > 3 else None

    def evaluate(lanes: Any, mask: Any) -> None:
        active = np.ones(lanes.count, bool) if mask is None else mask
        if not active.any():
            return
        bytes_ = size if valid is None else valid(lanes, mask)
        counts = np.broadcast_to(np.asarray(bytes_, np.int64), (lanes.count,))
        if (counts[active] > size).any():
            raise KernelFault(f"a copy of {size} bytes reads {int(counts[active].max())}")
        address = np.broadcast_to(np.asarray(source(lanes, mask), np.uint64), (lanes.count,))
        place = shared_place(lanes, target(lanes, mask), mask)
        _pending(lanes)["open"].append(ThreadCopies(lanes, active, place, address, size, counts))

    return evaluate


@instruction(r"cp\.async\.commit_group")
def _commit(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        pending = _pending(lanes)
        active = np.ones(lanes.count, bool) if mask is None else mask
        pending["groups"].append((active.copy(), pending["open"]))
        # Lanes that did not commit keep their copies pending, though other lanes' copies are in the group.
        pending["open"] = [copy for copy in pending["open"] if (copy.mask & ~active).any()]

    return evaluate


@instruction(r"cp\.async\.wait_(group|all)")
def _wait_group(expressions: Any, one: Instruction) -> Any:
    newest = int(one.operands[0]) if one.operands else 0

    def evaluate(lanes: Any, mask: Any) -> None:
        pending = _pending(lanes)
        active = np.ones(lanes.count, bool) if mask is None else mask
        later = np.zeros(lanes.count, np.int64)
        due = []
        for committed, copies in reversed(pending["groups"]):
            due.append((committed & active & (later >= newest), copies))
            later += committed
        for which, copies in reversed(due):
            for copy in copies:
                copy.complete(which)
        if "wait_all" in one.text:
            for copy in pending["open"]:
                copy.complete(active)
        remaining = [(who, [copy for copy in copies if copy.mask.any()]) for who, copies in pending["groups"]]
        while remaining and not remaining[0][1]:
            remaining.pop(0)
        pending["groups"] = remaining

    return evaluate


@instruction(r"cp\.async\.mbarrier\.arrive(\.noinc)?(\.shared(::cta)?)?\.b64")
def _arrive_after_copies(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    address = pointer(expressions, one.operands[0])
    if "noinc" not in one.parts:
        raise NotImplementedError("cp.async.mbarrier.arrive without .noinc")

    def evaluate(lanes: Any, mask: Any) -> None:
        for barrier, chosen in _by_barrier(lanes, mask, address(lanes, mask)):
            which = np.zeros(lanes.count, bool)
            which[chosen] = True
            pending = _pending(lanes)
            copies = [c for _, group in pending["groups"] for c in group] + list(pending["open"])
            cluster = int(lanes.instance[chosen[0]]) // lanes.blocks.cluster
            when = np.zeros(lanes.count, np.int32)
            when[chosen] = lanes.clocks.known[cluster, lanes.member[chosen], lanes.member[chosen]]
            released = lanes.clocks.release(cluster, lanes.member[chosen])
            if len(chosen) + sum(arrivals for _, arrivals, _ in barrier.copies) > barrier.left:
                barrier.arrive(released, 0)

            def deliver(
                barrier: Mbarrier = barrier,
                copies: list[ThreadCopies] = copies,
                which: np.ndarray = which,
                when: np.ndarray = when,
                released: np.ndarray = released,
            ) -> None:
                for copy in copies:
                    copy.complete(which, when)
                barrier.add(released)

            if len(chosen) + sum(arrivals for _, arrivals, _ in barrier.copies) > barrier.left:
                raise KernelFault(f"{len(chosen)} threads arrive too many: {barrier.text()}")
            barrier.copies.append((deliver, len(chosen), 0))
            pending["open"] = [copy for copy in pending["open"] if copy.mask.any()]

    return evaluate


def _aligned(*values: int) -> None:
    if any(value % 16 for value in values):
        raise KernelFault(f"bulk copy: addresses and size have to be multiples of 16 bytes, found {values}")


@instruction(
    r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.multicast::cluster)?(\..*)?"
)
def _bulk_load(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    target, source = pointer(expressions, one.operands[0]), pointer(expressions, one.operands[1])
    size, bar = expressions.compiled(one.operands[2]), pointer(expressions, one.operands[3])
    to_many = "multicast::cluster" in one.parts
    blocks = expressions.compiled(one.operands[4]) if to_many else None

    def evaluate(lanes: Any, mask: Any) -> None:
        instance, offset = shared_place(lanes, target(lanes, mask))
        of_barrier, at_barrier = shared_place(lanes, bar(lanes, mask))
        sources = np.broadcast_to(np.asarray(source(lanes, mask), np.uint64), (lanes.count,))
        sizes = np.broadcast_to(size(lanes, mask), (lanes.count,))
        members = None if blocks is None else np.broadcast_to(blocks(lanes, mask), (lanes.count,))
        for lane in lanes.active(mask):
            places = [(int(instance[lane]), int(of_barrier[lane]))]
            if members is not None:
                first = int(lanes.instance[lane]) // lanes.blocks.cluster * lanes.blocks.cluster
                ranks = [r for r in range(lanes.blocks.cluster) if int(members[lane]) >> r & 1]
                places = [(first + r, first + r) for r in ranks]
            for place, owner in places:
                barrier = barrier_at(lanes, owner, int(at_barrier[lane]), int(lane))
                if not barrier.visible:
                    raise KernelFault(f"{barrier.name} is used by a copy without fence.mbarrier_init behind its making")
                _issue_load(lanes, int(lane), (place, int(offset[lane])), int(sources[lane]), int(sizes[lane]), barrier)

    return evaluate


def _issue_load(lanes: Any, lane: int, target: tuple[int, int], source: int, size: int, barrier: Mbarrier) -> None:
    memory, origin = lanes.blocks.shared, memory_of(lanes, source >> ADDRESS_BITS)
    start = source & ((1 << ADDRESS_BITS) - 1)
    _aligned(target[1], start, size)
    read = origin.cells_of(0, start, size)
    cells = memory.cells_of(*target, size)
    clocks = lanes.clocks
    cluster, member = int(lanes.instance[lane]) // lanes.blocks.cluster, int(lanes.member[lane])
    if origin.accesses is not None:
        origin.accesses.read(clocks, np.full(len(read), lanes.uid[lane]), read)
    memory.accesses.write(clocks, np.full(len(cells), lanes.uid[lane]), cells, begins=True, asynchronous=True)
    memory.written[target[0], target[1] : target[1] + size] = 0
    snapshot = np.stack([clocks.known[cluster, member], clocks.fenced[cluster, member]]).copy()
    machine = clocks.width - 1
    uid = lanes.uid[lane] - member + machine

    def deliver() -> None:
        now = int(clocks.known[cluster, machine, machine]) + 1
        for table, one in zip((clocks.known, clocks.fenced), snapshot, strict=True):
            table[cluster, machine] = one
            table[cluster, machine, machine] = now
        memory.accesses.write(clocks, np.full(len(cells), uid), cells, asynchronous=True)
        memory.bytes[target[0], target[1] : target[1] + size] = origin.bytes[0, start : start + size]
        memory.written[target[0], target[1] : target[1] + size] = 1
        clock = np.zeros((2, clocks.width), np.int32)
        clock[:, machine] = now
        barrier.add(clock)

    barrier.copies.append((deliver, 0, size))


@instruction(r"st\.async(\.weak)?\.shared::cluster\.mbarrier::complete_tx::bytes\.u32")
def _store_async(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    expressions.names.accessed(4)
    target, value = pointer(expressions, one.operands[0]), expressions.compiled(one.operands[1])
    bar = pointer(expressions, one.operands[2])

    def evaluate(lanes: Any, mask: Any) -> None:
        instance, offset = shared_place(lanes, target(lanes, mask))
        values = np.broadcast_to(value(lanes, mask), (lanes.count,)).astype(np.uint32)
        for barrier, chosen in _by_barrier(lanes, mask, bar(lanes, mask)):
            if (instance[chosen] != barrier.owner[0]).any():
                raise KernelFault(f"{barrier.name} counts bytes that are stored in shared memory of another block")
            _issue_stores(lanes, chosen, (instance[chosen], offset[chosen]), values[chosen], barrier)

    return evaluate


def _issue_stores(
    lanes: Any, chosen: np.ndarray, target: tuple[np.ndarray, np.ndarray], words: np.ndarray, barrier: Mbarrier
) -> None:
    """Words that lanes of a block store, which arrive with the end of the barrier's phase."""
    memory, clocks = lanes.blocks.shared, lanes.clocks
    cluster = int(lanes.instance[chosen[0]]) // lanes.blocks.cluster
    cells = np.concatenate([memory.cells_of(int(block), int(at), 4) for block, at in zip(*target, strict=True)])
    uids = np.repeat(lanes.uid[chosen], len(cells) // len(chosen))
    memory.accesses.write(clocks, uids, cells, begins=True)
    place = target[0][:, None], target[1][:, None] + np.arange(4)
    memory.written[place] = 0
    released = clocks.release(cluster, lanes.member[chosen])

    def deliver() -> None:
        memory.bytes[place] = words.view(np.uint8).reshape(-1, 4)
        memory.written[place] = 1
        barrier.add(released)

    barrier.copies.append((deliver, 0, 4 * len(chosen)))


class BulkStore:
    """A bulk copy from shared to global memory by one thread."""

    def __init__(self, lanes: Any, lane: int, source: tuple[int, int], target: int, size: int) -> None:
        self.lanes, self.lane, self.source, self.size = lanes, lane, source, size
        self.target = memory_of(lanes, target >> ADDRESS_BITS)
        self.start = target & ((1 << ADDRESS_BITS) - 1)
        _aligned(source[1], self.start, size)
        memory = lanes.blocks.shared
        self.read = memory.cells_of(*source, size)
        self.cells = self.target.cells_of(0, self.start, size)
        memory.require(*source, size, "a bulk store")
        memory.accesses.read(lanes.clocks, np.full(len(self.read), lanes.uid[lane]), self.read, asynchronous=True)
        self.before = memory.accesses.versions(self.read)

    def complete(self) -> None:
        """The bytes arrive."""
        memory, uid = self.lanes.blocks.shared, self.lanes.uid[self.lane]
        now = memory.bytes[self.source[0], self.source[1] : self.source[1] + self.size]
        memory.accesses.read(self.lanes.clocks, np.full(len(self.read), uid), self.read)
        if (memory.accesses.versions(self.read) != self.before).any():
            raise KernelFault("shared memory changed before a bulk store had read it")
        self.target.accesses.write(self.lanes.clocks, np.full(len(self.cells), uid), self.cells)
        self.target.bytes[0, self.start : self.start + self.size] = now


def _stores(lanes: Any) -> dict[int, Any]:
    return lanes.state.setdefault("stores", {})


@instruction(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(\..*)?")
def _bulk_store(expressions: Any, one: Instruction) -> Any:
    expressions.names.roles = True
    target, source = pointer(expressions, one.operands[0]), pointer(expressions, one.operands[1])
    size = expressions.compiled(one.operands[2])

    def evaluate(lanes: Any, mask: Any) -> None:
        instance, offset = shared_place(lanes, source(lanes, mask))
        targets = np.broadcast_to(np.asarray(target(lanes, mask), np.uint64), (lanes.count,))
        sizes = np.broadcast_to(size(lanes, mask), (lanes.count,))
        for lane in lanes.active(mask):
            store = BulkStore(
                lanes, int(lane), (int(instance[lane]), int(offset[lane])), int(targets[lane]), int(sizes[lane])
            )
            _stores(lanes).setdefault(int(lane), {"open": [], "groups": []})["open"].append(store)

    return evaluate


@instruction(r"cp\.async\.bulk\.commit_group")
def _bulk_commit(expressions: Any, one: Instruction) -> Any:
    def evaluate(lanes: Any, mask: Any) -> None:
        for lane in lanes.active(mask):
            own = _stores(lanes).setdefault(int(lane), {"open": [], "groups": []})
            own["groups"].append(own["open"])
            own["open"] = []

    return evaluate


@instruction(r"cp\.async\.bulk\.wait_group(\.read)?")
def _bulk_wait(expressions: Any, one: Instruction) -> Any:
    newest = int(one.operands[0])

    def evaluate(lanes: Any, mask: Any) -> None:
        for lane in lanes.active(mask):
            own = _stores(lanes).get(int(lane), {"groups": []})
            while len(own["groups"]) > newest:
                for store in own["groups"].pop(0):
                    store.complete()

    return evaluate


def check_end(lanes: Any) -> None:
    """Check that the bulk stores of threads that end are complete.

    Raises
    ------
    KernelFault
        A bulk store may still read shared memory that is somebody else's by then.
    """
    for lane, own in _stores(lanes).items():
        if own["open"] or any(own["groups"]):
            raise KernelFault(f"{lanes.name(lane)} ends before its bulk stores have read shared memory")


def check_copies(barriers: Any) -> None:
    """Raise a fault if copies are left that nobody waited for when all threads have ended."""
    for barrier in barriers:
        if any(size for _, _, size in barrier.copies):
            raise KernelFault(f"all threads have ended and bulk copies are pending: {barrier.text()}")


Deliver = Callable[[], None]
