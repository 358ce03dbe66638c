"""Selection of the kernel generator of a matrix product.

Tensor cores multiply types of up to two bytes, and float32 if it may be rounded to tf32. SIMT kernels multiply all
other types, float32 by default, and by a few columns.
"""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....target.gpu_target import NARROW_COLUMNS, GpuTarget
from . import mma_matmul, skinny_gemm, wgmma_matmul
from .simt_matmul import simt_matmul_kernel


def cuda_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a matrix product, one launch; `MatmulProblem` documents its parameters."""
    columns = problem.rhs.size("n")
    if isinstance(columns, int) and columns <= NARROW_COLUMNS and not problem.rhs.layout.inner_dims:
        return simt_matmul_kernel(problem, gpu)
    if _is_skinny(problem) and not skinny_gemm.unsupported_reason(problem, gpu):
        return skinny_gemm.skinny_gemm_kernel(problem, gpu)
    if not wgmma_matmul.unsupported_reason(problem, gpu):
        return wgmma_matmul.wgmma_matmul_kernel(problem, gpu)
    if gpu.tensor == "mma" and not mma_matmul.unsupported_reason(problem, gpu):
        return mma_matmul.mma_matmul_kernel(problem, gpu)
    return simt_matmul_kernel(problem, gpu)


def sends_sum(problem: MatmulProblem, gpu: GpuTarget) -> bool:
    """Return whether the product's kernel can send its result to the GPUs that add it, and it saves time."""
    if _is_skinny(problem) and not skinny_gemm.unsupported_reason(problem, gpu):
        return skinny_gemm.sends_words(problem)
    return wgmma_matmul.sends_tiles(problem, gpu)


def multiplies_pairs(problem: MatmulProblem, gpu: GpuTarget) -> bool:
    """Return whether there is a kernel of the product and of a second one of the same rows (`MatmulProblem.second`)."""
    is_plain = problem.init is None and problem.sent is None and problem.rows is None and problem.second is None
    return is_plain and _is_skinny(problem) and not skinny_gemm.unsupported_reason(problem, gpu)


def _is_skinny(problem: MatmulProblem) -> bool:
    """Return whether few rows share a right operand, counting batch dimensions that it lacks."""
    lhs, shared = problem.lhs, problem.rhs.index_map
    rows = 1
    for name, size in zip(lhs.index_map, lhs.shape, strict=True):
        if name not in ("k", *shared):
            if not isinstance(size, int):
                return False
            rows *= size
    return rows <= skinny_gemm.MAX_ROWS
