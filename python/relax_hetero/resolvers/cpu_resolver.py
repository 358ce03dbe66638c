"""Layouts and kernels for CPUs: x86 from SSE2 to AVX-512, AArch64, and generic ones, by the tables of `target`.

The left operand and the result of a product stay row-major: the kernel broadcasts elements of the left one directly, as
fast as from packed storage, and stores rows of the result with a mask at their end. The right operand is packed into
panels of n0 columns, ``[b.., n/n0, k/k0, n0, k0]``, so that a k-step reads contiguous memory. Layouts of convolutions
are in the first section.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..encoding.block_weights import BlockLayout, Panels, panel_columns
from ..encoding.encoding import DYNAMIC, EXACT, FAST, LHS, RESULT, RHS, Encoding
from ..encoding.packed_layout import PackedLayout, tiled
from ..encoding.problem import (
    AttentionProblem,
    BlockRowsProblem,
    CachedAttentionProblem,
    ConvProblem,
    ElementwiseProblem,
    MatmulProblem,
    Problem,
    QuantizedMatmulProblem,
    RowPhase,
    RowsProblem,
)
from ..encoding.resolver import EncodingResolver
from ..encoding.winograd import WINDOW
from ..target.amx_instructions import amx_instruction_for
from ..target.cpu_target import CpuTarget, cpu_target_of
from ..target.dot_instructions import DotInstruction, dot_instruction_for
from ..target.element_types import HALF_TYPES, bytes_of, stored_type
from ..target.tiles import conv_columns, matmul_columns, tile_columns
from ..tir.conv.conv_winograd import Shape, estimated_speedup

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


# Layouts of convolutions on CPUs with vector instructions, and the selection of their algorithm.
#
# Feature maps are channels-last, ``[b, y0, y1, n]``: a vector is a run of channels, which may be of any number and are
# split into groups without padding; the data of a 1x1 convolution are the rows of a matrix; pooling, concatenation and
# elementwise ops only need permuted axes. An image of a few channels is not permuted.
#
# Weights are packed into panels of n0 output channels, ``[n/n0, w0, w1, k, n0]``; ``[n/n0, w0, w1, k/k0, n0, k0]``
# where the CPU multiplies k0 neighbouring input channels at once (low precision), and reads an image of few channels
# padded to k0. Where vectors have channels of several groups, or of a depthwise convolution, ``[1, w0, w1, n]``, a
# vector of weights is multiplied by a vector of channels, one (widened) input channel at a time.
#
# Windows of 3 x 3 elements and stride 1 may be stored transformed, ``[n/n0, m + 2, m + 2, k, n0]``, for the kernel
# that computes m x m results at a time with fewer multiplications (`encoding.winograd`), where that was measured to be
# faster; windows of volumes in their inner dimensions, ``[n/n0, m + 2, m + 2, w0, k, n0]``.

FEW_CHANNELS = 4  # maximum number of channels of an image that is not permuted: they would not fill a vector

WINOGRAD = ("avx512", "avx2")
"""Instruction sets for which Winograd's algorithm was measured to be faster: 1.4 to 2 times from 32 channels on."""
MIN_GAIN = 1.15
"""Minimum estimated speed-up of Winograd's algorithm, whose weights are larger: the estimates are not exact."""


