"""Quantized matrix products (weights of 4 to 8 bits, and 16 for experts) on tensor cores, dequantized in registers.

A lane loads 16 bytes, its part of 16 columns and 64 k (32 with 8 bits), and perhaps high bits, in fragment order
(`encoding.block_weights.pack_fragments`): a fragment of ``mma.sync`` per 16 k. Operands are swapped: columns are the
instruction's m dimension and rows of the left operand its n dimension, so that one to eight rows cost the same. Scales
are applied to the accumulators of a block of weights.

The warps of a thread block share its columns and split k. Each keeps several chunks of weights in flight in registers,
the first ones before the launch that writes the left operand has ended. Blocks are persistent: while one reduces the
accumulators of its warps in shared memory, the weights of its next columns are in flight.

Rows of a mixture of experts have blocks of their own (`expert_body`). The weights of one or two rows come through a
ring in shared memory (`ring_body`), those of 17 to 32 rows through a pipeline of each warp (`staged_body`).
"""

from __future__ import annotations

from math import prod

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import QuantizedMatmulProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Function, int64
from ..all_reduce import sends_short
from ..core import ptx
from ..core.launch import LATE_WAIT, SharedMemory, enable_pdl, launch
from ..core.operand import GpuOperand
from ..tile.epilogue import EpilogueWriter
from .block_body import BlockBody
from .block_plan import GROUP_COLUMNS, PARTS, STEP, BlockPlan, block_plans
from .expert_body import ExpertBody, expert_body
from .ring_body import RingBody, RingPlan, ring_plan
from .simt_quantized_matmul import simt_quantized_matmul_kernel
from .staged_body import StagedBody, StagedPlan, staged_plan
from .wgmma_experts import ExpertProduct, ExpertTiling, expert_tiling

_BLOCKS_PER_SM = 2  # resident blocks of a kernel with two bodies
_KINDS: dict[type, type[BlockBody]] = {BlockPlan: BlockBody, RingPlan: RingBody, StagedPlan: StagedBody}


def quantized_matmul_kernel(
    problem: QuantizedMatmulProblem, gpu: GpuTarget, plan: BlockPlan | ExpertTiling | None = None
) -> tirx.PrimFunc:
    """Kernel of a quantized matrix product, one launch; `QuantizedMatmulProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If the GPU lacks tensor cores for 16-bit floats, blocks are not a multiple of 16, 16-bit floats as weights do
        not fit the left operand, or a result is sent that cannot be (`sends_words`).
    """
    if problem.sent is not None and not sends_words(problem, gpu):
        expected = f"a static one of float32 for a short sum, at most {GROUP_COLUMNS} rows of a multiple of 4 columns"
        expected += ", without experts, on a GPU with programmatic dependent launch"
        raise EncodingError(f"block_matmul on {gpu.arch}: result {problem.result} is sent, expected {expected}")
    if not gpu.has_ptx:
        return simt_quantized_matmul_kernel(problem)
    dtype = problem.lhs_type
    if gpu.tensor == "" or dtype not in PARTS:
        raise EncodingError(f"block_matmul: found a left operand of {dtype} on {gpu.arch}, which no kernel multiplies")
    if problem.bits < 16 and problem.block % STEP:
        raise EncodingError(f"block_matmul: found blocks of {problem.block}, expected a multiple of {STEP}")
    function = Function("block_product", registers="local")
    with function:
        lhs = GpuOperand(function, "lhs", problem.lhs)
        packed = [
            GpuOperand(function, f"{prefix}{name}", operand)
            for prefix, operands in (("", problem.weights), ("second_", problem.second))
            for name, operand in zip(("weight", "scales", "zeros"), operands, strict=False)
        ]
        late: list[int] = []
        order = None if problem.order is None else GpuOperand(function, "order", problem.order.result)
        index = None if order or problem.index is None else GpuOperand(function, "index", problem.index)
        shares = None if problem.shares is None else GpuOperand(function, "shares", problem.shares)
        biases = [GpuOperand(function, f"bias{i}", operand) for i, operand in enumerate(problem.biases)]
        addresses = None if problem.sent is None else GpuOperand(function, "addresses", problem.sent.addresses)
        writer = EpilogueWriter.of(function, problem.epilogue, problem.result, "float32")
        for name in reversed([name for name in lhs.index_map if name.startswith("b")]):
            for view in (lhs, *(view for view in writer.operands if view.runs_along(name))):
                view.merge(name, "m")
        with function.body():
            lhs.open(raw=True)
            for view in packed:
                view.open()
            if order is not None:
                order.open()
                tiling = plan if isinstance(plan, ExpertTiling) else expert_tiling(problem)
                ExpertProduct(problem, gpu, tiling, lhs, packed, order, writer).emit()
                late = [*range(2 + len(packed))]
            else:
                assert not isinstance(plan, ExpertTiling), "pairs are not sorted"
                routes = [view for view in (index, shares) if view is not None]
                if addresses is not None:
                    addresses.open()
                body = _emit(problem, gpu, plan, lhs, packed, writer, routes, biases, addresses)
                if isinstance(body, ExpertBody):
                    late = [*range(0 if body.waits_at_end else 1, 1 + len(packed) + len(routes) + len(biases))]
    if not gpu.overlaps_launches:
        return function.result
    # Which weights are read follows from the order, which an earlier launch writes.
    kernel = enable_pdl(function.result, [] if order else range(1, 1 + len(packed)))
    return kernel.with_attr(LATE_WAIT, late) if late else kernel


