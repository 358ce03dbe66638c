"""Selection of the kernel generator of a convolution."""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import ConvProblem
from ....target.gpu_target import GpuTarget
from ...conv.conv_products import as_product
from ..matmul.cuda_matmul import cuda_matmul_kernel
from . import cuda_depthwise_conv, simt_conv, tensor_core_conv


def cuda_conv_kernel(problem: ConvProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a convolution, one launch; `ConvProblem` documents its parameters."""
    product = as_product(problem)
    if product is not None:
        return cuda_matmul_kernel(product, gpu)
    if not tensor_core_conv.unsupported_reason(problem, gpu):
        return tensor_core_conv.tensor_core_conv_kernel(problem, gpu)
    columns = int(problem.weight.shape[0]) // problem.groups
    is_narrow = problem.groups > 1 and columns < cuda_depthwise_conv.MAX_COLUMNS
    if (is_narrow or simt_conv.unsupported_reason(problem)) and not cuda_depthwise_conv.unsupported_reason(problem):
        return cuda_depthwise_conv.depthwise_conv_kernel(problem, gpu)
    return simt_conv.simt_conv_kernel(problem, gpu)
