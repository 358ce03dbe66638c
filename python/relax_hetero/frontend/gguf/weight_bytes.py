"""How many bytes of a device's memory the tensors of a GGUF file take, as its kernels read them.

A CPU keeps all weights in the file's bits, and experts too. A GPU keeps 5 and 6 bits in bytes, has scales and minimums
for blocks of its own, has matrices of plain numbers as 16-bit floats, and experts as numbers of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import tvm

from ...encoding.block_formats import FILE_FORMATS, BlockFormat
from ...encoding.block_panels import Panels
from ...encoding.block_weights import BlockLayout, Fragments
from ...encoding.resolver import answers_of
from .file import FileTensor
from .weights import is_plain

COPIED_EXPERTS = 3
"""Times that an expert's numbers go to or from memory where they are copied for the rows that chose them."""


def layouts_of(vdevices: Sequence[tvm.relax.VDevice]) -> list[BlockLayout | None]:
    """How each device keeps weights in blocks; None where it takes numbers."""
    return [answers_of(vdevice.target).block_layout(vdevice.target) for vdevice in vdevices]


def resident_bytes(tensor: FileTensor, layout: BlockLayout | None) -> float:
    """Bytes of a tensor on a device with a layout."""
    form = FILE_FORMATS.get(tensor.type.lower())
    shape = tensor.shape
    if isinstance(layout, Fragments) and len(shape) == 2 and (tensor.type == "F32" or is_plain(tensor.type)):
        return 2.0 * prod(shape)
    if form is None or len(shape) < 2 or layout is None or not layout.fits(form, shape[-1]):
        return 4.0 * prod(shape)
    matrices, columns = prod(shape[:-2]), shape[-2]
    if isinstance(layout, Panels):
        return float(sum(map(prod, layout.shapes(columns, form, shape[-1], matrices))))
    if matrices > 1:
        return 4.0 * prod(shape)
    return _bytes_of_fragments(layout, form, columns, shape[-1])


def _bytes_of_fragments(layout: Fragments, form: BlockFormat, columns: int, depth: int) -> float:
    words, *others = layout.shapes(columns, form, depth)
    # Scales of K types are products, which float16 cannot hold.
    size = 4 if form.scale == "int8" else 2
    return float(4 * prod(words) + size * sum(map(prod, others)))


def bytes_read(tensor: FileTensor, layout: BlockLayout | None, share: float) -> float:
    """Bytes that a token reads of a tensor of experts, `share` of which it chooses; of others, where it is 1."""
    copies = COPIED_EXPERTS if len(tensor.shape) > 2 and not isinstance(layout, Panels) else 1
    return copies * share * resident_bytes(tensor, layout)
