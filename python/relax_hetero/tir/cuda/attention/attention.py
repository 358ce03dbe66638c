"""The kernel of an attention on a GPU: by wgmma, by mma.sync or by plain threads."""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import AttentionProblem
from ....target.gpu_target import GpuTarget
from . import mma_attention, wgmma_attention
from .mma_attention import mma_attention_kernel
from .simt_attention import simt_attention_kernel
from .wgmma_attention import wgmma_attention_kernel


def cuda_attention_kernel(problem: AttentionProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """The kernel of an attention for a GPU, one launch; `AttentionProblem` says its parameters, it has no scratch.

    Raises
    ------
    EncodingError
        If an operand is of a type that GPUs do not multiply.
    """
    if not wgmma_attention.unsupported_reason(problem, gpu):
        return wgmma_attention_kernel(problem, gpu)
    if not mma_attention.unsupported_reason(problem, gpu):
        return mma_attention_kernel(problem, gpu)
    return simt_attention_kernel(problem, gpu)
