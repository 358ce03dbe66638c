"""How a convolution by Winograd's transforms is cut: tasks, blocks of tiles, rows of a product in registers.

A block of tiles is transformed into the second-level cache, and multiplied by one panel of weights after the other, so
that a panel is read once a block. Measured (AVX-512, float32): 24 tiles a block are best; with 48 and more the
transformed data leave the cache, and with fewer the weights are read more often than they are worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...encoding.winograd import positions
from ...target.cpu_target import CpuTarget
from ..core.builder import ceil_div

BLOCK_TILES = 24
BLOCK_BYTES = 7 << 17
"""What the transformed data of a block take at most."""
MOST_ROWS = 14
UNKNOWN_TILES = 196
"""A guess where a call says how many there are: an image of 28 x 28 places."""


@dataclass(frozen=True)
class Shape:
    """What is computed: plain sizes.

    Attributes
    ----------
    m : int
        Places of a tile along each dimension of the image.
    images, places : int, tuple of int
        The batch, and the extents of the result; 0 where a call says them.
    depth, width, panels, groups : int
        Input channels of a group, output channels of a panel, panels of a group.
    """

    m: int
    images: int
    places: tuple[int, int]
    depth: int
    width: int
    panels: int
    groups: int

    @property
    def tiles(self) -> int:
        """Tiles of all images, 0 where a call says how many."""
        return self.images * prod(ceil_div(extent, self.m) for extent in self.places)

    @property
    def weight_bytes(self) -> int:
        """Of the transformed weights, float32."""
        return self.groups * self.panels * positions(self.m) ** 2 * self.depth * self.width * 4


@dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes
    ----------
    tile_parts, panel_parts : int
        Into how many parts tiles, and panels of a group, are cut; a task is one of each.
    blocks : int
        Of a task; 0 where a call says how many tiles there are.
    tiles : int
        The most of a block.
    rows : int
        Tiles that a product in registers takes at once.
    """

    tile_parts: int
    panel_parts: int
    blocks: int
    tiles: int
    rows: int

    @property
    def tasks(self) -> int:
        """How many there are."""
        return self.tile_parts * self.panel_parts


def make_plan(shape: Shape, cpu: CpuTarget, dtype: str = "float32") -> Plan:
    """The plan of a convolution for all cores of a CPU."""
    vectors = ceil_div(shape.width, cpu.lanes(dtype))
    most_rows = max(1, min(MOST_ROWS, (cpu.isa.registers - 1 - vectors) // vectors))
    most_tiles = max(4, min(BLOCK_TILES, BLOCK_BYTES // (positions(shape.m) ** 2 * shape.depth * 4)))
    images = shape.images or 1
    known = images * prod(ceil_div(extent, shape.m) for extent in shape.places) or UNKNOWN_TILES * images
    found = []
    for parts in range(1, cpu.cores + 1):
        if cpu.cores % parts or (parts > known and parts > 1):
            continue
        columns = min(shape.panels, cpu.cores // parts)
        own = ceil_div(known, parts)
        blocks, rows, products = _cut(own, known // parts, most_rows, most_tiles)
        longest = ceil_div(shape.panels, columns)
        tiles = ceil_div(own, blocks)
        cost = longest * products + own * TRANSFORM_ROWS
        # Weights of more than the caches hold are read by one task rather than by all.
        many = shape.weight_bytes > 4 << 20 and known <= 64
        found.append((cost, parts if many else -parts, Plan(parts, columns, blocks, tiles, rows)))
    plan = min(found, key=lambda item: item[:2])[2]
    if shape.tiles:
        return plan
    return Plan(plan.tile_parts, plan.panel_parts, 0, max(plan.tiles, plan.rows), plan.rows)


TRANSFORM_ROWS = 0.4
"""What transforming a tile takes, in rows of a product by one panel."""


def _cut(own: int, least: int, most_rows: int, most_tiles: int) -> tuple[int, int, float]:
    """Blocks of a task, rows of a product, and what the products of a panel cost."""

    def cost(cut: tuple[int, int]) -> float:
        blocks, rows = cut
        return blocks * ceil_div(ceil_div(own, blocks), rows) * (rows + 1)

    near = {max(1, own // most_tiles), ceil_div(own, most_tiles)}
    cuts = [
        (blocks, rows)
        for blocks in near
        if ceil_div(own, blocks) <= most_tiles + most_tiles // 3
        for rows in range(1, min(most_rows, max(1, least // blocks)) + 1)
    ]
    best = min(cuts, key=cost)
    return (*best, cost(best))
