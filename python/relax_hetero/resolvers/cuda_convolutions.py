"""Layouts of convolutions for NVIDIA GPUs.

Feature maps lie channels-last, ``[b, y0, y1, n]``: threads read runs of channels, and the data of a 1x1 convolution are
the rows of a matrix. An image of a few channels is stored with `IMAGE_CHANNELS`, so that a pixel is one access.

Weights of tensor cores are tiles as those of products, one after another for the places of the window:
``[n/64, w0, w1, k/k0, 64, k0]``, k0 elements of 128 bytes, swizzled. Where these would be mostly padding, k0 are 16
bytes and not swizzled; of images so many are several places of the window, of halves ``[n/64, w0, w1/2, 1, 64, 2, 4]``.
Weights of plain threads are ``[w0, w1, k, n]``.
"""

from __future__ import annotations

from ..encoding.encoding import DYNAMIC, LHS, RHS, Encoding
from ..encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES, PackedLayout
from ..target.element_types import bytes_of
from ..target.gpu_target import GpuTarget
from ..tir.conv.conv_products import IMAGE_CHANNELS

COLUMNS = 64
"""Columns of a packed tile: the rows of one wgmma where operands are swapped, and a divisor of every tile's width."""

MAX_PADDING = 1.25
"""Times as many products as there are: more, and tiles of 16 bytes are used."""
_MAX_MMA_PADDING = 4


def conv_layout(encoding: Encoding, gpu: GpuTarget) -> PackedLayout | None:
    """The layout of an operand of a convolution; None for symbolic images, and for types without a kernel."""
    sizes = encoding.sizes
    if any(size == DYNAMIC for name, size in sizes.items() if name != "b"):
        return None
    spatial = tuple(range(2, len(encoding.index_map)))
    last, tile = (0, *spatial, 1), _tile(encoding, gpu)
    if encoding.operand_index == LHS and tile[-1:] == (IMAGE_CHANNELS,) and sizes["c"] < IMAGE_CHANNELS:
        return PackedLayout(last, (1,), (IMAGE_CHANNELS,))
    if encoding.operand_index != RHS:
        return PackedLayout(last)
    if not tile:
        return PackedLayout((*spatial, 1, 0))
    dims = (0, 1) if len(tile) == 2 else (0, spatial[-1], 1)
    return PackedLayout(last, dims, tile, swizzle=tile[-1] * bytes_of(encoding.element_type) == SWIZZLED_BYTES)


def _tile(encoding: Encoding, gpu: GpuTarget) -> tuple[int, ...]:
    """The tile of the weight: of channels, or of two places of the window and channels; none for plain threads."""
    data = encoding.element_types[LHS]
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    element, channels = bytes_of(data), sizes["k"]
    if not gpu.multiplies(*encoding.element_types):
        return ()
    if moves.groups > 1:
        fits = channels * element % 4 == 0 and sizes["n"] // moves.groups % COLUMNS == 0
        return (COLUMNS, SWIZZLED_BYTES // element) if fits else ()
    window = [size for name, size in encoding.iteration_sizes if name.startswith("w")]
    taps, chunk = 1, CHUNK_BYTES // element
    for size in window:
        taps *= size
    in_lines = COLUMNS, SWIZZLED_BYTES // element
    padded = -(-channels * element // SWIZZLED_BYTES) * SWIZZLED_BYTES / (channels * element)
    if gpu.tensor != "wgmma":
        # Tensor cores make up for that many zeros.
        return in_lines if channels * element % 4 == 0 and (taps == 1 or padded <= _MAX_MMA_PADDING) else ()
    if taps > 1 and channels <= IMAGE_CHANNELS:
        together = chunk // IMAGE_CHANNELS
        chunks = -(-window[-1] // together) * (taps // window[-1])
        tile = (COLUMNS, together, IMAGE_CHANNELS) if together > 1 else (COLUMNS, IMAGE_CHANNELS)
        return tile if chunks * CHUNK_BYTES >= SWIZZLED_BYTES else ()
    if taps > 1 and padded > MAX_PADDING and channels % chunk == 0 and taps * channels * element >= SWIZZLED_BYTES:
        return COLUMNS, chunk
    return in_lines if channels * element % 4 == 0 else ()
