"""How threads share the rows of a kernel: threads of a row, elements of a vector, what waits in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import MAX_BLOCK_THREADS, VECTOR_BYTES, WARP, GpuTarget
from ...core.builder import Expr
from ..core.vectors import MAX_LANES

ELEMENTS = 32
"""Maximum elements of a row that one thread holds: the code of all is written out."""
WORDS = 16
"""Registers for the elements of a row that one thread holds, where a row may have more threads, up to `BLOCK`. Measured
on an H200, a layer norm of 8192x1024 in float32 takes 19.0 us with 128 threads of 32 registers a row, 20.3 with 64 of
44; of 4096x4096 in float16 20.1 us with 128 threads, 22.5 with 512 that hold 8 elements each."""
LATE = 0.5
"""Registers of an operand that is loaded late count so much: the compiler loads some of it ahead."""
MAX_WORDS = 48
"""Registers for all elements of all operands of a thread, where there are few rows."""
MAX_BLOCKS = 8
"""Maximum number of blocks of a cluster, on every GPU that has clusters."""
MIN_BLOCK_ELEMENTS = 8192
"""Elements of a row that one block of a cluster has: the blocks wait for each other in every reduction."""
BLOCK = 128
"""Threads of a block of several rows, and of a row whose length only the run knows."""
LONG_BLOCK = 512
"""Threads of a row that is too long for registers."""
BATCH = 4
"""Vectors of such a row that a thread has in flight."""
MIN_ELEMENTS = 8
"""Minimum elements of a row for one thread, where there are too few rows to occupy the GPU otherwise."""
OCCUPIED = 512
"""Threads of a multiprocessor that hide most of the latency of memory."""


@dataclass(frozen=True)
class RowShape:
    """The threads of a row, and its elements.

    Thread t of a row has the vectors t, t + threads, t + 2 threads, ... so that neighbours read neighbouring memory.

    Attributes
    ----------
    threads : int
        Number of threads of a row: a power of two, of one warp, of the whole block or of all blocks of the cluster.
    rows : int
        Rows of a block.
    lanes : int
        Elements of a vector, which every row is a multiple of.
    vectors : int
        Number of vectors of a thread, the last of which may be beyond the row; 0 where a loop reads them anew in every
        pass.
    cluster : int
        Blocks that share a row.
    """

    threads: int
    rows: int
    lanes: int
    vectors: int
    cluster: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block that share a row, 1 where a warp has one or more rows."""
        return max(1, self.threads // self.cluster // WARP)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows // self.cluster


def lanes_for(n: Expr, dtypes: Sequence[str]) -> int:
    """Elements of a vector of tensors of these types: as many as rows of `n` elements can be cut into."""
    widest = min(MAX_LANES, VECTOR_BYTES // min(map(bytes_of, dtypes)))
    return math.gcd(n, widest) if isinstance(n, int) else widest


def held_shape(n: int, lanes: int, total: Expr, words: float, gpu: GpuTarget) -> RowShape | None:
    """The threads of rows that are held in registers; None where they are too long.

    Parameters
    ----------
    n : int
        Elements of a row.
    total : int or PrimExpr
        Rows.
    words : float
        Registers that an element takes.
    """
    vectors = -(-n // lanes)
    threads = min(WARP, _power_of_two(-(-vectors // 4)))

    def own(threads: int) -> int:
        return -(-vectors // threads) * lanes

    while own(threads) > MIN_ELEMENTS and threads < MAX_BLOCK_THREADS:
        if own(threads) <= ELEMENTS and (threads >= BLOCK or own(threads) * words <= WORDS):
            break
        threads *= 2
    cluster = 1
    if own(threads) > ELEMENTS:
        # Many small blocks: while some of a multiprocessor load their parts of rows, others compute.
        if not gpu.bulk_copies or own(MAX_BLOCKS * MAX_BLOCK_THREADS) > ELEMENTS:
            return None
        cluster = MAX_BLOCKS
        while own(threads) > ELEMENTS:
            threads *= 2
    if isinstance(total, int):
        while threads < MAX_BLOCK_THREADS and own(threads) > max(lanes, MIN_ELEMENTS):
            if not is_idle(RowShape(threads, 1, lanes, 0), total, gpu):
                break
            threads *= 2
        blocks = _cluster(n, total, gpu)
        if blocks > cluster:
            threads, cluster = max(threads, blocks * WARP), blocks
    if cluster > 1:
        return RowShape(threads, 1, lanes, -(-vectors // threads), cluster)
    rows = max(1, BLOCK // threads)
    while isinstance(total, int) and rows > 1 and rows * threads > WARP and total < rows * gpu.multiprocessors:
        rows //= 2
    return RowShape(threads, rows, lanes, -(-vectors // threads))


def is_idle(shape: RowShape, total: Expr, gpu: GpuTarget) -> bool:
    """Return whether there are too few rows to occupy the GPU with."""
    return isinstance(total, int) and total * shape.threads < gpu.multiprocessors * OCCUPIED


def looped_shape(n: Expr, lanes: int, total: Expr, gpu: GpuTarget) -> RowShape:
    """The threads of rows that every pass reads anew, of any length; parameters as of `held_shape`."""
    if not isinstance(n, int):
        return RowShape(BLOCK, 1, lanes, 0)
    cluster = _cluster(n, total, gpu) if isinstance(total, int) else 1
    # Where rows leave multiprocessors idle, those that work have all the threads that they can.
    block = MAX_BLOCK_THREADS if cluster == MAX_BLOCKS else LONG_BLOCK
    return RowShape(block * cluster, 1, lanes, 0, cluster)


def _cluster(n: int, total: int, gpu: GpuTarget) -> int:
    """The blocks of a row where rows are long and too few for the multiprocessors."""
    blocks = 1
    while gpu.bulk_copies and 2 * blocks <= MAX_BLOCKS and 2 * blocks * total <= gpu.multiprocessors:
        if n < 2 * blocks * MIN_BLOCK_ELEMENTS:
            break
        blocks *= 2
    return blocks


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1
