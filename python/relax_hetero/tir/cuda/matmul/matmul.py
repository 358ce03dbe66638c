"""Which generator writes a matrix product of a GPU.

Tensor cores multiply types of two bytes and less, and float32 where it may be rounded; everything else, float32 by
default, is multiplied by plain threads.
"""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....target.gpu_target import GpuTarget
from .simt_matmul import simt_matmul_kernel
from .wgmma_matmul import misfit, wgmma_matmul_kernel


def cuda_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """The kernel of a matrix product for a GPU, one launch; `MatmulProblem` says what its parameters are."""
    if not misfit(problem, gpu, problem.tf32):
        return wgmma_matmul_kernel(problem, gpu, problem.tf32)
    return simt_matmul_kernel(problem, gpu)
