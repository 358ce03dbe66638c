"""Convolutions on GPUs: selection of the kernel generator, and the one without tensor cores.

The latter takes any element types, windows and groups, and computes float32 without rounding to tf32.
"""

from __future__ import annotations

from tvm import tirx

from ....encoding.packed_layout import PackedLayout
from ....encoding.problem import ConvProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import GpuTarget
from ...conv.conv_products import as_product, implicit_product
from ...core.builder import Expr, Function
from ...core.ties import tied_to
from ...core.view import extent_of
from ...matmul.matmul import merge_batches
from ..core.operand import GpuOperand
from ..matmul.cuda_matmul import cuda_matmul_kernel
from ..matmul.simt_plan import SimtPlan, simt_plan
from ..matmul.simt_tiles import SimtOperand, TiledProduct, known
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from . import cuda_depthwise_conv, filter_taps, tensor_core_conv
from .filter_taps import FilterTaps


def unsupported_reason(problem: ConvProblem) -> str:
    """Reason why `simt_conv_kernel` does not support a problem; empty if it does."""
    expected = PackedLayout((*range(2, len(problem.windows) + 2), 1, 0))
    if problem.weight.layout != expected:
        return f"the weight is stored as {problem.weight.layout}, expected {expected}"
    if problem.data.layout.inner_dims:
        return f"the map is stored as {problem.data.layout}, expected no tiles"
    return filter_taps.unsupported_reason(problem)


def simt_conv_kernel(problem: ConvProblem, gpu: GpuTarget, plan: SimtPlan | None = None) -> tirx.PrimFunc:
    """Kernel of a convolution, one launch; `ConvProblem` documents its parameters.

    `plan`: tiles, by default those with the lowest estimated time. Raises EncodingError if the kernel does not support
    the problem (`unsupported_reason`).
    """
    reason = unsupported_reason(problem)
    if reason:
        raise EncodingError(f"convolution on {gpu.arch}: {reason}")
    product = implicit_product(problem)
    acc = problem.acc_dtype
    dtype = "float32" if acc in HALF_TYPES else acc
    function = Function("conv", registers="local")
    with function:
        data = GpuOperand(function, "data", problem.data)
        weight = GpuOperand(function, "weight", problem.weight)
        writer = EpilogueWriter.of(function, product.epilogue, product.result, acc)
        result = writer.result
        columns, depth = product.rhs.shape
        weight.restate((depth, problem.groups, columns), ("k", "g", "n"), PackedLayout.identity(3))
        names = ["b", *(f"y{d}" for d in range(len(problem.windows)))]
        extents: dict[str, Expr] = dict(zip(names, result.extents, strict=False))
        for view in writer.operands:
            view.split("n", "g", problem.groups)
        batch = merge_batches([weight, *writer.operands], weight, weight, result)
        with function.body():
            for view in (data, weight, *writer.operands):
                view.open_for_gpu()
            m = extent_of([result], "m")
            counts = {name: extent_of([result], name) for name in (*batch, "g")}
            batches = Batches(counts)
            if plan is None:
                plan = simt_plan((known(m), int(columns), int(depth)), known(batches.count), dtype, gpu)
            left = SimtOperand(data, "m", plan.rows, m, FilterTaps(data, problem, extents, len(batch)))
            right = SimtOperand(weight, "n", plan.columns, int(columns))
            TiledProduct(left, right, int(depth), dtype, writer, batches, plan).emit()
    return tied_to(function.result, problem.parameters[2:-1], 2, problem.result)


def cuda_conv_kernel(problem: ConvProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel of a convolution, one launch; `ConvProblem` documents its parameters."""
    product = as_product(problem)
    if product is not None:
        return cuda_matmul_kernel(product, gpu)
    if not tensor_core_conv.unsupported_reason(problem, gpu):
        return tensor_core_conv.tensor_core_conv_kernel(problem, gpu)
    columns = int(problem.weight.shape[0]) // problem.groups
    is_narrow = problem.groups > 1 and columns < cuda_depthwise_conv.MAX_COLUMNS
    if (is_narrow or unsupported_reason(problem)) and not cuda_depthwise_conv.unsupported_reason(problem):
        return cuda_depthwise_conv.depthwise_conv_kernel(problem, gpu)
    return simt_conv_kernel(problem, gpu)