def sends_words(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> bool:
    """Return whether the kernel can send its result to other GPUs, vectors of a short sum, and it saves time.

    On two H200s, a layer of 8 B with 4-bit weights takes 45.5 us for one row instead of 48.2: a sum 2.3 instead of 3.2,
    a product by 7,168 x 4,096 8.5 instead of 8.0. 32 rows would take as long as without it.
    """
    extents, is_plain = problem.result.shape, problem.result.layout.is_identity and problem.result.dtype == "float32"
    sizes = [extent for extent in extents if isinstance(extent, int)]
    if not (gpu.overlaps_launches and is_plain and len(sizes) == len(extents)) or problem.experts:
        return False
    is_few = prod(sizes[:-1]) <= GROUP_COLUMNS and sends_short(sizes, problem.sent)
    return is_few and sizes[-1] % 4 == 0


def _emit(
    problem: QuantizedMatmulProblem,
    gpu: GpuTarget,
    plan: BlockPlan | None,
    lhs: GpuOperand,
    packed: list[GpuOperand],
    writer: EpilogueWriter,
    routes: list[GpuOperand],
    biases: list[GpuOperand],
    addresses: GpuOperand | None,
) -> BlockBody:
    """Write the launch; returns the body of its blocks, of more rows if there are two."""
    for view in (*writer.operands, *routes, *biases):
        view.open_for_gpu()
    if routes:
        body = expert_body(problem, gpu, plan, lhs, packed, writer, routes, biases)
        _launch([body])
        return body
    one = plan or ring_plan(problem, gpu) or staged_plan(problem, gpu)
    plans = [one] if one else block_plans(problem, gpu)
    bodies = [_KINDS[type(each)](problem, gpu, each, lhs, packed, writer) for each in plans]
    for each in bodies:
        each.addresses = addresses
    _launch(bodies)
    return bodies[-1]


def _launch(bodies: list[BlockBody]) -> None:
    """Write the launch of one body, or of two, of which the first is for few rows."""
    last = bodies[-1]
    row_tiles, threads = last.count_row_tiles(), last.threads
    if 0 in (row_tiles, last.work.problem.columns):
        with launch(1, WARP):
            # The next launch waits only for this one.
            if last.gpu.overlaps_launches:
                ptx.griddepcontrol_wait()
            T.evaluate(0)
        return
    is_one = len(bodies) == 1
    last.prepare(row_tiles, 0 if is_one else _BLOCKS_PER_SM)
    blocks = int64(last.work.stride * row_tiles)
    if not is_one:
        bodies[0].prepare(1, _BLOCKS_PER_SM)
        is_few = last.work.m <= bodies[0].work.rows
        blocks = tirx.Select(is_few, int64(bodies[0].work.stride), blocks)
    shared = SharedMemory()
    max(bodies, key=lambda body: body.work.shared_bytes).reserve(shared)
    with launch(blocks, threads, min_blocks_per_sm=last.work.blocks_per_sm) as place:
        shared.open()
        if is_one:
            last.emit(place, shared)
            return
        with T.If(is_few):
            with T.Then():
                bodies[0].emit(place, shared)
            with T.Else():
                last.emit(place, shared)
