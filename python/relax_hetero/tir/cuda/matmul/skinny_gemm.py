"""Skinny GEMM on Hopper: few rows by a packed weight, bound by memory bandwidth.

Each weight is read once for up to 64 rows, so that bytes in flight are all that counts. Operands are swapped: 64
columns of the weight are wgmma's m dimension, and the rows of the left operand, rounded up to a multiple of 8, its n
dimension. A block has 64 columns, and a part of k. One thread issues bulk copies of weight tiles, a
pipeline of stages ahead, and the first of them before the launch that writes the left operand has ended
(`ptx.griddepcontrol_wait`), so that consecutive launches keep memory busy. The left operand has a pipeline of its own,
filled by asynchronous copies of all producers.

Two products of the same rows may be one kernel, such as gate and up of a feed-forward network: a block has the same
columns of both.

The result may be an operand of a short sum over GPUs: each vector is also sent to the other ones (`cuda.all_reduce`).

The blocks of a cluster split k. Each writes its accumulators of a row to the shared memory of the block that stores the
row, which adds them in a fixed order. A barrier there counts the stored bytes: a cluster barrier would also wait until
all earlier writes of the threads are visible, and with remote loads no block may exit before others have read.

A k-step is short, so its instructions count: stages advance without a division, and the condition that separates
producers and consumers comes from a shuffle, so that the compiler knows that it is the same in a warp, and computes
stages, parities and descriptors in uniform registers (64 instructions between the products of two steps, 97 otherwise).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import bytes_of
from ....target.gpu_target import WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ...core.view import Coordinates
from ..all_reduce import send_words, sends_short, word_places
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, at_least_one, enable_pdl, launch, local
from ..tile.operand_tiles import PACKED_ROWS, PRODUCERS, OperandTile, Source, arrive
from ..tile.register_tile import ALL_LANES, reinterpreted, sums_dtype
from ..tile.ring import Ring, RingPosition
from . import wgmma_matmul
from .product_parameters import ProductParameters

MAX_ROWS = 64
"""Maximum rows of the left operand, those of one tile."""

WEIGHT_BYTES = PACKED_ROWS * SWIZZLED_BYTES
"""Bytes of a tile of weights."""

_ROWS_PER_COPY = 16  # of the left operand, that the producers copy at a time
_PITCH = PACKED_ROWS + 4
"""Floats between rows of accumulators, padded to avoid bank conflicts."""
_THREADS = PRODUCERS + WARPGROUP


class _RowRange(NamedTuple):
    """Numbers of rows with a common rule of plans; stages are those of weights and of the left operand."""

    max_rows: int
    blocks: float  # maximum blocks per multiprocessor up to which k is split
    short_steps: int  # maximum k-steps of a block for `short`
    # Stages of blocks with few k-steps, and with more.
    short: tuple[int, int]
    long: tuple[int, int]
    alone: tuple[int, int]  # stages of long blocks if each has a multiprocessor of its own


# Measured on an H200. With 1 to 8 rows, three or four blocks are resident on a multiprocessor, including those of the
# next launch: blocks of 16 k-steps (4,096 columns) take 10.3 us with 76 KB of stages, 11.1 with 56 KB and 12.3 with
# 110 KB, which exclude the next launch; blocks of 64 steps (14,336 columns) 35.5, 28.6 and 28.9 us. By 4,096 x 6,144,
# 16 rows take 15.4 us with 8 and 8 stages, 18.8 with 11 and 5; 32 rows 13.6, and 20.8 with 7 and 6.
#
# Blocks that begin early go where there is room. If there is room for two on some multiprocessors, as the last launch
# has blocks on others only, those get twice the work. One block with so many stages that no second one fits has as many
# bytes in flight: in a decode step, 14,336 x 4,096 takes 29.5 us for one row and 29.7 for 32, by 128 blocks; 44.9 and
# 48.6 with 5 and 6 stages. Short blocks take longer, since the next launch waits: 2,048 x 4,096 8.3 us, 7.9 otherwise.
_ROW_RANGES = (
    _RowRange(8, 2, 16, short=(7, 7), long=(5, 5), alone=(13, 5)),
    _RowRange(32, 1.75, 32, short=(8, 8), long=(8, 8), alone=(16, 8)),
    _RowRange(MAX_ROWS, 1.75, 32, short=(6, 6), long=(6, 6), alone=(14, 6)),
)
# What does not help, in a decode step of 32 rows on two H200s (products by 7,168 x 4,096 without it: 15.6 to 15.9 us):
#
# - Prefetching 12 MB of the next product's first tiles into L2 when a block has issued its last loads: 16.9 to 17.3 us.
#   The prefetches delay other blocks' last loads, and are of tiles that the next blocks load while they wait anyway.
# - At most one block per multiprocessor, with room for one of the next launch beside it: 21 to 22 us. Blocks that begin
#   early go where the last launch left multiprocessors free, which then have twice the work: 128 blocks, two of which
#   fit, were on 66 to 76 of 132 multiprocessors. Holding idle ones by blocks that sleep: 15.8 us, but the products of
#   queries, keys and values 12.1 instead of 8.6.
# - Letting the next launch begin only when a block has issued its last loads: 16.0 to 16.1 us.
# - Prefetching the weights after the first stages into L2 while blocks wait. A layer of half of a model's heads and
#   columns takes 78.3 us without, and 80.0, 81.2 and 83.5 with 8, 16 and 32 k-steps: the norm before the product takes
#   0.7 us longer, as it reads its weight at that time. By the launch before the product, 8 k-steps: 79.0 us.
# - All weights of a product by 4,096 x 2,048 in shared memory, by 16 stages: it takes 7.2 us in place of 8.0, but the
#   decode attention before it 13.8 in place of 12.1, with one block of two pages per multiprocessor.
#
# Two products as one launch, in a decode step of an H200: 32 rows by 7,168 x 4,096 take 28.1 us by 112 blocks of 160 KB
# (two launches: 31.6), and the product after it 15.0 (16.4); one row 27.4 (29.8). By 14,336 x 4,096, 54.8 (57.2) and
# 54.6 (56.4). By 6,144 x 2,048, 32 rows take 15.0 us by 192 blocks (17.3), 17.9 by 96; one row 14.4 by 96 (19.3).
#
# In a decode step of an H200, products of one row by 4,096 x 14,336 take 26.9 to 28.5 us with 11 stages, 30.7 with 5;
# by 4,096 x 6,144 with a split of two 13.0 and 16.9.
_DEEP_STAGES = (11, 5)
_MIN_ALONE = 0.8
"""Tiles of two products per multiprocessor from which a split of k leaves at most one block on each; for the fewest
rows, that holds with any number of tiles."""
_DEEP_SPLIT = 2
"""Maximum split of k with `_DEEP_STAGES`, for the fewest rows, if all blocks are resident."""


@dataclass(frozen=True)
class SkinnyPlan:
    """Distribution of work among blocks."""

    split: int  # blocks of a cluster, which split k: 1, 2, 4 or 8
    stages: int  # maximum stages of weights, 8 KB each, or 16 KB of two products
    row_stages: int  # stages of the left operand
    evicts_first: bool = False  # whether L2 evicts weights first, to keep other data


def skinny_plan(problem: MatmulProblem, gpu: GpuTarget) -> SkinnyPlan:
    """Choose a plan: k is split until all multiprocessors have work, and the next launch can be resident, too."""
    element = bytes_of(problem.rhs.dtype)
    n, k = problem.rhs.size("n"), problem.rhs.size("k")
    assert isinstance(n, int) and isinstance(k, int), "packed weights have static extents"
    batches = [e for name, e in zip(problem.rhs.index_map, problem.rhs.shape, strict=True) if name.startswith("b")]
    tiles = -(-n // PACKED_ROWS) * prod(e for e in batches if isinstance(e, int))
    steps = -(-k * element // SWIZZLED_BYTES)
    rows, split = _rows(problem), 1
    rules = next((each for each in _ROW_RANGES if rows <= each.max_rows), _ROW_RANGES[-1])
    has_fewest_rows = rules is _ROW_RANGES[0]
    max_blocks = gpu.multiprocessors * rules.blocks
    # A block of two products has twice the bytes in flight: most multiprocessors have one of their own.
    is_alone = problem.second is not None and (has_fewest_rows or tiles >= _MIN_ALONE * gpu.multiprocessors)
    max_split_blocks = gpu.multiprocessors if is_alone else max_blocks
    while split < 8 and tiles * split * 2 <= max_split_blocks and steps >= split * 2 * 4:
        split *= 2
    is_short = steps <= split * rules.short_steps
    if has_fewest_rows and not is_short and split > _DEEP_SPLIT and tiles * split > gpu.multiprocessors:
        split //= 2
    stages = rules.short if is_short else rules.alone if tiles * split <= gpu.multiprocessors else rules.long
    if has_fewest_rows and stages == rules.long and split <= _DEEP_SPLIT and tiles * split <= max_blocks:
        stages = _DEEP_STAGES
    if problem.second is not None:
        stages = ceil_div(stages[0], 2), stages[1]
    # If two such weights exceed L2, those of a model do, too, and are always read from memory: 2 to 4 % less time on
    # an H200 for eight weights of 4,096 x 4,096. Weights that fit L2 must not be evicted: 14 to 19 % more time for 33
    # to 38 MB of small ones.
    evicts_first = tiles * steps * WEIGHT_BYTES * 2 > gpu.cache_bytes
    return SkinnyPlan(split, *stages, evicts_first=evicts_first)


def _rows(problem: MatmulProblem) -> int:
    """Number of rows that share the weight."""
    shared = problem.rhs.index_map
    sizes = [e for name, e in zip(problem.lhs.index_map, problem.lhs.shape, strict=True) if name not in ("k", *shared)]
    return prod(e for e in sizes if isinstance(e, int))


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Reason why `skinny_gemm_kernel` does not support a problem; empty if it does. Any number of rows is supported."""
    reason = wgmma_matmul.unsupported_reason(problem, gpu)
    if not reason and not problem.rhs.layout.inner_dims:
        return "the right operand is not packed"
    return reason


