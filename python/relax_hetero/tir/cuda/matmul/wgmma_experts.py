"""Products of many pairs of a token and one of its experts on Hopper's tensor cores, with quantized weights.

Pairs are sorted by expert (`expert_order`), so that a block multiplies the weights of an expert by up to `TILE_PAIRS`
rows. Weights are the instruction's left operand, dequantized and scaled in registers: a warp's fragment of ``mma.sync``
is its part of a warpgroup's 64 columns. Gathered rows are the right operand, in swizzled shared memory.

A producer warpgroup copies weights, their scales and rows to a ring of stages of `STAGE_DEPTH` k. Each of two consumer
warpgroups has blocks of 64 columns: while the tensor cores multiply half a stage of one, it dequantizes the next half.
Blocks are persistent and take tiles of pairs by columns in turn; their number is data.

The fragment order of weights (`encoding.block_weights.pack_fragments`) gives a lane neighbouring k, for loads of few
rows in vectors. Rows in shared memory are in the order of the instruction, so a lane reads words of other lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_weights import FRAGMENT_COLUMNS
from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ....encoding.problem import ExpertOrderProblem, QuantizedMatmulProblem
from ....target.element_types import HALF_TYPES, bytes_of
from ....target.gpu_target import ALL_LANES, WARP, WARPGROUP, GpuTarget
from ...core.builder import Expr, ceil_div, either, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SWIZZLED_ALIGN, SharedMemory, launch, local, unrolled, wait_late
from ..core.operand import GpuOperand
from ..tile.epilogue import EpilogueWriter, where
from ..tile.fragment_store import STAGING_PAD, SWAPPED_COLUMNS, FragmentStore
from ..tile.operand_tiles import PRODUCERS
from ..tile.ring import Ring, RingPosition
from .block_fragments import StagedFragments
from .block_plan import STEP, BlockPlan, BlockWork

TILE_PAIRS = 128
"""Maximum pairs of a tile."""
MIN_SORTED_PAIRS = 512
"""Minimum pairs that are sorted by expert on Hopper."""
STAGE_DEPTH = SWIZZLED_BYTES // 2
"""Extent of k of a stage."""

_CONSUMERS = 2  # warpgroups
_GROUP_STEPS = STAGE_DEPTH // STEP // 2  # instructions that are waited for together
_PRODUCER_REGISTERS, _CONSUMER_REGISTERS = 56, 224  # per thread: 128 * 56 + 256 * 224 <= 65,536
_CHUNKS = SWIZZLED_BYTES // CHUNK_BYTES  # of a row in a stage
_LINES = PRODUCERS // _CHUNKS  # rows that producers copy at a time
_MAX_STAGES = 8
_STAGED_ROWS = 32  # of the result, that a warpgroup transposes at a time
_LOW_BYTES = 512  # of a chunk, before its plane of high bits
_MINUS_ZEROS = 0x80008000  # a pair of float16


def expert_order_of(problem: QuantizedMatmulProblem, gpu: GpuTarget) -> ExpertOrderProblem | None:
    """The order of pairs that `ExpertProduct` needs; None if it does not support a problem, or pairs are few."""
    is_special = problem.second or problem.shares or problem.biases or problem.rounded
    if problem.index is None or is_special or gpu.tensor != "wgmma" or problem.lhs.dtype not in HALF_TYPES:
        return None
    extents, block = problem.index.shape, problem.block
    pairs = prod(extent if isinstance(extent, int) else 0 for extent in extents)
    has_whole_blocks = problem.bits == 16 or block in (16, 32) or block % STAGE_DEPTH == 0
    is_whole = problem.depth % STAGE_DEPTH == 0 and has_whole_blocks
    if pairs < MIN_SORTED_PAIRS or not is_whole:
        return None
    return ExpertOrderProblem(problem.index, problem.experts, TILE_PAIRS)


@dataclass(frozen=True)
class ExpertTiling:
    """Tiling of a product.

    Attributes
    ----------
    column_blocks : int
        Blocks of 64 columns of a consumer.
    rows : tuple of int
        Numbers of rows that are multiplied, multiples of 32, increasing; a tile takes the first that has its pairs.
    """

    column_blocks: int = 2
    rows: tuple[int, ...] = (TILE_PAIRS // 2, TILE_PAIRS * 3 // 4, TILE_PAIRS)

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return _CONSUMERS * self.column_blocks * SWAPPED_COLUMNS


def expert_tiling(problem: QuantizedMatmulProblem) -> ExpertTiling:
    """Tiling of a problem: wide blocks, as each loads its rows from L2, unless they would be mostly padding."""
    narrow, wide = ExpertTiling(1), ExpertTiling(2)
    padded = [ceil_div(problem.columns, tiling.columns) * tiling.columns for tiling in (narrow, wide)]
    return narrow if padded[1] > 1.25 * padded[0] else wide


def _held(value: Expr) -> Expr:
    """An int32 in a register that TVM does not look into: its passes are slow on long expressions."""
    register = local(1, "int32")
    T.buffer_store(register, value, [0])
    return register[0]


class _OrderedFragments(StagedFragments):
    """Writer of the dequantization of staged weights, in the order of k, to scaled fragments."""

    def __init__(self, work: BlockWork, packed: list[GpuOperand], lane: Expr, high: Expr) -> None:
        super().__init__(work, packed, lane, high)
        self._factors = local(4, "uint32")
        # Offsets are linear in the bits of a lane's place among the four that share a column.
        low = T.bind(lane % 4)
        if work.is_plain:
            self.lane_offset = _held((high * 4 + low // 2) * CHUNK_BYTES + (low % 2) * 8)
            return
        self._shift, self._high = T.Cast("uint32", _held(low % 2 * 8)), None
        if work.problem.bits < 4:
            # The four weights after a lane's first ones are in its next word of 4 bits, or in one of the next lane.
            is_own = work.steps * STEP >= 32
            self.lane_offset = _held(high * 4 + (0 if is_own else low // 2))
            self._next = T.Cast("uint32", _held(low // 2 if is_own else 0 * low))
            return
        offsets = (low // 2) * self._word_at(4) + (low % 2) * self._word_at(2)
        self.lane_offset = _held(offsets + high * CHUNK_BYTES)
        if work.high_bits:
            # A lane's high bits are in one word of a lane, of two runs of 32 or of four of 16.
            is_long = work.steps * STEP >= 32
            lanes, bits = (0, low * 2) if is_long else (low // 2, low % 2 * 2)
            lane_bytes = 4 * work.high_bits
            self._high = _held((high * 4 + lanes) * lane_bytes), T.Cast("uint32", _held(bits * work.high_bits))

    def allocate(self) -> None:
        """Allocate the registers of the fragments of two groups of steps."""
        self.fragment = local(2 * _GROUP_STEPS * 4, "uint32")

    def _word_at(self, k: int) -> int:
        """Offset of the word that has the weight k of a chunk for the first columns.

        The 16 bytes of lane l are at ``l % 4 * 8 + l // 4``, so that lanes of a warp read from different banks.
        """
        run, per_word = self.work.steps * STEP, 2 if self.is_bytes else 4
        quarter = run // 4
        lane, in_lane = divmod(k % run, quarter)
        return lane * 8 * CHUNK_BYTES + (k // run * (quarter // per_word) + in_lane // per_word) * 4

    def load_scaled(self, shared: SharedMemory, chunk: Expr, parts: list[list[Expr]], steps: range, begin: int) -> None:
        """Load steps of a chunk, and write their scaled fragments to registers from `begin` on.

        Parameters
        ----------
        chunk, parts : PrimExpr, list of list of PrimExpr
            Offsets of the chunk, and of the scales of `steps`, as in `load_staged`.
        """
        weights = _held(chunk if self.work.problem.bits < 4 else chunk + self.lane_offset)
        if self.work.is_plain:  # chunks of a step each
            for step in steps:
                for pair in range(2):
                    first = begin + (step - steps[0]) * 4 + 2 * pair
                    address = shared.at(weights + (step * self.work.chunk_bytes + pair * 2 * CHUNK_BYTES))
                    ptx.load_shared([self.fragment[first], self.fragment[first + 1]], address)
            return
        work, words = self.work, local(2, "uint32")
        self.load_parts(shared, 0, parts, steps[0] // work.steps)
        for step in steps:
            if step == steps[0] or step % work.steps == 0:
                self._load_factors(step // work.steps)
            for pair in range(2):
                if work.problem.bits < 4:
                    word = self._narrow_word(shared, weights, step * STEP + 8 * pair)
                else:
                    ptx.load_shared([words[pair]], shared.at(weights + self._word_at(step * STEP + 8 * pair)))
                    word = words[pair]
                if not self.is_bytes:
                    T.buffer_store(words, word >> self._shift, [pair])
            first = begin + (step - steps[0]) * 4
            self.unpack_words([words[0], words[1]], (0, 0), self._high_words(shared, chunk, step), first)
            for i in range(4):
                self._scale_pair(first + i, i % 2)

    def _narrow_word(self, shared: SharedMemory, chunk: Expr, k: int) -> Expr:
        """The word of 4 bits that has the weight k of a chunk of fewer bits, for the lane's first four."""
        run, words = self.work.steps * STEP, local(2, "uint32")
        lane, in_lane = divmod(k % run, run // 4)
        number, own = k // run * (run // 16) + in_lane // 4, []
        for i, (first, count) in enumerate(self.work.planes):
            place = (first * WARP + lane * count + number * count // 4) * 4
            ptx.load_shared([words[i]], shared.at(chunk + self.lane_offset * (4 * count) + place))
            own.append(words[i] >> self._next * T.uint32(count))
        return self.widened(own, number)

    def _high_words(self, shared: SharedMemory, chunk: Expr, step: int) -> list[tuple[Expr, int]]:
        """Words with the high bits of both pairs of a step, shifted by the lane's own bits, and their first bits."""
        if self._high is None:
            return []
        count, run = self.work.high_bits, self.work.steps * STEP
        lane_offset, lane_shift = self._high
        high = []
        for pair in range(2):
            k = step * STEP + 8 * pair
            # Of the lane's words of low bits, the first of those that lanes of the same run read.
            word = k // run * (run // 16)
            lanes, bit = k % run // (run // 4), 4 * word * count
            register = local(1, "uint32")
            address = chunk + (_LOW_BYTES + lanes * 4 * count + bit // 16 * 4) + lane_offset
            ptx.load_shared([register[0]], shared.at(address))
            high.append((T.bind(register[0] >> lane_shift), bit % 16))
        return high

    def _load_factors(self, number: int) -> None:
        """Convert a scale of both columns, and what is added, for `_scale_pair`."""
        self.begin(0, 0, number)
        self._scales = [self.scale(0, 0, number, half) for half in range(2)]
        self._addends = [self.addend(0, 0, number, half, scale) for half, scale in enumerate(self._scales)]
        if self.type == "float16":
            for half, values in enumerate(zip(self._scales, self._addends, strict=True)):
                for i, value in enumerate(values):
                    if value is not None:
                        ptx.pack_pair(self._factors[half * 2 + i], value, value, self.type)

    def _scale_pair(self, register: int, half: int) -> None:
        target, scale, addend = self.fragment[register], self._scales[half], self._addends[half]
        if self.type == "float16":
            added = T.uint32(_MINUS_ZEROS) if addend is None else self._factors[half * 2 + 1]
            ptx.multiply_add_pair(target, target, self._factors[half * 2], added, self.type)
            return
        for i in range(2):  # in float32, as bfloat16 has too few bits for scales
            value = T.reinterpret("float32", target & T.uint32(0xFFFF0000) if i else target << T.uint32(16)) * scale
            T.buffer_store(self.wide, value if addend is None else value + addend, [i])
        ptx.pack_pair(target, self.wide[0], self.wide[1], self.type)


class _PairStore(FragmentStore):
    """Store of a tile's rows to those of its pairs."""

    _fetches = False

    def begin(self, pair_at: Callable[[Expr], Expr], count: Expr) -> None:
        """Set the function that gives the pointer to a row's pair in shared memory, and the number of rows."""
        self._pair_at, self._count = pair_at, count

    def _locate_run(
        self, number: Expr, at: Coordinates, origin: tuple[Expr, Expr]
    ) -> tuple[Expr, Expr, Coordinates, Expr]:
        row, chunk, position, exists = super()._locate_run(number, at, origin)
        in_tile, word = T.Cast("int32", position["m"]), local(1, "uint32")
        # From shared memory, as the compiler would load pairs, and what they lead to, for all rows at once.
        ptx.load_shared([word[0]], self._pair_at(in_tile))
        pair = T.bind(T.Cast("int64", word[0]))
        return row, chunk, {**position, "m": pair}, exists if self._fetches else tirx.all(in_tile < self._count, exists)

    def _fetch_rows(self, at: Coordinates, origin: tuple[Expr, Expr], thread: Expr) -> list[Any]:
        # Rows without a pair read those of the last: with predicates, registers would be live between tiles.
        self._fetches = True
        registers = super()._fetch_rows(at, origin, thread)
        self._fetches = False
        return registers


class ExpertProduct:
    """Writer of a product's launch.

    Parameters
    ----------
    problem : QuantizedMatmulProblem
        With an order.
    lhs, packed, order : GpuOperand
        Left operand; weights, scales and perhaps zero points; sorted pairs.
    writer : EpilogueWriter
    """

    def __init__(
        self,
        problem: QuantizedMatmulProblem,
        gpu: GpuTarget,
        tiling: ExpertTiling,
        lhs: GpuOperand,
        packed: list[GpuOperand],
        order: GpuOperand,
        writer: EpilogueWriter,
    ) -> None:
        assert problem.order is not None and problem.index is not None, "pairs are sorted"
        self.tile = problem.order.tile
        assert tiling.rows[-1] == self.tile, f"tiles have {self.tile} pairs, of which {tiling.rows[-1]} are multiplied"
        self.problem, self.gpu, self.tiling, self.order_problem = problem, gpu, tiling, problem.order
        self.lhs, self.packed, self.order, self.writer = lhs, packed, order, writer
        self.work = BlockWork(problem, BlockPlan(1, 1, 1, 1), 1)
        self.steps = problem.depth // STAGE_DEPTH
        self.column_tiles = ceil_div(problem.columns, tiling.columns)
        self.fragments = tiling.columns // FRAGMENT_COLUMNS
        # Of a stage: chunks of a fragment, bytes of a fragment's scales, zero points and factors.
        self.chunks = STAGE_DEPTH // self.work.chunk
        self.part_bytes = [max(1, STAGE_DEPTH // part.unit) * part.unit_bytes for part in self.work.part_list]
        self.row_bytes = self.tile * SWIZZLED_BYTES
        self.weight_bytes = self.fragments * (self.chunks * self.work.chunk_bytes + sum(self.part_bytes))

    def emit(self) -> None:
        """Write the launch."""
        problem, tiling = self.problem, self.tiling
        self.in_rows = any(view.runs_along("m") for view in self.writer.views)
        element = 4 if self.in_rows else bytes_of(problem.result.dtype)
        self.store = _PairStore(self.writer, self.gpu)
        self.store.open(self.tile, problem.columns, self.in_rows)
        shared = self.shared = SharedMemory()
        staging = _CONSUMERS * (_STAGED_ROWS * (SWAPPED_COLUMNS * element + STAGING_PAD) + self.tile * 4)
        stage_bytes = self.row_bytes + self.weight_bytes
        self.stages = min(_MAX_STAGES, self.steps, (self.gpu.shared_bytes - staging - 1024) // stage_bytes)
        self.rows_at = shared.reserve(self.stages * self.row_bytes, SWIZZLED_ALIGN)
        self.weights_at = shared.reserve(self.stages * self.weight_bytes)
        self.pairs_at = shared.reserve(_CONSUMERS * self.tile * 4)
        self.store.plan(shared, (self.tile, tiling.columns), _CONSUMERS, _STAGED_ROWS, swap_ab=True)
        # Each warp of the consumers is done with a stage by itself.
        producers = PRODUCERS + 1 if self.work.is_plain else PRODUCERS
        self.ring = Ring(shared, self.stages, producers, _CONSUMERS * (WARPGROUP // WARP))
        self.blocks = min(self.gpu.multiprocessors, self.order_problem.max_tiles * self.column_tiles)
        with launch(self.blocks, PRODUCERS + _CONSUMERS * WARPGROUP, reallocates_registers=True) as place:
            self.thread, self.block = place.thread, place.block
            shared.open()
            with when(place.thread == 0):
                self.ring.initialize()
                ptx.barrier_init_fence()
            ptx.block_barrier()
            ptx.griddepcontrol_wait()
            ptx.launch_dependents()
            either(place.thread < PRODUCERS, self._produce, self._consume)

    # -- tiles and stages

    def _each_tile(self, body: Callable[[Expr, Expr], None]) -> None:
        """Write `body` for each tile of the block, given the index of its record and its column tile."""
        items = T.bind(self.order.data[0] * self.column_tiles)
        count = T.truncdiv(items - self.block + (self.blocks - 1), self.blocks)
        with T.serial(count) as number:
            item = T.bind(self.block + number * self.blocks)
            problem = self.order_problem
            record = T.bind(problem.TILES_AT + T.truncdiv(item, self.column_tiles) * problem.TILE_WORDS)
            body(record, T.bind(T.truncmod(item, self.column_tiles)))

    def _word(self, index: Expr) -> Expr:
        return T.bind(self.order.data[index])

    def _pair_of(self, first: Expr) -> Callable[[Expr], Expr]:
        """Function of a row of a tile that gives its pair, int64."""
        return lambda row: T.Cast("int64", self.order.data[self.order_problem.pairs_at + first + row])

    # -- producers

    def _produce(self) -> None:
        ptx.set_max_registers(_PRODUCER_REGISTERS, grows=False)
        position = RingPosition(self.stages)
        problem, work, thread = self.problem, self.work, self.thread
        assert problem.index is not None, "pairs are sorted"
        per_token = 1 if problem.has_row_per_expert else problem.index.shape[1]
        chunk, line = T.bind(thread % _CHUNKS), T.bind(thread // _CHUNKS)
        row_target = T.bind(line * SWIZZLED_BYTES + T.bitwise_xor(chunk, line % 8) * CHUNK_BYTES)
        warp, lane = T.bind(thread // WARP), T.bind(thread % WARP)
        place = lane if problem.bits < 4 else lane % 4 * 8 + lane // 4
        weight_target = T.bind(warp * work.chunk_bytes + place * CHUNK_BYTES)
        copies = None if problem.bits > 3 else lane < work.chunk_bytes // CHUNK_BYTES
        # In units of copies, as 32 bits suffice for these.
        rows = local(self.tile // _LINES, "int32")

        def copy_weights(weights_at: Expr, step: Expr, fragment_of: Callable[[Expr], Expr]) -> None:
            for i in range(self.fragments * self.chunks * WARP // PRODUCERS):
                number = warp + i * (PRODUCERS // WARP)
                fragment = fragment_of(number // self.chunks)
                source = fragment * work.chunks + step * self.chunks + number % self.chunks
                source = source * (work.chunk_bytes // CHUNK_BYTES) + lane
                copied = i * (PRODUCERS // WARP * work.chunk_bytes)
                with where([copies]):
                    self._copy(weights_at + weight_target + copied, self.packed[0], source)
                if work.high_bits:
                    target = weights_at + T.bind(warp * work.chunk_bytes + _LOW_BYTES + lane * CHUNK_BYTES) + copied
                    with when(lane < 8 * work.high_bits):
                        self._copy(target, self.packed[0], source + WARP)

        def tile(record: Expr, column: Expr) -> None:
            expert, first, count = (self._word(record + i) for i in range(3))
            pair_of = self._pair_of(first)
            for i in range(self.tile // _LINES):
                row = tirx.floordiv(pair_of(T.min(line + i * _LINES, count - 1)), int64(per_token))
                address = self.lhs.address({"m": row, "k": T.Cast("int64", chunk * (CHUNK_BYTES // 2))})
                T.buffer_store(rows, T.Cast("int32", tirx.floordiv(address, int64(CHUNK_BYTES // 2))), [i])
            copied_rows = T.bind(self._rows_of(count))
            matrix = T.bind(expert * work.tiles)
            first_fragment = T.bind(column * self.fragments)

            def fragment_of(number: Expr) -> Expr:
                return T.bind(matrix + T.min(first_fragment + number, work.tiles - 1))

            with T.serial(tirx.const(self.steps, "int32")) as step:
                stage, parity = T.bind(position.stage), T.bind(position.parity)
                ptx.barrier_wait(self.ring.empty(stage), T.bitwise_xor(parity, 1))
                weights_at = T.bind(self.weights_at + stage * self.weight_bytes)
                if work.is_plain:
                    self._load_plain(weights_at, step, stage, fragment_of)
                else:
                    copy_weights(weights_at, step, fragment_of)
                self._copy_parts(weights_at, step, fragment_of)
                rows_at = T.bind(self.rows_at + stage * self.row_bytes + row_target)
                for i in range(self.tile // _LINES):
                    with when(i * _LINES < copied_rows):
                        self._copy(rows_at + i * (_LINES * SWIZZLED_BYTES), self.lhs, rows[i] + step * _CHUNKS)
                ptx.barrier_arrive_after_copies(self.ring.full(stage))
                position.advance()

        self._each_tile(tile)

    def _rows_of(self, count: Expr) -> Expr:
        """Rows that are multiplied for a number of pairs."""
        rows: Expr = self.tiling.rows[-1]
        for choice in reversed(self.tiling.rows[:-1]):
            rows = T.Select(count <= choice, choice, rows)
        return rows

    def _load_plain(self, weights_at: Expr, step: Expr, stage: Expr, fragment_of: Callable[[Expr], Expr]) -> None:
        """Issue a bulk copy of each fragment's 16-bit weights: copies of 16 bytes are too many for 128 threads."""
        size = self.chunks * self.work.chunk_bytes
        with when(tirx.EQ(self.thread, 0)):
            ptx.barrier_expect(self.ring.full(stage), self.fragments * size)
        with when(self.thread < self.fragments):
            weights, first = self.packed[0], fragment_of(self.thread) * self.work.chunks + step * self.chunks
            elements = self.work.chunk_bytes // bytes_of(weights.nominal)  # of a chunk
            source = T.address_of(weights.data[T.Cast("int64", first) * elements])
            ptx.bulk_load(self.shared.at(weights_at + self.thread * size), source, size, self.ring.full(stage))

    def _copy_parts(self, weights_at: Expr, step: Expr, fragment_of: Callable[[Expr], Expr]) -> None:
        """Copy scales and zero points of a stage."""
        for number_of_part, (part, size) in enumerate(zip(self.work.part_list, self.part_bytes, strict=True)):
            copies, unit = size // CHUNK_BYTES, T.truncdiv(step * STAGE_DEPTH, part.unit)
            total = self.fragments * copies
            for begin in range(0, total, PRODUCERS):
                number = T.bind(begin + self.thread)
                with when(True if begin + PRODUCERS <= total else number < total):
                    offset = fragment_of(number // copies) * part.units + unit
                    target = weights_at + self._part_at(number_of_part) + number * CHUNK_BYTES
                    source = offset * (part.unit_bytes // CHUNK_BYTES) + number % copies
                    self._copy(target, self.packed[1 + number_of_part], source)

    def _part_at(self, part: int) -> int:
        """Offset of the scales (0) or zero points (1) of all fragments in a stage."""
        return self.fragments * (self.chunks * self.work.chunk_bytes + sum(self.part_bytes[:part]))

    def _copy(self, target: Expr, operand: GpuOperand, source: Expr) -> None:
        """Copy `CHUNK_BYTES` to an offset of shared memory, from an operand's offset in such units."""
        element = T.Cast("int64", source) * (CHUNK_BYTES // bytes_of(operand.nominal))
        ptx.copy_async(self.shared.at(target), T.address_of(operand.data[element]), CHUNK_BYTES)

    # -- consumers

    def _consume(self) -> None:
        ptx.set_max_registers(_CONSUMER_REGISTERS, grows=True)
        blocks, thread = self.tiling.column_blocks, self.thread
        self.member, self.group = T.bind(thread % WARPGROUP), T.bind(thread // WARPGROUP - 1)
        self.warp, self.lane = T.bind(self.member // WARP), T.bind(thread % WARP)
        self.position = RingPosition(self.stages)
        self.weights = _OrderedFragments(self.work, self.packed, self.lane, T.bind(self.lane // 4))
        base = local(1, "uint64")
        ptx.matrix_descriptor(base[0], self.shared.at(self.rows_at))
        self.descriptor = T.bind(base[0])

        def tile(record: Expr, column: Expr) -> None:
            first, count = self._word(record + 1), self._word(record + 2)
            pairs_at = T.bind(self.pairs_at + self.group * (self.tile * 4))
            with when(True if self.tile == WARPGROUP else self.member < self.tile):
                pair = self._pair_of(first)(T.min(self.member, count - 1))
                ptx.store_shared(self.shared.at(pairs_at + self.member * 4), [T.Cast("uint32", pair)])
            ptx.named_barrier(self.group + 1, WARPGROUP)
            self.store.begin(lambda row: self.shared.at(pairs_at + row * 4), count)
            origin = column * self.tiling.columns + self.group * (blocks * SWAPPED_COLUMNS)
            first_column = T.bind(T.Cast("int64", origin))
            self._choose_rows(self.tiling.rows, count, first_column)

        self._each_tile(tile)
        wait_late()  # of a block without tiles

    def _choose_rows(self, choices: tuple[int, ...], count: Expr, first_column: Expr) -> None:
        """Write the code of a tile for each number of rows."""
        if len(choices) == 1:
            self._multiply_tile(choices[0], first_column)
            return
        either(
            count <= choices[0],
            lambda: self._multiply_tile(choices[0], first_column),
            lambda: self._choose_rows(choices[1:], count, first_column),
        )

    def _multiply_tile(self, rows: int, first_column: Expr) -> None:
        last = local(1, "int32")
        self.sums = local(self.tiling.column_blocks * (rows // 2), "float32")
        # The first products add, too: else accumulators would be live between tiles, for each number of rows.
        with unrolled(self.tiling.column_blocks * (rows // 2)) as i:
            T.buffer_store(self.sums, T.float32(0), [i])
        self.weights.allocate()
        extents, own = (self.tiling.column_blocks, rows), (int64(0), first_column)

        def step(number: Expr) -> None:
            stage = _held(self.position.stage)
            ptx.barrier_wait(self.ring.full(stage), T.bind(self.position.parity))
            # Writes of cp.async belong to the generic proxy, wgmma reads by the async proxy.
            ptx.async_proxy_fence()
            with unrolled(self.tiling.column_blocks) as block:
                for half in range(2):
                    # Groups before the last are complete, so registers of fragments, and the stage before, are free.
                    ptx.wgmma_wait(1)
                    if half == 1:
                        self._release(last[0], tirx.EQ(block, 0), number > 0)
                    self._multiply_group(block, half, rows, stage)
            T.buffer_store(last, stage, [0])
            self.position.advance()

        if self.steps > 1:
            with T.serial(tirx.const(self.steps - 1, "int32")) as number:
                step(number)
        # Outside the loop: ptxas may read accumulators before products issued in a loop are complete.
        step(tirx.const(self.steps - 1, "int32"))
        ptx.wgmma_wait(0)
        self._release(last[0])
        # Opaque, as addresses that are computed once, before all tiles, would take registers in the main loop.
        member = T.bind(T.tvm_warp_shuffle(T.uint32(ALL_LANES), self.member, self.lane, WARP, WARP))
        wait_late()
        if not self.in_rows:
            self.store.fetch(extents, {}, own, member)
        self.store.emit(self.sums, extents, {}, own, self.group, member)

    def _release(self, stage: Expr, *conditions: Expr) -> None:
        """Give a stage back, by each warp."""
        ptx.warp_barrier()
        with when(tirx.all(tirx.EQ(self.lane, 0), *conditions)):
            ptx.barrier_arrive(self.ring.empty(stage))

    def _multiply_group(self, block: Expr, half: int, rows: int, stage: Expr) -> None:
        """Dequantize half of a stage's weights of a block, and issue their products as a group."""
        work, weights = self.work, self.weights
        stage_at = _held(self.weights_at + stage * self.weight_bytes)
        fragment = _held((self.group * self.tiling.column_blocks + block) * (WARPGROUP // WARP) + self.warp)
        chunk, first = divmod(half * _GROUP_STEPS, work.chunk // STEP)
        steps = range(first, first + _GROUP_STEPS)
        scales = range(first // work.steps, steps[-1] // work.steps + 1)
        parts = []
        for number, (part, size) in enumerate(zip(work.part_list, self.part_bytes, strict=True)):
            part_at = _held(stage_at + self._part_at(number) + fragment * size)
            of_chunk = scales if work.units_of_chunk(part) > 1 else range(1)
            units = [(chunk * work.chunk + scale * work.steps * STEP) // part.unit for scale in of_chunk]
            parts.append([part_at + unit * part.unit_bytes for unit in units])
        chunk_at = stage_at + (fragment * self.chunks + chunk) * work.chunk_bytes
        begin = half * _GROUP_STEPS * 4
        weights.load_scaled(self.shared, chunk_at, parts, steps, begin)
        ptx.wgmma_fence()
        for step in range(half * _GROUP_STEPS, (half + 1) * _GROUP_STEPS):
            units = T.Cast("uint64", stage * (self.row_bytes // 16) + step * (ptx.CONTRACTION_BYTES // 16))
            ptx.wgmma(
                [self.sums[block * (rows // 2) + i] for i in range(rows // 2)],
                [weights.fragment[step * 4 + i] for i in range(4)],
                self.descriptor + units,
                (work.type, work.type),
                T.uint32(1),
            )
        ptx.wgmma_commit()
