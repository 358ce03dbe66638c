"""SIMT attention in float32 without tensor cores: not rounded to tf32, on every GPU, for every type.

A block has a tile of queries; 16 threads share a row of scores. Tiles of keys and of values use the same shared memory
one after the other; probabilities are exchanged in shared memory of their own. Rows in shared memory are padded to
avoid bank conflicts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.problem import AttentionProblem
from ....errors import EncodingError
from ....target.element_types import HALF_TYPES
from ....target.gpu_target import GpuTarget
from ...attention.attention_tile import LOWEST
from ...core.builder import Expr, ceil_div, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.dialect import has_ptx
from ..core.expression import emit
from ..core.launch import SharedMemory, local, to_int32, unrolled
from ..tile.register_tile import add, reduce_lanes
from ..tile.softmax import average_factor, averaged
from .attention_plan import AttentionPlan, grouped_heads
from .attention_tensors import DenseTensors, kernel_of, require_supported
from .heads import GpuHeads
from .key_values import tiles_of

ROW_THREADS = 16
_QUAD = 4
_ROW_LANES = (1, 2, 4, 8)
"""Shuffle distances between the lanes of a row."""


@dataclass(frozen=True)
class SimtPlan:
    """Tiling of a SIMT attention."""

    rows: int  # queries of a block
    keys: int  # keys of a tile, a multiple of 16
    thread_rows: int

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return self.rows // self.thread_rows * ROW_THREADS


PLANS = (SimtPlan(64, 64, 4), SimtPlan(32, 64, 2), SimtPlan(16, 64, 1), SimtPlan(16, 16, 1))
"""Plans in the order of decreasing tiles: large ones read shared memory least, small ones need least of it."""


def _pitch(width: int) -> int:
    """Pitch of rows in floats: an odd multiple of four, to avoid bank conflicts."""
    quads = ceil_div(width, _QUAD)
    return (quads + 1 + quads % 2) * _QUAD


def _shared_bytes(plan: SimtPlan, d: int, e: int) -> int:
    tiles = plan.rows * _pitch(d) + plan.keys * max(_pitch(d), _pitch(e)) + plan.rows * _pitch(plan.keys)
    return tiles * 4


def min_shared_bytes(width: int) -> int:
    """Bytes of shared memory that attention with heads of a width needs at least."""
    return min(_shared_bytes(plan, width, width) for plan in PLANS)


def choose_simt_plan(problem: AttentionProblem, gpu: GpuTarget, heads_per_tile: int) -> SimtPlan:
    """Choose a plan: the largest tiles that occupy the GPU."""
    sizes: dict[str, Any] = dict(problem.sizes)
    fitting = [p for p in PLANS if _shared_bytes(p, sizes["d"], sizes["e"]) <= gpu.shared_bytes]
    if not fitting:
        raise EncodingError(f"attention on {gpu.arch}: heads of {sizes['d']} and {sizes['e']} exceed shared memory")
    if not isinstance(sizes["m"], int) or not isinstance(sizes["b"], int):
        return fitting[min(1, len(fitting) - 1)]
    groups, rows = sizes["b"] * sizes["h"] // heads_per_tile, sizes["m"] * heads_per_tile
    occupying = [p for p in fitting if ceil_div(rows, p.rows) * groups >= gpu.multiprocessors]
    return occupying[0] if occupying else next((p for p in fitting if p.rows == 16), fitting[-1])


def simt_attention_kernel(problem: AttentionProblem, gpu: GpuTarget, plan: SimtPlan | None = None) -> tirx.PrimFunc:
    """Kernel of an attention for any GPU, one launch; `AttentionProblem` documents its parameters.

    Raises
    ------
    EncodingError
        If an operand's type is not float32, float16 or bfloat16, an extent is 0, or a tile does not fit shared memory.
    """
    tensors = (problem.query, problem.key, problem.value, problem.result)
    types = {operand.dtype for operand in tensors}
    reason = (
        "" if types <= {"float32", *HALF_TYPES} else f"element types {sorted(types)}, expected float32 or {HALF_TYPES}"
    )
    if 0 in dict(problem.sizes).values():
        reason = f"an extent is 0 in {dict(problem.sizes)}"
    require_supported(problem, gpu, reason)
    heads_per_tile = grouped_heads(problem, 2 * ROW_THREADS)
    tiling = plan or choose_simt_plan(problem, gpu, heads_per_tile)
    common = AttentionPlan(tiling.rows, tiling.keys, heads_per_tile=heads_per_tile)
    return kernel_of("attention", problem, common, gpu, lambda tensors: _Kernel(tensors, tiling).emit(), raw=False)


class _Kernel:
    """Writer of the kernel."""

    def __init__(self, tensors: DenseTensors, plan: SimtPlan) -> None:
        self.tensors, self.plan = tensors, plan
        self.d, self.e = int(tensors.sizes["d"]), int(tensors.sizes["e"])
        self.columns = ceil_div(self.e, ROW_THREADS * _QUAD)
        """Groups of four columns of values per thread."""
        shared = self.shared = SharedMemory()
        self.q_at = shared.reserve(plan.rows * _pitch(self.d) * 4)
        self.k_at = shared.reserve(plan.keys * max(_pitch(self.d), _pitch(self.e)) * 4)
        self.p_at = shared.reserve(plan.rows * _pitch(plan.keys) * 4)

    def emit(self) -> None:
        """Write the launch."""
        with self.tensors.launch(self.plan.threads, self.shared) as place:
            self._block(place.thread)

    def _block(self, thread: Expr) -> None:
        tensors, plan, rows, self.thread = self.tensors, self.plan, self.tensors.rows, thread
        self.row, self.at, self.at_keys = tensors.row, tensors.at, tensors.at_keys
        visible = tensors.visible()
        self.end = T.bind(visible) if not isinstance(visible, int) else visible
        self.lane = T.bind(tirx.floormod(self.thread, ROW_THREADS))
        self.first_row = T.bind(tirx.floordiv(self.thread, ROW_THREADS) * plan.thread_rows)
        """The thread's first row in the tile."""
        count, keys = plan.thread_rows, plan.keys // ROW_THREADS
        self.scores = local(count * keys, "float32")
        self.sums = local(count * self.columns * _QUAD, "float32")
        self.row_max, self.row_sum, self.new_max, self.rescale = (local(count, "float32") for _ in range(4))
        self.left, self.right = local(count * _QUAD, "float32"), local(_QUAD * max(keys, _QUAD), "float32")
        for i in range(count):
            T.buffer_store(self.row_max, T.float32(-math.inf), [i])
            T.buffer_store(self.row_sum, T.float32(0), [i])
        with unrolled(count * self.columns * _QUAD) as i:
            T.buffer_store(self.sums, T.float32(0), [i])
        self._load(tensors.query, self.q_at, self.at, "row", self.row, to_int32(rows.count), plan.rows, self.d)
        self._separate_accesses()
        end = self.end
        with T.serial(tiles_of(end, plan.keys)) as tile:
            first = T.bind(tile * plan.keys)
            n = to_int32(tensors.sizes["n"])
            self._load(tensors.key, self.k_at, self.at_keys, "n", first, n, plan.keys, self.d)
            ptx.block_barrier()
            self._compute_scores()
            self._separate_accesses()
            self._softmax(first)
            ptx.block_barrier()
            self._load(tensors.value, self.k_at, self.at_keys, "n", first, n, plan.keys, self.e)
            ptx.block_barrier()
            self._accumulate_values()
            ptx.block_barrier()
        self._store()

    def _separate_accesses(self) -> None:
        """A barrier between accesses of two tiles, which TVM takes for one buffer in other languages than CUDA.

        It would insert the barrier itself, but not within the condition that blocks of a symbolic grid have.
        """
        if not has_ptx():
            ptx.block_barrier()

    # -- tiles

    def _load(
        self, view: GpuHeads, offset: int, at: Coordinates, row_dim: str, first: Expr, end: Expr, rows: int, width: int
    ) -> None:
        """Load a tile into shared memory as float32, by all threads; zeros beyond the extent."""
        quads, pitch = ceil_div(width, _QUAD), _pitch(width)
        values = local(_QUAD, "float32")
        is_vector = view.nominal == "float32" and width % _QUAD == 0
        is_vector = is_vector and view.is_contiguous("k") and view.alignment("k", 16) == 16
        with T.serial(ceil_div(rows * quads, self.plan.threads)) as iteration:
            item = T.bind(iteration * self.plan.threads + self.thread)
            with when(item < rows * quads):
                row, quad = T.bind(T.truncdiv(item, quads)), T.bind(T.truncmod(item, quads))
                exists = first + row < end
                at_row = {**at, row_dim: T.Cast("int64", first + row)}
                for i in range(_QUAD):
                    T.buffer_store(values, T.float32(0), [i])
                with when(exists):
                    if is_vector:
                        source = view.address({**at_row, "k": T.Cast("int64", quad * _QUAD)})
                        pointer = T.address_of(view.data[source])
                        ptx.load_global([values[i] for i in range(_QUAD)], pointer, "f32", is_constant=False)
                    else:
                        for i in range(_QUAD):
                            self._load_element(
                                view, {**at_row, "k": T.Cast("int64", quad * _QUAD + i)}, values, i, width
                            )
                target = self.shared.at(offset + (row * pitch + quad * _QUAD) * 4)
                ptx.store_shared(target, [values[i] for i in range(_QUAD)], "f32")

    def _load_element(self, view: GpuHeads, at: Coordinates, values: Any, i: int, width: int) -> None:
        value = T.cast(view.data[view.address(at)], "float32")
        if width % _QUAD:
            with when(at["k"] < width):
                T.buffer_store(values, value, [i])
        else:
            T.buffer_store(values, value, [i])

    def _read(self, buffer: Any, first: int, offset: Expr) -> None:
        """Load four neighbouring floats from shared memory."""
        ptx.load_shared([buffer[first + i] for i in range(_QUAD)], self.shared.at(offset), "f32")

    def _compute_scores(self) -> None:
        """Compute scores of the thread's keys ``lane``, ``lane + 16``, ..."""
        thread_rows, keys, pitch = self.plan.thread_rows, self.plan.keys // ROW_THREADS, _pitch(self.d)
        with unrolled(thread_rows * keys) as i:
            T.buffer_store(self.scores, T.float32(0), [i])
        query_offset = T.bind(self.q_at + self.first_row * (pitch * 4))
        key_offset = T.bind(self.k_at + self.lane * (pitch * 4))
        with T.serial(ceil_div(self.d, _QUAD)) as step:
            for i in range(thread_rows):
                self._read(self.left, i * _QUAD, query_offset + step * (_QUAD * 4) + i * pitch * 4)
            for j in range(keys):
                self._read(self.right, j * _QUAD, key_offset + step * (_QUAD * 4) + j * ROW_THREADS * pitch * 4)
            for i in range(thread_rows):
                for j in range(keys):
                    total: Expr = self.scores[i * keys + j]
                    for k in range(_QUAD):
                        total = total + self.left[i * _QUAD + k] * self.right[j * _QUAD + k]
                    T.buffer_store(self.scores, total, [i * keys + j])

    def _softmax(self, first: Expr) -> None:
        """Update the online softmax: store probabilities to shared memory, and rescale accumulators."""
        tensors, thread_rows, keys = self.tensors, self.plan.thread_rows, self.plan.keys // ROW_THREADS
        rows, sizes = tensors.rows, tensors.sizes
        dtypes = ["float32", *(view.nominal for view in tensors.masks)]
        for i in range(thread_rows):
            row = T.bind(self.row + self.first_row + i)
            visible = tensors.visible_to(row, self.end)
            if tensors.is_causal:
                visible = T.bind(visible)
            coordinates: dict[str, Expr] = {"b": self.at["b"]}
            if tensors.masks:
                clamped_row = T.min(T.Cast("int64", row), int64(rows.count - 1))
                coordinates = {**coordinates, **rows.place(clamped_row, self.at["group"])}
            T.buffer_store(self.new_max, self.row_max[i], [i])
            for j in range(keys):
                column = T.bind(first + (j * ROW_THREADS) + self.lane)
                key = T.min(T.Cast("int64", column), int64(sizes["n"] - 1))
                masks = [view.data[view.address({**coordinates, "n": key})] for view in tensors.masks]
                value = emit(tensors.scores, [self.scores[i * keys + j], *masks], dtypes)
                T.buffer_store(self.scores, value, [i * keys + j])
                masked = T.if_then_else(column < visible, self.scores[i * keys + j], T.float32(-math.inf))
                T.buffer_store(self.scores, masked, [i * keys + j])
                T.buffer_store(self.new_max, T.max(self.new_max[i], self.scores[i * keys + j]), [i])
            reduce_lanes(self.new_max, i, T.max, _ROW_LANES)
            # -inf - -inf is NaN.
            T.buffer_store(self.new_max, T.max(self.new_max[i], T.float32(LOWEST)), [i])
            T.buffer_store(self.rescale, T.exp(self.row_max[i] - self.new_max[i]), [i])
            T.buffer_store(self.row_max, self.new_max[i], [i])
            T.buffer_store(self.row_sum, self.row_sum[i] * self.rescale[i], [i])
            target = self.p_at + (self.first_row + i) * (_pitch(self.plan.keys) * 4)
            for j in range(keys):
                T.buffer_store(self.scores, T.exp(self.scores[i * keys + j] - self.new_max[i]), [i * keys + j])
                T.buffer_store(self.row_sum, self.row_sum[i] + self.scores[i * keys + j], [i])
                ptx.store_shared(
                    self.shared.at(target + (j * ROW_THREADS + self.lane) * 4), [self.scores[i * keys + j]], "f32"
                )
            width = self.columns * _QUAD
            for c in range(width):
                T.buffer_store(self.sums, self.sums[i * width + c] * self.rescale[i], [i * width + c])

    def _accumulate_values(self) -> None:
        """Accumulate the tile's values: four neighbouring columns per thread, 64 columns at a time."""
        thread_rows, pitch, width = self.plan.thread_rows, _pitch(self.e), self.columns * _QUAD
        offset = T.bind(self.p_at + self.first_row * (_pitch(self.plan.keys) * 4))
        with T.serial(self.plan.keys // _QUAD) as step:
            for i in range(thread_rows):
                self._read(self.left, i * _QUAD, offset + step * (_QUAD * 4) + i * _pitch(self.plan.keys) * 4)
            for c in range(self.columns):
                # Columns beyond the last one are clamped, and not stored.
                column = T.min(self.lane * _QUAD + c * ROW_THREADS * _QUAD, (ceil_div(self.e, _QUAD) - 1) * _QUAD)
                for k in range(_QUAD):
                    self._read(self.right, k * _QUAD, self.k_at + ((step * _QUAD + k) * pitch + column) * 4)
                for i in range(thread_rows):
                    for q in range(_QUAD):
                        number = i * width + c * _QUAD + q
                        total: Expr = self.sums[number]
                        for k in range(_QUAD):
                            total = total + self.left[i * _QUAD + k] * self.right[k * _QUAD + q]
                        T.buffer_store(self.sums, total, [number])

    def _store(self) -> None:
        tensors, width = self.tensors, self.columns * _QUAD
        result = tensors.result
        for i in range(self.plan.thread_rows):
            reduce_lanes(self.row_sum, i, add, _ROW_LANES)
            T.buffer_store(self.rescale, average_factor(self.row_sum[i], tensors.nan_to_zero), [i])
            row = T.bind(self.row + self.first_row + i)
            with when(row < to_int32(tensors.rows.count)), unrolled(width) as c:
                column = T.bind(
                    self.lane * _QUAD + tirx.floordiv(c, _QUAD) * (ROW_THREADS * _QUAD) + tirx.floormod(c, 4)
                )
                with when(column < self.e):
                    value = averaged(self.sums[i * width + c], self.rescale[i], tensors.nan_to_zero)
                    at = {**self.at, "row": T.Cast("int64", row), "k": T.Cast("int64", column)}
                    stored = value if result.nominal == "float32" else T.Cast(result.nominal, value)
                    T.buffer_store(result.data, stored, [result.address(at)])
