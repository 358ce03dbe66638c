"""Products with weights of 4 bits on tensor cores: weights go from memory to registers, and become fragments there.

A lane reads 16 bytes, its part of 16 columns and 64 k, laid out for it (`encoding.block_weights.pack_fragments`): 32
weights, a fragment of ``mma.sync`` for each 16 k. The columns of the product are the instruction's rows and the rows
of the left operand its columns, so that one to eight rows cost the same. Four bits become a 16-bit float as the last
bits of a power of two; scales are applied to the sums of a block.

The warps of a kernel's block share its columns and cut k. Each asks for several of its weights at once, before it waits
for the launch that writes the left operand, and holds them in registers. Blocks are persistent: while one adds up the
sums of its warps, through shared memory, the weights of its next columns are on their way.

A left operand of float32 is cut into three parts of bfloat16, whose sum it is exactly; each is a row of its own. Few
rows are brought to shared memory as the fragments read them; more are read from memory, where the caches have them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import gcd, prod
from operator import getitem
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import CHUNK, FRAGMENT_COLUMNS
from ....encoding.expression import Expression
from ....encoding.problem import BlockProductProblem
from ....errors import EncodingError
from ....target.gpu_target import WARP, GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, minimum
from ...core.view import extent_of
from ..core import ptx
from ..core.epilogue import EpilogueWriter
from ..core.launch import Place, SharedMemory, launch, local, may_begin_early
from ..core.operand import GpuOperand

STEP = 16
"""Values of k that one instruction multiplies."""

GROUP_COLUMNS = 8
"""Rows of the left operand, or parts of them, that one instruction multiplies."""

PARTS = {"float16": 1, "bfloat16": 1, "float32": 3}
"""Rows of 16-bit floats that make one row of the left operand."""

MOST_WARPS = 8
MOST_CHUNKS_AHEAD = 8
"""Chunks of 64 k that a warp has asked for: with 8 to 32 warps on a multiprocessor 32 to 128 KB, more than what memory
delivers while the first is on its way."""

WARPS_PER_MULTIPROCESSOR = 32
"""Of persistent blocks, and of blocks of few rows, which then have 64 registers a thread."""

HELD_BYTES = 72 << 10
"""Of the left operand in shared memory, at most."""

_PAD = 16  # words between held rows: neighbours begin in other banks
_TOGETHER = 2  # blocks of a kernel with two bodies that share a multiprocessor's registers
_TWO_SUMS_BYTES = 32 << 10  # up to here sums of one tile are added while those of the next are written


@dataclass(frozen=True)
class BlockPlan:
    """How a kernel shares its work.

    Attributes
    ----------
    fragments : int
        Of 16 columns, of a block.
    groups : int
        Of `GROUP_COLUMNS` rows (or parts of rows), of a block.
    warps : int
        That cut k.
    ahead : int
        Chunks of 64 k that a warp asks for at once.
    """

    fragments: int
    groups: int
    warps: int
    ahead: int


def block_plans(problem: BlockProductProblem, gpu: GpuTarget) -> list[BlockPlan]:
    """The plan of a problem; of one with a symbolic number of rows, that for few and that for more."""
    extents = problem.result.shape[:-1]
    in_group = GROUP_COLUMNS // PARTS[problem.lhs.dtype]
    if all(isinstance(extent, int) for extent in extents):
        return [_plan_of(problem, prod(extent for extent in extents if isinstance(extent, int)))]
    # Both have the registers of one kernel: two blocks share a multiprocessor.
    return [_plan_of(problem, 1), replace(_plan_of(problem, 4 * in_group), fragments=2, ahead=1)]


def _plan_of(problem: BlockProductProblem, rows: int) -> BlockPlan:
    in_group = GROUP_COLUMNS // PARTS[problem.lhs.dtype]
    groups = min(4, max(1, -(-rows // in_group)))
    # Fragments share what is read of the left operand.
    fragments = {1: 1, 2: 2}.get(groups, 4)
    chunks = -(-problem.depth // CHUNK)
    own = -(-chunks // min(MOST_WARPS, chunks))
    warps = -(-chunks // own)
    most = max(1, MOST_CHUNKS_AHEAD // fragments)
    # Rounds of equal length: chunks that are not there cost as much as others.
    ahead = min(
        range(1, min(own, most) + 1),
        key=lambda count: (-(-own // count) * count if count * 2 > most else own + most, -count),
    )
    return BlockPlan(fragments, groups, warps, ahead)


def block_product_kernel(problem: BlockProductProblem, gpu: GpuTarget, plan: BlockPlan | None = None) -> tirx.PrimFunc:
    """The kernel of a product with weights of 4 bits, one launch; its parameters are as `BlockProductProblem` says.

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
            plans = [plan] if plan else block_plans(problem, gpu)
            _launch([_Body(problem, gpu, one, lhs, packed, writer) for one in plans])
    return may_begin_early(function.result, range(1, 1 + len(problem.weights)))


