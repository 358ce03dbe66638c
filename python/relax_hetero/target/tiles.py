"""Table of tile sizes of matrix products and convolutions, by instruction set.

A kernel keeps ``rows * vectors`` accumulators in registers, besides `vectors` of the right operand and one broadcast of
the left operand. More rows save loads of the right operand, more vectors save broadcasts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cpu_target import CpuTarget
from .dot_instructions import DotInstruction, multiplies_by_sve

MAX_PIXELS = 14
"""Maximum number of pixels of a convolution's tile: with two vectors each, they fill the registers of AVX-512."""


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes of one instruction set."""

    rows: int  # rows (m) of a tile
    vectors: int  # columns (n) of a tile, in vectors of the accumulator's type (in elements on CPUs without vectors)
    pixels: int = MAX_PIXELS  # maximum number of pixels of a convolution's tile
    # Bytes of a convolution's left factors, after they are widened, that one load of a pixel fetches, for several steps
    # that multiply by lanes; 0 if each step broadcasts its own.
    left_bytes: int = 0
    # Rows of a tile whose left factors are packed, too; 0 if products read the left operand in place.
    panel_rows: int = 0


# Measured for AVX-512 (8x32 is within 3 % of the best for nearly every shape); otherwise the largest tile that fits
# the registers besides the operands.
TILE_SIZES: dict[str, TileSizes] = {
    "avx512": TileSizes(8, 2),
    "avx2": TileSizes(6, 2),
    "sse": TileSizes(4, 2),
    # LLVM hoists loads on AArch64: with more pixels it spills accumulators.
    "neon": TileSizes(8, 2, 12, 16, 12),
    "generic": TileSizes(4, 4),
}


def tile_sizes(cpu: CpuTarget) -> TileSizes:
    """The tile of a CPU's main loop."""
    return TILE_SIZES[cpu.isa.name]


def tile_columns(cpu: CpuTarget, acc_dtype: str) -> int:
    """Columns of a tile in NEON's or x86's vectors, by which weights are packed."""
    return tile_sizes(cpu).vectors * cpu.lanes(acc_dtype)


def matmul_columns(cpu: CpuTarget, dot: DotInstruction) -> int:
    """Columns of a product's tile, by which its right operand is packed: in vectors of SVE if those multiply."""
    columns = tile_columns(cpu, dot.types[2])
    return columns * cpu.sve_bytes // cpu.isa.vector_bytes if multiplies_by_sve(cpu, dot) else columns


def conv_pixels(cpu: CpuTarget, dot: DotInstruction, vectors: int, has_left_vectors: bool = False) -> int:
    """Maximum number of pixels of a convolution's tile with `vectors` vectors of output channels.

    Accumulators, weights, one register for the data (`has_left_vectors`: for each pixel) and the temporaries of a step
    fit the registers.
    """
    registers = cpu.isa.registers - 1 - dot.temporaries
    pixels = max(1, min(tile_sizes(cpu).pixels, (registers - vectors) // (vectors + has_left_vectors)))
    return max(dot.rows, pixels // dot.rows * dot.rows)


MAX_VECTORS = 6
"""Maximum vectors of a grouped convolution's tile; wider than in products, to keep the channels of a group together."""


def conv_columns(
    cpu: CpuTarget, dtype: str, out_channels_per_group: int, in_channels_per_group: int, groups: int
) -> int:
    """Tile of output channels by which the weight of a convolution is packed.

    Parameters
    ----------
    dtype : str
        Element type of the accumulators.

    Returns
    -------
    int
        Number of output channels of a tile: the weight is stored as ``[OC/tile, KH, KW, IC/groups, tile]``. 0 for
        depthwise convolutions, whose weight is stored with channels last, ``[1, KH, KW, OC]``.

    Notes
    -----
    A tile either divides the channels of a group, or is one vector of several complete groups.
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
        # Idle lanes first, then the distance from the preferred tile.
        vectors = -(-size // lanes)
        return channels // size * vectors, abs(size - preferred)

    return min(divisors, key=cost)
