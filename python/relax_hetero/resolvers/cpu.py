"""Layouts for CPUs with vector instructions: x86 from SSE2 to AVX-512, and AArch64. Tables of `target` decide.

The left operand and the result stay row-major: the kernel broadcasts elements of the left one from where they lie, as
fast as from packed storage, and stores rows of the result with a mask at their end. The right operand is packed into
panels of n0 columns, ``[b.., n/n0, k/k0, n0, k0]``: a k-step reads one stretch of memory.

Feature maps of convolutions lie channels-last, ``[b, y0, y1, n]``: a vector is a run of channels, which exist in any
number and divide among groups without padding; the data of a 1x1 convolution are the rows of a matrix; pooling,
concatenation and elementwise work need nothing but permuted axes. An image of a few channels is read as it lies.

Weights of convolutions are packed into panels of n0 output channels, ``[n/n0, w0, w1, k, n0]``;
``[n/n0, w0, w1, k/k0, n0, k0]`` where the CPU multiplies k0 neighbouring input channels at once (low precision), and so
reads an image of few channels padded to k0. Where vectors hold channels of several groups, or of a depthwise
convolution, ``[1, w0, w1, n]``, one channel at a time is widened and multiplied: one vector of weights meets one vector
of channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..encoding.encoding import DYNAMIC, LHS, RHS, Encoding
from ..encoding.packed_layout import PackedLayout
from ..encoding.problem import AttentionProblem, BlockProductProblem, RowPhase, RowsProblem
from ..target.cpu_target import CpuTarget, cpu_target_of
from ..target.dot_instructions import DotInstruction, dot_instruction_for
from ..target.element_types import bytes_of
from ..target.tile_instructions import tile_instruction_for
from ..target.tiles import conv_columns, tile_columns
from .resolver_base import ResolverBase, tiled

if TYPE_CHECKING:
    import tvm

IN_PLACE_BYTES = 256 * 1024
"""A row-major right operand that is no larger is read in place: it fits the second-level cache, and packing it for one
product costs more than it saves. Measured (AVX-512, float32, M=128): 3 to 8 % faster in place up to here, level at
1 MiB, a third slower at 4 MiB."""

FEW_ROWS = 8
"""For no more rows of the left operand than this, laying a right operand out costs more than it saves. Measured
(AVX-512, float32, 4096x4096): 8 rows take a third of the time in place, one row a tenth."""

FEW_CHANNELS = 4
"""An image of no more channels is read as it lies: they would not fill a vector, and it need not be permuted first."""


class CpuResolver(ResolverBase):
    """Row-major left operand and result, packed right operand."""

    name = "cpu"
    problems = (AttentionProblem, BlockProductProblem, RowsProblem, RowPhase)

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major left operand and result; panels for the right one, unless it is a small activation."""
        cpu = cpu_target_of(target)
        if encoding.moves is not None:
            return conv_layout(encoding, cpu)
        dot = dot_instruction_for(cpu, *encoding.element_types)
        if dot is None:
            return None
        index_map = encoding.index_map
        if encoding.operand_index != RHS or _read_in_place(encoding, dot):
            return PackedLayout.identity(len(index_map))
        tiles = {"n": panel_width(cpu, dot, encoding.sizes["n"]), "k": dot.k0}
        return tiled(index_map, ("n", "k"), tiles, dot.compensation != 0)

    def resolve_activation(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """As `resolve`, but a right operand that few rows meet stays as it is, and one that is packed in the kernel."""
        if encoding.moves is not None or encoding.operand_index != RHS:
            return self.resolve(encoding, target)
        cpu = cpu_target_of(target)
        dot = dot_instruction_for(cpu, *encoding.element_types)
        few = 0 <= encoding.sizes["m"] <= FEW_ROWS
        if dot is not None and ((few and _is_readable(encoding, dot)) or _is_packed_in_kernel(encoding, dot, cpu)):
            return PackedLayout.identity(len(encoding.index_map))
        return self.resolve(encoding, target)


def panel_width(cpu: CpuTarget, dot: DotInstruction, n: int) -> int:
    """Columns of a packed panel: those of the kernel's tile, one vector where N is no wider."""
    lanes = cpu.lanes(dot.types[2])
    return lanes if 0 <= n <= lanes else tile_columns(cpu, dot.types[2])


def _read_in_place(encoding: Encoding, dot: DotInstruction) -> bool:
    """Whether the right operand is a small activation: it runs along a batch dimension; weights are shared by all."""
    if not _is_readable(encoding, dot) or not any(name.startswith("b") for name in encoding.of(RHS).index_map):
        return False
    k, n = encoding.sizes["k"], encoding.sizes["n"]
    return DYNAMIC in (k, n) or k * n * bytes_of(encoding.element_types[RHS]) <= IN_PLACE_BYTES


def _is_readable(encoding: Encoding, dot: DotInstruction) -> bool:
    """Whether the kernel can read the right operand as it lies: rows of n, one k a step."""
    return dot.k0 == 1 and encoding.of(RHS).index_map[-2:] == ("k", "n")


def _is_packed_in_kernel(encoding: Encoding, dot: DotInstruction, cpu: CpuTarget) -> bool:
    """Whether tile registers multiply rows of n that the kernel packs itself, panel by panel.

    Vectors read them as well, a group at a time, where the process may not use tiles; but not with compensation, which
    is part of packed storage.
    """
    tiles = tile_instruction_for(cpu, *encoding.element_types)
    sizes, rows = encoding.sizes, encoding.of(RHS).index_map[-2:] == ("k", "n")
    if tiles is None or dot.compensation or not rows or DYNAMIC in (sizes["k"], sizes["n"]):
        return False
    return sizes["m"] == DYNAMIC or sizes["m"] >= tiles.least_rows


def conv_layout(encoding: Encoding, cpu: CpuTarget) -> PackedLayout | None:
    """The layout of an operand of a convolution; None for symbolic images, and for types without a kernel."""
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    unknown = [name for name, size in sizes.items() if size == DYNAMIC and name != "b"]
    dot = dot_instruction_for(cpu, *encoding.element_types)
    if unknown or dot is None:
        return None
    spatial = tuple(range(2, len(encoding.index_map)))
    channels_last = PackedLayout((0, *spatial, 1))
    if encoding.operand_index == LHS:
        if moves.groups > 1 or sizes["c"] > FEW_CHANNELS:
            return channels_last
        if dot.k0 == 1:
            return PackedLayout.identity(len(encoding.index_map))
        return PackedLayout((0, *spatial, 1), (1,), (dot.k0,)) if sizes["c"] % dot.k0 else channels_last
    if encoding.operand_index != RHS:
        return channels_last
    channels = sizes["n"] // moves.groups
    columns = conv_columns(cpu, encoding.element_types[2], channels, sizes["k"], moves.groups)
    if columns == 0:
        return PackedLayout((1, *spatial, 0))
    if dot.k0 == 1 or (moves.groups > 1 and columns > channels):
        return PackedLayout((0, *spatial, 1), (0,), (columns,))
    return PackedLayout((0, *spatial, 1), (0, 1), (columns, dot.k0), dot.compensation != 0)
