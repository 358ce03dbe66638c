"""SIMT matrix products (without tensor cores): any element types, permuted layouts, sizes and epilogues.

float32 is multiplied in float32, not rounded to the 10 bits of tf32. Few rows or columns take a GEMV kernel (`Gemv`),
all others tiles (`simt_tiles`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import ALL_LANES, VECTOR_BYTES, WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, lane_indices
from ...core.view import Coordinates
from ..core.dialect import shared_scope
from ..core.launch import WAIT, at_least_one, enable_pdl, launch, local, unrolled
from ..core.operand import GpuOperand, divides
from ..tile.batches import Batches
from ..tile.epilogue import EpilogueWriter
from .product_parameters import ProductParameters
from .simt_plan import SimtPlan, simt_plan
from .simt_tiles import SimtOperand, TiledProduct, barrier, known

# GEMV: products with few rows, bound by the bandwidth of reading the other operand, the weight, once.
#
# The lanes of a warp lie along the weight's contiguous dimension, 16 bytes each; the remaining lanes, and the warps of
# a block, split k. A thread accumulates its columns in registers; lanes reduce by shuffles, warps in shared memory.
# Where columns are many, warps have columns of their own instead; where k is short, a thread has several columns.

MAX_GEMV_ROWS = 8
"""Maximum rows of a block: a thread has accumulators for all of them."""
_MIN_TILED_GEMV_DEPTH, _MAX_TILED_GEMV_BYTES = 1024, 40 << 20
"""Minimum k of a GEMV with several blocks of rows, and bytes of rows that all blocks read from L2.

A product of 32 by 128 by 2,048 in float32, as of a router of experts, took 43 us by tiles on an H200, which wait for
memory in each of 64 steps.
"""

_LOADS_IN_FLIGHT = 4
"""Weight loads that a thread issues at a time."""
_MAX_REPEATS, _MAX_SUMS = 8, 32
"""Maximum columns of a thread if k is short, and accumulators of these."""
_MANY_BLOCKS = 128
"""Minimum blocks per multiprocessor whose warps have columns of their own."""


@dataclass(frozen=True)
class Gemv:
    """A product with few rows."""

    # The operand with few rows and the other one.
    few: GpuOperand
    weight: GpuOperand
    # Their dimensions of the result: ("m", "n") or ("n", "m").
    row: str
    column: str
    # Rows of a block, and number of blocks of rows.
    rows: int
    row_tiles: int
    columns: Expr
    k: Expr
    dtype: str  # element type of the accumulators
    writer: EpilogueWriter
    batches: Batches

    def emit(self, gpu: GpuTarget) -> bool:
        """Write the launch; returns whether its weight is loaded before a statement with `WAIT`."""
        plan = _plan(self, gpu)
        if isinstance(self.k, int):
            plan = replace(plan, loads=max(1, min(plan.loads, ceil_div(self.k, plan.step))))
        tiles = at_least_one(ceil_div(self.columns, plan.block_columns))
        count = at_least_one(self.batches.count)
        with launch(int64(count * self.row_tiles * tiles), plan.threads) as place:
            block, first_row = int64(place.block), int64(0)
            if self.row_tiles > 1:
                first_row = T.bind(tirx.floormod(block, self.row_tiles) * self.rows)
                block = T.bind(tirx.floordiv(block, self.row_tiles))
            at = self.batches.place(tirx.floordiv(block, tiles))
            first = T.bind(tirx.floormod(block, tiles) * plan.block_columns)
            block = _Block(self, plan, at, (first_row, first), place.thread)
            block.emit()
        return block.loads_first


@dataclass(frozen=True)
class _Plan:
    """Distribution of the weight among threads."""

    along_k: bool  # whether a thread's vector lies along k, else along the columns
    vector: int  # elements of a vector load
    column_lanes: int  # lanes of a warp along the columns; the others lie along k
    # Warps of a block that split k, and those that split its columns.
    warps: int
    column_warps: int = 1
    loads: int = _LOADS_IN_FLIGHT  # loads along k that a thread has in flight
    repeats: int = 1  # vectors of columns of a thread

    @property
    def threads(self) -> int:
        return self.warps * self.column_warps * WARP

    @property
    def own_columns(self) -> int:
        """Neighbouring columns of a thread."""
        return 1 if self.along_k else self.vector

    @property
    def block_columns(self) -> int:
        return self.column_lanes * self.own_columns * self.column_warps * self.repeats

    @property
    def k_lanes(self) -> int:
        return WARP // self.column_lanes

    @property
    def own_k(self) -> int:
        """Elements along k of a thread's load."""
        return self.vector if self.along_k else 1

    @property
    def step(self) -> int:
        """Elements along k of one load of all threads of a block."""
        return self.k_lanes * self.warps * self.own_k

    def sums(self, rows: int) -> int:
        """Elements of shared memory for the accumulators of all warps."""
        return self.warps * rows * self.block_columns


