"""Matrix products without tensor cores: any element types, layouts that are permutations, sizes and epilogues.

float32 products are exact multiply-adds of float32: no tensor core, whose tf32 has 10 bits, takes part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import MatmulProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import VECTOR_BYTES, WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, lane_indices
from ...core.ties import tied_to
from ...core.view import Coordinates, extent_of
from ...matmul.matmul import merge_batches
from ..core.epilogue import EpilogueWriter
from ..core.launch import at_least_one, launch, local, unrolled
from ..core.operand import GpuOperand
from .simt_plan import SimtPlan, simt_plan
from .simt_tiles import SHARED, Batches, Side, TiledProduct, barrier, divides, known

# Products of few rows without tensor cores: the other operand, the weight, is read once, at memory's rate.
#
# The lanes of a warp lie along what is contiguous in the weight, 16 bytes each; the warps of a block, and lanes that
# are left, share k. A thread keeps the sums of its columns in registers; lanes add theirs by shuffles, warps in
# shared memory.

FEW_ROWS = 8
"""No more rows than this: a thread has sums of all rows."""

_IN_FLIGHT = 4
"""Loads of the weight that a thread waits for together."""


@dataclass(frozen=True)
class Gemv:
    """A product of few rows.

    Attributes
    ----------
    few, weight : GpuOperand
        The operand of few rows and the other one.
    row, column : str
        Their dimensions of the result: ("m", "n"), or the other way round.
    rows : int
    columns, k : PrimExpr or int
    dtype : str
        Element type of the sums.
    """

    few: GpuOperand
    weight: GpuOperand
    row: str
    column: str
    rows: int
    columns: Expr
    k: Expr
    dtype: str
    writer: EpilogueWriter
    batches: Batches

    def emit(self, gpu: GpuTarget) -> None:
        """Write the launch."""
        plan = _plan(self, gpu)
        tiles = at_least_one(ceil_div(self.columns, plan.block_columns))
        count = at_least_one(self.batches.count)
        with launch(int64(count * tiles), plan.threads) as place:
            block = int64(place.block)
            at = self.batches.place(tirx.floordiv(block, tiles))
            first = T.bind(tirx.floormod(block, tiles) * plan.block_columns)
            _Block(self, plan, at, first, place.thread).emit()


@dataclass(frozen=True)
class _Plan:
    """How threads share the weight.

    Attributes
    ----------
    along_k : bool
        Whether a thread's vector lies along k, else along the columns.
    vector : int
        Elements of a load.
    column_lanes : int
        Lanes of a warp that lie side by side along the columns; the others along k.
    warps : int
        Number of warps of a block; they share k.
    """

    along_k: bool
    vector: int
    column_lanes: int
    warps: int

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def own_columns(self) -> int:
        """Columns of a thread."""
        return 1 if self.along_k else self.vector

    @property
    def block_columns(self) -> int:
        return self.column_lanes * self.own_columns

    @property
    def k_lanes(self) -> int:
        return WARP // self.column_lanes

    @property
    def own_k(self) -> int:
        """Neighbours along k of a thread's load."""
        return self.vector if self.along_k else 1

    @property
    def step(self) -> int:
        """The k of a block's loads, one of each thread."""
        return self.k_lanes * self.warps * self.own_k

    def sums(self, rows: int) -> int:
        """Elements of shared memory: the sums of every warp."""
        return self.warps * rows * self.block_columns


