"""Experts in a CPU's panels, copied to a GPU as they are, turned into the fragments of its tensor cores.

Both have the same bits in another order. A thread has two columns of a fragment block, 8 apart: it reads their quants
of a chunk of k, and stores the words of four lanes.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.block_formats import BlockFormat
from ....encoding.block_panels import HIGH_BITS
from ....encoding.block_weights import FRAGMENT_COLUMNS, NARROW_PLANES, chunk_of, lane_words
from ....encoding.problem import PanelFragmentsProblem
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ..core import ptx
from ..core.launch import enable_pdl, launch
from ..core.operand import GpuOperand

_THREADS, _COLUMNS, _QUARTERS = 128, 8, 4


def _sections(form: BlockFormat, part: int) -> list[str]:
    """Sections of a superblock in a panel that a part of the fragments consists of."""
    names = ("scales", "minimums")
    if form.scale != "int8" or (form.shares_bytes and part == 1):
        return [names[part - 1]]
    return [name if part == 1 else f"superblock_{name}" for name in names[: 1 + bool(form.minimum)]]


def panel_fragments_kernel(problem: PanelFragmentsProblem, gpu: GpuTarget) -> tirx.PrimFunc:
    """Kernel that writes a part of the fragments, one launch; `PanelFragmentsProblem` documents its parameters."""
    function = Function("panel_fragments", registers="local")
    with function:
        panels = GpuOperand(function, "panels", problem.panels)
        result = GpuOperand(function, "result", problem.result)
        with function.body():
            panels.open()
            result.open(raw=True)
            kernel = _Kernel(problem, panels, result)
            items = kernel.chunks * _COLUMNS if problem.part == 0 else result.extents[1] * FRAGMENT_COLUMNS
            items *= result.extents[0] * (1 if problem.part == 0 else result.extents[3] // 2)
            with launch(ceil_div(items, _THREADS), _THREADS) as place:
                if gpu.overlaps_launches:
                    ptx.griddepcontrol_wait()
                    ptx.launch_dependents()
                item = T.bind(T.Cast("int64", place.block) * _THREADS + T.Cast("int64", place.thread))
                with when(True if items % _THREADS == 0 else item < int64(items)):
                    (kernel.weights if problem.part == 0 else kernel.factors)(item)
    return enable_pdl(function.result) if gpu.overlaps_launches else function.result


class _Kernel:
    """Writer of a thread's work."""

    def __init__(self, problem: PanelFragmentsProblem, panels: GpuOperand, result: GpuOperand) -> None:
        self.problem, self.plan, self.panels, self.result = problem, problem.plan, panels, result
        self.bits = problem.form.bits
        self.chunk, self.lane_words = chunk_of(self.bits), lane_words(self.bits)
        self.chunks = ceil_div(problem.depth, self.chunk)
        self.run = min(problem.form.block, self.chunk) if self.bits < 16 else self.chunk

    def _panel(self, tile: Expr, column: Expr) -> tuple[Expr, Expr]:
        """Offset in bytes of the panel of a column of a tile, and the column in it."""
        columns, width = self.problem.columns, self.plan.columns
        tiles = columns // FRAGMENT_COLUMNS
        in_matrix = T.bind(tirx.floormod(tile, tiles) * FRAGMENT_COLUMNS + column)
        panel = tirx.floordiv(tile, tiles) * ceil_div(columns, width) + tirx.floordiv(in_matrix, width)
        return T.bind(panel * self.plan.panel_bytes), T.bind(tirx.floormod(in_matrix, width))

    def factors(self, item: Expr) -> None:
        """Copy an element of scales, minimums or factors: ``(tile, block, column, number)``."""
        tiles, blocks, columns, numbers = map(int, self.problem.result.shape)
        number, rest = tirx.floormod(item, numbers), tirx.floordiv(item, numbers)
        column, rest = tirx.floormod(rest, columns), T.bind(tirx.floordiv(rest, columns))
        block, tile = T.bind(tirx.floormod(rest, blocks)), T.bind(tirx.floordiv(rest, blocks))
        start, in_panel = self._panel(tile, column + tirx.floormod(number, 2) * _COLUMNS)
        per = 1 if self.problem.part == 2 and self.problem.form.scale == "int8" else self.plan.blocks
        superblock = start + tirx.floordiv(block, per) * self.plan.offsets["end"]
        place = tirx.floormod(block, per) * self.plan.columns + in_panel
        names = _sections(self.problem.form, self.problem.part)
        values = [self._factor(superblock, name, place) for name in names]
        value = values[0] if len(values) == 1 else T.Select(number < 2, *values)
        T.buffer_store(self.result.data, value, [item])

    def _factor(self, superblock: Expr, section: str, place: Expr) -> Expr:
        """A number of a section as the result stores it."""
        size = 1 if self.result.dtype == "uint8" else 2
        elements = self.panels.elements(self.result.dtype)
        value = elements[tirx.floordiv(superblock + self.plan.offsets[section], size) + place]
        # Minimums are subtracted on CPUs, and added on GPUs.
        return T.bitwise_xor(value, tirx.const(1 << 15, "uint16")) if section == "superblock_minimums" else value

    def weights(self, item: Expr) -> None:
        """Write the words of four lanes: ``(tile, chunk, column)``."""
        column, rest = T.bind(tirx.floormod(item, _COLUMNS)), T.bind(tirx.floordiv(item, _COLUMNS))
        chunk, tile = T.bind(tirx.floormod(rest, self.chunks)), T.bind(tirx.floordiv(rest, self.chunks))
        quants = [self._quants(tile, column + half * _COLUMNS, chunk) for half in range(2)]
        first = T.bind(rest * (32 * self.lane_words))
        for quarter in range(_QUARTERS):
            lane = column * _QUARTERS + quarter
            if self.bits == 16:
                self._store(first + lane * 4, [self._plain(quants, quarter, w) for w in range(4)])
            elif self.bits == 8:
                self._store(first + lane * 4, [self._bytes(quants, quarter, w) for w in range(4)])
            elif self.bits < 4:
                begin = 0
                for width in NARROW_PLANES[self.bits]:
                    plane = [[quant >> _u32(begin) for quant in of_column] for of_column in quants]
                    words = [self._fields(plane, quarter, w, (1 << width) - 1) << _u32(w * width % 4) for w in range(4)]
                    per_word = 4 // width
                    joined = [_joined(words[w : w + per_word]) for w in range(0, 4, per_word)]
                    self._store(first + (32 * begin + lane * width), joined)
                    begin += width
            else:
                self._store(first + lane * 4, [self._fields(quants, quarter, w, 15) for w in range(4)])
                planes = self.bits - 4
                if planes:
                    words = [self._high(quants, quarter, w) for w in range(planes)]
                    self._store(first + (32 * 4 + lane * planes), words)

    def _store(self, offset: Expr, words: list[Expr]) -> None:
        ptx.store_global(T.address_of(self.result.data[T.bind(offset)]), [T.bind(word) for word in words])

    def _quants(self, tile: Expr, column: Expr, chunk: Expr) -> list[Expr]:
        """Quants of a column in a chunk of k, uint32; bits of plain numbers."""
        plan = self.plan
        start, in_panel = self._panel(tile, column)
        quants: list[Expr] = []
        for first in range(0, self.chunk, plan.group):
            k = T.bind(chunk * self.chunk + first)
            superblock = start + tirx.floordiv(k, plan.superblock_size) * plan.offsets["end"]
            codes = T.bind(superblock + plan.offsets["codes"])
            exists = None if self.problem.depth % self.chunk == 0 else k < plan.superblocks * plan.superblock_size
            quants += self._group(codes, tirx.floormod(k, plan.superblock_size), in_panel, exists)
        return quants[: self.chunk]

    def _group(self, codes: Expr, k: Expr, column: Expr, exists: Expr | None) -> list[Expr]:
        """Quants of a group of a superblock whose codes begin at a byte; zeros unless it exists."""
        plan, bits, columns = self.plan, self.bits, self.plan.columns
        if bits >= 8:
            size = bits // 8
            elements = self.panels.elements(f"uint{bits}")
            place = T.bind(tirx.floordiv(codes, size) + k * columns + column)
            flip = (1 << (bits - 1)) if bits == 8 else 0  # codes of 8 bits are signed
            loaded = [T.Cast("uint32", elements[place + i * columns]) for i in range(plan.group)]
            return [self._existing(T.bitwise_xor(value, _u32(flip)), exists) for value in loaded]
        elements = self.panels.elements("uint32")
        group = T.bind(codes + tirx.floordiv(k, plan.group) * plan.group_bytes)
        place = T.bind(tirx.floordiv(group, 4) + column)
        lanes = [self._existing(elements[place + w * columns], exists) for w in range(plan.words)]
        if bits == 3:
            halves = self.panels.elements("uint16")
            half = T.Cast("uint32", halves[tirx.floordiv(group, 2) + 2 * columns + column])
            high = self._existing(half, exists)
            return [_field(lanes[0], 2, i) | _field(high, 1, HIGH_BITS[i]) << _u32(2) for i in range(plan.group)]
        whole = plan.words * plan.fields
        quants = [_field(lanes[i // plan.fields], bits, i % plan.fields) for i in range(whole)]
        if plan.group > whole:  # in the two bits that are left over of each lane
            high = (T.bitwise_and(lane >> _u32(30 - 2 * w), _u32(3 << 2 * w)) for w, lane in enumerate(lanes))
            joined = T.bind(_joined(high))
            quants += [_field(joined, bits, i) for i in range(plan.group - whole)]
        return quants

    def _existing(self, value: Expr, exists: Expr | None) -> Expr:
        return T.bind(value if exists is None else T.if_then_else(exists, value, _u32(0)))

    def _fields(self, quants: list[list[Expr]], quarter: int, word: int, mask: int) -> Expr:
        """Low bits of four neighbours of both columns, in 4 bits each; see `pack_fragments`."""
        k = self._first(quarter, word * 4, self.run // 4)
        shifts = [0, 16, 8, 24]
        return _joined(
            T.bitwise_and(quants[half][k + i], _u32(mask)) << _u32(shifts[i] + 4 * half)
            for i in range(4)
            for half in range(2)
        )

    def _high(self, quants: list[list[Expr]], quarter: int, word: int) -> Expr:
        """The high one or two bits of a lane; see `block_weights`."""
        width = self.bits - 4
        steps = 4 // width  # of four neighbours, in a word
        first = [self._first(quarter, 4 * (word * steps + step), self.run // 4) for step in range(steps)]
        return _joined(
            (quants[half][first[step] + 2 * pair + weight] >> _u32(4))
            << _u32(16 * weight + width * (4 * step + 2 * pair + half))
            for step in range(steps)
            for pair in range(2)
            for weight in range(2)
            for half in range(2)
        )

    def _bytes(self, quants: list[list[Expr]], quarter: int, word: int) -> Expr:
        """Two neighbours of both columns."""
        k = self._first(quarter, word * 2, self.run // 4)
        return _joined(quants[half][k + i] << _u32(16 * half + 8 * i) for half in range(2) for i in range(2))

    def _plain(self, numbers: list[list[Expr]], quarter: int, word: int) -> Expr:
        """Two neighbours of one of the columns."""
        k = quarter * 4 + word // 2 * 2
        return _joined(numbers[word % 2][k + i] << _u32(16 * i) for i in range(2))

    def _first(self, quarter: int, place: int, size: int) -> int:
        """The k of a place in the weights of a lane: those of a quarter of each run."""
        return place // size * self.run + quarter * size + place % size


def _u32(value: int) -> Expr:
    return tirx.const(value, "uint32")


def _joined(words: Iterable[Expr]) -> Expr:
    return reduce(T.bitwise_or, words)


def _field(lane: Expr, bits: int, number: int) -> Expr:
    return T.bitwise_and(lane >> _u32(bits * number), _u32((1 << bits) - 1))