def _plan(product: Gemv, gpu: GpuTarget) -> _Plan:
    weight = product.weight
    along_k = weight.is_contiguous("k")
    max_bytes = VECTOR_BYTES if along_k else max(1, min(4, 32 // product.rows)) * bytes_of(weight.nominal)
    vector = weight.vector("k" if along_k else product.column, max_bytes)
    columns = product.columns if isinstance(product.columns, int) else 1 << 14
    count = product.batches.count if isinstance(product.batches.count, int) else 1
    many = _MANY_BLOCKS * gpu.multiprocessors
    if along_k and isinstance(product.k, int) and 0 < product.k <= vector * WARP // 2:
        lanes = WARP >> (-(-product.k // vector) - 1).bit_length()
        plan = _Plan(along_k, vector, lanes, 1, 8, 1, min(_MAX_REPEATS, _MAX_SUMS // product.rows))
        while plan.threads * plan.repeats > WARP and count * columns < plan.block_columns * many // 16:
            if plan.repeats > 1:
                plan = replace(plan, repeats=plan.repeats // 2)
            else:
                plan = replace(plan, column_warps=plan.column_warps // 2)
        return plan
    if along_k:
        lanes = 1
        while lanes < 4 and count * -(-columns // (2 * lanes)) >= 16 * gpu.multiprocessors:
            lanes *= 2
    else:
        lanes = WARP
        while lanes * vector * bytes_of(weight.nominal) > 32 and lanes > 1:
            if count * -(-columns // (lanes * vector)) >= gpu.multiprocessors:
                break
            lanes //= 2
    warps = min(16, gpu.block_threads // WARP)
    k = product.k if isinstance(product.k, int) else 1 << 12
    k_lanes = WARP // lanes * (vector if along_k else 1)
    while warps > 1 and k_lanes * warps > max(k, 1):
        warps //= 2
    plan = _Plan(along_k, vector, lanes, warps)
    while along_k and plan.warps > 1 and count * columns >= plan.block_columns * 2 * many:
        plan = replace(plan, warps=plan.warps // 2, column_warps=plan.column_warps * 2)
    while plan.warps > 1 and plan.sums(product.rows) * bytes_of(product.dtype) > gpu.shared_bytes:
        plan = replace(plan, warps=plan.warps // 2)
    return plan


class _Block:
    """Writer of a block's code."""

    def __init__(self, product: Gemv, plan: _Plan, at: Coordinates, first: tuple[Expr, Expr], thread: Expr) -> None:
        self.product, self.plan, self.at, self.thread = product, plan, at, thread
        self.first_row, self.first = first
        number = T.bind(tirx.floordiv(thread, WARP))
        self.column_warp: Expr = T.bind(tirx.floordiv(number, plan.warps)) if plan.column_warps > 1 else 0
        self.warp = T.bind(tirx.floormod(number, plan.warps)) if plan.column_warps > 1 else number
        lane = tirx.floormod(thread, WARP)
        self.column_lane = T.bind(tirx.floormod(lane, plan.column_lanes))
        self.k_lane = T.bind(tirx.floordiv(lane, plan.column_lanes))
        self.column = T.bind(self.first + self._in_block(0))
        self.own = T.bind(int64((self.warp * plan.k_lanes + self.k_lane) * plan.own_k))
        self.sums_per_repeat = product.rows * plan.own_columns
        self.count = self.sums_per_repeat * plan.repeats

    def _in_block(self, repeat: Expr) -> Expr:
        """First column of the thread's vector `repeat`, in its block."""
        plan = self.plan
        own_warp = repeat * plan.column_warps + self.column_warp
        return (own_warp * plan.column_lanes + self.column_lane) * plan.own_columns

    def emit(self) -> None:
        product, plan = self.product, self.plan
        sums = local(self.count, product.dtype)
        with unrolled(self.count) as i:
            T.buffer_store(sums, tirx.const(0, product.dtype), [i])
        steps = self._steps
        loaded = local(plan.loads * plan.repeats * plan.vector, product.weight.dtype)
        with T.serial(int64(steps)) as step:
            with unrolled(plan.loads) as load, unrolled(plan.repeats) as repeat:
                self._load(loaded, load, repeat, self._k(step, load))
            if self.loads_first:
                with T.attr(0, WAIT, 1):
                    T.evaluate(0)
            with unrolled(plan.loads) as load:
                self._multiply(sums, loaded, load, self._k(step, load))
        self._add_lanes(sums)
        if plan.along_k and plan.warps == 1:
            with T.If(tirx.EQ(self.k_lane, 0)), T.Then(), unrolled(plan.repeats) as repeat:
                with unrolled(product.rows) as row, unrolled(plan.own_columns) as c:
                    value = sums[repeat * self.sums_per_repeat + row * plan.own_columns + c]
                    self._write(value, row, self._in_block(repeat) + c, [])
            return
        warp_sums = T.alloc_buffer((plan.sums(product.rows),), product.dtype, scope=shared_scope())
        with T.If(tirx.EQ(self.k_lane, 0)), T.Then(), unrolled(product.rows) as row, unrolled(plan.own_columns) as c:
            index = (self.warp * product.rows + row) * plan.block_columns + self._in_block(0) + c
            T.buffer_store(warp_sums, sums[row * plan.own_columns + c], [index])
        barrier()
        self._store(warp_sums)

    @property
    def _steps(self) -> Expr:
        return ceil_div(self.product.k, self.plan.step * self.plan.loads)

    @property
    def loads_first(self) -> bool:
        """True if registers hold the block's whole weight, so that it can be loaded before the previous launch ends."""
        steps = self._steps
        return isinstance(steps, int) and steps == 1

    def _k(self, step: Expr, load: Expr) -> Expr:
        return (step * self.plan.loads + load) * self.plan.step + self.own

    def _load(self, loaded: Expr, load: Expr, repeat: Expr, k: Expr) -> None:
        product, plan = self.product, self.plan
        weight = product.weight
        column = self.column if plan.repeats == 1 else T.bind(self.first + self._in_block(repeat))
        conditions = [] if product.batches.exists is None else [product.batches.exists]
        if not divides(product.k, plan.step * plan.loads):
            conditions.append(k < product.k)
        if not divides(product.columns, plan.block_columns):
            conditions.append(column < product.columns)
        position = {**self.at, product.column: column, "k": k}
        value = weight.data[lane_indices(weight.address(position), plan.vector)]
        begin = (load * plan.repeats + repeat) * plan.vector
        lanes = [lane_indices(begin, plan.vector)]
        if not conditions:
            T.buffer_store(loaded, value, lanes)
            return
        with T.If(tirx.all(*conditions)):
            with T.Then():
                T.buffer_store(loaded, value, lanes)
            with T.Else(), unrolled(plan.vector) as v:
                T.buffer_store(loaded, tirx.const(0, weight.dtype), [begin + v])

    def _multiply(self, sums: Expr, loaded: Expr, load: Expr, k: Expr) -> None:
        product, plan = self.product, self.plan
        few = product.few
        # Steps beyond k multiply zero weights; the other operand must be zero, too, as infinity would give NaN.
        is_guarded = not divides(product.k, plan.step * plan.loads) or product.batches.exists is not None
        width = min(plan.own_k, few.vector("k")) if few.is_contiguous("k") else 1
        with unrolled(product.rows) as row:
            values = local(plan.own_k, few.dtype)
            for start in range(0, plan.own_k, width):
                position = {**self.at, product.row: self.first_row + int64(row), "k": k + start}
                value = few.data[lane_indices(few.address(position), width)]
                if not is_guarded:
                    T.buffer_store(values, value, [lane_indices(tirx.const(start, "int32"), width)])
                    continue
                conditions = [position["k"] < product.k]
                if product.batches.exists is not None:
                    conditions.append(product.batches.exists)
                with T.If(tirx.all(*conditions)):
                    with T.Then():
                        T.buffer_store(values, value, [lane_indices(tirx.const(start, "int32"), width)])
                    with T.Else(), unrolled(width) as v:
                        T.buffer_store(values, tirx.const(0, few.dtype), [start + v])
            with unrolled(plan.repeats) as repeat, unrolled(plan.vector) as v:
                column, inner = (tirx.const(0, "int32"), v) if plan.along_k else (v, tirx.const(0, "int32"))
                index = repeat * self.sums_per_repeat + row * plan.own_columns + column
                a = few.converted(values[inner], product.dtype)
                weight = loaded[(load * plan.repeats + repeat) * plan.vector + v]
                b = product.weight.converted(weight, product.dtype)
                T.buffer_store(sums, sums[index] + a * b, [index])

    def _add_lanes(self, sums: Expr) -> None:
        """Reduce over the lanes that split k, by shuffles."""
        distance = self.plan.column_lanes
        mask = T.uint32(ALL_LANES)
        while distance < WARP:
            with unrolled(self.count) as i:
                other = T.tvm_warp_shuffle_xor(mask, sums[i], distance, WARP, WARP)
                T.buffer_store(sums, sums[i] + other, [i])
            distance *= 2

    def _store(self, warp_sums: Expr) -> None:
        """Reduce over the warps that split k, and store."""
        product, plan = self.product, self.plan
        warp_size = product.rows * plan.block_columns
        iterations = -(-warp_size // plan.threads)
        total = local(1, product.dtype)
        with unrolled(iterations) as iteration:
            number = T.bind(iteration * plan.threads + self.thread)
            row, column = tirx.floordiv(number, plan.block_columns), tirx.floormod(number, plan.block_columns)
            conditions = [number < warp_size] if warp_size % plan.threads else []
            clamped = number if warp_size % plan.threads == 0 else tirx.min(number, warp_size - 1)
            T.buffer_store(total, tirx.const(0, product.dtype), [0])
            with unrolled(plan.warps) as warp:
                T.buffer_store(total, total[0] + warp_sums[warp * warp_size + clamped], [0])
            self._write(total[0], row, column, conditions)

    def _write(self, value: Expr, row: Expr, column: Expr, conditions: list[Expr]) -> None:
        """Write a result, given its column in the block."""
        product = self.product
        end = None if divides(product.columns, self.plan.block_columns) else product.columns
        at = {**self.at, product.row: self.first_row + int64(row), product.column: self.first + column}
        product.writer.write([lambda: value], at, product.column, [product.batches.exists, *conditions], end)


def simt_matmul_kernel(problem: MatmulProblem, gpu: GpuTarget, plan: SimtPlan | None = None) -> tirx.PrimFunc:
    """Kernel of a matrix product, one launch; `MatmulProblem` documents its parameters.

    Parameters
    ----------
    plan : SimtPlan, optional
        Tiling, by default the one with the lowest estimated time.

    Raises
    ------
    EncodingError
        If an operand is stored in tiles, or the product is fused with a row program.
    """
    _check(problem)
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem)
        with function.body():
            for view in (parameters.lhs, parameters.rhs, *parameters.writer.operands):
                view.open_for_gpu()
            early = _emit(parameters, gpu, plan)
    kernel = parameters.tied(function.result)
    return kernel if early is None else enable_pdl(kernel, [early])


def _gemv_rows(rows: int, columns: Expr, k: Expr, dtype: str) -> int | None:
    """Rows of a block of a GEMV, which divide `rows`; None if tiles are better."""
    if rows <= MAX_GEMV_ROWS:
        return rows or None
    if not (isinstance(columns, int) and isinstance(k, int)) or columns <= MAX_GEMV_ROWS or k < _MIN_TILED_GEMV_DEPTH:
        return None
    tile = max(count for count in range(1, MAX_GEMV_ROWS + 1) if rows % count == 0)
    is_few = tile > 1 and rows * columns * k * bytes_of(dtype) <= _MAX_TILED_GEMV_BYTES
    return tile if is_few else None


def _check(problem: MatmulProblem) -> None:
    if problem.rows is not None:
        raise EncodingError("matmul: found a product fused with a row program, which GPU kernels do not support")
    names = ("lhs", "rhs", *("operand",) * (len(problem.parameters) - 3), "result")
    for name, operand in zip(names, problem.parameters, strict=True):
        if operand.layout.inner_dims:
            raise EncodingError(f"matmul: found {name} stored as {operand.layout}, expected a permutation")


def _emit(parameters: ProductParameters, gpu: GpuTarget, plan: SimtPlan | None) -> int | None:
    """Write the launch; returns the number of the operand that is loaded before a statement with `WAIT`, if any."""
    lhs, rhs, writer, batches = parameters.lhs, parameters.rhs, parameters.writer, parameters.batches
    (m, n, k), result = parameters.sizes, writer.result
    # 16-bit and 8-bit floats are accumulated in float32.
    acc = writer.acc_dtype
    dtype = "float32" if acc in HALF_TYPES or acc.startswith("float8") else acc
    sides = [(known(m), "m", "n", lhs, rhs, n), (known(n), "n", "m", rhs, lhs, m)]
    for rows, row, column, few, weight, columns in sides:
        if plan is not None or rows is None:
            continue
        tile = _gemv_rows(rows, columns, k, few.nominal)
        if tile is not None:
            gemv = Gemv(few, weight, row, column, tile, rows // tile, columns, k, dtype, writer, batches)
            early = 0 if weight is lhs else 1
            return early if gemv.emit(gpu) else None
    down, across = ("m", m, lhs), ("n", n, rhs)
    if result.is_contiguous("m") and not result.is_contiguous("n"):
        down, across = across, down
    if plan is None:
        plan = simt_plan(
            (known(down[1]), known(across[1]), known(k)), known(batches.count), dtype, gpu, gpu.stages_tiles
        )
    left, right = (SimtOperand(view, along, size, extent) for (along, extent, view), size in (
        (down, plan.rows), (across, plan.columns)))  # fmt: skip
    TiledProduct(left, right, k, dtype, writer, batches, plan).emit()
    return None
