"""How CPUs with vectors store the operands of convolutions.

Feature maps lie channels-last, ``[b, y0, y1, n]``: a vector is a run of channels, which exist in any number and divide
among groups without padding; the data of a 1x1 convolution are the rows of a matrix; pooling, concatenation and
elementwise work need nothing but permuted axes. An image of a few channels is read as it lies.

Weights are packed into panels of n0 output channels, ``[n/n0, w0, w1, k, n0]``, those of a depthwise convolution into
``[1, w0, w1, n]``: one vector of them meets one vector of channels.
"""

from __future__ import annotations

from ..encoding import DYNAMIC, LHS, RHS, Encoding
from ..machine import Machine
from ..packed_layout import PackedLayout
from ..tiles import conv_columns

FEW_CHANNELS = 4
"""An image of no more channels is read as it lies: they would not fill a vector, and it need not be permuted first."""

_ELEMENT_TYPES = ("float32", "float64")


def conv_layout(encoding: Encoding, machine: Machine) -> PackedLayout | None:
    """The layout of an operand of a convolution; None for symbolic images, and for types without a kernel."""
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    unknown = [name for name, size in sizes.items() if size == DYNAMIC and name != "b"]
    if unknown or any(dtype not in _ELEMENT_TYPES for dtype in encoding.element_types):
        return None
    spatial = tuple(range(2, len(encoding.index_map)))
    channels_last = PackedLayout((0, *spatial, 1))
    if encoding.operand_index == LHS:
        few = moves.groups == 1 and sizes["c"] <= FEW_CHANNELS
        return PackedLayout.identity(len(encoding.index_map)) if few else channels_last
    if encoding.operand_index != RHS:
        return channels_last
    columns = conv_columns(machine, encoding.element_types[2], sizes["n"] // moves.groups, sizes["k"], moves.groups)
    if columns == 0:
        return PackedLayout((1, *spatial, 0))
    return PackedLayout((0, *spatial, 1), (0,), (columns,))
