"""GEMV on Hopper: up to eight rows by a packed weight that fits in the shared memory of all multiprocessors.

Kernels of a decode step of one text are short: what counts is the time from the end of the launch before to the end of
this one. So blocks have all of k, for 16 columns, and need no cluster. Each warp has a part of the weight's tiles in
flight before that launch has ended, in shared memory of its own. Then the rows are loaded to registers, and
multiplied by ``mma.sync``, whose operands are swapped: columns are its m dimension, and rows its n dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import SharedMemory, enable_pdl, launch, local
from ..tile.ring import Ring
from .product_parameters import ProductParameters

MAX_ROWS = 8
"""Maximum rows, those of an instruction's n dimension."""
COLUMNS = 16
"""Columns of a block, those of an instruction's m dimension."""
WARPS = 8
"""Warps of a block, which split k."""
_STEP = SWIZZLED_BYTES // 2
"""The k of a tile of the weight."""
_TILE_BYTES = COLUMNS * SWIZZLED_BYTES
_BATCH = 4
"""Tiles of a warp whose rows are in registers at a time."""
MIN_STAGES = 1000
RELEASES_LATE = False
_OTHER_BYTES = 3 << 10
"""Shared memory of a block for accumulators, barriers and the driver."""


@dataclass(frozen=True)
class GemvPlan:
    """Distribution of work."""

    stages: int  # maximum tiles of a warp in flight


