"""Layouts of convolutions on CPUs with vector instructions, and which form of convolution they are for.

Feature maps lie channels-last, ``[b, y0, y1, n]``: a vector is a run of channels, which exist in any number and divide
among groups without padding; the data of a 1x1 convolution are the rows of a matrix; pooling, concatenation and
elementwise work need nothing but permuted axes. An image of a few channels is read as it lies.

Weights are packed into panels of n0 output channels, ``[n/n0, w0, w1, k, n0]``; ``[n/n0, w0, w1, k/k0, n0, k0]`` where
the CPU multiplies k0 neighbouring input channels at once (low precision), and so reads an image of few channels padded
to k0. Where vectors hold channels of several groups, or of a depthwise convolution, ``[1, w0, w1, n]``, one channel at
a time is widened and multiplied: one vector of weights meets one vector of channels.

Windows of 3 x 3 elements and stride 1 may be stored transformed, ``[n/n0, m + 2, m + 2, k, n0]``, for the kernel that
makes m x m places at a time with fewer multiplications (`encoding.winograd`), where that was measured to be faster;
those of volumes in their inner dimensions, ``[n/n0, m + 2, m + 2, w0, k, n0]``.
"""

from __future__ import annotations

from math import prod

from ..encoding.encoding import DYNAMIC, EXACT, FAST, LHS, RESULT, RHS, Encoding
from ..encoding.packed_layout import PackedLayout
from ..encoding.winograd import WINDOW
from ..target.cpu_target import CpuTarget
from ..target.dot_instructions import dot_instruction_for
from ..target.element_types import stored_type
from ..target.tiles import conv_columns
from ..tir.conv.dynamic_height import can_have_dynamic_height
from ..tir.conv.winograd_plan import Shape, gain

FEW_CHANNELS = 4
"""An image of no more channels is read as it lies: they would not fill a vector, and it need not be permuted first."""

WINOGRAD = ("avx512", "avx2")
"""Instruction sets for which Winograd's form was measured to be faster: 1.4 to 2 times from 32 channels on."""
MIN_GAIN = 1.15
"""Minimum estimated speed-up: its weights are larger, and the estimates are not exact."""


def conv_layout(encoding: Encoding, cpu: CpuTarget) -> PackedLayout | None:
    """The layout of an operand of a convolution.

    None for types without a kernel, and for symbolic images of types that are not multiplied one channel at a time.
    """
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    dot = dot_instruction_for(cpu, *encoding.element_types)
    places, _ = _choose(encoding, cpu)
    if dot is None or (_is_symbolic(encoding) and not places and not can_have_dynamic_height(dot)):
        return None
    spatial = tuple(range(2, len(encoding.index_map)))
    channels_last = PackedLayout((0, *spatial, 1))
    if encoding.operand_index == LHS:
        if moves.groups > 1 or sizes["c"] > FEW_CHANNELS or _is_symbolic(encoding):
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
    if places:
        return PackedLayout((0, *spatial[-2:], *spatial[:-2], 1), (0,), (columns,), winograd=places)
    if dot.k0 == 1 or (moves.groups > 1 and columns > channels):
        return PackedLayout((0, *spatial, 1), (0,), (columns,))
    return PackedLayout((0, *spatial, 1), (0, 1), (columns, dot.k0), dot.compensation != 0)


def form_of(encoding: Encoding, cpu: CpuTarget, weight: PackedLayout) -> str:
    """Which form of a convolution a layout of the weight is for, and why."""
    if weight.winograd:
        name = f"F({weight.winograd}x{weight.winograd}, {WINDOW}x{WINDOW})"
        return f"{name}: {_choose(encoding, cpu)[1]}"
    places, why = _choose(encoding, cpu)
    return f"direct: {'the weights are not known when the model is compiled' if places else why}"


def _is_symbolic(encoding: Encoding) -> bool:
    """Return whether a call says how large images are."""
    return any(size == DYNAMIC and name != "b" for name, size in encoding.iteration_sizes)


def _places(encoding: Encoding) -> tuple[str, ...]:
    """The names of the result's spatial dimensions, the outermost first."""
    return tuple(name for name in encoding.index_maps[RESULT] if name.startswith("y"))


def _share_of_data(encoding: Encoding) -> float:
    """How much of what a volume's windows read along the outer dimension is no padding, which the direct form skips."""
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    if len(moves.strides) < 3:
        return 1.0
    starts = [place * moves.strides[0] - moves.padding[0] for place in range(sizes["y0"])]
    read = [start + tap * moves.dilation[0] for start in starts for tap in range(sizes["w0"])]
    return sum(0 <= at < sizes["x0"] for at in read) / max(1, len(read))


def _choose(encoding: Encoding, cpu: CpuTarget) -> tuple[int, str]:
    """How many places at a time, along each dimension, Winograd's form makes (0: it is not taken), and why."""
    sizes, moves = encoding.sizes, encoding.moves
    assert moves is not None
    windows = [sizes[name] for name in encoding.index_maps[RHS][2:]]
    if len(windows) < 2 or windows[-2:] != [WINDOW] * 2 or {*moves.strides[-2:], *moves.dilation[-2:]} != {1}:
        return 0, "windows are not of 3x3 elements, with stride 1 and no dilation"
    if len(windows) > 2 and _is_symbolic(encoding):
        return 0, "the size of volumes is not known when the model is compiled"
    if {stored_type(dtype) for dtype in encoding.element_types} != {"float32"}:
        return 0, "elements are not float32"
    if encoding.accuracy == EXACT:
        return 0, "accuracy is 'exact'"
    if cpu.isa.name not in WINOGRAD:
        return 0, f"not measured to be faster with {cpu.isa.name}"
    if sizes["c"] <= FEW_CHANNELS:
        return 0, f"{sizes['c']} input channels do not fill a vector"
    channels = sizes["n"] // moves.groups
    width = conv_columns(cpu, "float32", channels, sizes["k"], moves.groups)
    if width == 0 or (moves.groups > 1 and (channels % width or width < cpu.lanes("float32"))):
        return 0, f"groups of {channels} channels do not fill panels"
    images, *outer, rows, columns = (max(0, sizes[name]) for name in ("b", *_places(encoding)))
    images, depth = images * prod(outer), sizes["k"] * prod(windows[:-2])
    found = {}
    for m in (2, 4) if encoding.accuracy == FAST else (2,):
        shape = Shape(m, images, (rows, columns), depth, channels, width, moves.groups)
        found[m] = gain(shape, cpu) * _share_of_data(encoding)
    best = max(found, key=lambda m: found[m])
    if _is_symbolic(encoding):
        return best, "images of any size, whose times cannot be estimated"
    if found[best] < MIN_GAIN:
        return 0, f"F({best}x{best}, 3x3) is estimated to take {1 / found[best]:.2f} of the time, with larger weights"
    return best, f"estimated to take {1 / found[best]:.2f} of the direct form's time"