def _launch(bodies: list[_Body]) -> None:
    """Write the launch of a body; or of two, of which the first is for as few rows as it has."""
    last = bodies[-1]
    m, threads = last.m, last.plan.warps * WARP
    if 0 in (m, last.problem.columns):
        with launch(1, WARP):
            T.evaluate(0)
        return
    is_one = len(bodies) == 1
    row_tiles = ceil_div(m, last.rows)
    last.prepare(row_tiles, 0 if is_one else _TOGETHER)
    blocks = int64(last.stride * row_tiles)
    if not is_one:
        bodies[0].prepare(1, _TOGETHER)
        blocks = tirx.Select(m <= bodies[0].rows, int64(bodies[0].stride), blocks)
    shared = SharedMemory()
    shared.take(max(body.shared_bytes for body in bodies))
    with launch(blocks, threads, together=last.together) as place:
        shared.open()
        if is_one:
            last.emit(place, shared)
            return
        with T.If(m <= bodies[0].rows):
            with T.Then():
                bodies[0].emit(place, shared)
            with T.Else():
                last.emit(place, shared)


class _Body:
    """What a block does, while it is written."""

    def __init__(
        self,
        problem: BlockProductProblem,
        gpu: GpuTarget,
        plan: BlockPlan,
        lhs: GpuOperand,
        packed: list[GpuOperand],
        writer: EpilogueWriter,
    ) -> None:
        self.problem, self.gpu, self.plan, self.lhs, self.writer = problem, gpu, plan, lhs, writer
        self.weight, self.scales = packed[0].data, packed[1].data
        self.zeros = packed[2].data if len(packed) > 2 else None
        self.parts = PARTS[problem.lhs.dtype]
        self.type = "float16" if problem.lhs.dtype == "float16" else "bfloat16"
        self.chunks = -(-problem.depth // CHUNK)
        self.blocks = -(-problem.depth // problem.block)
        self.steps = gcd(problem.block, CHUNK) // STEP  # that share a scale, within a chunk
        self.scaled = CHUNK // STEP // self.steps  # groups of steps in a chunk
        self.tiles = -(-problem.columns // FRAGMENT_COLUMNS)
        self.rows = plan.groups * (GROUP_COLUMNS // self.parts)
        self.m = extent_of([writer.result], "m")
        self.own = -(-self.chunks // plan.warps)  # chunks of a warp, of a tile
        self.pitch = self.chunks * CHUNK // 2 + _PAD
        rows = min(self.m, self.rows) if isinstance(self.m, int) else self.rows
        self.held_rows = rows * self.parts if rows * self.parts * self.pitch * 4 <= HELD_BYTES else 0
        if self.parts > 1 and plan.groups > 1:
            self.held_rows = 0  # the parts of a row lie in one group of eight

    def prepare(self, row_tiles: Expr, together: int) -> None:
        """Share the work among blocks, of which `together` (0: as is best) share a multiprocessor's registers."""
        self.row_tiles = row_tiles
        self.column_tiles = -(-self.tiles // self.plan.fragments)
        self.together = together or self._blocks_together(self.column_tiles * row_tiles)
        self.stride = self._blocks_of_a_row(row_tiles)
        plan = self.plan
        count = plan.warps * plan.fragments * plan.groups * GROUP_COLUMNS * FRAGMENT_COLUMNS
        self.sums_of_tile = count if self.stride < self.column_tiles and count * 4 <= _TWO_SUMS_BYTES else 0
        self.held_at = (count + self.sums_of_tile) * 4
        self.shared_bytes = self.held_at + self.held_rows * self.pitch * 4

    def emit(self, place: Place, shared: SharedMemory) -> None:
        """Write the block's work."""
        self.shared = shared
        block, row_tiles = T.Cast("int64", place.block), self.row_tiles
        self.first_block = T.bind(tirx.floordiv(block, int64(row_tiles)))
        self.first_row = T.bind(tirx.floormod(block, int64(row_tiles)) * self.rows)
        self.thread = place.thread
        self.warp = T.bind(tirx.floordiv(place.thread, WARP))
        self.lane = T.bind(tirx.floormod(place.thread, WARP))
        self.high, self.low = T.bind(tirx.floordiv(self.lane, 4)), T.bind(tirx.floormod(self.lane, 4))
        self._allocate()
        self._work()

    def _blocks_together(self, blocks: Expr) -> int:
        """Blocks that share a multiprocessor's registers; where all are few, those of the next launch among them."""
        if self.plan.groups > 1 or self.plan.fragments > 1 or not isinstance(blocks, int):
            return 0
        most = WARPS_PER_MULTIPROCESSOR // self.plan.warps
        goes_on = blocks > self.gpu.multiprocessors * most or self.own > self.plan.ahead
        return max(1, most - goes_on - (self.zeros is not None) - self._has_any_points)

    def _blocks_of_a_row(self, row_tiles: Expr) -> int:
        """Blocks that share the columns: no more than run at once, where that is known."""
        if not isinstance(row_tiles, int):
            return self.column_tiles
        at_once = self.gpu.multiprocessors * (self.together or max(1, WARPS_PER_MULTIPROCESSOR // self.plan.warps))
        return min(self.column_tiles, max(1, at_once // row_tiles))

    def _allocate(self) -> None:
        plan, steps = self.plan, CHUNK // STEP
        held = plan.ahead * plan.fragments
        self.bits = local(held * steps, "uint32")
        self.scale_bits = local(held * self.scaled * 2, str(self.scales.dtype))
        self.point_bits: Any = None if self.zeros is None else local(held * self.scaled * 2, str(self.zeros.dtype))
        self.left = local(plan.groups * steps * 2, "uint32")
        self.wide = local(4, "uint32")
        self.fragment = local(4, "uint32")
        self.points = local(4, "uint32")
        self.sums = local(plan.groups * 4, "float32")
        self.left_sums = local(plan.groups * 4, "float32")
        self.totals = local(plan.fragments * plan.groups * 4, "float32")

    def _work(self) -> None:
        """All columns of the block, while the weights of the next chunks are on their way."""
        plan = self.plan
        rounds = -(-self.own // plan.ahead)
        for slot in range(plan.ahead):
            self._load(slot, self.first_block, slot)
        ptx.wait_for_launches_before()
        ptx.let_next_launch_begin()
        if self.held_rows:
            self._hold_left()
            ptx.block_barrier()
        turns: Expr = 1
        if self.stride < self.column_tiles:
            turns = T.bind(tirx.floordiv(self.column_tiles - 1 - self.first_block, self.stride) + 1)
        with T.serial(int64(turns)) as turn:
            tile = T.bind(self.first_block + turn * self.stride)
            for number in range(plan.fragments * plan.groups * 4):
                T.buffer_store(self.totals, T.float32(0), [number])
            with T.serial(int64(rounds)) as number:
                for slot in range(plan.ahead):
                    self._chunk(slot, number * plan.ahead + slot)
                    self._load_next(slot, (number, rounds), tile, turn + 1 < turns)
            self._finish(turn, T.bind(tile * plan.fragments))

    def _load_next(self, slot: int, where: tuple[Expr, int], tile: Expr, more: Expr) -> None:
        """Ask for what comes into a slot next: of this tile, or of the block's next one."""
        number, rounds = where
        persistent = self.stride < self.column_tiles
        if rounds > 1:
            with T.If(number + 1 < rounds), T.Then():
                self._load(slot, tile, (number + 1) * self.plan.ahead + slot)
        if persistent:
            with T.If(more if rounds == 1 else tirx.all(tirx.EQ(number + 1, int64(rounds)), more)), T.Then():
                self._load(slot, tile + self.stride, slot)

    def _chunk_of(self, index: Expr) -> Expr:
        """The warps' chunks are neighbours: a block reads one stretch."""
        return int64(index) * self.plan.warps + self.warp

    def _exists(self, index: Expr) -> Expr | None:
        """Whether a warp's chunk is one; None where it is known to."""
        warps = self.plan.warps
        if self.chunks % warps == 0 or (isinstance(index, int) and (index + 1) * warps <= self.chunks):
            return None
        return self._chunk_of(index) < self.chunks

    def _load(self, slot: int, tile_of_block: Expr, index: Expr) -> None:
        """Ask for the weights of a chunk, and for their scales and zero points."""
        chunk = self._chunk_of(index)
        if self._exists(index) is not None:
            chunk = minimum(chunk, int64(self.chunks - 1))
        chunk = T.bind(chunk)
        for fragment in range(self.plan.fragments):
            tile = tile_of_block * self.plan.fragments + fragment
            if self.tiles % self.plan.fragments:
                tile = minimum(tile, int64(self.tiles - 1))
            at = ((tile * self.chunks + chunk) * WARP + self.lane) * 4
            begin = (slot * self.plan.fragments + fragment) * 4
            ptx.stream_global([self.bits[begin + i] for i in range(4)], T.address_of(self.weight[at]))
            for number in range(self.scaled):
                scale = tirx.floordiv(chunk * CHUNK + number * self.steps * STEP, self.problem.block)
                if self.chunks * CHUNK > self.blocks * self.problem.block:
                    scale = minimum(scale, int64(self.blocks - 1))
                at = ((tile * self.blocks + scale) * 8 + self.high) * 2
                first = ((slot * self.plan.fragments + fragment) * self.scaled + number) * 2
                for held, data in ((self.scale_bits, self.scales), (self.point_bits, self.zeros)):
                    if data is not None:
                        where = T.ramp(tirx.const(first, "int32"), 1, 2)
                        T.buffer_store(held, data[T.ramp(at, int64(1), 2)], [where])

    def _chunk(self, slot: int, index: Expr) -> None:
        """Add the products of a chunk."""
        exists = self._exists(index)
        if exists is None:
            self._products(slot, index)
        else:
            with T.If(exists), T.Then():
                self._products(slot, index)

    def _products(self, slot: int, index: Expr) -> None:
        plan, groups, types = self.plan, range(self.plan.groups), (self.type, self.type)
        first_k = T.bind(self._chunk_of(index) * CHUNK)
        if not self.held_rows:
            self._load_left(first_k)
        elif plan.fragments > 1:
            self._load_held(first_k, range(self.scaled))
        for fragment in range(plan.fragments):
            for number in range(self.scaled):
                at = ((slot * plan.fragments + fragment) * self.scaled + number) * 2
                if self.held_rows and plan.fragments == 1:
                    self._load_held(first_k, [number])
                self._points_of(at)
                for step in range(self.steps):
                    k = number * self.steps + step
                    self._unpack(self.bits[(slot * plan.fragments + fragment) * 4 + k])
                    for group in groups:
                        right = [self.left[(group * 4 + k) * 2 + i] for i in range(2)]
                        sums = [self.sums[group * 4 + i] for i in range(4)]
                        ptx.multiply_fragments(sums, [self.fragment[i] for i in range(4)], right, types, step > 0)
                        if self._has_any_points:
                            ones = [T.uint32(0x3C003C00 if self.type == "float16" else 0x3F803F80)] * 4
                            sums = [self.left_sums[group * 4 + i] for i in range(4)]
                            ptx.multiply_fragments(sums, ones, right, types, step > 0)
                for half in range(2):
                    scale = T.bind(T.cast(self.scale_bits[at + half], "float32"))
                    for group in groups:
                        for i in (2 * half, 2 * half + 1):
                            total = (fragment * plan.groups + group) * 4 + i
                            value: Expr = self.sums[group * 4 + i]
                            if self._has_any_points:
                                point = self.point_bits[at + half] - T.float32(8)
                                value = value - point * self.left_sums[group * 4 + i]
                            T.buffer_store(self.totals, self.totals[total] + scale * value, [total])

    @property
    def _has_any_points(self) -> bool:
        """Whether zero points are any numbers: they are multiplied by the sums of the left operand."""
        return self.zeros is not None and str(self.zeros.dtype) == "float32"

    # A weight w under the exponent of 1024 (float16) or 128 (bfloat16) is that power of two and w.

    def _points_of(self, at: int) -> None:
        """What is added to weights under the exponent, for both columns of a lane; see `_unpack`."""
        is_half = self.type == "float16"
        for half in range(2):
            if self.zeros is None or self._has_any_points:
                T.buffer_store(self.points, T.uint32(0xE408E408 if is_half else 0xC308C308), [half])
                if is_half:
                    T.buffer_store(self.points, T.uint32(0xD480D480), [half + 2])
                continue
            point = T.cast(self.point_bits[at + half], "uint32")
            base = T.uint32(0xE400E400 if is_half else 0xC300C300)
            T.buffer_store(self.points, base | point | (point << T.uint32(16)), [half])
            if is_half:  # -(1024 + z) + 960
                ptx.add_pair(self.points[half + 2], self.points[half], T.uint32(0x63806380))

    def _unpack(self, bits: Expr) -> None:
        """The fragment of eight weights of a lane: those of both rows, less their zero points."""
        low, high = T.uint32(0x000F000F), T.uint32(0x00F000F0)
        if self.type == "float16":
            one, exponent, sixteenth = T.uint32(0x3C003C00), T.uint32(0x64006400), T.uint32(0x2C002C00)
            for i in range(2):
                moved = bits if i == 0 else T.bind(bits >> T.uint32(8))
                first, second = self.fragment[2 * i], self.fragment[2 * i + 1]
                ptx.multiply_add_pair(first, (moved & low) | exponent, one, self.points[0], self.type)
                # Four bits further up, the weight is 16 times as much beside 1024; a sixteenth of both is 64 and it.
                ptx.multiply_add_pair(second, (moved & high) | exponent, sixteenth, self.points[3], self.type)
            return
        one, exponent = T.uint32(0x3F803F80), T.uint32(0x43004300)
        for i in range(4):
            moved = bits if i == 0 else bits >> T.uint32(4 * i)
            ptx.multiply_add_pair(self.fragment[i], (moved & low) | exponent, one, self.points[i % 2], self.type)

    # The left operand: a lane's values of k are neighbours, as many as its weights that share a scale.

    def _load_left(self, k: Expr) -> None:
        run = 4 * self.steps
        for group in range(self.plan.groups):
            if self.parts == 1:
                row = self.first_row + (group * GROUP_COLUMNS + self.high)
                in_group = None
            else:
                row = self.first_row + (group * (GROUP_COLUMNS // self.parts) + tirx.floordiv(self.high, self.parts))
                in_group = self.high < GROUP_COLUMNS // self.parts * self.parts
            row = T.bind(row)
            exists = row < self.m if in_group is None else tirx.all(row < self.m, in_group)
            for number in range(self.scaled):
                at = T.bind(k + (number * 4 * run + self.low * run))
                words = (group * 4 + number * self.steps) * 2
                if self.parts == 1:
                    self._load_halves(row, at, exists, words, run)
                else:
                    self._load_parts(row, at, exists, words, run)

    def _hold_left(self) -> None:
        """Bring the rows to shared memory, each part of them as one."""
        threads, unit = self.plan.warps * WARP, 8 if self.parts == 1 else 4
        per_row = self.chunks * CHUNK // unit
        items = self.held_rows // self.parts * per_row
        with T.serial(tirx.const(-(-items // threads), "int32")) as turn:
            item = T.bind(turn * threads + self.thread)
            with T.If(item < items), T.Then():
                row, k = T.bind(tirx.floordiv(item, per_row)), T.bind(tirx.floormod(item, per_row) * unit)
                at_row, at_k = self.first_row + T.Cast("int64", row), T.Cast("int64", k)
                if self.parts == 1:
                    self._load_halves(at_row, at_k, at_row < self.m, 0, unit)
                    self._store_held(row, k, 4)
                    continue_parts = 0
                else:
                    self._load_wide(at_row, at_k, at_row < self.m)
                    continue_parts = self.parts
                for part in range(continue_parts):
                    cut = [T.bind(_part(self.wide[i], tirx.const(part, "int32"))) for i in range(4)]
                    for i in range(2):
                        T.buffer_store(self.left, (cut[2 * i] >> T.uint32(16)) | cut[2 * i + 1], [i])
                    self._store_held(row * self.parts + part, k, 2)

    def _store_held(self, row: Expr, k: Expr, words: int) -> None:
        at = self.held_at + (row * self.pitch + tirx.floordiv(k, 2)) * 4
        ptx.store_shared(self.shared.at(at), [self.left[i] for i in range(words)])

    def _load_held(self, k: Expr, numbers: Sequence[int]) -> None:
        """The fragments of parts of a chunk from shared memory."""
        words = 2 * self.steps  # of a lane, of steps that share a scale
        width = min(4, words)
        for group in range(self.plan.groups):
            row = self.high + group * GROUP_COLUMNS
            for number in numbers:
                for i in range(words):
                    T.buffer_store(self.left, T.uint32(0), [group * 8 + number * words + i])
            with T.If(row < self.held_rows), T.Then():
                for number in numbers:
                    first = row * self.pitch + T.Cast("int32", tirx.floordiv(k, 2)) + (number * 4 + self.low) * words
                    for i in range(0, words, width):
                        targets = [self.left[group * 8 + number * words + i + j] for j in range(width)]
                        ptx.load_shared(targets, self.shared.at(self.held_at + (first + i) * 4))

    def _runs(self, at: Expr, exists: Expr, run: int, most: int) -> list[tuple[int, int, Expr]]:
        """Accesses of `run` neighbours from k on: offset, width and condition of each."""
        k, width = self.problem.depth, most
        while k % width:
            width //= 2
        runs = []
        for offset in range(0, run, width):
            inside = exists if k % CHUNK == 0 else tirx.all(exists, at + offset < k)
            runs.append((offset, width, inside))
        return runs

    def _load_halves(self, row: Expr, at: Expr, exists: Expr, words: int, run: int) -> None:
        for i in range(run // 2):
            T.buffer_store(self.left, T.uint32(0), [words + i])
        for offset, width, inside in self._runs(at, exists, run, min(8, run)):
            address = T.address_of(self.lhs.data[self.lhs.address({"m": row, "k": at + offset})])
            with T.If(inside), T.Then():
                if width > 1:
                    first = words + offset // 2
                    ptx.load_global([self.left[first + i] for i in range(width // 2)], address, is_constant=False)
                else:
                    one = local(1, "uint16")
                    ptx.load_global([one[0]], address, "u16", is_constant=False)
                    word = words + offset // 2
                    value = T.cast(one[0], "uint32") << T.uint32(16 * (offset % 2))
                    T.buffer_store(self.left, self.left[word] | value, [word])

    def _load_parts(self, row: Expr, at: Expr, exists: Expr, words: int, run: int) -> None:
        part = tirx.floormod(self.high, self.parts)
        for offset in range(0, run, 4):
            self._load_wide(row, at + offset, exists)
            parts = [T.bind(_part(self.wide[i], part)) for i in range(4)]
            for i in range(2):
                pair = (parts[2 * i] >> T.uint32(16)) | parts[2 * i + 1]
                T.buffer_store(self.left, pair, [words + offset // 2 + i])

    def _load_wide(self, row: Expr, at: Expr, exists: Expr) -> None:
        """Four values of float32."""
        for i in range(4):
            T.buffer_store(self.wide, T.uint32(0), [i])
        for inner, width, inside in self._runs(at, exists, 4, 4):
            place = {"m": row, "k": at + inner}
            with T.If(inside), T.Then():
                address = T.address_of(self.lhs.data[self.lhs.address(place)])
                ptx.load_global([self.wide[inner + i] for i in range(width)], address, is_constant=False)

    # The end: sums of the warps, in order.

    def _finish(self, turn: Expr, first_tile: Expr) -> None:
        plan, columns = self.plan, plan_columns(self.plan)
        width = plan.groups * GROUP_COLUMNS
        begin = T.bind(T.Cast("int32", tirx.floormod(turn, 2)) * self.sums_of_tile)
        for fragment in range(plan.fragments):
            for group in range(plan.groups):
                for i in range(4):
                    row = group * GROUP_COLUMNS + 2 * self.low + i % 2
                    column = fragment * FRAGMENT_COLUMNS + self.high + 8 * (i // 2)
                    at = begin + (self.warp * width + row) * columns + column
                    total = tirx.reinterpret("uint32", self.totals[(fragment * plan.groups + group) * 4 + i])
                    ptx.store_shared(self.shared.at(at * 4), [total])
        ptx.block_barrier()
        result = self.writer.result
        vector = min(4, result.vector("n"))
        items = self.rows * columns // vector
        threads = plan.warps * WARP
        with T.serial(tirx.const(-(-items // threads), "int32")) as part_of_items:
            item = T.bind(part_of_items * threads + self.thread)
            row, column = tirx.floordiv(item, columns // vector), tirx.floormod(item, columns // vector) * vector
            at = {
                "m": T.bind(self.first_row + row),
                "n": T.bind(first_tile * FRAGMENT_COLUMNS + column),
            }
            inside = at["m"] < self.m if items % threads == 0 else tirx.all(item < items, at["m"] < self.m)
            is_whole = self.problem.columns % columns == 0

            with T.If(inside), T.Then():
                totals = self._added(begin, row, column, vector)
                end = None if is_whole else int64(self.problem.columns)
                self.writer.write([partial(getitem, totals, i) for i in range(vector)], at, "n", [], end)
        if self.stride < self.column_tiles and not self.sums_of_tile:
            ptx.block_barrier()

    def _added(self, begin: Expr, row: Expr, column: Expr, vector: int) -> Any:
        """Sums of neighbouring columns of a row, over the warps and the parts of the row."""
        plan, columns = self.plan, plan_columns(self.plan)
        width, per = plan.groups * GROUP_COLUMNS, GROUP_COLUMNS // self.parts
        totals, part_sums = local(vector, "float32"), local(vector, "float32")
        for i in range(vector):
            T.buffer_store(totals, T.float32(0), [i])
        for warp in range(plan.warps):
            for part in range(self.parts):
                # Where rows are parts, the last of a group of eight are none.
                first = tirx.floordiv(row, per) * GROUP_COLUMNS + tirx.floormod(row, per) * self.parts + part
                at = begin + (warp * width + first) * columns + column
                ptx.load_shared([part_sums[i] for i in range(vector)], self.shared.at(at * 4), "f32")
                for i in range(vector):
                    T.buffer_store(totals, totals[i] + part_sums[i], [i])
        return totals


def plan_columns(plan: BlockPlan) -> int:
    """Columns of a block."""
    return plan.fragments * FRAGMENT_COLUMNS


def _part(bits: Expr, part: Expr) -> Expr:
    """One of three bfloat16 whose sum a float32 is, in the upper half of a word; by bits, so that infinity stays."""
    mask = T.uint32(0xFFFF0000)

    def rest(of: Expr) -> Expr:
        upper = T.reinterpret("float32", of & mask)
        whole = T.reinterpret("float32", of)
        return T.reinterpret("uint32", T.Select(tirx.EQ(of & mask, of), T.float32(0), whole - upper))

    second = T.bind(rest(bits))
    third = T.bind(rest(second))
    chosen = T.Select(tirx.EQ(part, 0), bits, T.Select(tirx.EQ(part, 1), second, third))
    return chosen & mask
