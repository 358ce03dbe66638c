"""GEMV on Hopper: a row by a packed weight that fits in the shared memory of all multiprocessors.

Kernels of a decode step of one text are short: what counts is the time from the end of the launch before to the end of
this one. So a block has 16 columns and all of k, and needs no cluster. All of the weight is in flight before that
launch has ended: each warp copies its part to shared memory of its own. Rows and operands of the epilogue are loaded
next, and the rows multiplied by ``mma.sync``: columns are its m dimension, rows its n dimension.

In a decode step of a mixture on an H200 (Qwen3-30B-A3B, one text), a row by 2,048 x 5,120 takes 3.0 us after the launch
before it, 8.3 by `skinny_gemm` (6.9 in a dense model); by 4,096 x 2,048 3.4 and 4.1. On each of two GPUs, by 2,048 x
2,560 2.7 and 4.3, by 2,048 x 2,048 2.5 and 3.6; of a llama of 8 billion weights, by 2,048 x 4,096 3.0 and 4.8. (The
models of `apps/bench/llm_bench/tensor_parallel.py`; differences of kernels' ends, by torch.profiler.)
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import MatmulProblem
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, enable_pdl, launch, local
from ..tile.ring import BARRIER_BYTES, Ring
from .product_parameters import ProductParameters

MAX_ROWS = 1
"""Maximum rows. Eight cost an instruction the same, but by 4,096 x 2,048 they take 6.7 us, 5.2 by `skinny_gemm`."""
COLUMNS = 16
"""Columns of a block, those of an instruction's m dimension."""
WARPS = 8
"""Warps of a block, which split k."""
TILE_K = SWIZZLED_BYTES // 2
"""The k of a tile of the weight."""
TILE_BYTES = COLUMNS * SWIZZLED_BYTES
MIN_BUSY = 0.25
"""Minimum blocks per multiprocessor: with fewer, blocks that split k load more at a time."""
_STEPS = TILE_K // 16
"""Instructions of a tile."""
_TILES_IN_FLIGHT = 4
"""Tiles of a warp whose rows are in registers at a time."""
_RESERVED_BYTES = 1 << 10
"""Shared memory of a block that the driver takes."""


def unsupported_reason(problem: MatmulProblem, gpu: GpuTarget) -> str:
    """Reason why `packed_gemv_kernel` does not support a problem of `skinny_gemm`; empty if it does."""
    lhs, rhs, result = problem.lhs, problem.rhs, problem.result
    sizes = [lhs.size("m"), rhs.size("n"), rhs.size("k")]
    if (lhs.index_map, result.index_map, len(rhs.index_map)) != (("m", "k"), ("m", "n"), 2):
        return "there are batch dimensions"
    if problem.second is not None or problem.sent is not None or problem.init is not None:
        return "a second product, a result that is sent, and initial values are left to other kernels"
    if lhs.dtype not in HALF_TYPES or rhs.dtype != lhs.dtype or problem.acc_dtype != "float32":
        return f"found {lhs.dtype} * {rhs.dtype} -> {problem.acc_dtype}, expected 16-bit floats and sums of float32"
    if not (lhs.layout.is_identity and rhs.layout.swizzle and all(isinstance(size, int) for size in sizes)):
        return "expected row-major rows, a packed weight, and static extents"
    m, n, k = (int(size) for size in sizes)
    if not 0 < m <= MAX_ROWS or n < 1 or k < 1 or k % TILE_K:
        return f"found {m} rows and a k of {k}, expected at most {MAX_ROWS} and a multiple of {TILE_K}"
    blocks, size = ceil_div(n, COLUMNS), shared_bytes(m, k)
    if blocks < MIN_BUSY * gpu.multiprocessors:
        return f"{blocks} blocks leave most of {gpu.multiprocessors} multiprocessors idle"
    blocks_per_sm = ceil_div(blocks, gpu.multiprocessors)
    if size > gpu.shared_bytes or blocks_per_sm * (size + _RESERVED_BYTES) > gpu.shared_bytes_sm:
        return f"{blocks_per_sm} blocks of {size} bytes do not fit a multiprocessor"
    return ""