def _plan(product: Gemv, gpu: GpuTarget) -> _Plan:
    weight = product.weight
    along_k = weight.is_contiguous("k")
    most = VECTOR_BYTES if along_k else max(1, min(4, 32 // product.rows)) * bytes_of(weight.nominal)
    vector = weight.vector("k" if along_k else product.column, most)
    known = product.columns if isinstance(product.columns, int) else 1 << 14
    count = product.batches.count if isinstance(product.batches.count, int) else 1
    if along_k:
        lanes = 1
        while lanes < 4 and count * -(-known // (2 * lanes)) >= 16 * gpu.multiprocessors:
            lanes *= 2
    else:
        lanes = WARP
        while lanes * vector * bytes_of(weight.nominal) > 32 and lanes > 1:
            if count * -(-known // (lanes * vector)) >= gpu.multiprocessors:
                break
            lanes //= 2
    warps = 16
    k = product.k if isinstance(product.k, int) else 1 << 12
    k_lanes = WARP // lanes * (vector if along_k else 1)
    while warps > 1 and k_lanes * warps > max(k, 1):
        warps //= 2
    plan = _Plan(along_k, vector, lanes, warps)
    while plan.warps > 1 and plan.sums(product.rows) * bytes_of(product.dtype) > gpu.shared_bytes:
        plan = replace(plan, warps=plan.warps // 2)
    return plan


class _Block:
    """The work of a block, while it is built."""

    def __init__(self, product: Gemv, plan: _Plan, at: Coordinates, first: Expr, thread: Expr) -> None:
        self.product, self.plan, self.at, self.first, self.thread = product, plan, at, first, thread
        self.warp = T.bind(tirx.floordiv(thread, WARP))
        lane = tirx.floormod(thread, WARP)
        self.column_lane = T.bind(tirx.floormod(lane, plan.column_lanes))
        self.k_lane = T.bind(tirx.floordiv(lane, plan.column_lanes))
        self.column = T.bind(first + self.column_lane * plan.own_columns)
        self.own = T.bind(int64((self.warp * plan.k_lanes + self.k_lane) * plan.own_k))
        self.count = product.rows * plan.own_columns

    def emit(self) -> None:
        product, plan = self.product, self.plan
        sums = local(self.count, product.dtype)
        with unrolled(self.count) as i:
            T.buffer_store(sums, tirx.const(0, product.dtype), [i])
        steps = ceil_div(product.k, plan.step * _IN_FLIGHT)
        loaded = local(_IN_FLIGHT * plan.vector, product.weight.dtype)
        with T.serial(int64(steps)) as step:
            with unrolled(_IN_FLIGHT) as turn:
                self._load(loaded, turn, self._k(step, turn))
            with unrolled(_IN_FLIGHT) as turn:
                self._multiply(sums, loaded, turn, self._k(step, turn))
        self._add_lanes(sums)
        parts = T.alloc_buffer((plan.sums(product.rows),), product.dtype, scope=SHARED)
        with T.If(tirx.EQ(self.k_lane, 0)), T.Then(), unrolled(product.rows) as row, unrolled(plan.own_columns) as c:
            index = (self.warp * product.rows + row) * plan.block_columns + self.column_lane * plan.own_columns + c
            T.buffer_store(parts, sums[row * plan.own_columns + c], [index])
        barrier()
        self._store(parts)

    def _k(self, step: Expr, turn: Expr) -> Expr:
        return (step * _IN_FLIGHT + turn) * self.plan.step + self.own

    def _load(self, loaded: Expr, turn: Expr, k: Expr) -> None:
        product, plan = self.product, self.plan
        weight = product.weight
        conditions = [] if product.batches.exists is None else [product.batches.exists]
        if not divides(product.k, plan.step * _IN_FLIGHT):
            conditions.append(k < product.k)
        if not divides(product.columns, plan.block_columns):
            conditions.append(self.column < product.columns)
        place = {**self.at, product.column: self.column, "k": k}
        value = weight.data[lane_indices(weight.address(place), plan.vector)]
        here = [lane_indices(turn * plan.vector, plan.vector)]
        if not conditions:
            T.buffer_store(loaded, value, here)
            return
        with T.If(tirx.all(*conditions)):
            with T.Then():
                T.buffer_store(loaded, value, here)
            with T.Else(), unrolled(plan.vector) as v:
                T.buffer_store(loaded, tirx.const(0, weight.dtype), [turn * plan.vector + v])

    def _multiply(self, sums: Expr, loaded: Expr, turn: Expr, k: Expr) -> None:
        product, plan = self.product, self.plan
        few = product.few
        # A step beyond the end multiplies zeros by what the last k has: nothing, but an infinity would make it NaN.
        beyond = not divides(product.k, plan.step * _IN_FLIGHT) or product.batches.exists is not None
        wide = min(plan.own_k, few.vector("k")) if few.is_contiguous("k") else 1
        with unrolled(product.rows) as row:
            held = local(plan.own_k, few.dtype)
            for start in range(0, plan.own_k, wide):
                place = {**self.at, product.row: int64(row), "k": k + start}
                value = few.data[lane_indices(few.address(place), wide)]
                if not beyond:
                    T.buffer_store(held, value, [lane_indices(tirx.const(start, "int32"), wide)])
                    continue
                conditions = [place["k"] < product.k]
                if product.batches.exists is not None:
                    conditions.append(product.batches.exists)
                with T.If(tirx.all(*conditions)):
                    with T.Then():
                        T.buffer_store(held, value, [lane_indices(tirx.const(start, "int32"), wide)])
                    with T.Else(), unrolled(wide) as v:
                        T.buffer_store(held, tirx.const(0, few.dtype), [start + v])
            with unrolled(plan.vector) as v:
                column, inner = (tirx.const(0, "int32"), v) if plan.along_k else (v, tirx.const(0, "int32"))
                at = row * plan.own_columns + column
                a = few.converted(held[inner], product.dtype)
                b = product.weight.converted(loaded[turn * plan.vector + v], product.dtype)
                T.buffer_store(sums, sums[at] + a * b, [at])

    def _add_lanes(self, sums: Expr) -> None:
        """Lanes that share k and columns: the first of each has the total."""
        distance = self.plan.column_lanes
        mask = T.uint32(0xFFFFFFFF)
        while distance < WARP:
            with unrolled(self.count) as i:
                other = T.tvm_warp_shuffle_xor(mask, sums[i], distance, WARP, WARP)
                T.buffer_store(sums, sums[i] + other, [i])
            distance *= 2

    def _store(self, parts: Expr) -> None:
        product, plan = self.product, self.plan
        each = product.rows * plan.block_columns
        turns = -(-each // plan.threads)
        total = local(1, product.dtype)
        with unrolled(turns) as turn:
            number = T.bind(turn * plan.threads + self.thread)
            row, column = tirx.floordiv(number, plan.block_columns), tirx.floormod(number, plan.block_columns)
            conditions: list[Expr | None] = [product.batches.exists]
            if each % plan.threads:
                conditions.append(number < each)
            inside = number if each % plan.threads == 0 else tirx.min(number, each - 1)
            T.buffer_store(total, tirx.const(0, product.dtype), [0])
            with unrolled(plan.warps) as warp:
                T.buffer_store(total, total[0] + parts[warp * each + inside], [0])
            end = None if divides(product.columns, plan.block_columns) else product.columns
            product.writer.write(
                [lambda: total[0]],
                {**self.at, product.row: int64(row), product.column: self.first + column},
                product.column,
                conditions,
                end,
            )


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
