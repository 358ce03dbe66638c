"""Distribution of rows among threads: threads of a row, vector width, and elements kept in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import VECTOR_BYTES, WARP, GpuTarget
from ...core.builder import Expr
from ..core.vectors import MAX_LANES

MAX_THREAD_ELEMENTS = 32  # maximum elements of a row in a thread's registers: their code is unrolled
TARGET_REGISTERS = 16
"""Registers for the elements of a row in a thread; rows that need more get more threads, up to `BLOCK_THREADS`.
Measured on an H200, a layer norm of 8192x1024 in float32 takes 19.0 us with 128 threads of 32 registers a row, 20.3
with 64 of 44; of 4096x4096 in float16 20.1 us with 128 threads, 22.5 with 512 of 8 elements each."""
LATE_FRACTION = 0.5
"""Fraction of an operand's registers that counts if it is loaded late: the compiler hoists some of its loads."""
MAX_REGISTERS = 48  # maximum registers for all operands of a thread, where there are few rows
MAX_CLUSTER_BLOCKS = 8  # maximum blocks of a cluster on every GPU that has clusters
MIN_BLOCK_ELEMENTS = 8192  # minimum elements of a row per block of a cluster: each reduction is a cluster barrier
BLOCK_THREADS = 128  # threads of a block of several rows, and of a row of symbolic length
LONG_ROW_THREADS = 512  # threads of a row that is too long for registers
IN_FLIGHT = 4  # vectors of such a row that a thread loads at a time
MIN_THREAD_ELEMENTS = 8
"""Minimum elements of a row per thread, where there are too few rows to occupy the GPU otherwise."""
OCCUPYING_THREADS = 512  # threads per multiprocessor that hide most of the memory latency


@dataclass(frozen=True)
class RowShape:
    """Distribution of a row among threads.

    Thread t of a row has the vectors t, t + threads, t + 2 threads, ... so that accesses are coalesced.
    """

    threads: int  # threads of a row: a power of two within a warp, the whole block or all blocks of the cluster
    rows: int  # rows of a block
    lanes: int  # elements of a vector, a divisor of the row's length
    # Vectors in a thread's registers, the last of which may be beyond the row; 0 if every pass loads the row again.
    vectors: int
    cluster: int = 1  # blocks of the cluster that shares a row

    @property
    def warps(self) -> int:
        """Warps of a block that share a row, at least 1."""
        return max(1, self.threads // self.cluster // WARP)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows // self.cluster


def lanes_for(n: Expr, dtypes: Sequence[str]) -> int:
    """Maximum lanes of vectors of these types that divide rows of `n` elements."""
    max_lanes = min(MAX_LANES, VECTOR_BYTES // min(map(bytes_of, dtypes)))
    return math.gcd(n, max_lanes) if isinstance(n, int) else max_lanes


def register_shape(
    n: int,  # elements of a row
    lanes: int,
    total: Expr,  # rows
    words: float,  # registers per element
    gpu: GpuTarget,
) -> RowShape | None:
    """Shape for rows kept in registers; None if they are too long."""
    vectors = -(-n // lanes)
    threads = min(WARP, _ceil_power_of_two(-(-vectors // 4)))

    def own(threads: int) -> int:
        return -(-vectors // threads) * lanes

    while own(threads) > MIN_THREAD_ELEMENTS and threads < gpu.block_threads:
        if own(threads) <= MAX_THREAD_ELEMENTS and (
            threads >= BLOCK_THREADS or own(threads) * words <= TARGET_REGISTERS
        ):
            break
        threads *= 2
    cluster = 1
    if own(threads) > MAX_THREAD_ELEMENTS:
        # Many small blocks: while some on a multiprocessor load, others compute.
        if not gpu.bulk_copies or own(MAX_CLUSTER_BLOCKS * gpu.block_threads) > MAX_THREAD_ELEMENTS:
            return None
        cluster = MAX_CLUSTER_BLOCKS
        while own(threads) > MAX_THREAD_ELEMENTS:
            threads *= 2
    if isinstance(total, int):
        while threads < gpu.block_threads and own(threads) > max(lanes, MIN_THREAD_ELEMENTS):
            if not is_idle(RowShape(threads, 1, lanes, 0), total, gpu):
                break
            threads *= 2
        blocks = _cluster(n, total, gpu)
        if blocks > cluster:
            threads, cluster = max(threads, blocks * WARP), blocks
    if cluster > 1:
        return RowShape(threads, 1, lanes, -(-vectors // threads), cluster)
    rows = max(1, BLOCK_THREADS // threads)
    while isinstance(total, int) and rows > 1 and rows * threads > WARP and total < rows * gpu.multiprocessors:
        rows //= 2
    return RowShape(threads, rows, lanes, -(-vectors // threads))


def is_idle(shape: RowShape, total: Expr, gpu: GpuTarget) -> bool:
    """Return whether the rows are too few to occupy the GPU."""
    return isinstance(total, int) and total * shape.threads < gpu.multiprocessors * OCCUPYING_THREADS


def looped_shape(n: Expr, lanes: int, total: Expr, gpu: GpuTarget) -> RowShape:
    """Shape for rows of any length that every pass loads again; parameters as in `register_shape`."""
    if not isinstance(n, int):
        return RowShape(BLOCK_THREADS, 1, lanes, 0)
    cluster = _cluster(n, total, gpu) if isinstance(total, int) else 1
    # With few rows, blocks are as large as possible.
    block = gpu.block_threads if cluster == MAX_CLUSTER_BLOCKS else min(LONG_ROW_THREADS, gpu.block_threads)
    return RowShape(block * cluster, 1, lanes, 0, cluster)


def _cluster(n: int, total: int, gpu: GpuTarget) -> int:
    """Cluster size for rows that are long and too few for the multiprocessors."""
    blocks = 1
    while gpu.bulk_copies and 2 * blocks <= MAX_CLUSTER_BLOCKS and 2 * blocks * total <= gpu.multiprocessors:
        if n < 2 * blocks * MIN_BLOCK_ELEMENTS:
            break
        blocks *= 2
    return blocks


def _ceil_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length() if value > 1 else 1