def sends_words(problem: MatmulProblem) -> bool:
    """Return whether the kernel can send a product's result to other GPUs: vectors of a short sum, in order."""
    lhs, result, extents = problem.lhs, problem.result, [problem.lhs.size("m"), problem.rhs.size("n")]
    are_rows = (lhs.index_map, result.index_map, result.dtype) == (("m", "k"), ("m", "n"), "float32")
    sizes = [size for size in extents if isinstance(size, int)]
    is_static = len(sizes) == 2 and result.layout.is_identity and problem.second is None
    return are_rows and is_static and sizes[1] % 4 == 0 and sends_short(sizes, problem.sent)


def skinny_gemm_kernel(problem: MatmulProblem, gpu: GpuTarget, plan: SkinnyPlan | None = None) -> tirx.PrimFunc:
    """Kernel of a product of few rows by a packed weight, one launch; `MatmulProblem` documents its parameters.

    It supports programmatic dependent launch if the right operand is a constant.

    Raises
    ------
    EncodingError
        If the kernel does not support the problem (`unsupported_reason`, `sends_words` if it is sent).
    """
    reason = unsupported_reason(problem, gpu)
    if not reason and problem.sent is not None and not sends_words(problem):
        expected = "a static, row-major one of float32 for a short sum, of a multiple of 4 columns"
        reason = f"result {problem.result} is sent, expected {expected}"
    if reason:
        raise EncodingError(f"matmul of few rows on {gpu.arch}: {reason}")
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem)
        with function.body():
            if parameters.addresses is not None:
                parameters.addresses.open()
            parameters.lhs.open(raw=True)
            parameters.rhs.open(raw=True)
            if parameters.second is not None:
                parameters.second.open(raw=True)
            for view in parameters.writer.operands:
                view.open_for_gpu()
            _Kernel(parameters, plan or skinny_plan(problem, gpu)).emit()
    return enable_pdl(parameters.tied(function.result), [1] if problem.second is None else [1, 2])


