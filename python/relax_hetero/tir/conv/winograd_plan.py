"""Plans of Winograd convolutions: tasks, blocks of tiles, rows of a register tile.

The transformed data of a block of tiles stay in the L2 cache and meet one panel of weights after the other, so that a
panel is read once per block. Measured (AVX-512, float32): 24 tiles per block are best; with 48 and more the transformed
data leave the cache, and with fewer the weights are read too often.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ...encoding.winograd import WINDOW, positions
from ...target.cpu_target import CpuTarget
from ..core.builder import ceil_div
from ..core.work_split import tasks_for

BLOCK_TILES = 24
BLOCK_BYTES = 7 << 17  # maximum bytes of the transformed data of a block
MAX_ROWS = 14
SYMBOLIC_TILES_GUESS = 196  # guess for a symbolic number of tiles: an image of 28 x 28 pixels

TRANSFORM_COST = {2: 140, 4: 700}
"""Cost of a forward or inverse transform of a vector of a tile, by m, in multiply-adds of vectors."""
PANEL_READ_ROWS = 12  # cost of reading a panel from L3 for each block, in rows of a product
COLD_BYTE_COST = 0.12  # extra cost of the first read of a byte of the weights, in multiply-adds of vectors
DIRECT_EFFICIENCY = 0.93  # fraction of the peak of multiply-adds that the direct kernel reaches
# Measured on a Zen 4 with AVX-512, one and two threads, weights not in the caches: the estimates are within 25 % of the
# times of 30 shapes of 7 x 7 to 224 x 224 pixels and 16 to 1,024 channels.


@dataclass(frozen=True)
class Shape:
    """Plain sizes of the problem."""

    m: int  # pixels of a tile along each dimension of the image
    # The batch, and the extents of the result; symbolic ones are 0.
    images: int
    places: tuple[int, int]
    # Input and output channels of a group, output channels of a panel of weights, groups.
    depth: int
    columns: int
    width: int
    groups: int

    @property
    def panels(self) -> int:
        """Number of panels of a group."""
        return ceil_div(self.columns, self.width)

    @property
    def tiles(self) -> int:
        """Number of tiles of all images, 0 if symbolic."""
        return self.images * prod(ceil_div(extent, self.m) for extent in self.places)

    @property
    def usual_tiles(self) -> int:
        """Number of tiles, a guess if symbolic."""
        return self.tiles or prod(ceil_div(extent, self.m) for extent in self.places) or SYMBOLIC_TILES_GUESS

    @property
    def products(self) -> int:
        """Number of small matrix products of a tile: one for each position."""
        return positions(self.m) ** 2


@dataclass(frozen=True)
class Plan:
    """Tasks, blocks and register tiles of a Winograd convolution."""

    # Numbers of parts of the tiles and of the panels of a group; a task is one of each.
    tile_parts: int
    panel_parts: int
    blocks: int  # number of blocks of a task; 0 for a symbolic number of tiles
    tiles: int  # maximum number of tiles of a block
    rows: int  # tiles (rows) of a register tile
    cost: float  # cost of the longest task, in multiply-adds of vectors

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.tile_parts * self.panel_parts


def make_plan(shape: Shape, cpu: CpuTarget, dtype: str = "float32") -> Plan:
    """The plan of a convolution for all cores of a CPU, or for one core if there is little work."""
    vectors = ceil_div(shape.width, cpu.lanes(dtype))
    macs = shape.usual_tiles * shape.products * shape.depth * shape.panels * shape.width * shape.groups
    cores = tasks_for(cpu.cores, "multiply-adds", macs if shape.tiles else None)
    plans = []
    for parts in range(1, cores + 1):
        if cores % parts == 0 and parts <= shape.usual_tiles:
            plans.append(_plan(shape, cpu, vectors, parts, min(shape.panels, cores // parts)))
    plan = min(plans, key=lambda plan: (plan.cost, -plan.tile_parts))
    return plan if shape.tiles else replace(plan, blocks=0, tiles=max(plan.tiles, plan.rows))


def estimated_speedup(shape: Shape, cpu: CpuTarget) -> float:
    """The estimated speedup over a direct convolution, in float32."""
    lanes = cpu.lanes("float32")
    places = prod(shape.places) * (shape.images or 1) or shape.usual_tiles * shape.m**2
    direct = places * WINDOW**2 * shape.depth * shape.panels * ceil_div(shape.width, lanes) * shape.groups
    plan = make_plan(shape, cpu, "float32")
    return direct / plan.tasks / DIRECT_EFFICIENCY / plan.cost


def _plan(shape: Shape, cpu: CpuTarget, vectors: int, tile_parts: int, panel_parts: int) -> Plan:
    max_rows = max(1, min(MAX_ROWS, (cpu.isa.registers - 1 - vectors) // vectors))
    max_tiles = max(4, min(BLOCK_TILES, BLOCK_BYTES // (shape.products * shape.depth * 4)))
    max_part, min_part = ceil_div(shape.usual_tiles, tile_parts), shape.usual_tiles // tile_parts
    panels = ceil_div(shape.panels, panel_parts)

    def rows_computed(choice: tuple[int, int]) -> int:
        blocks, rows = choice
        # Each product reads its weights, which takes about as long as a row.
        return blocks * max(ceil_div(ceil_div(max_part, blocks), rows) * (rows + 1), PANEL_READ_ROWS)

    block_counts = {max(1, max_part // max_tiles), ceil_div(max_part, max_tiles)}
    choices = [
        (blocks, rows)
        for blocks in sorted(block_counts)
        if ceil_div(max_part, blocks) <= max_tiles + max_tiles // 3
        for rows in range(1, min(max_rows, max(1, min_part // blocks)) + 1)
    ]
    blocks, rows = best = min(choices, key=rows_computed)
    row = shape.products * shape.depth * vectors
    transforms = max_part * TRANSFORM_COST[shape.m] * (ceil_div(shape.depth, cpu.lanes("float32")) + panels * vectors)
    weights = panels * shape.products * shape.depth * shape.width * 4
    cost = (panels * rows_computed(best) * row + transforms + weights * COLD_BYTE_COST) * shape.groups
    return Plan(tile_parts, panel_parts, blocks, ceil_div(max_part, blocks), rows, cost)
