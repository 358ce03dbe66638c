"""Weights of 4 bits as numbers: eight of a column in a lane of 32 bits, as many columns as a vector has lanes.

Four bits at a place of the fraction of a float, whose exponent says what the fraction's last bits are worth, are a
power of two (the place's mark) and the weight added: no conversion, and no shift for the second of two weights. The
first of two is looked up where the CPU can. (Measured for one row, AVX-512: 10 % faster than looking up both, 25 %
faster than marking both.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from ..core.builder import Expr, constant, lane_indices, lane_numbers, let, vector_type

PLACES = 2
"""Weights of a lane that are told apart without a shift."""

MIDDLE = 8
"""The zero point of weights that have none of their own."""

_FRACTION_BITS, _EXPONENT_BIAS = 23, 127  # of float32

_LOOKUP = "llvm.x86.avx512.permvar.sf.512"
"""Sixteen of sixteen floats, by the low four bits of every lane (Intel SDM: VPERMPS)."""


@dataclass(frozen=True)
class Unpacking:
    """How a kernel makes numbers of weights.

    Attributes
    ----------
    zeros : Buffer or None
        Zero points in one dimension, uint8 or float32.
    table : PrimExpr or None
        The 16 weights as numbers, less `MIDDLE`; None where the CPU has no look-up of floats.
    """

    lanes: int
    zeros: Expr
    table: Expr

    @staticmethod
    def of(cpu: CpuTarget, zeros: Expr) -> Unpacking:
        """For a CPU; called inside the body of a PrimFunc."""
        table = None
        if cpu.isa.name == "avx512":
            table = T.bind(tirx.Cast("float32x16", lane_numbers(16)) - constant(MIDDLE, "float32", 16))
        return Unpacking(cpu.lanes("float32"), zeros, table)

    def points(self, start: Expr) -> list[Expr]:
        """What is to be taken from weights whose zero points begin at `start`; see `numbers`.

        For each place its mark and the zero point together. Zero points that are any number, which a mark would
        round, stand by themselves, as the last.
        """
        lanes = self.lanes
        marks = [constant(self._mark(place), "float32", lanes) for place in range(PLACES)]
        if self.zeros is None:
            return [mark + constant(MIDDLE, "float32", lanes) for mark in marks]
        point = self.zeros[lane_indices(start, lanes)]
        if str(self.zeros.dtype) == "float32":
            return [*marks, let(point)]
        number = let(tirx.Cast(vector_type("float32", lanes), tirx.Cast(vector_type("int32", lanes), point)))
        return [let(mark + number) for mark in marks]

    def numbers(self, bits: Expr, points: list[Expr]) -> Callable[[int], Expr]:
        """Gives, by its position in the lane, each weight less its zero point.

        Parameters
        ----------
        bits : PrimExpr
            A vector of int32.
        points : list of PrimExpr
            Of the lanes' columns, as `points` gives them.
        """
        moved: dict[int, Expr] = {0: bits}

        def number(position: int) -> Expr:
            shift, place = divmod(position, PLACES)
            if shift not in moved:
                moved[shift] = let(tirx.shift_right(bits, self._bits(4 * PLACES * shift)))
            if not self._is_looked_up(place):
                return self._less(self._marked(moved[shift], place), points, place)
            value = tirx.call_llvm_pure_intrin("float32x16", _LOOKUP, self.table, moved[shift])
            return value if self.zeros is None else self._less(value, points, place)

        return number

    def _mark(self, place: int) -> float:
        if self._is_looked_up(place):
            return -MIDDLE
        return 0 if self.lanes == 1 else float(1 << (_FRACTION_BITS - 4 * place))

    def _is_looked_up(self, place: int) -> bool:
        return self.table is not None and place == 0

    def _marked(self, bits: Expr, place: int) -> Expr:
        """The weight at a place and its mark; converted, without a mark, where there are no vectors."""
        four = tirx.bitwise_and(bits, self._bits(15 << 4 * place))
        if self.lanes == 1:
            return tirx.Cast("float32", tirx.shift_right(four, self._bits(4 * place)))
        exponent = self._bits((_EXPONENT_BIAS + _FRACTION_BITS - 4 * place) << _FRACTION_BITS)
        return tirx.reinterpret(vector_type("float32", self.lanes), tirx.bitwise_or(four, exponent))

    def _less(self, value: Expr, points: list[Expr], place: int) -> Expr:
        value = value - points[place]
        return value - points[PLACES] if len(points) > PLACES else value

    def _bits(self, value: int) -> Expr:
        return constant(value, "int32", self.lanes)