class _Item(NamedTuple):
    """Vector of the result that a thread stores."""

    index: Expr  # of its row among those of the block
    column: Expr  # of the tile
    at: Coordinates
    exists: Expr  # whether the row exists


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, parameters: ProductParameters, plan: SkinnyPlan) -> None:
        lhs, rhs = parameters.lhs, parameters.rhs
        weights = [rhs] if parameters.second is None else [rhs, parameters.second]
        self.writer, self.batches = parameters.writer, parameters.batches
        self.sent, self.addresses = parameters.problem.sent, parameters.addresses
        self.m, self.n, self.k = parameters.sizes
        self.types = (lhs.nominal, rhs.nominal)
        self.sum_type = "int32" if sums_dtype(lhs.nominal) == "uint32" else "float32"
        steps = -(-self.k // (SWIZZLED_BYTES // bytes_of(rhs.nominal)))
        # Every block must have a k-step.
        while plan.split > steps:
            plan = replace(plan, split=plan.split // 2)
        self.plan, split = plan, plan.split
        # K-steps of every block, and the number of blocks with one more.
        self.min_steps, self.remainder = divmod(steps, split)
        self.rows = self._rows()
        loaded_rows = -(-self.rows // _ROWS_PER_COPY) * _ROWS_PER_COPY
        self.left = OperandTile.of(lhs, "m", loaded_rows, self.m, self.k, may_transpose=False)
        self.rights = [
            replace(OperandTile.of(weight, "n", PACKED_ROWS, self.n, self.k), evicts_first=plan.evicts_first)
            for weight in weights
        ]
        self.stage_size = sum(right.size for right in self.rights)
        max_steps = -(-steps // split)
        self.stages = max(2, min(plan.stages, max_steps))
        self.row_stages = max(2, min(plan.row_stages, max_steps))
        self.own_rows = -(-self.rows // split)
        self.product_size = self.own_rows * _PITCH * 4
        self.sums_size = len(weights) * self.product_size

    def _rows(self) -> int:
        """Rows of a tile, rounded up to a valid n of wgmma."""
        rows = min(self.m, MAX_ROWS) if isinstance(self.m, int) else MAX_ROWS
        # Integer wgmma lacks n = 40 and 56.
        unit = 16 if rows > 24 and self.sum_type == "int32" else 8
        return max(unit, -(-rows // unit) * unit)

    def emit(self) -> None:
        """Write the launch."""
        split, stages, row_stages = self.plan.split, self.stages, self.row_stages
        self.shared = SharedMemory()
        # Weights first, for the swizzle's alignment; their memory is later reused for accumulators.
        self.shared.reserve(stages * self.stage_size, SWIZZLED_ALIGN)
        self.left_at = self.shared.reserve(row_stages * self.left.size, SWIZZLED_ALIGN)
        self.parts_at = self.shared.reserve((split - 1) * self.sums_size)
        self.exchange = Ring(self.shared, 1, producers=1)
        self.weight_ring = Ring(self.shared, stages, producers=1)
        self.row_ring = Ring(self.shared, row_stages, PRODUCERS, consumers=1)
        row_tiles = ceil_div(self.m, MAX_ROWS)
        column_tiles = -(-self.n // PACKED_ROWS)
        tiles = row_tiles * column_tiles * self.batches.count
        with launch(at_least_one(int64(tiles * split)), _THREADS, split) as place:
            self.shared.open()
            self.rank, self.thread = place.rank, place.thread
            tile = T.bind(tirx.floordiv(T.Cast("int64", place.block), split))
            self.row = T.bind(tirx.floormod(tile, int64(row_tiles)) * MAX_ROWS)
            remaining = tirx.floordiv(tile, int64(row_tiles))
            self.column = T.bind(tirx.floormod(remaining, int64(column_tiles)) * PACKED_ROWS)
            self.at = self.batches.place(tirx.floordiv(remaining, int64(column_tiles)))
            self.count: Expr = self.min_steps
            if self.remainder:
                self.count = T.bind(self.min_steps + T.Select(self.rank < self.remainder, 1, 0))
            self.first: Expr = T.bind(self.rank * self.min_steps + T.min(self.rank, self.remainder))
            self._block()

    def _block(self) -> None:
        with when(self.thread == 0):
            self._load_early()
        ptx.griddepcontrol_wait()
        # If the sum of few rows began at once, so would the launch after it, whose first loads delay these: on two
        # H200s, one row by 7,168 x 4,096 takes 14.4 us instead of 16.4, by 2,048 x 4,096 4.4 instead of 5.6, the sum
        # 3.7 instead of 3.2; 32 rows as long. On one GPU, a norm follows, and takes 3.7 us then instead of 1.7: one row
        # by 14,336 x 4,096 takes 27.3 instead of 30.0, a layer 119.6 instead of 116.8.
        releases_late = self.sent is not None and self.rows <= _ROW_RANGES[0].max_rows
        if not releases_late:
            ptx.launch_dependents()
        send = None
        if self.sent is not None and self.addresses is not None:
            send = partial(send_words, word_places(self.sent, self.addresses.data))
        if self.plan.split > 1:
            ptx.cluster_begin()
        loaded = self._load_operands()
        ptx.block_barrier()
        own_warp = tirx.floordiv(self.thread, WARP)  # a shuffle tells the compiler that all lanes have the same
        warp = T.bind(T.tvm_warp_shuffle(T.uint32(ALL_LANES), own_warp, 0, WARP, WARP))
        with T.If(warp < PRODUCERS // WARP):
            with T.Then():
                self._produce()
                if releases_late:
                    ptx.launch_dependents()
                self._wait_for_cluster()
            with T.Else():
                sums = self._consume()
                self._wait_for_cluster()
                self._exchange(sums)
        if self.plan.split == 1:
            ptx.block_barrier()
        else:
            ptx.barrier_wait(self.exchange.full(0), tirx.const(0, "int32"))
        self._store(send, loaded)

    def _wait_for_cluster(self) -> None:
        """Wait until all blocks of the cluster have begun."""
        if self.plan.split > 1:
            ptx.cluster_wait()

    def _load_early(self) -> None:
        """Initialize barriers and load the first weights, which are constants, before previous launches have ended."""
        self.weight_ring.initialize()
        self.row_ring.initialize()
        if self.plan.split > 1:
            self.exchange.initialize()
        ptx.barrier_init_fence()
        if self.plan.split > 1:
            rows = min(ceil_div(self.m, 8) * 8, self.rows) if isinstance(self.m, int) else self.rows
            ptx.barrier_expect(self.exchange.full(0), rows * PACKED_ROWS * 4 * len(self.rights))
        num_loaded = min(self.stages, self.min_steps)  # the minimum k-steps of a block
        for step in range(num_loaded):
            self._load_weights(tirx.const(step, "int32"), tirx.const(step, "int32"))

    def _load_weights(self, step: Expr, stage: Expr) -> None:
        """Issue the bulk copies of the weights of a k-step, by one thread."""
        full = self.weight_ring.full(stage)
        ptx.barrier_expect(full, self.stage_size)
        for number, right in enumerate(self.rights):
            target = stage * self.stage_size + number * right.size
            right.load_bulk(self.shared, target, self.at, self.column, self.first + step, full)

    def _load_rows(self, step: Expr, stage: Expr) -> None:
        """Issue the copies of the left operand of a k-step, by all producers."""
        full = self.row_ring.full(stage)
        target = self.left_at + stage * self.left.size
        self.left.load(self.shared, target, self.at, self.row, self.first + step, self.thread)
        arrive(full, self.left.source is Source.GATHER)

    def _produce(self) -> None:
        loaded_row_steps, loaded_weight_steps = min(self.row_stages, self.min_steps), min(self.stages, self.min_steps)
        with T.serial(tirx.const(loaded_row_steps, "int32")) as step:
            self._load_rows(step, step)
        if isinstance(self.count, int) and self.count == min(loaded_row_steps, loaded_weight_steps):
            return
        freed, weights = RingPosition(self.row_stages), RingPosition(self.stages, loaded_weight_steps % self.stages)
        is_full = loaded_row_steps == self.row_stages
        rows = freed if is_full else RingPosition(self.row_stages, loaded_row_steps)
        with T.serial(self.count - min(loaded_row_steps, loaded_weight_steps)) as number:
            # A stage is free when its previous k-step has been multiplied; without a full ring, some are still empty.
            if is_full or loaded_weight_steps == self.stages:
                ptx.barrier_wait(self.row_ring.empty(freed.stage), freed.parity)
            # Weights first, to keep memory busy while addresses of the left operand are computed.
            step = T.bind(number + loaded_weight_steps)
            with T.If(tirx.all(self.thread == 0, step < self.count)), T.Then():
                self._load_weights(step, T.bind(weights.stage))
            step = T.bind(number + loaded_row_steps)
            with T.If(step < self.count), T.Then():
                self._load_rows(step, T.bind(rows.stage))
            for position in (freed, weights) if is_full else (freed, weights, rows):
                position.advance()

    def _consume(self) -> list[Any]:
        """Multiply all k-steps; returns the accumulators of each weight."""
        registers = self.rows // 2
        sums, base = [local(registers, sums_dtype(self.types[0])) for _ in self.rights], local(2, "uint64")
        self.member = T.bind(self.thread - PRODUCERS)
        ptx.matrix_descriptor(base[0], self.shared.at(0))
        ptx.matrix_descriptor(base[1], self.shared.at(self.left_at))

        at_weights, at_rows, freed = (RingPosition(n) for n in (self.stages, self.row_stages, self.row_stages))

        def multiply(step: Expr) -> None:
            stage, row_stage = T.bind(at_weights.stage), T.bind(at_rows.stage)
            ptx.barrier_wait(self.weight_ring.full(stage), at_weights.parity)
            ptx.barrier_wait(self.row_ring.full(row_stage), at_rows.parity)
            # Writes of cp.async belong to the generic proxy, wgmma reads by the async proxy.
            ptx.async_proxy_fence()
            weights = T.bind(base[0] + T.Cast("uint64", stage) * T.uint64(self.stage_size // 16))
            rows = T.bind(base[1] + T.Cast("uint64", row_stage) * T.uint64(self.left.size // 16))
            ptx.wgmma_fence()
            for i in range(SWIZZLED_BYTES // ptx.CONTRACTION_BYTES):
                adds = T.uint32(1) if i else T.if_then_else(step > 0, T.uint32(1), T.uint32(0))
                advance = T.uint64(i * ptx.CONTRACTION_BYTES // 16)
                types = (self.types[1], self.types[0])
                for number, own in enumerate(sums):
                    tile = weights + T.uint64((number * self.rights[0].size + i * ptx.CONTRACTION_BYTES) // 16)
                    ptx.wgmma([own[r] for r in range(registers)], tile, rows + advance, types, adds)
            ptx.wgmma_commit()
            at_weights.advance()
            at_rows.advance()

        last = tirx.const(self.count - 1, "int32") if isinstance(self.count, int) else T.bind(self.count - 1)
        if self.min_steps + bool(self.remainder) > 1:
            with T.serial(last) as step:
                multiply(step)
                # The previous step is complete, and its stages free.
                ptx.wgmma_wait(1)
                with when(step > 0):
                    with when(self.member == 0):
                        ptx.barrier_arrive(self.row_ring.empty(freed.stage))
                    freed.advance()
        # Outside the loop: ptxas may read accumulators before products issued in a loop are complete.
        multiply(last)
        ptx.wgmma_wait(0)
        # All warps have read all stages, whose memory is reused for accumulators.
        ptx.named_barrier(1, WARPGROUP)
        return sums

    def _exchange(self, sums: Sequence[Any]) -> None:
        """Write each row of accumulators to the shared memory of the block that stores it."""
        split = self.plan.split
        warp, lane = tirx.floordiv(self.member, WARP), T.bind(tirx.floormod(self.member, WARP))
        column = T.bind(warp * 16 + tirx.floordiv(lane, 4))
        remote, barriers = local(2, "uint32"), local(2, "uint32")
        for c in range(2):
            row = tirx.floormod(lane, 4) * 2 + c
            offset = (tirx.floordiv(row, split) * _PITCH + column) * 4
            if split > 1:
                owner = T.bind(tirx.floormod(row, split))
                # Parts of other blocks are in the order of ranks after the owner's.
                part = tirx.floormod(self.rank - owner - 1 + split, split)
                offset = offset + T.Select(owner == self.rank, 0, self.parts_at + part * self.sums_size)
                ptx.remote_address(remote[c], T.bind(ptx.shared_address(self.shared.at(offset))), owner)
                ptx.remote_address(barriers[c], T.bind(ptx.shared_address(self.exchange.full(0))), owner)
                offset = 0
            for j in range(self.rows // 8):
                if isinstance(self.m, int) and j * 8 >= self.m:
                    continue
                for number, h in itertools.product(range(len(sums)), range(2)):
                    value = sums[number][j * 4 + h * 2 + c]
                    bits = reinterpreted(value, "uint32")
                    tile_offset = number * self.product_size + (j * 8 // split * _PITCH + h * 8) * 4
                    if split == 1:
                        ptx.store_shared(self.shared.at(offset + tile_offset), [bits])
                    else:
                        ptx.store_async(remote[c] + T.uint32(tile_offset), [bits], barriers[c])

    def _store(self, send: Callable[[Sequence[Expr], Expr], None] | None, loaded: list[Any] | None) -> None:
        """Reduce over the cluster in order, and store this block's rows, by all threads, which may also send them."""
        zero = tirx.const(0, "int32")
        with T.serial(tirx.const(self._rounds, "int32")) as iteration:
            item = self._item(iteration)
            with T.If(item.exists), T.Then():
                products = range(len(self.rights))
                totals = [self._total(number, item.index, item.column, self._vector) for number in products]
                end = None if self.n % PACKED_ROWS == 0 else int64(self.n)

                def read(element: int) -> Expr | tuple[Expr, ...]:
                    values = tuple(total[element] for total in totals)
                    return values if len(values) > 1 else values[0]

                reads = [partial(read, i) for i in range(self._vector)]
                self.writer.write(reads, item.at, "n", [], end, None if loaded is None else (loaded, zero), send)

    @property
    def _vector(self) -> int:
        """Neighbouring numbers of a row that a thread stores at a time."""
        return min(4, self.writer.result.vector("n")) if self.writer.result.is_contiguous("n") else 1

    @property
    def _rounds(self) -> int:
        """Vectors that a thread stores."""
        return -(-self.own_rows * (PACKED_ROWS // self._vector) // _THREADS)

    def _load_operands(self) -> list[Any] | None:
        """Load the epilogue's operands before the block multiplies, if each thread stores one vector; else None."""
        if self._rounds > 1 or len(self.writer.operands) == 1:
            return None
        zero = tirx.const(0, "int32")
        loaded, item = self.writer.registers(1, self._vector), self._item(zero)
        with T.If(tirx.all(item.exists, item.at["n"] < int64(self.n))), T.Then():
            self.writer.load(loaded, zero, item.at, self._vector)
        return loaded

    def _item(self, iteration: Expr) -> _Item:
        """The vector that the thread stores in an iteration."""
        per_row = PACKED_ROWS // self._vector
        item = T.bind(iteration * _THREADS + self.thread)
        index = T.bind(tirx.floordiv(item, per_row))
        row = T.bind(index * self.plan.split + self.rank)
        column = T.bind(tirx.floormod(item, per_row) * self._vector)
        m, n = T.bind(self.row + T.Cast("int64", row)), T.bind(self.column + T.Cast("int64", column))
        return _Item(index, column, {**self.at, "m": m, "n": n}, tirx.all(row < self.rows, m < self.m))

    def _total(self, product: int, index: Expr, column: Expr, vector: int) -> Any:
        """Reduce `vector` neighbours of a row of a product: this block's part, then those of the following ranks."""
        totals, part = local(vector, self.sum_type), local(vector, "uint32")
        own_offset = T.bind((index * _PITCH + column) * 4 + product * self.product_size)
        for number in range(self.plan.split):
            offset = own_offset if number == 0 else own_offset + (self.parts_at + (number - 1) * self.sums_size)
            ptx.load_shared([part[i] for i in range(vector)], self.shared.at(offset))
            for i in range(vector):
                value = tirx.reinterpret(self.sum_type, part[i])
                T.buffer_store(totals, value if number == 0 else totals[i] + value, [i])
        return totals
