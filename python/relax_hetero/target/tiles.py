"""How large the tiles of matrix products and convolutions are: a table from instruction set to rows and columns.

A kernel keeps ``rows * vectors`` accumulators in registers, beside `vectors` of the right operand and one broadcast of
the left one. More rows save loads of the right operand, more vectors save broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpu_target import CpuTarget
from .dot_instructions import DotInstruction

# More places of a convolution's tile gain nothing: with two vectors each, this many fill the registers of AVX-512.
MAX_PIXELS = 14


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes of one instruction set.

    Attributes
    ----------
    rows : int
        m of a tile.
    vectors : int
        n of a tile, in vectors of the accumulator's type (in elements where a CPU has no vectors).
    groups : int
        The most places of a convolution's tile whose steps take groups of input channels.
    """

    rows: int
    vectors: int
    groups: int = MAX_PIXELS


# Measured for AVX-512 (8x32 is within 3 % of the best for nearly every shape); elsewhere the largest that fits the
# registers with room for the operands.
TILE_SIZES: dict[str, TileSizes] = {
    "avx512": TileSizes(8, 2),
    "avx2": TileSizes(6, 2),
    "sse": TileSizes(4, 2),
    # LLVM loads groups ahead on AArch64: with 14 places, sums go to the stack and back.
    "neon": TileSizes(8, 2, 12),
    "generic": TileSizes(4, 4),
}


def tile_sizes(cpu: CpuTarget) -> TileSizes:
    """The tile of a CPU's main loop."""
    return TILE_SIZES[cpu.isa.name]


def tile_columns(cpu: CpuTarget, acc_dtype: str) -> int:
    """n of a tile: what the right operand is packed by."""
    return tile_sizes(cpu).vectors * cpu.lanes(acc_dtype)


def conv_pixels(cpu: CpuTarget, dot: DotInstruction, vectors: int) -> int:
    """The most places of a convolution's tile of so many vectors of output channels.

    Accumulators, a vector of weights each, one register for the data and what a step needs besides fit the registers.
    """
    registers = cpu.isa.registers - 1 - dot.temporaries
    max_pixels = tile_sizes(cpu).groups if dot.k0 > 1 else MAX_PIXELS
    pixels = max(1, min(max_pixels, (registers - vectors) // vectors))
    return max(dot.rows, pixels // dot.rows * dot.rows)


# A tile of a convolution may be wider than that of a matrix product, where this keeps all channels of a group together.
MAX_VECTORS = 6


def conv_columns(
    cpu: CpuTarget, dtype: str, out_channels_per_group: int, in_channels_per_group: int, groups: int
) -> int:
    """Number of output channels by which the weight of a convolution is packed.

    Parameters
    ----------
    dtype : str
        Element type of the accumulators.

    Returns
    -------
    int
        The tile along the output channels: the weight is stored as ``[OC/tile, KH, KW, IC/groups, tile]``. 0: a
        depthwise convolution, whose weight is stored with its channels last, ``[1, KH, KW, OC]``.

    Notes
    -----
    A tile never holds a part of one group beside a part of another: it divides the channels of a group, or it is one
    vector that holds several whole groups.
    """
    lanes, preferred = cpu.lanes(dtype), tile_columns(cpu, dtype)
    if groups > 1 and in_channels_per_group == 1:
        return 0
    channels = out_channels_per_group
    if groups == 1:
        wide = preferred + lanes
        if lanes > 1 and cpu.isa.registers >= 32 and preferred < channels <= wide:
            return wide
        return min(preferred, -(-channels // lanes) * lanes)
    if channels < lanes and lanes % channels == 0 and channels == in_channels_per_group:
        return lanes
    divisors = [size for size in range(1, MAX_VECTORS * lanes + 1) if channels % size == 0]

    def cost(size: int) -> tuple[int, int]:
        # Lanes that compute nothing, then the distance from the tile that is best where all sizes fit.
        vectors = -(-size // lanes)
        return channels // size * vectors, abs(size - preferred)

    return min(divisors, key=cost)
