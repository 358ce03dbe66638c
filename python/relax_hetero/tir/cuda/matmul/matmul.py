"""Which generator writes a matrix product of a GPU.

Tensor cores multiply types of two bytes and less, and float32 where it may be rounded; everything else, float32 by
default, is multiplied by plain threads.
"""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....target.gpu_target import GpuTarget
from . import mma_matmul, skinny_gemm, wgmma_matmul
from .simt_matmul import simt_matmul_kernel


def cuda_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """The kernel of a matrix product for a GPU, one launch; `MatmulProblem` says what its parameters are."""
    if _is_skinny(problem) and not skinny_gemm.unsupported_reason(problem, gpu):
        return skinny_gemm.skinny_gemm_kernel(problem, gpu)
    if not wgmma_matmul.unsupported_reason(problem, gpu):
        return wgmma_matmul.wgmma_matmul_kernel(problem, gpu)
    if gpu.tensor == "mma" and not mma_matmul.unsupported_reason(problem, gpu):
        return mma_matmul.mma_matmul_kernel(problem, gpu)
    return simt_matmul_kernel(problem, gpu)


def _is_skinny(problem: MatmulProblem) -> bool:
    """Return whether the rows that share a right operand are few: batch dimensions that it lacks count as rows."""
    lhs, shared = problem.lhs, problem.rhs.index_map
    rows = 1
    for name, size in zip(lhs.index_map, lhs.shape, strict=True):
        if name not in ("k", *shared):
            if not isinstance(size, int):
                return False
            rows *= size
    return rows <= skinny_gemm.MAX_ROWS