def conv_layout(encoding: Encoding, cpu: CpuTarget) -> PackedLayout | None:
    """The layout of an operand of a convolution; None for types without a kernel."""
    sizes, conv = encoding.sizes, encoding.conv
    assert conv is not None
    dot = dot_instruction_for(cpu, *encoding.element_types)
    if dot is None:
        return None
    winograd, _ = _choose_winograd(encoding, cpu)
    spatial = tuple(range(2, len(encoding.index_map)))
    channels_last = PackedLayout((0, *spatial, 1))
    if encoding.operand_index == LHS:
        if conv.groups > 1 or sizes["c"] > FEW_CHANNELS or _is_symbolic(encoding):
            return channels_last
        if dot.k0 == 1:
            return PackedLayout.identity(len(encoding.index_map))
        return PackedLayout((0, *spatial, 1), (1,), (dot.k0,)) if sizes["c"] % dot.k0 else channels_last
    if encoding.operand_index != RHS:
        return channels_last
    channels = sizes["n"] // conv.groups
    columns = conv_columns(cpu, encoding.element_types[2], channels, sizes["k"], conv.groups)
    if columns == 0:
        return PackedLayout((1, *spatial, 0))
    if winograd:
        return PackedLayout((0, *spatial[-2:], *spatial[:-2], 1), (0,), (columns,), winograd=winograd)
    if dot.k0 == 1 or (conv.groups > 1 and columns > channels):
        return PackedLayout((0, *spatial, 1), (0,), (columns,))
    return PackedLayout((0, *spatial, 1), (0, 1), (columns, dot.k0), dot.compensation != 0)


def form_of(encoding: Encoding, cpu: CpuTarget, weight: PackedLayout) -> str:
    """Algorithm of a convolution whose weight has a layout, and the reason."""
    if weight.winograd:
        name = f"F({weight.winograd}x{weight.winograd}, {WINDOW}x{WINDOW})"
        return f"{name}: {_choose_winograd(encoding, cpu)[1]}"
    winograd, reason = _choose_winograd(encoding, cpu)
    return f"direct: {'the weights are not known when the model is compiled' if winograd else reason}"


def _is_symbolic(encoding: Encoding) -> bool:
    """Return whether the sizes of images are symbolic."""
    return any(size == DYNAMIC and name != "b" for name, size in encoding.iteration_sizes)


def _result_dims(encoding: Encoding) -> tuple[str, ...]:
    """The names of the result's spatial dimensions, the outermost first."""
    return tuple(name for name in encoding.index_maps[RESULT] if name.startswith("y"))


def _share_of_data(encoding: Encoding) -> float:
    """Share of reads along a volume's outer dimension that are not padding, which the direct algorithm skips."""
    sizes, conv = encoding.sizes, encoding.conv
    assert conv is not None
    if len(conv.strides) < 3:
        return 1.0
    starts = [y * conv.strides[0] - conv.padding[0] for y in range(sizes["y0"])]
    reads = [start + tap * conv.dilation[0] for start in starts for tap in range(sizes["w0"])]
    return sum(0 <= x < sizes["x0"] for x in reads) / max(1, len(reads))


def _choose_winograd(encoding: Encoding, cpu: CpuTarget) -> tuple[int, str]:
    """Tile size m of Winograd's algorithm (0: the direct one is used), and the reason."""
    sizes, conv = encoding.sizes, encoding.conv
    assert conv is not None
    windows = [sizes[name] for name in encoding.index_maps[RHS][2:]]
    if len(windows) < 2 or windows[-2:] != [WINDOW] * 2 or {*conv.strides[-2:], *conv.dilation[-2:]} != {1}:
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
    channels = sizes["n"] // conv.groups
    width = conv_columns(cpu, "float32", channels, sizes["k"], conv.groups)
    if width == 0 or (conv.groups > 1 and (channels % width or width < cpu.lanes("float32"))):
        return 0, f"groups of {channels} channels do not fill panels"
    images, *outer, rows, columns = (max(0, sizes[name]) for name in ("b", *_result_dims(encoding)))
    images, depth = images * prod(outer), sizes["k"] * prod(windows[:-2])
    gains = {}
    for m in (2, 4) if encoding.accuracy == FAST else (2,):
        shape = Shape(m, images, (rows, columns), depth, channels, width, conv.groups)
        gains[m] = estimated_speedup(shape, cpu) * _share_of_data(encoding)
    best = max(gains, key=lambda m: gains[m])
    if _is_symbolic(encoding):
        return best, "images of any size, whose times cannot be estimated"
    if gains[best] < MIN_GAIN:
        return 0, f"F({best}x{best}, 3x3) is estimated to take {1 / gains[best]:.2f} of the time, with larger weights"
    return best, f"estimated to take {1 / gains[best]:.2f} of the direct form's time"


