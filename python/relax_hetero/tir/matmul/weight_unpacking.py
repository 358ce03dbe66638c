"""Dequantization of packed weights: quants in fields of 32-bit lanes, a lane per column.

A field is masked in place and combined with the exponent of a float that gives the field's bits their value: the result
is a power of two plus the quant, without a conversion, and without a shift for the second field of a lane. The first
field is looked up in a register (VPERMPS) if the CPU can. (Measured for one row, 4 bits, AVX-512: 10 % faster than
looking up both, 25 % faster than exponents for both.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.block_formats import SCALES_OF_BYTES, stored_scale_type
from ...encoding.block_panels import HIGH_BITS, PanelPlan
from ...target.cpu_target import CpuTarget, WeightPrefetch
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

MAX_UNSHIFTED_FIELDS = 3  # maximum number of neighbouring fields of a lane that are read without a shift

_FRACTION_BITS, _EXPONENT_BIAS = 23, 127  # of float32

_LOOKUP = "llvm.x86.avx512.permvar.sf.512"
"""Sixteen of sixteen floats, by the low four bits of every lane (Intel SDM: VPERMPS)."""

_LOOKUP_OF_EIGHT = "llvm.x86.avx2.permps"
"""Eight of eight floats, by the low three bits of every lane (Intel SDM: VPERMPS)."""

_LOOKUP_OF_TWO = "llvm.x86.avx512.vpermi2var.ps.512"
"""Sixteen of 32 floats in two vectors, by the low five bits of every lane (Intel SDM: VPERMI2PS)."""

Numbers = Callable[[int], Expr]  # function from a position in a group to the quant of every column as float32


@dataclass(frozen=True)
class PanelReader:
    """Reads of panels; offsets are in words of 32 bits."""

    plan: PanelPlan
    lanes: int  # lanes of a vector
    elements: dict[str, Expr]  # the operand's bytes as elements of each type in it
    tables: list[Expr]  # vectors of the values of fields as float32; empty if the CPU lacks a look-up of floats
    has_halves: bool  # whether the CPU converts float16 by an instruction
    prefetch: WeightPrefetch
    codes: Any = None  # float32 codes of the quants, if they are from a table and the CPU lacks the look-up

    @staticmethod
    def of(cpu: CpuTarget, view: View, plan: PanelPlan) -> PanelReader:
        """The reader for a CPU; called inside of a PrimFunc's body, before its loops."""
        lanes, form = cpu.lanes("float32"), plan.form
        has_halves = cpu.isa.name not in ("sse", "generic")
        kinds = {"float32", "int8", "uint8", "int32", "uint16", *(["float16"] if has_halves else [])}
        elements = {kind: view.elements(kind) for kind in sorted(kinds)}
        tables, codes = [], None
        if form.codes:
            values = [tirx.const(code, "float32") for code in form.codes]
            if cpu.isa.name in ("avx512", "avx2"):
                repeated = values * max(1, lanes // len(values))
                parts = [repeated[first : first + lanes] for first in range(0, len(repeated), lanes)]
                tables = [let(tirx.Shuffle(part, list(range(lanes)))) for part in parts]
            codes = T.alloc_buffer((len(values),), "float32", scope="global")
            for index, value in enumerate(values):
                T.buffer_store(codes, value, [index])
        elif cpu.isa.name == "avx512" and form.bits < 6:
            number = tirx.bitwise_and(lane_numbers(16), constant((1 << form.bits) - 1, "int32", 16))
            low = let(tirx.Cast("float32x16", number) + constant(form.min_code, "float32", 16))
            tables = [low] if form.bits < 5 else [low, let(low + constant(16, "float32", 16))]
        return PanelReader(plan, lanes, elements, tables, has_halves, cpu.weight_prefetch, codes)

    @staticmethod
    def of_columns(cpu: CpuTarget, view: View, plan: PanelPlan) -> PanelReader:
        """The reader of single columns: the argument `vector` of its methods is a column of the panel."""
        return replace(PanelReader.of(cpu, view, plan), lanes=1, tables=[])

    @property
    def shape(self) -> tuple[int, int]:
        """Registers that unpacking takes for every vector of a panel, and for the whole kernel."""
        return 2 + MAX_UNSHIFTED_FIELDS, len(self.tables)

    def superblock(self, panel: Expr, number: Expr) -> Expr:
        """Offset of a superblock."""
        return panel * (self.plan.panel_bytes // 4) + number * (self.plan.offsets["end"] // 4)

    @property
    def is_prefetched(self) -> bool:
        """True if weights of this format are prefetched."""
        return self.plan.form.bits <= self.prefetch.max_bits

    def prefetch_weights(self, panel: Expr, k: Expr, count: int, distance: int) -> None:
        """Prefetch the lines of `count` weights of a panel, `distance` bytes after those at `k`."""
        plan, memory = self.plan, self.elements["int8"]
        end = plan.offsets["end"]
        start = materialize(panel * plan.panel_bytes + tirx.floordiv(k * end, plan.superblock_size) + distance)
        for line in range(ceil_div(count * end, plan.superblock_size * CACHE_LINE_BYTES)):
            prefetch(memory, start + line * CACHE_LINE_BYTES)

    def outer(self, superblock: Expr, vector: Expr) -> list[Expr]:
        """The factors `d` and `dmin` of a superblock's scales and minimums; empty for formats without them."""
        kinds = ((self.plan.form.scale, "superblock_scales"), (self.plan.form.minimum, "superblock_minimums"))
        factors = [
            self._load_factors(superblock, part, "float16", vector * self.lanes)
            for kind, part in kinds
            if kind == "int8"
        ]
        factor = self.plan.form.factor
        return factors if factor == 1 else [let(value * constant(factor, "float32", self.lanes)) for value in factors]

    def scale(self, superblock: Expr, block: Expr, outer: list[Expr], vector: Expr) -> Expr | None:
        """Scale of a block; None if the format lacks scales."""
        if not self.plan.form.scale:
            return None
        return self._block_factor(superblock, block, "scales", self.plan.form.scale, outer[:1], vector)

    def minimum(self, superblock: Expr, block: Expr, outer: list[Expr], vector: Expr) -> Expr | None:
        """Minimum of a block, the factor of the sum of left factors; None if the format lacks minimums."""
        kind = self.plan.form.minimum
        if not kind:
            return None
        value = self._block_factor(superblock, block, "minimums", kind, outer[1:], vector)
        return let(constant(0, "float32", self.lanes) - value) if kind == "int8" else value

    def _block_factor(
        self, superblock: Expr, block: Expr, part: str, kind: str, outer: list[Expr], vector: Expr
    ) -> Expr:
        offset = block * self.plan.columns + vector * self.lanes
        if self.plan.form.shares_bytes:
            value = self._nibbles(superblock, part, offset)
        else:
            value = self._load_factors(superblock, part, kind, offset)
        return let(value * outer[0]) if kind == "int8" else value

    def _nibbles(self, superblock: Expr, part: str, offset: Expr) -> Expr:
        """Scales or minimums in one half of bytes, as float32."""
        start = superblock * 4 + self.plan.offsets["scales"] + offset
        byte = tirx.Cast(vector_type("int32", self.lanes), self.elements["uint8"][lane_indices(start, self.lanes)])
        nibble = tirx.bitwise_and(byte, self._bits(15)) if part == "scales" else tirx.shift_right(byte, self._bits(4))
        return let(tirx.Cast(vector_type("float32", self.lanes), nibble))

    def _load_factors(self, superblock: Expr, part: str, kind: str, offset: Expr) -> Expr:
        """Scales or minimums of neighbouring columns in a section of a superblock, as float32."""
        size = bytes_of(stored_scale_type(kind))
        start = superblock * (4 // size) + self.plan.offsets[part] // size + offset
        if kind == "float16":
            return self._load_half(start)
        value = self.elements["uint8" if kind in SCALES_OF_BYTES else kind][lane_indices(start, self.lanes)]
        if kind in SCALES_OF_BYTES:
            byte = let(tirx.Cast(vector_type("int32", self.lanes), value))
            return self._power_of_two(byte) if kind == "e8m0" else self._float_of_byte(byte)
        return let(self._bytes_to_float(value) if kind == "int8" else value)

    def _power_of_two(self, exponent: Expr) -> Expr:
        """Number of a byte of e8m0; the smallest two are denormal."""
        normal = tirx.shift_left(exponent - self._bits(1), self._bits(_FRACTION_BITS))
        small = tirx.shift_left(self._bits(1 << (_FRACTION_BITS - 2)), tirx.bitwise_and(exponent, self._bits(1)))
        bits = let(tirx.Select(exponent > self._bits(1), normal, small))
        return let(tirx.reinterpret(vector_type("float32", self.lanes), bits))

    def _float_of_byte(self, byte: Expr) -> Expr:
        """Half of the number of a byte of e4m3, whose exponents' bias is 120 less than that of float32."""
        bits = tirx.shift_left(tirx.bitwise_and(byte, self._bits(0x7F)), self._bits(_FRACTION_BITS - 3))
        number = tirx.reinterpret(vector_type("float32", self.lanes), bits)
        return let(number * constant(2.0**119, "float32", self.lanes))

    def _load_half(self, start: Expr) -> Expr:
        """Contiguous float16 as float32, by integers if the CPU lacks the conversion."""
        index, lanes = lane_indices(start, self.lanes), self.lanes
        if self.has_halves:
            return let(cast(self.elements["float16"][index], "float32"))
        bits = let(tirx.Cast(vector_type("int32", lanes), self.elements["uint16"][index]))
        size = let(tirx.shift_left(tirx.bitwise_and(bits, self._bits(0x7FFF)), self._bits(13)))
        sign = tirx.shift_left(tirx.bitwise_and(bits, self._bits(0x8000)), self._bits(16))
        # The bias of exponents is 112 less than that of float32; infinity and NaN have all exponent bits set.
        kind = vector_type("float32", lanes)
        small = tirx.reinterpret(kind, size) * constant(2.0**112, "float32", lanes)
        large = tirx.reinterpret(kind, tirx.bitwise_or(size, self._bits(0x7F800000)))
        value = let(tirx.Select(size >= self._bits(0x7C00 << 13), large, small))
        return let(tirx.reinterpret(kind, tirx.bitwise_or(tirx.reinterpret(vector_type("int32", lanes), value), sign)))

    def _bytes_to_float(self, value: Expr) -> Expr:
        """Bytes as float32."""
        return tirx.Cast(vector_type("float32", self.lanes), tirx.Cast(vector_type("int32", self.lanes), value))

    def group(self, superblock: Expr, number: Expr, vector: Expr) -> Numbers:
        """The weights of a group of a superblock, for a vector of columns."""
        plan, columns = self.plan, self.plan.columns
        if plan.form.bits >= 8:
            return self._read_rows(superblock, number * plan.group, vector)
        first = superblock + plan.offsets["codes"] // 4 + number * (plan.group_bytes // 4) + vector * self.lanes
        lanes = [let(self.elements["int32"][lane_indices(first + w * columns, self.lanes)]) for w in range(plan.words)]
        if plan.form.bits == 3:
            high = self.high_halves(superblock, number, vector)
            return lambda position: self._number(self._field_of_planes(lanes[0], high, position), 0)
        readers = [self._fields(lane) for lane in lanes]
        per, last = plan.fields, plan.words * plan.fields
        if plan.group > last:
            readers.append(self._fields(self._join_high_bits(lanes)))

        def number_at(position: int) -> Expr:
            return readers[position // per](position % per) if position < last else readers[-1](position - last)

        return number_at

    def high_halves(self, superblock: Expr, number: Expr, vector: Expr) -> Expr:
        """The high bits of a group of 3-bit quants, in the low halves of lanes."""
        plan = self.plan
        start = superblock * 2 + plan.offsets["codes"] // 2 + number * (plan.group_bytes // 2)
        index = lane_indices(start + plan.columns * 2 + vector * self.lanes, self.lanes)
        return let(tirx.Cast(vector_type("int32", self.lanes), self.elements["uint16"][index]))

    def _field_of_planes(self, low: Expr, high: Expr, position: int) -> Expr:
        """A quant of two low bits and a high one."""
        low_bits = tirx.bitwise_and(tirx.shift_right(low, self._bits(2 * position)), self._bits(3))
        shifted = tirx.shift_right(tirx.shift_left(high, self._bits(2)), self._bits(HIGH_BITS[position]))
        return let(tirx.bitwise_or(low_bits, tirx.bitwise_and(shifted, self._bits(4))))

    def _read_rows(self, superblock: Expr, k: Expr, vector: Expr) -> Numbers:
        """8-bit quants and plain floats: a row of the panel's columns for each k."""
        plan = self.plan
        kind = {"bf16": "uint16", "f16": "float16"}.get(plan.form.name, "int8")
        size = 1 if kind == "int8" else 2
        first = superblock * (4 // size) + plan.offsets["codes"] // size + k * plan.columns + vector * self.lanes

        def number_at(position: int) -> Expr:
            at = first + position * plan.columns
            if kind == "float16":
                return self._load_half(at)
            value = self.elements[kind][lane_indices(at, self.lanes)]
            if kind == "int8":
                return self._bytes_to_float(value)
            wide = tirx.Cast(vector_type("uint32", self.lanes), value)
            upper = tirx.shift_left(wide, constant(16, "uint32", self.lanes))
            return tirx.reinterpret(vector_type("float32", self.lanes), upper)

        return number_at

    def _join_high_bits(self, lanes: list[Expr]) -> Expr:
        """The two highest bits of several lanes in one lane."""
        joined = None
        for number, lane in enumerate(lanes):
            shifted_lane = tirx.shift_right(lane, self._bits(30 - 2 * number))
            bits = tirx.bitwise_and(shifted_lane, self._bits(3 << 2 * number))
            joined = bits if joined is None else tirx.bitwise_or(joined, bits)
        return let(joined)

    def _fields(self, lane: Expr) -> Numbers:
        """The fields of a lane by position, from the lowest bits on."""
        bits = self.plan.form.bits
        unshifted_fields = 2 if self.tables or bits < 5 else MAX_UNSHIFTED_FIELDS
        if self.codes is not None:
            unshifted_fields = 1  # all are looked up
        shifted: dict[int, Expr] = {0: lane}

        def number(position: int) -> Expr:
            shift, field = divmod(position, unshifted_fields)
            if shift not in shifted:
                shifted[shift] = let(tirx.shift_right(lane, self._bits(bits * unshifted_fields * shift)))
            return self._number(shifted[shift], field)

        return number

    def _number(self, lane: Expr, field_index: int) -> Expr:
        bits, low = self.plan.form.bits, self.plan.form.min_code
        if self.tables and self.lanes == 8:
            low_half, *high = (
                tirx.call_llvm_pure_intrin("float32x8", _LOOKUP_OF_EIGHT, table, lane) for table in self.tables
            )
            if not high:
                return let(low_half)
            (high_half,) = high
            return let(tirx.Select(tirx.bitwise_and(lane, self._bits(8)) > self._bits(0), high_half, low_half))
        if self.tables and field_index == 0:
            if len(self.tables) == 1:
                return tirx.call_llvm_pure_intrin("float32x16", _LOOKUP, self.tables[0], lane)
            return tirx.call_llvm_pure_intrin("float32x16", _LOOKUP_OF_TWO, self.tables[0], lane, self.tables[1])
        if self.codes is not None:
            return let(self.codes[tirx.bitwise_and(lane, self._bits((1 << bits) - 1))])
        at = bits * field_index
        field = tirx.bitwise_and(lane, self._bits(((1 << bits) - 1) << at))
        if self.lanes == 1:
            return tirx.Cast("float32", tirx.shift_right(field, self._bits(at)) + tirx.const(low, "int32"))
        exponent = self._bits((_EXPONENT_BIAS + _FRACTION_BITS - at) << _FRACTION_BITS)
        with_exponent = tirx.reinterpret(vector_type("float32", self.lanes), tirx.bitwise_or(field, exponent))
        return with_exponent - constant(float((1 << (_FRACTION_BITS - at)) - low), "float32", self.lanes)

    def _bits(self, value: int) -> Expr:
        return constant(value, "int32", self.lanes)