def shared_bytes(m: int, k: int) -> int:
    """Shared memory of a block: its columns of the weight, accumulators and barriers."""
    tiles = ceil_div(k // TILE_K, WARPS)
    return WARPS * (tiles * (TILE_BYTES + BARRIER_BYTES) + m * COLUMNS * 4)


def packed_gemv_kernel(problem: MatmulProblem) -> tirx.PrimFunc:
    """Kernel of a product without `unsupported_reason`, one launch; `MatmulProblem` documents its parameters.

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
            _Kernel(parameters).emit()
    return enable_pdl(parameters.tied(function.result), [1])


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, parameters: ProductParameters) -> None:
        self.lhs, self.rhs, self.writer = parameters.lhs, parameters.rhs, parameters.writer
        self.m, self.n, k = parameters.sizes
        self.tiles = k // TILE_K
        self.own_tiles = ceil_div(self.tiles, WARPS)
        self.vector = min(4, self.writer.result.vector("n")) if self.writer.result.is_contiguous("n") else 1
        self.vectors = COLUMNS // self.vector  # of a row of the block's results

    def emit(self) -> None:
        """Write the launch."""
        self.shared = SharedMemory()
        self.weights_at = self.shared.reserve(WARPS * self.own_tiles * TILE_BYTES, SWIZZLED_ALIGN)
        self.sums_at = self.shared.reserve(WARPS * self.m * COLUMNS * 4)
        self.barriers = Ring(self.shared, WARPS * self.own_tiles, producers=1)
        with launch(ceil_div(self.n, COLUMNS), WARPS * WARP) as place:
            self.shared.open()
            self.column, self.thread = T.bind(T.Cast("int64", place.block) * COLUMNS), place.thread
            self.warp, self.lane = T.bind(tirx.floordiv(place.thread, WARP)), T.bind(tirx.floormod(place.thread, WARP))
            self.high, self.low = T.bind(tirx.floordiv(self.lane, 4)), T.bind(tirx.floormod(self.lane, 4))
            self._block()

    def _block(self) -> None:
        ptx.launch_dependents()
        with when(self.lane == 0):
            for index in range(self.own_tiles):
                ptx.barrier_init(self.barriers.full(self._place(index)), 1)
            ptx.barrier_init_fence()
            for index in range(self.own_tiles):
                with when(self._exists(index)):
                    self._copy(index)
        ptx.warp_barrier()
        self.totals = local(8, "float32")  # of even and of odd steps, which do not wait for each other
        for i in range(8):
            T.buffer_store(self.totals, T.float32(0), [i])
        ptx.griddepcontrol_wait()
        self._multiply()
        self._store()

    def _tile(self, index: int) -> Expr:
        """Number of a warp's tile among those of all warps."""
        return index * WARPS + self.warp

    def _exists(self, index: int) -> Expr:
        """Predicate of a warp's tile."""
        return True if (index + 1) * WARPS <= self.tiles else self._tile(index) < self.tiles

    def _place(self, index: int) -> Expr:
        """Place in shared memory of a warp's tile."""
        return self.warp * self.own_tiles + index

    def _copy(self, index: int) -> None:
        """Issue the copy of a warp's tile, by one thread."""
        full = self.barriers.full(self._place(index))
        ptx.barrier_expect(full, TILE_BYTES)
        source = self.rhs.address({"n": self.column, "k": T.Cast("int64", self._tile(index)) * TILE_K})
        target = self.shared.at(self.weights_at + self._place(index) * TILE_BYTES)
        ptx.bulk_load(target, T.address_of(self.rhs.data[source]), TILE_BYTES, full)

    def _multiply(self) -> None:
        """Multiply a warp's tiles; rows are loaded some tiles ahead."""
        batches = [range(self.own_tiles)[i : i + _TILES_IN_FLIGHT] for i in range(0, self.own_tiles, _TILES_IN_FLIGHT)]
        rows = [local(_TILES_IN_FLIGHT * _STEPS * 2, "uint32") for _ in batches[:2]]
        self._load_rows(rows[0], batches[0])
        self._load_operands()
        self.fragments = local(_STEPS * 4, "uint32")
        line = tirx.floormod(self.lane, 16)
        self.line, self.swizzle = T.bind(line * SWIZZLED_BYTES), T.bind(tirx.floormod(self.lane, 8))
        self.first_chunk = T.bind(tirx.floordiv(self.lane, 16))
        for number, batch in enumerate(batches):
            if number + 1 < len(batches):
                self._load_rows(rows[(number + 1) % 2], batches[number + 1])
            for i, index in enumerate(batch):
                with when(self._exists(index)):
                    self._multiply_tile(index, rows[number % 2], i * _STEPS * 2)

    def _load_rows(self, registers: Any, batch: range) -> None:
        """Load a warp's part of the rows for some tiles, zeros for missing rows."""
        for i in range(len(batch) * _STEPS * 2):
            T.buffer_store(registers, T.uint32(0), [i])
        with when(self.high < self.m):
            for i, index in enumerate(batch):
                with when(self._exists(index)):
                    first = T.bind(T.Cast("int64", self._tile(index) * TILE_K + self.low * 2))
                    for word in range(_STEPS * 2):
                        at = {"m": T.Cast("int64", self.high), "k": first + word * 8}
                        address = T.address_of(self.lhs.data[self.lhs.address(at)])
                        ptx.load_global([registers[i * _STEPS * 2 + word]], address, is_constant=False)

    def _multiply_tile(self, index: int, rows: Any, begin: int) -> None:
        """Multiply a tile, given its rows from register `begin` on."""
        ptx.barrier_wait(self.barriers.full(self._place(index)), 0)
        tile = T.bind(self.weights_at + self._place(index) * TILE_BYTES + self.line)
        fragments = [[self.fragments[step * 4 + i] for i in range(4)] for step in range(_STEPS)]
        for step, fragment in enumerate(fragments):
            chunk = T.bitwise_xor(self.first_chunk + step * 2, self.swizzle)
            ptx.load_matrices(fragment, self.shared.at(tile + chunk * CHUNK_BYTES))
        for step, fragment in enumerate(fragments):
            right = [rows[begin + 2 * step + i] for i in range(2)]
            totals = [self.totals[step % 2 * 4 + i] for i in range(4)]
            ptx.multiply_fragments(totals, fragment, right, (self.rhs.nominal, self.rhs.nominal))

    def _load_operands(self) -> None:
        """Load the epilogue's operands for the vector that the thread stores, if it is not beyond the columns."""
        row, column = tirx.floordiv(self.thread, self.vectors), tirx.floormod(self.thread, self.vectors) * self.vector
        self.own_row, self.own_column = T.bind(row), T.bind(column)
        self.at = {"m": T.Cast("int64", self.own_row), "n": T.bind(self.column + T.Cast("int64", self.own_column))}
        self.operands = self.writer.registers(1, self.vector) if self.n % COLUMNS == 0 else None
        if self.operands is not None:
            with when(self.thread < self.m * self.vectors):
                self.writer.load(self.operands, tirx.const(0, "int32"), self.at, self.vector)

    def _store(self) -> None:
        """Reduce over the warps in order, and store."""
        for c in range(2):
            row = T.bind(self.low * 2 + c)
            with when(row < self.m):
                begin = T.bind(self.sums_at + ((self.warp * self.m + row) * COLUMNS + self.high) * 4)
                for half in range(2):
                    total = self.totals[half * 2 + c] + self.totals[4 + half * 2 + c]
                    ptx.store_shared(self.shared.at(begin + half * 32), [tirx.reinterpret("uint32", total)])
        ptx.block_barrier()
        with when(self.thread < self.m * self.vectors):
            totals, part = local(self.vector, "float32"), local(self.vector, "float32")
            for warp in range(WARPS):
                offset = self.sums_at + ((warp * self.m + self.own_row) * COLUMNS + self.own_column) * 4
                ptx.load_shared([part[i] for i in range(self.vector)], self.shared.at(offset), "f32")
                for i in range(self.vector):
                    T.buffer_store(totals, part[i] if warp == 0 else totals[i] + part[i], [i])
            end, loaded = (int64(self.n), None) if self.operands is None else (None, (self.operands, 0))
            reads = [partial(lambda i: totals[i], i) for i in range(self.vector)]
            self.writer.write(reads, self.at, "n", [], end, loaded)
