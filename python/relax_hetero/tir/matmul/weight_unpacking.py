"""Weights in panels as numbers: fields of 32-bit lanes, of as many columns as a vector has lanes.

The bits of a field at a place of the fraction of a float, whose exponent says what the fraction's last bits are worth,
are a power of two (the place's mark) and the field added: no conversion, and no shift for the second of two fields. The
first is looked up where the CPU can. (Measured for one row, 4 bits, AVX-512: 10 % faster than looking up both, 25 %
faster than marking both.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx

from ...encoding.block_panels import RecordPlan
from ...target.cpu_target import CpuTarget
from ...target.element_types import bytes_of
from ..core.builder import (
    CACHE_LINE_BYTES,
    Expr,
    ceil_div,
    constant,
    lane_indices,
    lane_numbers,
    let,
    materialize,
    prefetch,
    vector_type,
)
from ..core.view import View
from ..math.casts import cast

MAX_PLACES = 3
"""Fields of a lane that are told apart without a shift, at most."""

AHEAD = 2048
"""Bytes between what is read and what is asked for. (Measured on a Xeon: a tenth faster than without.)"""

_FRACTION_BITS, _EXPONENT_BIAS = 23, 127  # of float32

_LOOKUP = "llvm.x86.avx512.permvar.sf.512"
"""Sixteen of sixteen floats, by the low four bits of every lane (Intel SDM: VPERMPS)."""

_LOOKUP_OF_TWO = "llvm.x86.avx512.vpermi2var.ps.512"
"""Sixteen of 32 floats in two vectors, by the low five bits of every lane (Intel SDM: VPERMI2PS)."""

Numbers = Callable[[int], Expr]
"""Gives a weight of every column, by its position in its group, as float32: its code."""


@dataclass(frozen=True)
class PanelReader:
    """Reads of panels; offsets are in words of 32 bits.

    Attributes
    ----------
    plan : RecordPlan
    lanes : int
        Lanes of a vector.
    elements : dict
        The operand's bytes as elements of each type that it has.
    tables : list of PrimExpr
        The codes of fields as float32; none where the CPU has no look-up of floats.
    has_halves : bool
        Whether the CPU widens float16 by an instruction.
    """

    plan: RecordPlan
    lanes: int
    elements: dict[str, Expr]
    tables: list[Expr]
    has_halves: bool

    @staticmethod
    def of(cpu: CpuTarget, view: View, plan: RecordPlan) -> PanelReader:
        """For a CPU; called inside the body of a PrimFunc, before its loops."""
        lanes, form = cpu.lanes("float32"), plan.form
        has_halves = cpu.isa.name not in ("sse", "generic")
        kinds = {"float32", "int8", "int32", "uint16", *(["float16"] if has_halves else [])}
        elements = {kind: view.elements(kind) for kind in sorted(kinds)}
        tables = []
        if cpu.isa.name == "avx512" and form.bits in (2, 4, 5):
            number = tirx.bitwise_and(lane_numbers(16), constant((1 << form.bits) - 1, "int32", 16))
            low = let(tirx.Cast("float32x16", number) + constant(form.low, "float32", 16))
            tables = [low] if form.bits < 5 else [low, let(low + constant(16, "float32", 16))]
        return PanelReader(plan, lanes, elements, tables, has_halves)

    @staticmethod
    def of_columns(cpu: CpuTarget, view: View, plan: RecordPlan) -> PanelReader:
        """Reader of single columns, whose numbers in their panel stand in the place of vectors'."""
        whole = PanelReader.of(cpu, view, plan)
        return PanelReader(plan, 1, whole.elements, [], whole.has_halves)

    @property
    def shape(self) -> tuple[int, int]:
        """Registers that unpacking takes for every vector of a panel, and for the whole kernel."""
        return 2 + MAX_PLACES, len(self.tables)

    def record(self, panel: Expr, number: Expr) -> Expr:
        """Where a record begins."""
        return panel * (self.plan.panel_bytes // 4) + number * (self.plan.places["end"] // 4)

    def fetch_ahead(self, panel: Expr, k: Expr, count: int) -> None:
        """Ask for the lines that hold `count` weights of a panel, from some k on and so far ahead.

        The CPU's own prefetching ends with each page of 4 KiB.
        """
        plan, memory = self.plan, self.elements["int8"]
        end = plan.places["end"]
        start = materialize(panel * plan.panel_bytes + tirx.floordiv(k * end, plan.span) + AHEAD)
        for line in range(ceil_div(count * end, plan.span * CACHE_LINE_BYTES)):
            prefetch(memory, start + line * CACHE_LINE_BYTES)

    def outer(self, record: Expr, vector: Expr) -> list[Expr]:
        """Factors of the scales and the minimums of a record's blocks, for a vector of columns; none for most."""
        kinds = ((self.plan.form.scale, "outer_scales"), (self.plan.form.minimum, "outer_minimums"))
        return [self._vector(record, part, "float16", vector * self.lanes) for kind, part in kinds if kind == "int8"]

    def scale(self, record: Expr, block: Expr, outer: list[Expr], vector: Expr) -> Expr | None:
        """Factor of a block's sums of codes."""
        if not self.plan.form.scale:
            return None
        return self._of_block(record, block, "scales", self.plan.form.scale, outer[:1], vector)

    def minimum(self, record: Expr, block: Expr, outer: list[Expr], vector: Expr) -> Expr | None:
        """Factor of the sum of a block's left factors; None where the format has no minimums."""
        kind = self.plan.form.minimum
        if not kind:
            return None
        value = self._of_block(record, block, "minimums", kind, outer[1:], vector)
        return let(constant(0, "float32", self.lanes) - value) if kind == "int8" else value

    def _of_block(self, record: Expr, block: Expr, part: str, kind: str, outer: list[Expr], vector: Expr) -> Expr:
        value = self._vector(record, part, kind, block * self.plan.columns + vector * self.lanes)
        return let(value * outer[0]) if kind == "int8" else value

    def _vector(self, record: Expr, part: str, kind: str, offset: Expr) -> Expr:
        """Neighbouring columns' numbers of a part of a record, as float32."""
        size = bytes_of(kind)
        start = record * (4 // size) + self.plan.places[part] // size + offset
        if kind == "float16":
            return self._half(start)
        value = self.elements[kind][lane_indices(start, self.lanes)]
        return let(self._widened(value) if kind == "int8" else value)

    def _half(self, start: Expr) -> Expr:
        """Neighbours of float16, as float32; by integers where the CPU has no instruction."""
        index, lanes = lane_indices(start, self.lanes), self.lanes
        if self.has_halves:
            return let(cast(self.elements["float16"][index], "float32"))
        bits = let(tirx.Cast(vector_type("int32", lanes), self.elements["uint16"][index]))
        size = let(tirx.shift_left(tirx.bitwise_and(bits, self._bits(0x7FFF)), self._bits(13)))
        sign = tirx.shift_left(tirx.bitwise_and(bits, self._bits(0x8000)), self._bits(16))
        # The exponent's bias is 112 less than that of float32; of what is not finite, all bits of it are set.
        kind = vector_type("float32", lanes)
        small = tirx.reinterpret(kind, size) * constant(2.0**112, "float32", lanes)
        large = tirx.reinterpret(kind, tirx.bitwise_or(size, self._bits(0x7F800000)))
        value = let(tirx.Select(size >= self._bits(0x7C00 << 13), large, small))
        return let(tirx.reinterpret(kind, tirx.bitwise_or(tirx.reinterpret(vector_type("int32", lanes), value), sign)))

    def _widened(self, value: Expr) -> Expr:
        """Bytes as float32."""
        return tirx.Cast(vector_type("float32", self.lanes), tirx.Cast(vector_type("int32", self.lanes), value))

    def group(self, record: Expr, number: Expr, vector: Expr) -> Numbers:
        """The weights of a group of a record, for a vector of columns."""
        plan, columns = self.plan, self.plan.columns
        if plan.form.bits >= 8:
            return self._of_rows(record, number * plan.group, vector)
        first = record + plan.places["codes"] // 4 + number * (plan.words * columns) + vector * self.lanes
        lanes = [let(self.elements["int32"][lane_indices(first + w * columns, self.lanes)]) for w in range(plan.words)]
        readers = [self._fields(lane) for lane in lanes]
        per, last = plan.fields, plan.words * plan.fields
        if plan.group > last:
            readers.append(self._fields(self._left_over(lanes)))

        def number_at(position: int) -> Expr:
            return readers[position // per](position % per) if position < last else readers[-1](position - last)

        return number_at

    def _of_rows(self, record: Expr, k: Expr, vector: Expr) -> Numbers:
        """Codes of 8 bits, and plain numbers: a panel's columns for each k."""
        plan = self.plan
        kind = {"bf16": "uint16", "f16": "float16"}.get(plan.form.name, "int8")
        size = 1 if kind == "int8" else 2
        first = record * (4 // size) + plan.places["codes"] // size + k * plan.columns + vector * self.lanes

        def number_at(position: int) -> Expr:
            at = first + position * plan.columns
            if kind == "float16":
                return self._half(at)
            value = self.elements[kind][lane_indices(at, self.lanes)]
            if kind == "int8":
                return self._widened(value)
            wide = tirx.Cast(vector_type("uint32", self.lanes), value)
            upper = tirx.shift_left(wide, constant(16, "uint32", self.lanes))
            return tirx.reinterpret(vector_type("float32", self.lanes), upper)

        return number_at

    def _left_over(self, lanes: list[Expr]) -> Expr:
        """The two highest bits of each of some lanes, one after the other."""
        found = None
        for number, lane in enumerate(lanes):
            moved = tirx.shift_right(lane, self._bits(30 - 2 * number))
            two = tirx.bitwise_and(moved, self._bits(3 << 2 * number))
            found = two if found is None else tirx.bitwise_or(found, two)
        return let(found)

    def _fields(self, lane: Expr) -> Numbers:
        """The fields of a lane, by their position from the lowest bits on."""
        bits = self.plan.form.bits
        places = 2 if self.tables or bits < 5 else MAX_PLACES
        moved: dict[int, Expr] = {0: lane}

        def number(position: int) -> Expr:
            shift, place = divmod(position, places)
            if shift not in moved:
                moved[shift] = let(tirx.shift_right(lane, self._bits(bits * places * shift)))
            return self._number(moved[shift], place)

        return number

    def _number(self, lane: Expr, place: int) -> Expr:
        bits, low = self.plan.form.bits, self.plan.form.low
        if self.tables and place == 0:
            if len(self.tables) == 1:
                return tirx.call_llvm_pure_intrin("float32x16", _LOOKUP, self.tables[0], lane)
            return tirx.call_llvm_pure_intrin("float32x16", _LOOKUP_OF_TWO, self.tables[0], lane, self.tables[1])
        at = bits * place
        field = tirx.bitwise_and(lane, self._bits(((1 << bits) - 1) << at))
        if self.lanes == 1:
            return tirx.Cast("float32", tirx.shift_right(field, self._bits(at)) + tirx.const(low, "int32"))
        exponent = self._bits((_EXPONENT_BIAS + _FRACTION_BITS - at) << _FRACTION_BITS)
        marked = tirx.reinterpret(vector_type("float32", self.lanes), tirx.bitwise_or(field, exponent))
        return marked - constant(float((1 << (_FRACTION_BITS - at)) - low), "float32", self.lanes)

    def _bits(self, value: int) -> Expr:
        return constant(value, "int32", self.lanes)