IN_PLACE_BYTES = 256 * 1024
"""Maximum size of a row-major right operand that is not packed: it fits the L2, and packing it for one product takes
longer than it saves. Measured (AVX-512, float32, M=128): 3 to 8 % faster unpacked up to here, equal at 1 MiB, a third
slower at 4 MiB."""

MAX_SKINNY_ROWS = 8
"""Maximum number of rows of the left operand for which packing the right one takes longer than it saves. Measured
(AVX-512, float32, 4096x4096): 8 rows take a third of the time unpacked, one row a tenth."""

GENERIC_TILE = 8  # rows and columns of a tile of `GenericResolver` (as in IREE's VMVX)


class CpuKernels(EncodingResolver):
    """Kernels, layouts of block-quantized weights and page order of all CPUs; subclasses choose layouts."""

    def block_layout(self, target: tvm.target.Target) -> BlockLayout | None:
        """Panels, by the CPU's vectors."""
        return Panels(panel_columns(cpu_target_of(target)))

    def page_order(self, target: tvm.target.Target) -> str:
        """Tokens in lanes, as all kernels of CPUs read the keys of a page."""
        return "lanes"

    def general_problem(self, problem: CachedAttentionProblem, target: tvm.target.Target) -> CachedAttentionProblem:
        """The problem with symbolic rows, unless work is split otherwise for its number of rows."""
        from ..tir.attention.cached.spec import cached_plan

        general, cpu = problem.with_rows("rows"), cpu_target_of(target)
        return general if cached_plan(general, cpu) == cached_plan(problem, cpu) else problem

    def attention_types(self, target: tvm.target.Target, width: int) -> frozenset[str]:
        """Floats of at most 32 bits, for heads of any width."""
        return frozenset(("float32", *HALF_TYPES))

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """The kernel of this library for the target's CPU."""
        return _generators()[type(problem)](problem, cpu_target_of(target))


class CpuResolver(CpuKernels):
    """Row-major left operand and result, packed right operand."""

    name = "cpu"
    problems = (
        AttentionProblem,
        QuantizedMatmulProblem,
        BlockRowsProblem,
        CachedAttentionProblem,
        RowsProblem,
        RowPhase,
    )

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major left operand and result; panels for the right one, unless it is a small activation."""
        cpu = cpu_target_of(target)
        if encoding.conv is not None:
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
        """The layout of `resolve`, except that a right operand for few rows is not packed."""
        if encoding.conv is not None:
            # Windows are transformed at compile time only.
            return conv_layout(replace(encoding, accuracy=EXACT), cpu_target_of(target))
        dot = dot_instruction_for(cpu_target_of(target), *encoding.element_types)
        is_skinny = 0 <= encoding.sizes["m"] <= MAX_SKINNY_ROWS
        if (
            dot is not None
            and encoding.operand_index == RHS
            and is_skinny
            and _is_readable(encoding, dot, is_skinny=True)
        ):
            return PackedLayout.identity(len(encoding.index_map))
        if _is_packed_in_kernel(encoding, cpu_target_of(target)):
            return PackedLayout.identity(len(encoding.index_map))
        return self.resolve(encoding, target)

    def convolution_form(self, encoding: Encoding, target: tvm.target.Target, weight: PackedLayout) -> str:
        """Algorithm of a convolution and the reason, for `explain`."""
        return form_of(encoding, cpu_target_of(target), weight)


class GenericResolver(CpuKernels):
    """Tiles of 8 by 8, one k at a time, every operand packed: for ``c`` targets and CPUs outside of the tables.

    Packing all three makes every access of the kernel's tile contiguous, which any C compiler vectorizes.
    """

    name = "generic"
    problems = (AttentionProblem, QuantizedMatmulProblem, BlockRowsProblem, CachedAttentionProblem)

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """``[m/8, k, 8]``, ``[n/8, k, 8]`` and ``[m/8, n/8, 8, 8]``; convolutions stay stock ops."""
        if encoding.conv is not None or dot_instruction_for(cpu_target_of(target), *encoding.element_types) is None:
            return None
        index_map = encoding.index_map
        if encoding.operand_index == LHS:
            return tiled(index_map, ("m", "k"), {"m": GENERIC_TILE})
        if encoding.operand_index == RHS:
            return tiled(index_map, ("n", "k"), {"n": GENERIC_TILE})
        return tiled(index_map, ("m", "n"), {"m": GENERIC_TILE, "n": GENERIC_TILE})


def panel_width(cpu: CpuTarget, dot: DotInstruction, n: int) -> int:
    """Columns of a packed panel: those of the kernel's tile, or fewer if N is at most that."""
    lanes, columns = cpu.lanes(dot.types[2]), tile_columns(cpu, dot.types[2])
    return lanes if 0 <= n <= lanes else columns if 0 <= n <= columns else matmul_columns(cpu, dot)


