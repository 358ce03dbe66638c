"""How CPUs with vectors store the operands of convolutions.

Feature maps lie channels-last, ``[b, y0, y1, n]``: a vector is a run of channels, which exist in any number and divide
among groups without padding; the data of a 1x1 convolution are the rows of a matrix; pooling, concatenation and
elementwise work need nothing but permuted axes. An image of a few channels is read as it lies.

Weights are packed into panels of n0 output channels, ``[n/n0, w0, w1, k, n0]``; ``[n/n0, w0, w1, k/k0, n0, k0]`` where
the CPU multiplies k0 neighbouring input channels at once (low precision), and so reads an image of few channels
padded to k0. Where vectors hold channels of several groups, or of a depthwise convolution, ``[1, w0, w1, n]``, one
channel at a time is widened and multiplied: one vector of weights meets one vector of channels.
"""

from __future__ import annotations

from ..encoding.encoding import DYNAMIC, LHS, RHS, Encoding
from ..encoding.packed_layout import PackedLayout
from ..target.cpu_target import CpuTarget
from ..target.dot_instructions import dot_instruction_for
from ..target.tiles import conv_columns

FEW_CHANNELS = 4
"""An image of no more channels is read as it lies: they would not fill a vector, and it need not be permuted first."""


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
