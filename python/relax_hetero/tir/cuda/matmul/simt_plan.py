"""Tiles of products without tensor cores: how much a block and a thread compute, chosen by the sizes and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, GpuTarget

SHARED_BYTES = 48 << 10
"""Shared memory that a kernel has without asking, on every GPU."""

UNKNOWN = 1024
"""What a symbolic extent is taken for where tiles are chosen."""


@dataclass(frozen=True)
class SimtPlan:
    """Tiles of a product.

    Attributes
    ----------
    rows, columns : int
        Of a block's tile.
    thread_rows, thread_columns : int
        Of a thread's, multiples of `group`.
    group : int
        Neighbouring elements that a thread reads from shared memory at once.
    depth : int
        Of k in one step of a slice.
    slices : int
        Groups of threads that share k; their sums are added at the end.
    cluster : int
        Blocks that share the k of a tile: 1, 2, 4 or 8.
    """

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    group: int
    depth: int
    slices: int
    cluster: int = 1

    @property
    def slice_threads(self) -> int:
        """Threads that compute a tile together."""
        return (self.rows // self.thread_rows) * (self.columns // self.thread_columns)

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.slice_threads * self.slices

    def shared_bytes(self, size: int) -> int:
        """Shared memory of a block, for sums of `size` bytes."""
        pitch = self.rows + self.columns + 2 * self.group
        partial = self.slices * self.rows * self.columns if self.slices * self.cluster > 1 else 0
        return (2 * self.depth * self.slices * pitch + partial) * size


# Rows, columns, thread's rows and columns, and how near to the peak of multiply-adds the tile comes by its traffic to
# shared memory: a step of k costs a thread (rows + columns) loads for rows * columns multiply-adds.
_TILES = ((128, 128, 8, 8, 1.0), (128, 64, 8, 8, 0.9), (64, 128, 8, 8, 0.9), (64, 64, 8, 4, 0.8), (64, 32, 4, 4, 0.65),
          (32, 64, 4, 4, 0.65), (32, 32, 4, 4, 0.6), (16, 64, 4, 4, 0.5), (16, 32, 4, 4, 0.4))  # fmt: skip

THREADS_TO_HIDE = 256
"""Threads that a multiprocessor needs for the peak of its multiply-adds, about."""


def simt_plan(
    sizes: tuple[int | None, int | None, int | None], batch: int | None, dtype: str, gpu: GpuTarget
) -> SimtPlan:
    """The tiles that are estimated to be the quickest.

    Parameters
    ----------
    sizes : tuple of (int or None)
        Rows and columns of the result, and k; None where symbolic.
    batch : int or None
    dtype : str
        Of the sums.
    """
    size = bytes_of(dtype)
    group = max(1, 16 // size)
    m, n, k = (UNKNOWN if extent is None else max(extent, 1) for extent in sizes)
    count = 1 if batch is None else max(batch, 1)
    best: tuple[float, SimtPlan] | None = None
    for rows, columns, thread_rows, thread_columns, share in _TILES:
        if size > 4 and thread_rows * thread_columns > 32:
            thread_columns //= 2  # registers
        tiles = count * -(-m // rows) * -(-n // columns)
        for slices in (1, 2, 4, 8):
            plan = SimtPlan(rows, columns, thread_rows, thread_columns, group, 8, slices)
            if plan.threads > 512 or plan.slice_threads < WARP or plan.shared_bytes(size) > SHARED_BYTES:
                continue
            if slices > 1 and (k < 32 * slices or thread_rows * thread_columns < slices * group):
                continue
            waves = -(-tiles // gpu.multiprocessors)
            # Blocks on a multiprocessor at the same time hide each other's latency.
            beside = min(waves, max(1, 512 // plan.threads)) * plan.threads
            hidden = min(1.0, beside / THREADS_TO_HIDE)
            steps = -(-k // (plan.depth * slices))
            cost = waves * (
                rows * columns * plan.depth * slices * steps / (share * hidden * 128) + 600 + 150 * (slices > 1)
            )
            if best is None or cost < best[0]:
                best = cost, plan
    assert best is not None, "the smallest tile always fits"
    return best[1]