def _read_in_place(encoding: Encoding, dot: DotInstruction) -> bool:
    """True if the right operand is a small activation, which has a batch dimension unlike weights."""
    if not _is_readable(encoding, dot) or not any(name.startswith("b") for name in encoding.of(RHS).index_map):
        return False
    k, n = encoding.sizes["k"], encoding.sizes["n"]
    return DYNAMIC in (k, n) or k * n * bytes_of(encoding.element_types[RHS]) <= IN_PLACE_BYTES


def _is_readable(encoding: Encoding, dot: DotInstruction, is_skinny: bool = False) -> bool:
    """Return whether the kernel should read the right operand unpacked: rows of n, one k for each step.

    Pairs of float16 are interleaved from two rows in every step, which is worth it for few rows of the left operand.
    """
    is_single = dot.k0 == 1 or (is_skinny and dot.short > 0)
    return is_single and encoding.of(RHS).index_map[-2:] == ("k", "n")


def _is_packed_in_kernel(encoding: Encoding, cpu: CpuTarget) -> bool:
    """Return whether AMX multiplies rows of n that the kernel itself packs, panel by panel.

    If the process may not use AMX, vectors read them as well, a group of k at a time; but not with compensation, which
    is part of packed storage.
    """
    if encoding.conv is not None or encoding.operand_index != RHS or encoding.index_map[-2:] != ("k", "n"):
        return False
    amx = amx_instruction_for(cpu, *encoding.element_types)
    dot = dot_instruction_for(cpu, *encoding.element_types)
    sizes = encoding.sizes
    if amx is None or dot is None or dot.compensation or DYNAMIC in (sizes["k"], sizes["n"]):
        return False
    return sizes["m"] == DYNAMIC or sizes["m"] >= amx.min_rows


@cache
def _generators() -> dict[type, Callable[[Any, CpuTarget], tirx.PrimFunc]]:
    """Generators by problem; they are imported when the first kernel is written."""
    from ..tir.attention.attention import attention_kernel
    from ..tir.attention.cached.cached_attention import cached_attention_kernel
    from ..tir.conv.convolution import conv_kernel
    from ..tir.elementwise.elementwise import elementwise_kernel
    from ..tir.matmul.block_rows import block_rows_kernel
    from ..tir.matmul.matmul import matmul_kernel
    from ..tir.matmul.quantized_matmul import quantized_matmul_kernel
    from ..tir.rows.rows import rows_kernel

    return {
        MatmulProblem: matmul_kernel,
        ConvProblem: conv_kernel,
        QuantizedMatmulProblem: quantized_matmul_kernel,
        BlockRowsProblem: block_rows_kernel,
        AttentionProblem: attention_kernel,
        CachedAttentionProblem: cached_attention_kernel,
        RowsProblem: rows_kernel,
        ElementwiseProblem: elementwise_kernel,
    }
