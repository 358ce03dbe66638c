"""Layouts and kernels for NVIDIA GPUs, by the table of `target.gpu_target`.

The left operand and the result of a product stay row-major: kernels copy tiles of the left one into shared memory. A
constant right operand of the tensor cores is packed into the tiles that they read from shared memory,
``[b.., n/64, k/k0, 64, k0]`` with k0 elements of 128 bytes, swizzled: a tile is contiguous memory, fetched by one copy
with a plain pointer, and sizes of the model need not be multiples of anything. Wider tiles are several of these.

Right operands that are activations, and operands of plain threads, are not packed. Layouts of convolutions are in the
first section.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ..encoding.block_panels import Panels
from ..encoding.block_weights import BlockLayout, Fragments
from ..encoding.encoding import DYNAMIC, LHS, RHS, Encoding
from ..encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES, PackedLayout, tiled
from ..encoding.problem import (
    AttentionProblem,
    BlockRowsProblem,
    BlockUnpackProblem,
    CachedAttentionProblem,
    ConvProblem,
    ElementwiseProblem,
    ExpertOrderProblem,
    MatmulProblem,
    PanelFragmentsProblem,
    Problem,
    QuantizedMatmulProblem,
    RowsProblem,
)
from ..encoding.resolver import EncodingResolver
from ..errors import EncodingError
from ..target.element_types import HALF_TYPES, TF32, bytes_of
from ..target.gpu_target import NARROW_COLUMNS, WARP, GpuTarget, gpu_target_of
from ..tir.conv.conv_products import IMAGE_CHANNELS
from ..tir.cuda.attention.attention_plan import decode_heads
from ..tir.cuda.core.dialect import dialect_of

if TYPE_CHECKING:
    import tvm
    from tvm import tirx


# Layouts of convolutions for NVIDIA GPUs.
#
# Feature maps are channels-last, ``[b, y0, y1, n]``: threads read runs of channels, and the data of a 1x1 convolution
# are the rows of a matrix. An image of a few channels is padded to `IMAGE_CHANNELS`, so that a pixel is one access.
#
# Weights of tensor cores are tiles like those of products, one after another for the taps of the window: ``[n/64, w0,
# w1, k/k0, 64, k0]``, k0 elements of 128 bytes, swizzled. Where these would be mostly padding, k0 is 16 bytes without
# swizzle; for images 16 bytes are several taps of the window, in half precision ``[n/64, w0, w1/2, 1, 64, 2, 4]``.
# Weights of plain threads are ``[w0, w1, k, n]``.

COLUMNS = 64
"""Columns of a packed tile: the rows of one wgmma with swapped operands, and a divisor of every tile's width."""

