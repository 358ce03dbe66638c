"""Matrix products without tensor cores: any element types, layouts that are permutations, sizes and epilogues.

float32 products are exact multiply-adds of float32: no tensor core, whose tf32 has 10 bits, takes part.
"""

from __future__ import annotations

from tvm import tirx

from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import GpuTarget
from ...core.builder import Function
from ...core.ties import tied_to
from ...core.view import extent_of
from ...matmul.matmul import merge_batches
from ..core.epilogue import EpilogueWriter
from ..core.operand import GpuOperand
from .gemv import FEW_ROWS, Gemv
from .simt_parts import Batches, known
from .simt_plan import SimtPlan, simt_plan
from .simt_tiles import Side, TiledProduct


def simt_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget, plan: SimtPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a matrix product, one launch; `MatmulProblem` says what its parameters are.

    Parameters
    ----------
    plan : SimtPlan, optional
        Tiles to use instead of those that are estimated to be the quickest.

    Raises
    ------
    EncodingError
        If an operand is stored in tiles, or work on rows stands behind the product.
    """
    _check(problem)
    function = Function("matmul", registers="local")
    with function:
        lhs, rhs = (GpuOperand(function, name, o) for name, o in (("lhs", problem.lhs), ("rhs", problem.rhs)))
        writer = EpilogueWriter.of(function, problem)
        operands = [lhs, rhs, *writer.operands]
        names = merge_batches(list(operands), lhs, rhs, writer.result)
        with function.body():
            for view in operands:
                view.open_for_gpu()
            _emit(lhs, rhs, writer, names, gpu, plan)
    in_place = [*([problem.init] if problem.init else []), *(problem.epilogue.operands if problem.epilogue else ())]
    return tied_to(function.result, in_place, 2, problem.result)


def _check(problem: MatmulProblem) -> None:
    if problem.rows is not None:
        raise EncodingError("matmul: found work on rows behind a product, which no kernel of a GPU does")
    names = ("lhs", "rhs", *("operand",) * (len(problem.parameters) - 3), "result")
    for name, operand in zip(names, problem.parameters, strict=True):
        if operand.layout.inner_dims:
            raise EncodingError(f"matmul: found {name} stored as {operand.layout}, expected a permutation")


def _emit(
    lhs: GpuOperand,
    rhs: GpuOperand,
    writer: EpilogueWriter,
    names: list[str],
    gpu: GpuTarget,
    plan: SimtPlan | None,
) -> None:
    result = writer.result
    views = [lhs, rhs, *writer.operands]
    m, n, k = (extent_of(views, name) for name in "mnk")
    batches = Batches({name: extent_of([result], name) for name in names})
    # 16-bit sums are made in float32, as the numbers that they are sums of.
    acc = writer.acc_dtype
    dtype = "float32" if acc in HALF_TYPES or acc.startswith("float8") else acc
    sides = [(known(m), "m", "n", lhs, rhs, n), (known(n), "n", "m", rhs, lhs, m)]
    for rows, row, column, few, weight, columns in sides:
        if plan is None and rows is not None and 0 < rows <= FEW_ROWS:
            Gemv(few, weight, row, column, rows, columns, k, dtype, writer, batches).emit(gpu)
            return
    down, across = ("m", m, lhs), ("n", n, rhs)
    if result.is_contiguous("m") and not result.is_contiguous("n"):
        down, across = across, down
    if plan is None:
        plan = simt_plan((known(down[1]), known(across[1]), known(k)), known(batches.count), dtype, gpu)
    left, right = (Side(view, along, size, extent) for (along, extent, view), size in (
        (down, plan.rows), (across, plan.columns)))  # fmt: skip
    TiledProduct(left, right, k, dtype, writer, batches, plan).emit()
