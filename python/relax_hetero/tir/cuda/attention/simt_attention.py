"""Attention by multiply-adds of plain threads, in float32: exact, on every GPU, for every type.

A block has a tile of queries; 16 threads share a row of scores. Tiles of keys and then of values take the same place in
shared memory, and the powers have another one, from which all threads read them for the sums of values. Rows in shared
memory are padded, so that threads that read neighbouring rows at a time find them in different banks.
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
from ...core.builder import Expr, Function, ceil_div, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.expression import emit
from ..core.launch import SharedMemory, enable_pdl, local, unrolled
from ..tile.register_tile import add, reduce_lanes
from ..tile.softmax import average_factor, averaged
from .attention_plan import AttentionPlan
from .attention_tensors import AttentionTensors, tiles_of, to_int32
from .heads import GpuHeads

SHARING = 16
"""Threads that share a row."""
_QUAD = 4
_ROW_LANES = (1, 2, 4, 8)
"""Distances between the lanes that share a row."""


@dataclass(frozen=True)
class SimtPlan:
    """How an attention of plain threads is cut.

    Attributes
    ----------
    rows : int
        Queries of a block.
    keys : int
        Number of keys of a tile, a multiple of 16.
    each : int
        Rows of a thread.
    """

    rows: int
    keys: int
    each: int

    @property
    def threads(self) -> int:
        """Number of threads of a block."""
        return self.rows // self.each * SHARING


PLANS = (SimtPlan(64, 64, 4), SimtPlan(32, 64, 2), SimtPlan(16, 64, 1), SimtPlan(16, 16, 1))
"""From the one that reads shared memory least to the one that needs least of it."""


def _pitch(width: int) -> int:
    """Floats between rows: an odd number of times four."""
    quads = ceil_div(width, _QUAD)
    return (quads + 1 + quads % 2) * _QUAD


def _shared_bytes(plan: SimtPlan, d: int, e: int) -> int:
    tiles = plan.rows * _pitch(d) + plan.keys * max(_pitch(d), _pitch(e)) + plan.rows * _pitch(plan.keys)
    return tiles * 4


def choose_simt_plan(problem: AttentionProblem, gpu: GpuTarget, heads_per_tile: int) -> SimtPlan:
    """The plan of a problem: large tiles, unless there are too few for the GPU."""
    sizes: dict[str, Any] = dict(problem.sizes)
    fitting = [p for p in PLANS if _shared_bytes(p, sizes["d"], sizes["e"]) <= gpu.shared_bytes]
    if not fitting:
        raise EncodingError(f"attention on {gpu.arch}: heads of {sizes['d']} and {sizes['e']} exceed shared memory")
    if not isinstance(sizes["m"], int) or not isinstance(sizes["b"], int):
        return fitting[min(1, len(fitting) - 1)]
    groups, rows = sizes["b"] * sizes["h"] // heads_per_tile, sizes["m"] * heads_per_tile
    busy = [p for p in fitting if ceil_div(rows, p.rows) * groups >= gpu.multiprocessors]
    return busy[0] if busy else next((p for p in fitting if p.rows == 16), fitting[-1])


def simt_attention_kernel(problem: AttentionProblem, gpu: GpuTarget, plan: SimtPlan | None = None) -> tirx.PrimFunc:
    """The kernel of an attention for any GPU, one launch; `AttentionProblem` says its parameters, it has no scratch.

    Raises
    ------
    EncodingError
        If an operand is of another type than float32, float16 or bfloat16, an extent is 0, or a row does not fit into
        shared memory.
    """
    tensors = (problem.query, problem.key, problem.value, problem.result)
    types = {operand.dtype for operand in tensors}
    if not types <= {"float32", *HALF_TYPES}:
        raise EncodingError(f"attention on {gpu.arch}: element types {sorted(types)}, expected float32 or {HALF_TYPES}")
    sizes: dict[str, Any] = dict(problem.sizes)
    if 0 in sizes.values():
        raise EncodingError(f"attention on {gpu.arch}: an extent is 0 in {sizes}")
    shared = sizes["h"] // sizes["g"]
    heads_per_tile = shared if isinstance(sizes["m"], int) and sizes["m"] * shared <= 2 * SHARING else 1
    plan = plan or choose_simt_plan(problem, gpu, heads_per_tile)
    begins_early = gpu.overlaps_launches
    function = Function("attention", registers="local")
    with function:
        found = AttentionTensors.of(function, problem, AttentionPlan(1, plan.keys, 1, 1, heads_per_tile))
        with function.body():
            found.open(raw=False)
            _Kernel(found, plan, begins_early).emit()
    return enable_pdl(function.result) if begins_early else function.result


class _Kernel:
    """State that the parts of a kernel share while it is written."""

    def __init__(self, tensors: AttentionTensors, plan: SimtPlan, begins_early: bool) -> None:
        self.begins_early = begins_early
        self.tensors, self.plan, self.problem = tensors, plan, tensors.problem
        self.d, self.e = int(tensors.sizes["d"]), int(tensors.sizes["e"])
        self.columns = ceil_div(self.e, SHARING * _QUAD)
        """Times that the threads of a row take four columns of values each."""
        shared = self.shared = SharedMemory()
        self.q_at = shared.reserve(plan.rows * _pitch(self.d) * 4)
        self.k_at = shared.reserve(plan.keys * max(_pitch(self.d), _pitch(self.e)) * 4)
        self.p_at = shared.reserve(plan.rows * _pitch(plan.keys) * 4)

    def emit(self) -> None:
        """The launch."""
        self.tensors.launch(self.plan.rows, self.plan.threads, self.shared, self.begins_early, self._block)

    def _block(self, thread: Expr, block: Expr) -> None:
        tensors, plan, rows, self.thread = self.tensors, self.plan, self.tensors.rows, thread
        self.row, self.at, self.at_keys = tensors.locate(block, plan.rows)
        visible = tensors.visible(self.row, plan.rows)
        self.end = T.bind(visible) if not isinstance(visible, int) else visible
        self.part = T.bind(tirx.floormod(self.thread, SHARING))
        self.own = T.bind(tirx.floordiv(self.thread, SHARING) * plan.each)
        """The thread's first row in the tile."""
        count, keys = plan.each, plan.keys // SHARING
        self.scores = local(count * keys, "float32")
        self.sums = local(count * self.columns * _QUAD, "float32")
        self.row_max, self.totals, self.new, self.shrink = (local(count, "float32") for _ in range(4))
        self.left, self.right = local(count * _QUAD, "float32"), local(_QUAD * max(keys, _QUAD), "float32")
        for i in range(count):
            T.buffer_store(self.row_max, T.float32(-math.inf), [i])
            T.buffer_store(self.totals, T.float32(0), [i])
        with unrolled(count * self.columns * _QUAD) as i:
            T.buffer_store(self.sums, T.float32(0), [i])
        self._load(tensors.query, self.q_at, self.at, "row", self.row, to_int32(rows.count), plan.rows, self.d)
        end = self.end
        with T.serial(tiles_of(end, plan.keys)) as tile:
            first = T.bind(tile * plan.keys)
            n = to_int32(tensors.sizes["n"])
            self._load(tensors.key, self.k_at, self.at_keys, "n", first, n, plan.keys, self.d)
            ptx.block_barrier()
            self._products()
            self._softmax(first)
            ptx.block_barrier()
            self._load(tensors.value, self.k_at, self.at_keys, "n", first, n, plan.keys, self.e)
            ptx.block_barrier()
            self._values()
            ptx.block_barrier()
        self._store()

    # -- tiles

    def _load(
        self, view: GpuHeads, offset: int, at: Coordinates, side: str, first: Expr, end: Expr, rows: int, width: int
    ) -> None:
        """A tile as float32 in shared memory, by all threads; zeros where there is nothing."""
        quads, pitch = ceil_div(width, _QUAD), _pitch(width)
        held = local(_QUAD, "float32")
        is_vector = view.nominal == "float32" and width % _QUAD == 0
        is_vector = is_vector and view.is_contiguous("k") and view.alignment("k", 16) == 16
        with T.serial(ceil_div(rows * quads, self.plan.threads)) as turn:
            item = T.bind(turn * self.plan.threads + self.thread)
            with when(item < rows * quads):
                row, quad = T.bind(T.truncdiv(item, quads)), T.bind(T.truncmod(item, quads))
                exists = first + row < end
                place = {**at, side: T.Cast("int64", first + row)}
                for i in range(_QUAD):
                    T.buffer_store(held, T.float32(0), [i])
                with when(exists):
                    if is_vector:
                        source = view.address({**place, "k": T.Cast("int64", quad * _QUAD)})
                        pointer = T.address_of(view.data[source])
                        ptx.load_global([held[i] for i in range(_QUAD)], pointer, "f32", is_constant=False)
                    else:
                        for i in range(_QUAD):
                            self._load_one(view, {**place, "k": T.Cast("int64", quad * _QUAD + i)}, held, i, width)
                target = self.shared.at(offset + (row * pitch + quad * _QUAD) * 4)
                ptx.store_shared(target, [held[i] for i in range(_QUAD)], "f32")

    def _load_one(self, view: GpuHeads, at: Coordinates, held: Any, i: int, width: int) -> None:
        value = T.cast(view.data[view.address(at)], "float32")
        if width % _QUAD:
            with when(at["k"] < width):
                T.buffer_store(held, value, [i])
        else:
            T.buffer_store(held, value, [i])

    def _read(self, buffer: Any, first: int, offset: Expr) -> None:
        """Four neighbouring floats of shared memory into registers."""
        ptx.load_shared([buffer[first + i] for i in range(_QUAD)], self.shared.at(offset), "f32")

    def _products(self) -> None:
        """Scores of the tile, keys ``part``, ``part + 16``, ..."""
        each, keys, pitch = self.plan.each, self.plan.keys // SHARING, _pitch(self.d)
        with unrolled(each * keys) as i:
            T.buffer_store(self.scores, T.float32(0), [i])
        own = T.bind(self.q_at + self.own * (pitch * 4))
        other = T.bind(self.k_at + self.part * (pitch * 4))
        with T.serial(ceil_div(self.d, _QUAD)) as step:
            for i in range(each):
                self._read(self.left, i * _QUAD, own + step * (_QUAD * 4) + i * pitch * 4)
            for j in range(keys):
                self._read(self.right, j * _QUAD, other + step * (_QUAD * 4) + j * SHARING * pitch * 4)
            for i in range(each):
                for j in range(keys):
                    total: Expr = self.scores[i * keys + j]
                    for k in range(_QUAD):
                        total = total + self.left[i * _QUAD + k] * self.right[j * _QUAD + k]
                    T.buffer_store(self.scores, total, [i * keys + j])

    def _softmax(self, first: Expr) -> None:
        """Scores become powers, in shared memory; maxima and sums go on, sums of values shrink."""
        tensors, each, keys = self.tensors, self.plan.each, self.plan.keys // SHARING
        rows, sizes = tensors.rows, tensors.sizes
        dtypes = ["float32", *(view.nominal for view in tensors.masks)]
        for i in range(each):
            own = T.bind(self.row + self.own + i)
            seen: Expr = self.end
            if self.problem.causal:
                seen = T.bind(T.min(self.end, rows.query(own) + (1 + tensors.ahead)))
            place: dict[str, Expr] = {"b": self.at["b"]}
            if tensors.masks:
                held = T.min(T.Cast("int64", own), int64(rows.count - 1))
                place = {**place, **rows.place(held, self.at["group"])}
            T.buffer_store(self.new, self.row_max[i], [i])
            for j in range(keys):
                column = T.bind(first + (j * SHARING) + self.part)
                key = T.min(T.Cast("int64", column), int64(sizes["n"] - 1))
                masks = [view.data[view.address({**place, "n": key})] for view in tensors.masks]
                value = emit(self.problem.scores.expression, [self.scores[i * keys + j], *masks], dtypes)
                T.buffer_store(self.scores, value, [i * keys + j])
                hidden = T.if_then_else(column < seen, self.scores[i * keys + j], T.float32(-math.inf))
                T.buffer_store(self.scores, hidden, [i * keys + j])
                T.buffer_store(self.new, T.max(self.new[i], self.scores[i * keys + j]), [i])
            reduce_lanes(self.new, i, T.max, _ROW_LANES)
            # -inf less -inf is no number.
            T.buffer_store(self.new, T.max(self.new[i], T.float32(LOWEST)), [i])
            T.buffer_store(self.shrink, T.exp(self.row_max[i] - self.new[i]), [i])
            T.buffer_store(self.row_max, self.new[i], [i])
            T.buffer_store(self.totals, self.totals[i] * self.shrink[i], [i])
            target = self.p_at + (self.own + i) * (_pitch(self.plan.keys) * 4)
            for j in range(keys):
                T.buffer_store(self.scores, T.exp(self.scores[i * keys + j] - self.new[i]), [i * keys + j])
                T.buffer_store(self.totals, self.totals[i] + self.scores[i * keys + j], [i])
                ptx.store_shared(
                    self.shared.at(target + (j * SHARING + self.part) * 4), [self.scores[i * keys + j]], "f32"
                )
            width = self.columns * _QUAD
            for c in range(width):
                T.buffer_store(self.sums, self.sums[i * width + c] * self.shrink[i], [i * width + c])

    def _values(self) -> None:
        """Sums of the tile's values: of four neighbouring columns each, 64 columns at a time."""
        each, pitch, width = self.plan.each, _pitch(self.e), self.columns * _QUAD
        own = T.bind(self.p_at + self.own * (_pitch(self.plan.keys) * 4))
        with T.serial(self.plan.keys // _QUAD) as step:
            for i in range(each):
                self._read(self.left, i * _QUAD, own + step * (_QUAD * 4) + i * _pitch(self.plan.keys) * 4)
            for c in range(self.columns):
                # Beyond the last column: any that exists, of which nothing is stored.
                column = T.min(self.part * _QUAD + c * SHARING * _QUAD, (ceil_div(self.e, _QUAD) - 1) * _QUAD)
                for k in range(_QUAD):
                    self._read(self.right, k * _QUAD, self.k_at + ((step * _QUAD + k) * pitch + column) * 4)
                for i in range(each):
                    for q in range(_QUAD):
                        number = i * width + c * _QUAD + q
                        total: Expr = self.sums[number]
                        for k in range(_QUAD):
                            total = total + self.left[i * _QUAD + k] * self.right[k * _QUAD + q]
                        T.buffer_store(self.sums, total, [number])

    def _store(self) -> None:
        tensors, width = self.tensors, self.columns * _QUAD
        result = tensors.result
        for i in range(self.plan.each):
            reduce_lanes(self.totals, i, add, _ROW_LANES)
            T.buffer_store(self.shrink, average_factor(self.totals[i], self.problem.nan_to_zero), [i])
            own = T.bind(self.row + self.own + i)
            with when(own < to_int32(tensors.rows.count)), unrolled(width) as c:
                column = T.bind(self.part * _QUAD + tirx.floordiv(c, _QUAD) * (SHARING * _QUAD) + tirx.floormod(c, 4))
                with when(column < self.e):
                    value = averaged(self.sums[i * width + c], self.shrink[i], self.problem.nan_to_zero)
                    at = {**self.at, "row": T.Cast("int64", own), "k": T.Cast("int64", column)}
                    kept = value if result.nominal == "float32" else T.Cast(result.nominal, value)
                    T.buffer_store(result.data, kept, [result.address(at)])