MAX_PADDING = 1.25
"""Maximum ratio of padded to actual channels; beyond it tiles of 16 bytes are used."""
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
    """The tile of the weight: channels, or two taps and channels; empty for plain threads."""
    data = encoding.element_types[LHS]
    sizes, conv = encoding.sizes, encoding.conv
    assert conv is not None
    element, channels = bytes_of(data), sizes["k"]
    if not gpu.multiplies(*encoding.element_types):
        return ()
    if conv.groups > 1:
        fits = channels * element % 4 == 0 and sizes["n"] // conv.groups % COLUMNS == 0
        return (COLUMNS, SWIZZLED_BYTES // element) if fits else ()
    window = [size for name, size in encoding.iteration_sizes if name.startswith("w")]
    taps, chunk = 1, CHUNK_BYTES // element
    for size in window:
        taps *= size
    if taps == 1 and sizes["n"] <= NARROW_COLUMNS:
        return ()
    swizzled = COLUMNS, SWIZZLED_BYTES // element
    padded = -(-channels * element // SWIZZLED_BYTES) * SWIZZLED_BYTES / (channels * element)
    if gpu.tensor != "wgmma":
        # Tensor cores are still faster with this much padding.
        return swizzled if channels * element % 4 == 0 and (taps == 1 or padded <= _MAX_MMA_PADDING) else ()
    if taps > 1 and channels <= IMAGE_CHANNELS:
        tap_count = chunk // IMAGE_CHANNELS
        chunks = -(-window[-1] // tap_count) * (taps // window[-1])
        tile = (COLUMNS, tap_count, IMAGE_CHANNELS) if tap_count > 1 else (COLUMNS, IMAGE_CHANNELS)
        return tile if chunks * CHUNK_BYTES >= SWIZZLED_BYTES or chunks % 2 == 0 else ()
    if taps > 1 and padded > MAX_PADDING and channels % chunk == 0 and taps * channels * element >= SWIZZLED_BYTES:
        return COLUMNS, chunk
    return swizzled if channels * element % 4 == 0 else ()


UNPACKED_ROWS = 128
"""Minimum number of rows for which quantized weights are dequantized once, before a product of 16-bit floats."""
MAX_HEAD = 256
"""Maximum width of heads for attention by tensor cores, whose accumulators are in registers."""
MAX_TF32_HEAD = 128
"""Maximum width of heads in tf32, whose tiles are in shared memory."""


MIN_TILE_BYTES = 16 << 10
"""Minimum shared memory for tiles of products, which OpenCL requires of every GPU."""


class CudaResolver(EncodingResolver):
    """Packed constant right operands of tensor cores, channels-last feature maps, other tensors row-major."""

    name = "cuda"
    problems: tuple[type, ...] = (
        AttentionProblem,
        RowsProblem,
        QuantizedMatmulProblem,
        BlockRowsProblem,
        CachedAttentionProblem,
    )

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major left operand and result; swizzled tiles for a right one that tensor cores read."""
        if encoding.conv is not None:
            return conv_layout(encoding, gpu_target_of(target))
        sizes, gpu = encoding.sizes, gpu_target_of(target)
        is_static = DYNAMIC not in (sizes["n"], sizes["k"]) and 0 not in sizes.values()
        is_wide = is_static and sizes["n"] > NARROW_COLUMNS
        if encoding.operand_index != RHS or not is_wide or not gpu.multiplies(*encoding.element_types):
            return PackedLayout.identity(len(encoding.index_map))
        tiles = {"n": COLUMNS, "k": SWIZZLED_BYTES // bytes_of(encoding.element_type)}
        return tiled(encoding.index_map, ("n", "k"), tiles, swizzle=True)

    def resolve_activation(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major: packing an operand in every call takes longer than reading it unpacked."""
        if encoding.conv is not None:
            return self.resolve(encoding, target)
        return PackedLayout.identity(len(encoding.index_map))

    def block_layout(self, target: tvm.target.Target) -> BlockLayout | None:
        """Fragments on GPUs with tensor cores; elsewhere plain ops dequantize the weights."""
        return Fragments() if gpu_target_of(target).tensor else None

    def page_order(self, target: tvm.target.Target) -> str:
        """Runs of eight numbers of a token, as tensor cores read keys and values."""
        return "chunks"

    def appends_in_own_kernel(self, problem: CachedAttentionProblem) -> bool:
        """Return whether several blocks read what a row writes, as blocks of a launch do not wait for each other."""
        return problem.rows != "decode" or decode_heads(problem) < problem.group

    def unpacked_layout(self, problem: QuantizedMatmulProblem, target: tvm.target.Target) -> PackedLayout | None:
        """Swizzled tiles, for products of `UNPACKED_ROWS` or more rows of 16-bit floats on Hopper's tensor cores."""
        gpu, dtype, extents = gpu_target_of(target), problem.lhs.dtype, problem.lhs.shape[:-1]
        rows = prod(extent if isinstance(extent, int) else 0 for extent in extents)
        tile = SWIZZLED_BYTES // 2
        is_supported = (
            dtype in HALF_TYPES and gpu.tensor == "wgmma" and problem.depth % tile == 0 and problem.block % 16 == 0
        )
        if rows < UNPACKED_ROWS or problem.experts or not is_supported:
            return None
        return tiled(("k", "n"), ("n", "k"), {"n": COLUMNS, "k": tile}, swizzle=True)

    def sends_sum(self, problem: MatmulProblem | QuantizedMatmulProblem, target: tvm.target.Target) -> bool:
        """Return whether sending saves time: of few rows, and where a kernel of wgmma overlaps what it sends."""
        from ..tir.cuda.matmul.cuda_matmul import sends_sum
        from ..tir.cuda.matmul.cuda_quantized_matmul import sends_words

        gpu = gpu_target_of(target)
        return sends_words(problem, gpu) if isinstance(problem, QuantizedMatmulProblem) else sends_sum(problem, gpu)

    def multiplies_pairs(self, problem: MatmulProblem, target: tvm.target.Target) -> bool:
        """Return whether the product has at most 64 rows, on Hopper's tensor cores."""
        from ..tir.cuda.matmul.cuda_matmul import multiplies_pairs

        return multiplies_pairs(problem, gpu_target_of(target))

    def expert_order(self, problem: QuantizedMatmulProblem, target: tvm.target.Target) -> ExpertOrderProblem | None:
        """Tiles of pairs, for products of many pairs of 16-bit floats on Hopper's tensor cores."""
        from ..tir.cuda.matmul.wgmma_experts import expert_order_of

        return expert_order_of(problem, gpu_target_of(target))

    def group_columns(self, target: tvm.target.Target, dtype: str) -> int:
        """Columns of a packed tile, for half types that tensor cores multiply."""
        return COLUMNS if dtype in HALF_TYPES and gpu_target_of(target).multiplies(dtype, dtype, "float32") else 0

    def attention_types(self, target: tvm.target.Target, width: int) -> frozenset[str]:
        """Types that tensor cores multiply, for heads that fit in registers."""
        types = {*HALF_TYPES, TF32} if width <= MAX_TF32_HEAD else set(HALF_TYPES) if width <= MAX_HEAD else set()
        return frozenset(types & gpu_target_of(target).mma_types)

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """The kernel of this library for the target's GPU."""
        generator = _generators().get(type(problem))
        if generator is None:
            raise EncodingError(f"target {target.kind.name} has no encoded kernels for {problem}")
        gpu = gpu_target_of(target)
        with dialect_of(gpu):
            return generator(problem, gpu)


class SimtResolver(CudaResolver):
    """Kernels for plain threads, without what only NVIDIA GPUs have.

    Products and convolutions of devices with little shared memory are plain loops.
    """

    name = "simt"
    problems = (AttentionProblem, RowsProblem, QuantizedMatmulProblem, BlockRowsProblem, CachedAttentionProblem)

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        """Row-major operands of products, channels-last feature maps."""
        return super().resolve(encoding, target) if gpu_target_of(target).shared_bytes >= MIN_TILE_BYTES else None

    def attention_types(self, target: tvm.target.Target, width: int) -> frozenset[str]:
        """float32, for heads of which a tile of queries and one of keys fit local memory."""
        from ..tir.cuda.attention.simt_attention import min_shared_bytes

        fits = min_shared_bytes(width) <= gpu_target_of(target).shared_bytes
        return frozenset({"float32"} if fits and width <= MAX_TF32_HEAD else ())

    def appends_in_own_kernel(self, problem: CachedAttentionProblem) -> bool:
        """Return True: several blocks read what a row writes."""
        return True

    def block_layout(self, target: tvm.target.Target) -> BlockLayout | None:
        """Panels, whose neighbouring columns neighbouring threads read."""
        return Panels(WARP)

    def unpacked_layout(self, problem: QuantizedMatmulProblem, target: tvm.target.Target) -> PackedLayout | None:
        """None: products of any number of rows read the bits."""
        return None

    def kernel(self, problem: Problem, target: tvm.target.Target) -> tirx.PrimFunc:
        """The kernel of this library, by plain threads."""
        if not isinstance(problem, (*self.problems, MatmulProblem, ConvProblem, ElementwiseProblem)):
            raise EncodingError(
                f"devices of kind {target.kind.name!r} lack this kernel; expected a placement on a CPU or an NVIDIA GPU"
            )
        return super().kernel(problem, target)


@cache
def _generators() -> dict[type, Callable[[Any, GpuTarget], tirx.PrimFunc]]:
    """Generators by problem; they are imported when the first kernel is written."""
    from ..tir.cuda.attention.cuda_attention import cuda_attention_kernel, cuda_cached_attention_kernel
    from ..tir.cuda.conv.cuda_convolution import cuda_conv_kernel
    from ..tir.cuda.cuda_elementwise import elementwise_kernel
    from ..tir.cuda.matmul.block_gather import block_rows_kernel
    from ..tir.cuda.matmul.block_unpack import block_unpack_kernel
    from ..tir.cuda.matmul.cuda_matmul import cuda_matmul_kernel
    from ..tir.cuda.matmul.cuda_quantized_matmul import quantized_matmul_kernel
    from ..tir.cuda.matmul.expert_order import expert_order_kernel
    from ..tir.cuda.matmul.panel_fragments import panel_fragments_kernel
    from ..tir.cuda.rows.cuda_rows import rows_kernel

    return {
        MatmulProblem: cuda_matmul_kernel,
        ConvProblem: cuda_conv_kernel,
        QuantizedMatmulProblem: quantized_matmul_kernel,
        BlockUnpackProblem: block_unpack_kernel,
        BlockRowsProblem: block_rows_kernel,
        ExpertOrderProblem: expert_order_kernel,
        PanelFragmentsProblem: panel_fragments_kernel,
        AttentionProblem: cuda_attention_kernel,
        CachedAttentionProblem: cuda_cached_attention_kernel,
        RowsProblem: rows_kernel,
        ElementwiseProblem: elementwise_kernel,
    }
