"""Selection of the attention kernel: wgmma, mma.sync or SIMT."""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import AttentionProblem
from ....target.gpu_target import GpuTarget
from . import mma_attention, wgmma_attention
from .mma_attention import mma_attention_kernel
from .simt_attention import simt_attention_kernel
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
    if not mma_attention.unsupported_reason(problem, gpu):
        return mma_attention_kernel(problem, gpu)
    return simt_attention_kernel(problem, gpu)
