"""Tilings of SIMT products (without tensor cores), chosen by sizes and GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....target.element_types import bytes_of
from ....target.gpu_target import GpuTarget
from ..core.minimax_regret import cases_of, minimax_regret


@dataclass(frozen=True)
class SimtPlan:
    """Tiling of a product."""

    # Rows and columns of a block tile.
    rows: int
    columns: int
    # Rows and columns of a thread tile, multiples of `group`.
    thread_rows: int
    thread_columns: int
    group: int  # neighbouring elements that a thread loads from shared memory at once
    depth: int  # extent of k in a k-step of a slice
    slices: int  # sliced-k: groups of threads that split the k of a block tile; their accumulators are added at the end
    cluster: int = 1  # split-k: blocks of a cluster that split the k of a tile: 1, 2, 4 or 8
    # Whether tiles of the operands are staged in shared memory; otherwise threads read global memory, in one slice.
    staged: bool = True

    @property
    def slice_threads(self) -> int:
        """Threads of a slice."""
        return (self.rows // self.thread_rows) * (self.columns // self.thread_columns)

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return self.slice_threads * self.slices

    @property
    def left_elements(self) -> int:
        """Elements of shared memory for both buffers of left tiles."""
        return 2 * self.depth * self.slices * (self.rows + self.group)

    @property
    def shared_elements(self) -> int:
        """Elements of shared memory of a block: tiles, later reused for accumulators."""
        if not self.staged:
            return 0
        tiles = self.left_elements + 2 * self.depth * self.slices * (self.columns + self.group)
        sums = self.slices * self.rows * self.columns if self.slices * self.cluster > 1 else 0
        return max(tiles, sums)


# Rows, columns, thread rows, thread columns, depth, slices; multiply-adds per cycle and multiprocessor with one block,
# and with several: measured on an H200, whose peak is 128. Large thread tiles load the least shared memory.
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

_PROLOGUE_EPILOGUE_CYCLES = 1000.0
_MIN_STEP_CYCLES = 1200.0
"""Time of a k-step of a single block on a multiprocessor, which waits for memory: measured with 64 steps on an H200."""
_CLUSTER_BARRIER_CYCLES = 1500.0
_EXCHANGED_SUMS_PER_CYCLE = 4.0
"""Accumulators of another block that a block reads per cycle."""


def simt_plan(
    sizes: tuple[int | None, int | None, int | None],
    batch: int | None,
    dtype: str,
    gpu: GpuTarget,
    staged: bool = True,
) -> SimtPlan:
    """Tiling with the lowest estimated time.

    Parameters
    ----------
    sizes : tuple of (int or None)
        Rows and columns of the result, and k; None where symbolic.
    dtype : str
        Element type of the accumulators.
    staged : bool
        Whether tiles are staged in shared memory.
    """
    size = bytes_of(dtype)
    group = max(1, 16 // size)
    cases = [[max(size, 1) for size in case] for case in cases_of(sizes, None not in (*sizes, batch))]
    count = 1 if batch is None else max(batch, 1)
    # Blocks of a cluster split a static k, and exchange 4-byte accumulators.
    clusters = (1, 2, 4, 8) if gpu.bulk_copies and sizes[2] is not None and size == 4 else (1,)
    choices: list[tuple[SimtPlan, tuple[int, int]]] = []
    for rows, columns, thread_rows, thread_columns, depth, slices, *rates in _TILES:
        if size > 4 and thread_rows * thread_columns > 32:
            continue  # registers
        if not staged and slices > 1:
            continue
        for cluster in clusters:
            plan = SimtPlan(rows, columns, thread_rows, thread_columns, group, depth, slices, cluster, staged)
            if not _is_possible(plan, size, gpu) or (cluster > 1 and cases[0][2] < 4 * depth * slices * cluster):
                continue
            if cluster == 1 or min(_tiles(plan, case, count) for case in cases) < gpu.multiprocessors:
                choices.append((plan, (rates[0], rates[1])))

    return minimax_regret(choices, cases, lambda choice, case: _cycles(choice[0], case, count, choice[1], gpu))[0]


def _tiles(plan: SimtPlan, sizes: Sequence[int], count: int) -> int:
    return count * -(-sizes[0] // plan.rows) * -(-sizes[1] // plan.columns)


def _cycles(plan: SimtPlan, sizes: Sequence[int], count: int, rates: tuple[int, int], gpu: GpuTarget) -> float:
    """Estimated cycles of a product; `rates` are multiply-adds per cycle with one block and with several."""
    step, cluster, k, tiles = plan.depth * plan.slices, plan.cluster, sizes[2], _tiles(plan, sizes, count)
    waves = -(-tiles * cluster // (gpu.multiprocessors if cluster == 1 else gpu.model.resident_blocks[cluster]))
    step_cycles = max(plan.rows * plan.columns * step / rates[waves > 1], 0 if waves > 1 else _MIN_STEP_CYCLES)
    work = step_cycles * -(-k // (step * cluster))
    exchange = _CLUSTER_BARRIER_CYCLES + plan.rows * plan.columns / _EXCHANGED_SUMS_PER_CYCLE if cluster > 1 else 0
    return waves * (work + _PROLOGUE_EPILOGUE_CYCLES + exchange)


def _is_possible(plan: SimtPlan, size: int, gpu: GpuTarget) -> bool:
    """Return whether a plan fits shared memory, and every thread has accumulators to add."""
    groups = plan.thread_rows * plan.thread_columns // plan.group
    return plan.shared_elements * size <= gpu.shared_bytes_sm // 2 and groups % (plan.slices * plan.cluster) == 0
