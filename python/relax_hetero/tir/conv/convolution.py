"""Convolutions: which kernel computes a problem."""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.packed_layout import PackedLayout
from ...encoding.problem import ConvProblem
from ...encoding.winograd import WINDOW
from ...errors import EncodingError
from ...target.cpu_target import CpuTarget
from ...target.dot_instructions import DotInstruction, dot_instruction_for
from ..core.builder import Function
from ..core.ties import tied_to
from ..matmul.fp16_partial_sums import marked
from ..matmul.k_step import llvm_import
from ..matmul.matmul import matmul_kernel
from .conv_direct import emit_direct
from .conv_products import as_product
from .conv_spec import Convolution
from .conv_winograd import emit_winograd
from .depthwise_conv import emit_depthwise
from .dynamic_height import can_have_dynamic_height


def conv_kernel(problem: ConvProblem, cpu: CpuTarget) -> tirx.PrimFunc:
    """The kernel of a convolution.

    Parameters
    ----------
    problem : ConvProblem
        Data and result row-major or permuted (channels last is what kernels are made for), the data perhaps with its
        channels padded to `DotInstruction.k0`; the weight in tiles of output channels, `conv_columns` of them,
        ``[OC/n0, KH, KW, IC/groups/k0, n0, k0]``.

    Returns
    -------
    tirx.PrimFunc
        Its parameters are those that `ConvProblem` says; it is parallel over the CPU's cores.

    Raises
    ------
    EncodingError
        If no kernel computes these element types, stores, or symbolic extents (the batch may be symbolic, and where the
        weight's windows are transformed or `can_have_dynamic_height`, the image).
    """
    dot = _checked(problem, cpu)
    matmul = as_product(problem)
    if matmul is not None:
        return matmul_kernel(matmul, cpu)
    function = Function("conv2d")
    with function:
        conv = Convolution.of(function, problem, cpu, dot)
        with function.body():
            conv.open()
            text = llvm_import(dot, conv.lanes)
            if problem.weight.layout.winograd:
                emit_winograd(conv)
            elif _is_depthwise(problem):
                emit_depthwise(conv)
            elif text is None:
                emit_direct(conv)
            else:
                with T.attr(0, "pragma_import_llvm", text):
                    emit_direct(conv)
    tied = tied_to(function.result, problem.epilogue.operands if problem.epilogue else (), 2, problem.result)
    return tied if _is_depthwise(problem) else marked(tied, dot)


def _checked(problem: ConvProblem, cpu: CpuTarget) -> DotInstruction:
    """How the CPU multiplies what the problem, which kernels can compute, multiplies."""
    types = (problem.data.dtype, problem.weight.dtype, problem.acc_dtype)
    dot = dot_instruction_for(cpu, *types)
    if dot is None:
        raise EncodingError(
            "convolution: found element types {} * {} -> {}, expected ones that {} multiplies".format(
                *types, cpu.isa.name
            )
        )
    takes_images = bool(problem.weight.layout.winograd) or can_have_dynamic_height(dot)
    last, but = (2, "images") if takes_images else (None, "the batch")
    fixed = (*problem.data.shape[1:last], *problem.weight.shape, *problem.result.shape[1:last])
    if not all(isinstance(extent, int) for extent in fixed):
        raise EncodingError(f"convolution: found extents {fixed}, expected numbers for all but {but}")
    for d, window in enumerate(problem.windows):
        extent, found = problem.data.shape[2 + d], problem.result.shape[2 + d]
        places = window.places(extent) if isinstance(extent, int) and isinstance(found, int) else found
        if places != found:
            raise EncodingError(f"convolution: found {found} places along spatial dimension {d}, expected {places}")
    _check_layouts(problem, dot)
    return dot


def _check_layouts(problem: ConvProblem, dot: DotInstruction) -> None:
    rank = len(problem.windows) + 2
    perm, last = (0, *range(2, rank), 1), (1, *range(2, rank), 0)
    data, result, weight = problem.data.layout, problem.result.layout, problem.weight.layout
    padded = PackedLayout(perm, (1,), (dot.k0,))
    if data.inner_dims and (data != padded or problem.groups > 1 or dot.k0 == 1):
        raise EncodingError(f"convolution: found data stored as {data}, expected no tiles but those of {padded}")
    if result.inner_dims:
        raise EncodingError(f"convolution: found result stored as {result}, expected no tiles")
    if problem.weight.shape[1] == 1 and weight == PackedLayout(last):
        return
    # Transformed windows lie before what products add over: places along outer dimensions, input channels.
    order = (0, *perm[-3:-1], *perm[1:-3], 1) if weight.winograd else perm
    expected = PackedLayout(order, (0,), (weight.tile(0),), winograd=weight.winograd)
    if dot.k0 > 1 and not (weight.inner_dims and _is_depthwise(problem)):
        expected = PackedLayout(perm, (0, 1), (weight.tile(0), dot.k0), dot.compensation != 0)
    if weight.winograd:
        _check_winograd(problem, dot)
    if weight != expected:
        raise EncodingError(
            f"convolution: found the weight stored as {weight}, expected {expected} with any tile of dimension 0, "
            f"or outer={list(last)} where groups have one input channel"
        )


def _check_winograd(problem: ConvProblem, dot: DotInstruction) -> None:
    windows = [(window.size, window.stride, window.dilation) for window in problem.windows]
    if len(windows) not in (2, 3) or windows[-2:] != [(WINDOW, 1, 1)] * 2 or dot.types != ("float32",) * 3:
        raise EncodingError(
            f"convolution: found transformed windows {problem.weight.layout} of {dot.types[1]}, sizes, strides and "
            f"dilations {windows}; expected float32 and two (inner) dimensions of {WINDOW}, 1 and 1"
        )
    for side, operand in (("data", problem.data), ("result", problem.result)):
        if operand.layout != PackedLayout((0, *range(2, len(windows) + 2), 1)):
            raise EncodingError(f"convolution: found {side} stored as {operand.layout}, expected channels last")
    channels = int(problem.weight.shape[0]) // problem.groups
    if problem.groups > 1 and channels % problem.weight.layout.tile(0):
        raise EncodingError(
            f"convolution: found {channels} channels a group in panels of {problem.weight.layout.tile(0)}, expected "
            "whole panels"
        )


def _is_depthwise(problem: ConvProblem) -> bool:
    """Return whether a vector of output channels holds several groups."""
    channels = int(problem.weight.shape[0]) // problem.groups
    return not problem.weight.layout.inner_dims or (problem.groups > 1 and problem.weight.layout.tile(0) > channels)
