"""Tiles of products without tensor cores: how much a block and a thread compute, chosen by the sizes and the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ..core.minimax_regret import cases_of, minimax_regret


@dataclass(frozen=True)
class SimtPlan:
    """Tiles of a product.

    Attributes
    ----------
    rows, columns : int
        Rows and columns of a block's tile.
    thread_rows, thread_columns : int
        Rows and columns of a thread, multiples of `group`.
    group : int
        Neighbouring elements that a thread reads from shared memory at once.
    depth : int
        Extent of k in one step of a slice.
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
        """Number of threads of a block."""
        return self.slice_threads * self.slices

    @property
    def left_elements(self) -> int:
        """Elements of shared memory for both buffers of the tiles whose rows are those of the result."""
        return 2 * self.depth * self.slices * (self.rows + self.group)

    @property
    def shared_elements(self) -> int:
        """Elements of a block: tiles, which sums replace that are added at the end."""
        tiles = self.left_elements + 2 * self.depth * self.slices * (self.columns + self.group)
        sums = self.slices * self.rows * self.columns if self.slices * self.cluster > 1 else 0
        return max(tiles, sums)


# Rows, columns, thread's rows and columns, depth, slices; multiply-adds of a cycle that a multiprocessor reaches with
# one block, and with several: measured on an H200, whose peak is 128. Large parts of threads read the least memory.
_TILES = (
    (256, 128, 16, 8, 8, 1, 91, 94),
    (128, 128, 8, 8, 16, 1, 88, 92),
    (128, 128, 8, 8, 8, 1, 86, 89),
    (128, 64, 8, 8, 8, 2, 83, 88),
    (64, 128, 8, 8, 8, 2, 83, 88),
    (64, 64, 8, 8, 8, 4, 78, 80),
    (64, 64, 8, 8, 8, 2, 72, 86),
    (64, 64, 8, 4, 8, 2, 71, 74),
    (32, 64, 8, 4, 8, 4, 65, 68),
    (32, 32, 4, 4, 16, 2, 50, 54),
    (32, 32, 4, 4, 8, 1, 30, 45),
    (16, 32, 4, 4, 8, 2, 40, 42),
    (16, 32, 4, 4, 8, 1, 20, 30),
)

# Cycles of a block's first loads and last stores, and of blocks of a cluster that wait for each other; sums of another
# block that a block reads in a cycle.
_ENDS, _MEETING, _EXCHANGED = 1000.0, 1500.0, 4.0


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
        Element type of the sums.
    """
    size = bytes_of(dtype)
    group = max(1, 16 // size)
    cases = [[max(size, 1) for size in case] for case in cases_of(sizes, None not in (*sizes, batch))]
    count = 1 if batch is None else max(batch, 1)
    # Blocks of a cluster have parts of a known k, and read each other's sums of four bytes.
    clusters = (1, 2, 4, 8) if gpu.bulk_copies and sizes[2] is not None and size == 4 else (1,)
    found: list[tuple[SimtPlan, tuple[int, int]]] = []
    for rows, columns, thread_rows, thread_columns, depth, slices, *rates in _TILES:
        if size > 4 and thread_rows * thread_columns > 32:
            continue  # registers
        for cluster in clusters:
            plan = SimtPlan(rows, columns, thread_rows, thread_columns, group, depth, slices, cluster)
            if not _is_possible(plan, size, gpu) or (cluster > 1 and cases[0][2] < 4 * depth * slices * cluster):
                continue
            if cluster == 1 or min(_tiles(plan, case, count) for case in cases) < gpu.multiprocessors:
                found.append((plan, (rates[0], rates[1])))

    def cost(one: tuple[SimtPlan, tuple[int, int]], case: Sequence[int]) -> float:
        return _cycles(one[0], case, count, one[1], gpu)

    return minimax_regret(found, cases, cost)[0]


def _tiles(plan: SimtPlan, sizes: Sequence[int], count: int) -> int:
    return count * -(-sizes[0] // plan.rows) * -(-sizes[1] // plan.columns)


def _cycles(plan: SimtPlan, sizes: Sequence[int], count: int, rates: tuple[int, int], gpu: GpuTarget) -> float:
    """About how long a product takes; `rates` are the multiply-adds of a cycle, with one block and with several."""
    step, cluster, k, tiles = plan.depth * plan.slices, plan.cluster, sizes[2], _tiles(plan, sizes, count)
    # A cluster lies within a part of the GPU that has not always a multiple of its blocks.
    turns = -(-tiles * cluster // (gpu.multiprocessors // cluster * cluster))
    work = plan.rows * plan.columns * step * -(-k // (step * cluster)) / rates[turns > 1]
    exchange = _MEETING + plan.rows * plan.columns / _EXCHANGED if cluster > 1 else 0
    return turns * (work + _ENDS + exchange)


def _is_possible(plan: SimtPlan, size: int, gpu: GpuTarget) -> bool:
    """Return whether a block has room for a plan, and every thread a part of the sums to add."""
    groups = plan.thread_rows * plan.thread_columns // plan.group
    return plan.shared_elements * size <= gpu.shared_bytes // 2 and groups % (plan.slices * plan.cluster) == 0
