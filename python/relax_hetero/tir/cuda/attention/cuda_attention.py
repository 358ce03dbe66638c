"""Selection of the attention kernel: wgmma, mma.sync or SIMT; over pages, also of decode and append kernels."""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import APPEND, AttentionProblem, CachedAttentionProblem
from ....target.gpu_target import GpuTarget
from . import attention_tensors, wgmma_attention
from .attention_plan import MAX_NARROW, MIN_WGMMA_CHUNK, paged_extents
from .decode_attention import decode_attention_kernel
from .mma_attention import mma_attention_kernel
from .page_append import page_append_kernel
from .shared_values_attention import shared_values_kernel
from .simt_attention import simt_attention_kernel
from .simt_cached_attention import simt_cached_attention_kernel
from .wgmma_attention import wgmma_attention_kernel


def cuda_attention_kernel(problem: AttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of an attention, one launch without scratch; `AttentionProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If no kernel supports an operand's type.
    """
    if not wgmma_attention.unsupported_reason(problem, gpu):
        return wgmma_attention_kernel(problem, gpu)
    if not attention_tensors.unsupported_reason(problem, gpu, with_tf32=True):
        return mma_attention_kernel(problem, gpu)
    return simt_attention_kernel(problem, gpu)


def cuda_cached_attention_kernel(problem: CachedAttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a paged attention, one launch without scratch; `CachedAttentionProblem` documents its parameters.

    Keys and values of a chunk must be in their pages already; a problem with the rows "append" writes them.

    Raises
    ------
    EncodingError
        If sizes are symbolic, or no kernel supports the element types, head size or GPU.
    """
    if problem.rows == APPEND:
        return page_append_kernel(problem, gpu)
    if not gpu.has_ptx:
        return simt_cached_attention_kernel(problem, gpu)
    if problem.shared_values:
        return shared_values_kernel(problem, gpu)
    if problem.is_decode:
        return decode_attention_kernel(problem, gpu)
    is_suitable = problem.size <= MAX_NARROW and paged_extents(problem)[0] >= MIN_WGMMA_CHUNK
    if is_suitable and not wgmma_attention.unsupported_reason(problem, gpu):
        return wgmma_attention_kernel(problem, gpu)
    return mma_attention_kernel(problem, gpu)
