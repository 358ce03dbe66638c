"""How large the tiles of a matrix product are: a table from instruction set to rows and columns.

A kernel keeps ``rows * vectors`` accumulators in registers, beside `vectors` of the right operand and one broadcast of
the left one. More rows save loads of the right operand, more vectors save broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine


@dataclass(frozen=True)
class TileSizes:
    """Of one instruction set.

    Attributes
    ----------
    rows : int
        m of a tile.
    vectors : int
        n of a tile, in vectors of the accumulator's type (in elements where a machine has no vectors).
    """

    rows: int
    vectors: int


# Measured for AVX-512 (8x32 is within 3 % of the best for nearly every shape); elsewhere the largest that fits the
# registers with room for the operands.
TILES: dict[str, TileSizes] = {
    "avx512": TileSizes(8, 2),
    "avx2": TileSizes(6, 2),
    "sse": TileSizes(4, 2),
    "neon": TileSizes(8, 2),
    "generic": TileSizes(4, 4),
}


def tile_sizes(machine: Machine) -> TileSizes:
    """The tile of a machine's main loop."""
    return TILES[machine.isa.name]


def tile_columns(machine: Machine, acc_dtype: str) -> int:
    """n of a tile: what the right operand is packed by."""
    return tile_sizes(machine).vectors * machine.lanes(acc_dtype)
