"""Products with weights of 4 or 8 bits on tensor cores: weights go to registers, and become fragments there.

A lane reads 16 bytes, its part of 16 columns and 64 k (32 of bytes), laid out for it
(`encoding.block_weights.pack_fragments`): a fragment of ``mma.sync`` for each 16 k. The columns of the product are the
instruction's rows and the rows of the left operand its columns, so that one to eight rows cost the same. Scales are
applied to the sums of a block of weights.

The warps of a kernel's block share its columns and cut k. Each asks for several of its weights at once, before it waits
for the launch that writes the left operand, and holds them in registers. Blocks are persistent: while one adds up the
sums of its warps, through shared memory, the weights of its next columns are on their way.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.expression import Expression
from ....encoding.problem import QuantizedMatmulProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Function, ceil_div, int64
from ..core import ptx
from ..core.epilogue import EpilogueWriter
from ..core.launch import SharedMemory, enable_pdl, launch
from ..core.operand import GpuOperand
from .block_body import BlockBody
from .block_plan import PARTS, STEP, BlockPlan, block_plans
from .block_stages import StagedBody, StagedPlan, staged_plan

_TOGETHER = 2  # blocks of a kernel with two bodies that share a multiprocessor's registers


def quantized_matmul_kernel(
    problem: QuantizedMatmulProblem, gpu: GpuTarget, plan: BlockPlan | None = None
) -> tirx.PrimFunc:
    """The kernel of a product with weights of 4 or 8 bits, one launch; `QuantizedMatmulProblem` says its parameters.

    Raises EncodingError for a GPU without tensor cores of 16-bit floats, and for blocks that are no multiple of 16.
    """
    dtype = problem.lhs.dtype
    if gpu.tensor == "" or dtype not in PARTS:
        raise EncodingError(f"block_matmul: found a left operand of {dtype} on {gpu.arch}, which no kernel multiplies")
    if problem.block % STEP:
        raise EncodingError(f"block_matmul: found blocks of {problem.block}, expected a multiple of {STEP}")
    function = Function("block_product", registers="local")
    with function:
        lhs = GpuOperand(function, "lhs", problem.lhs)
        packed = [
            GpuOperand(function, name, operand)
            for name, operand in zip(("weight", "scales", "zeros"), problem.weights, strict=False)
        ]
        epilogue = problem.epilogue
        views = tuple(
            GpuOperand(function, f"x{i + 1}", operand)
            for i, operand in enumerate(epilogue.operands if epilogue else ())
        )
        result = GpuOperand(function, "result", problem.result)
        expression = epilogue.expression if epilogue else Expression.operand(0)
        writer = EpilogueWriter(expression, None, views, result, "float32")
        for name in reversed([name for name in result.index_map if name.startswith("b")]):
            for view in (lhs, *views, result):
                view.merge(name, "m")
        with function.body():
            for view in (*views, result):
                view.open_for_gpu()
            lhs.open(raw=True)
            for view in packed:
                view.open()
            staged = None if plan else staged_plan(problem, gpu)
            plans = [plan] if plan else [staged] if staged else block_plans(problem, gpu)
            kinds = [StagedBody if isinstance(one, StagedPlan) else BlockBody for one in plans]
            _launch([kind(problem, gpu, one, lhs, packed, writer) for kind, one in zip(kinds, plans, strict=True)])
    if not gpu.overlaps_launches:
        return function.result
    return enable_pdl(function.result, range(1, 1 + len(problem.weights)))


def _launch(bodies: list[BlockBody]) -> None:
    """Write the launch of a body; or of two, of which the first is for as few rows as it has."""
    last = bodies[-1]
    m, threads = last.work.m, last.work.plan.warps * WARP
    if 0 in (m, last.work.problem.columns):
        with launch(1, WARP):
            # The launch behind this one waits for this one alone.
            if last.gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
            T.evaluate(0)
        return
    is_one = len(bodies) == 1
    row_tiles = ceil_div(m, last.work.rows)
    last.prepare(row_tiles, 0 if is_one else _TOGETHER)
    blocks = int64(last.work.stride * row_tiles)
    if not is_one:
        bodies[0].prepare(1, _TOGETHER)
        blocks = tirx.Select(m <= bodies[0].work.rows, int64(bodies[0].work.stride), blocks)
    shared = SharedMemory()
    shared.take(max(body.work.shared_bytes for body in bodies))
    with launch(blocks, threads, together=last.work.together) as place:
        shared.open()
        if is_one:
            last.emit(place, shared)
            return
        with T.If(m <= bodies[0].work.rows):
            with T.Then():
                bodies[0].emit(place, shared)
            with T.Else():
                last.emit(place, shared)
