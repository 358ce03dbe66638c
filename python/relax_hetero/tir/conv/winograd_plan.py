"""How a convolution by Winograd's transforms is cut: tasks, blocks of tiles, rows of a product in registers.

A block of tiles is transformed into the second-level cache, and multiplied by one panel of weights after the other, so
that a panel is read once a block. Measured (AVX-512, float32): 24 tiles a block are best; with 48 and more the
transformed data leave the cache, and with fewer the weights are read more often than they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ...encoding.winograd import WINDOW, positions
from ...target.cpu_target import CpuTarget
from ..core.builder import ceil_div
from ..core.work_split import tasks_for

BLOCK_TILES = 24
BLOCK_BYTES = 7 << 17
"""Maximum bytes of the transformed data of a block."""
MAX_ROWS = 14
UNKNOWN_TILES = 196
"""A guess where a call says how many there are: an image of 28 x 28 places."""

TRANSFORM = {2: 140, 4: 700}
"""Cost of transforming a vector of a tile, there or back, by m, in multiply-adds of vectors."""
WEIGHT_ROWS = 12
"""Cost of reading a panel from L3, in rows of a product, for each block."""
COLD_BYTE = 0.12
"""Extra cost of reading a byte of the weights for the first time, in multiply-adds of vectors."""
DIRECT = 0.93
"""Which part of the peak of multiply-adds the direct kernel reaches."""
# Measured on a Zen 4 of AVX-512 with one and two threads, weights not in the caches: the estimates are within 25 % of
# what 30 shapes of 7 x 7 to 224 x 224 places and 16 to 1,024 channels took.


@dataclass(frozen=True)
class Shape:
    """Plain sizes of the problem.

    Attributes
    ----------
    m : int
        Places of a tile along each dimension of the image.
    images, places : int, tuple of int
        The batch, and the extents of the result; 0 where a call says them.
    depth, columns, width, groups : int
        Input and output channels of a group, output channels of a panel of weights, groups.
    """

    m: int
    images: int
    places: tuple[int, int]
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
        """Number of tiles of all images, 0 where a call says how many."""
        return self.images * prod(ceil_div(extent, self.m) for extent in self.places)

    @property
    def usual_tiles(self) -> int:
        """As `tiles`, a guess where a call says."""
        return self.tiles or prod(ceil_div(extent, self.m) for extent in self.places) or UNKNOWN_TILES

    @property
    def products(self) -> int:
        """Small matrix products a tile takes: one for each position."""
        return positions(self.m) ** 2


@dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes
    ----------
    tile_parts, panel_parts : int
        Into how many parts tiles, and panels of a group, are cut; a task is one of each.
    blocks : int
        Number of blocks of a task; 0 where a call says how many tiles there are.
    tiles : int
        The most of a block.
    rows : int
        Tiles that a product in registers takes at once.
    cost : float
        Cost of the longest task, in multiply-adds of vectors.
    """

    tile_parts: int
    panel_parts: int
    blocks: int
    tiles: int
    rows: int
    cost: float

    @property
    def tasks(self) -> int:
        """How many there are."""
        return self.tile_parts * self.panel_parts


def make_plan(shape: Shape, cpu: CpuTarget, dtype: str = "float32") -> Plan:
    """The plan of a convolution for all cores of a CPU, or for one where that is all that the work is worth."""
    vectors = ceil_div(shape.width, cpu.lanes(dtype))
    macs = shape.usual_tiles * shape.products * shape.depth * shape.panels * shape.width * shape.groups
    cores = tasks_for(cpu.cores, "multiply-adds", macs if shape.tiles else None)
    found = []
    for parts in range(1, cores + 1):
        if cores % parts == 0 and parts <= shape.usual_tiles:
            found.append(_plan(shape, cpu, vectors, parts, min(shape.panels, cores // parts)))
    plan = min(found, key=lambda plan: (plan.cost, -plan.tile_parts))
    return plan if shape.tiles else replace(plan, blocks=0, tiles=max(plan.tiles, plan.rows))


def gain(shape: Shape, cpu: CpuTarget, dtype: str = "float32") -> float:
    """How many times as fast as a direct convolution this one is, as estimated."""
    lanes = cpu.lanes(dtype)
    places = prod(shape.places) * (shape.images or 1) or shape.usual_tiles * shape.m**2
    direct = places * WINDOW**2 * shape.depth * shape.panels * ceil_div(shape.width, lanes) * shape.groups
    plan = make_plan(shape, cpu, dtype)
    return direct / plan.tasks / DIRECT / plan.cost


def _plan(shape: Shape, cpu: CpuTarget, vectors: int, tile_parts: int, panel_parts: int) -> Plan:
    max_rows = max(1, min(MAX_ROWS, (cpu.isa.registers - 1 - vectors) // vectors))
    max_tiles = max(4, min(BLOCK_TILES, BLOCK_BYTES // (shape.products * shape.depth * 4)))
    known = shape.usual_tiles
    own, least = ceil_div(known, tile_parts), known // tile_parts
    panels = ceil_div(shape.panels, panel_parts)

    def rows_computed(cut: tuple[int, int]) -> int:
        blocks, rows = cut
        # Each product reads its weights, about as much work as a row.
        return blocks * max(ceil_div(ceil_div(own, blocks), rows) * (rows + 1), WEIGHT_ROWS)

    near = {max(1, own // max_tiles), ceil_div(own, max_tiles)}
    cuts = [
        (blocks, rows)
        for blocks in sorted(near)
        if ceil_div(own, blocks) <= max_tiles + max_tiles // 3
        for rows in range(1, min(max_rows, max(1, least // blocks)) + 1)
    ]
    blocks, rows = best = min(cuts, key=rows_computed)
    row = shape.products * shape.depth * vectors
    transforms = own * TRANSFORM[shape.m] * (ceil_div(shape.depth, cpu.lanes("float32")) + panels * vectors)
    weights = panels * shape.products * shape.depth * shape.width * 4
    cost = (panels * rows_computed(best) * row + transforms + weights * COLD_BYTE) * shape.groups
    return Plan(tile_parts, panel_parts, blocks, ceil_div(own, blocks), rows, cost)