def gemv_plan(problem: MatmulProblem, gpu: GpuTarget) -> GemvPlan | None:
    """Plan of a product that `packed_gemv_kernel` computes; None if it does not, or other kernels take less time."""
    lhs, rhs, result = problem.lhs, problem.rhs, problem.result
    sizes = [lhs.size("m"), rhs.size("n"), rhs.size("k")]
    names = (lhs.index_map, result.index_map)
    is_plain = problem.second is None and problem.sent is None and problem.init is None
    if not (is_plain and gpu.tensor == "wgmma" and names == (("m", "k"), ("m", "n")) and len(rhs.index_map) == 2):
        return None
    if not all(isinstance(size, int) for size in sizes) or lhs.dtype != rhs.dtype or lhs.dtype not in HALF_TYPES:
        return None
    m, n, k = (int(size) for size in sizes)
    if not (0 < m <= MAX_ROWS and n > 0 and k > 0 and k % _STEP == 0 and lhs.layout.is_identity):
        return None
    if problem.acc_dtype != "float32" or not rhs.layout.swizzle:
        return None
    blocks_per_sm = ceil_div(ceil_div(n, COLUMNS), gpu.multiprocessors)
    stages = (gpu.shared_bytes_sm // blocks_per_sm - _OTHER_BYTES) // (WARPS * _TILE_BYTES)
    tiles = ceil_div(k // _STEP, WARPS)
    return GemvPlan(min(stages, tiles)) if stages >= min(tiles, MIN_STAGES) else None


def packed_gemv_kernel(problem: MatmulProblem, plan: GemvPlan) -> tirx.PrimFunc:
    """Kernel of a product with a plan, one launch; `MatmulProblem` documents its parameters.

    It supports programmatic dependent launch if the right operand is a constant.
    """
    function = Function("matmul", registers="local")
    with function:
        parameters = ProductParameters.declare(function, problem)
        with function.body():
            parameters.lhs.open(raw=True)
            parameters.rhs.open(raw=True)
            for view in parameters.writer.operands:
                view.open_for_gpu()
            _Kernel(parameters, plan).emit()
    return enable_pdl(parameters.tied(function.result), [1])


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, parameters: ProductParameters, plan: GemvPlan) -> None:
        self.lhs, self.rhs, self.writer = parameters.lhs, parameters.rhs, parameters.writer
        self.m, self.n, self.k = parameters.sizes
        self.tiles = self.k // _STEP
        self.own_tiles = ceil_div(self.tiles, WARPS)
        self.stages = min(plan.stages, self.own_tiles)

    def emit(self) -> None:
        """Write the launch."""
        self.shared = SharedMemory()
        self.weights_at = self.shared.reserve(WARPS * self.stages * _TILE_BYTES, 1024)
        self.sums_at = self.shared.reserve(WARPS * self.m * COLUMNS * 4)
        self.ring = Ring(self.shared, WARPS * self.stages, producers=1)
        with launch(ceil_div(self.n, COLUMNS), WARPS * WARP) as place:
            self.shared.open()
            self.column = T.bind(T.Cast("int64", place.block) * COLUMNS)
            self.thread = place.thread
            self.warp, self.lane = T.bind(tirx.floordiv(place.thread, WARP)), T.bind(tirx.floormod(place.thread, WARP))
            self._block()

    def _block(self) -> None:
        if not RELEASES_LATE:
            ptx.launch_dependents()
        with when(self.lane == 0):
            for stage in range(self.stages):
                ptx.barrier_init(self.ring.full(self.warp * self.stages + stage), 1)
            ptx.barrier_init_fence()
            for index in range(self.stages):
                self._copy(index)
        ptx.warp_barrier()
        self.totals = local(8, "float32")  # of even and of odd steps, which do not wait for each other
        for i in range(8):
            T.buffer_store(self.totals, T.float32(0), [i])
        ptx.griddepcontrol_wait()
        if RELEASES_LATE:
            ptx.launch_dependents()
        vector = min(4, self.writer.result.vector("n")) if self.writer.result.is_contiguous("n") else 1
        per_row = COLUMNS // vector
        self.vector, self.items = vector, self.m * per_row
        self.own_row, self.own = T.bind(tirx.floordiv(self.thread, per_row)), T.bind(tirx.floormod(self.thread, per_row) * vector)
        self.at = {"m": T.Cast("int64", self.own_row), "n": T.bind(self.column + T.Cast("int64", self.own))}
        self.operands = self.writer.registers(1, vector) if self.n % COLUMNS == 0 else None
        self._multiply_all()
        self._store()

    def _tile(self, index: int) -> Expr:
        """Number of a warp's tile."""
        return index * WARPS + self.warp

    def _exists(self, index: int) -> Expr:
        return True if (index + 1) * WARPS <= self.tiles else self._tile(index) < self.tiles

    def _stage(self, index: int) -> Expr:
        """Stage of a warp's tile."""
        return self.warp * self.stages + index % self.stages

    def _copy(self, index: int) -> None:
        """Issue the copy of a warp's tile, by one thread."""
        with when(self._exists(index)):
            stage = T.bind(self._stage(index))
            full = self.ring.full(stage)
            ptx.barrier_expect(full, _TILE_BYTES)
            source = self.rhs.address({"n": self.column, "k": T.Cast("int64", self._tile(index)) * _STEP})
            target = self.shared.at(self.weights_at + stage * _TILE_BYTES)
            ptx.bulk_load(target, T.address_of(self.rhs.data[source]), _TILE_BYTES, full)

    def _multiply_all(self) -> None:
        """Multiply a warp's tiles; rows are loaded a batch of tiles ahead."""
        words = _STEP // 16 * 2  # registers of the rows of a tile
        batches = [range(i, min(i + _BATCH, self.own_tiles)) for i in range(0, self.own_tiles, _BATCH)]
        rows = [local(_BATCH * words, "uint32") for _ in batches[:2]]
        self._load_rows(rows[0], batches[0], words)
        if self.operands is not None:
            with when(self.thread < self.items):
                self.writer.load(self.operands, tirx.const(0, "int32"), self.at, self.vector)
        self.fragments = local(16, "uint32")
        row = tirx.floormod(self.lane, 8)
        half, chunk = T.bind(tirx.floormod(tirx.floordiv(self.lane, 8), 2)), tirx.floordiv(self.lane, 16)
        self.line, self.swizzle, self.first_chunk = T.bind((row + half * 8) * SWIZZLED_BYTES), T.bind(row), T.bind(chunk)
        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                self._load_rows(rows[(number + 1) % 2], batches[number + 1], words)
            for i, index in enumerate(batch):
                with when(self._exists(index)):
                    self._multiply(index, rows[number % 2], i * words)

    def _load_rows(self, registers: Any, batch: range, words: int) -> None:
        """Load a warp's part of the rows for a batch of tiles, zeros for missing rows."""
        row, pair = tirx.floordiv(self.lane, 4), tirx.floormod(self.lane, 4) * 2
        for i in range(len(batch) * words):
            T.buffer_store(registers, T.uint32(0), [i])
        with when(row < self.m):
            for i, index in enumerate(batch):
                with when(self._exists(index)):
                    first = T.bind(T.Cast("int64", self._tile(index) * _STEP + pair))
                    for word in range(words):
                        at = {"m": T.Cast("int64", row), "k": first + word * 8}
                        address = T.address_of(self.lhs.data[self.lhs.address(at)])
                        ptx.load_global([registers[i * words + word]], address, is_constant=False)

    def _multiply(self, index: int, rows: Any, begin: int) -> None:
        """Multiply a tile, whose stage then gets a later one."""
        stage = T.bind(self._stage(index))
        ptx.barrier_wait(self.ring.full(stage), index // self.stages % 2)
        tile = T.bind(self.weights_at + stage * _TILE_BYTES + self.line)
        for step in range(_STEP // 16):
            chunk = T.bitwise_xor(self.first_chunk + step * 2, self.swizzle)
            fragment = [self.fragments[step * 4 + i] for i in range(4)]
            ptx.load_matrices(fragment, self.shared.at(tile + chunk * CHUNK_BYTES))
        for step in range(_STEP // 16):
            fragment = [self.fragments[step * 4 + i] for i in range(4)]
            right = [rows[begin + 2 * step + i] for i in range(2)]
            totals = [self.totals[step % 2 * 4 + i] for i in range(4)]
            ptx.multiply_fragments(totals, fragment, right, (self.rhs.nominal, self.rhs.nominal))
        if index + self.stages < self.own_tiles:
            ptx.warp_barrier()
            with when(self.lane == 0):
                self._copy(index + self.stages)

    def _store(self) -> None:
        """Reduce over the warps in order, and store."""
        column = tirx.floordiv(self.lane, 4)
        for c in range(2):
            row = T.bind(tirx.floormod(self.lane, 4) * 2 + c)
            with when(row < self.m):
                begin = T.bind(self.sums_at + ((self.warp * self.m + row) * COLUMNS + column) * 4)
                for half in range(2):
                    total = tirx.reinterpret("uint32", self.totals[half * 2 + c] + self.totals[4 + half * 2 + c])
                    ptx.store_shared(self.shared.at(begin + half * 32), [total])
        ptx.block_barrier()
        with when(self.thread < self.items):
            vector = self.vector
            totals, part = local(vector, "float32"), local(vector, "float32")
            for warp in range(WARPS):
                offset = self.sums_at + ((warp * self.m + self.own_row) * COLUMNS + self.own) * 4
                ptx.load_shared([part[i] for i in range(vector)], self.shared.at(offset), "f32")
                for i in range(vector):
                    T.buffer_store(totals, part[i] if warp == 0 else totals[i] + part[i], [i])
            end = None if self.operands is not None else int64(self.n)
            loaded = None if self.operands is None else (self.operands, tirx.const(0, "int32"))
            self.writer.write([partial(lambda i: totals[i], i) for i in range(vector)], self.at, "n", [], end, loaded)
