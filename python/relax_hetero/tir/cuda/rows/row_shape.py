"""How threads share the rows of a kernel: threads of a row, elements of a vector, what waits in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr
from ..core.vectors import VECTOR_BYTES

MOST_LANES = 8
"""Elements of a vector: bytes meet floats of which so many take two accesses."""
MOST_THREADS = 1024
"""Of a block."""
ELEMENTS = 32
"""Of a row that one thread holds, at most: the code of all is written out."""
WORDS = 48
"""Registers for the elements of a row that one thread holds, where a row may have more threads. More leave too few
threads on a multiprocessor to hide the latency of memory."""
BLOCK = 128
"""Threads of a block of several rows, and of a row whose length only the run knows."""
LONG_BLOCK = 512
"""Threads of a row that is too long for registers."""
BATCH = 4
"""Vectors of such a row that a thread has in flight."""
LEAST_ELEMENTS = 8
"""Of a row that one thread has, where there are too few rows to occupy the GPU otherwise."""
OCCUPIED = 512
"""Threads of a multiprocessor that hide most of the latency of memory."""


@dataclass(frozen=True)
class RowShape:
    """The threads of a row, and its elements.

    Thread t of a row has the vectors t, t + threads, t + 2 threads, ... so that neighbours read neighbouring memory.

    Attributes
    ----------
    threads : int
        Of a row: a power of two, of one warp or of the whole block.
    rows : int
        Rows of a block.
    lanes : int
        Elements of a vector, which every row is a multiple of.
    vectors : int
        Of a thread, the last of which may be beyond the row; 0 where a loop reads them anew in every pass.
    """

    threads: int
    rows: int
    lanes: int
    vectors: int

    @property
    def warps(self) -> int:
        """Warps that share a row, 1 where a warp has one or more rows."""
        return max(1, self.threads // WARP)

    @property
    def block(self) -> int:
        """Threads of a block."""
        return self.threads * self.rows


def lanes_for(n: Expr, dtypes: Sequence[str]) -> int:
    """Elements of a vector of tensors of these types: as many as rows of `n` elements can be cut into."""
    widest = min(MOST_LANES, VECTOR_BYTES // min(map(bytes_of, dtypes)))
    return math.gcd(n, widest) if isinstance(n, int) else widest


def held_shape(n: int, lanes: int, total: Expr, words: int, gpu: GpuTarget) -> RowShape | None:
    """The threads of rows that are held in registers; None where they are too long.

    Parameters
    ----------
    n : int
        Elements of a row.
    total : int or PrimExpr
        Rows.
    words : int
        Registers that an element takes, at least.
    """
    vectors = -(-n // lanes)
    threads = min(WARP, _power_of_two(-(-vectors // 4)))

    def own(threads: int) -> int:
        return -(-vectors // threads) * lanes

    while own(threads) > ELEMENTS or own(threads) * words > WORDS:
        if threads == MOST_THREADS:
            if own(threads) > ELEMENTS:
                return None
            break
        threads *= 2
    if isinstance(total, int):
        while threads < MOST_THREADS and own(threads) > LEAST_ELEMENTS and own(threads) > lanes:
            if total * threads >= gpu.multiprocessors * OCCUPIED:
                break
            threads *= 2
    rows = max(1, BLOCK // threads)
    while isinstance(total, int) and rows > 1 and rows * threads > WARP and total < rows * gpu.multiprocessors:
        rows //= 2
    return RowShape(threads, rows, lanes, -(-vectors // threads))


def looped_shape(n: Expr, lanes: int) -> RowShape:
    """The threads of rows that every pass reads anew, of any length."""
    return RowShape(LONG_BLOCK if isinstance(n, int) else BLOCK, 1, lanes, 0)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length() if least > 1 else 1
