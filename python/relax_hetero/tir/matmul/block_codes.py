"""Rows of a left operand as bytes with a scale for each chain: what dot products of integers multiply weights by.

A number is ``scale * (256 * high + low)``: two signed bytes, of which each makes a product of its own; or ``scale *
high``, half of the work. The scale is that of its chain, so the error is at most one in 65,024 of the largest number of
the chain, or one in 254.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ..core.builder import Expr, broadcast, constant, lane_indices, lane_mask, let, materialize, over_lanes, vector_type
from ..core.view import OperandView

_LARGEST = {1: 127, 2: 127 * 256}
"""The largest integer, by the bytes of a number."""

_LEAST = 1e-30
"""Chains whose numbers are all smaller are zeros: what their scale is divided by is no number of float32."""

_ROUND = 1.5 * 2.0**23
"""Added to a float32 of small magnitude, it leaves the nearest integer in the fraction's last bits."""


@dataclass(frozen=True)
class Codes:
    """Where the bytes of a block of rows lie.

    Attributes
    ----------
    terms : int
        Bytes of a number: 1 or 2.
    words : Buffer
        int32: of a row, of a chain the high bytes, then the low ones.
    scales : Buffer
        float32, by row and chain.
    sums : Buffer or None
        Sums of the row's integers by row and chain, times `low` as int32, or times their scale as float32.
    chain, chains : int
        Numbers of a chain, and chains of a row.
    low : int
        Factor of the sums of integers; 0 where that is their scale.
    order : sequence of int
        Positions of numbers in a run of them, in the order of their bytes.
    """

    terms: int
    words: Any
    scales: Any
    sums: Any
    chain: int
    chains: int
    low: int
    order: Sequence[int]

    @property
    def row_words(self) -> int:
        """Lanes of a row."""
        return self.chains * self.chain_words

    @property
    def chain_words(self) -> int:
        """Lanes of a chain."""
        return self.terms * self.chain // 4

    def write_chain(self, lhs: OperandView, row: Expr, at: Expr, number: Expr, size: int, lanes: int) -> None:
        """Write the bytes of a chain.

        Parameters
        ----------
        lhs : OperandView
            float32.
        row, at : PrimExpr
            The row, and its number among those of the block.
        number : PrimExpr
            Number of the chain.
        size : int
            How many of its numbers exist.
        lanes : int
            Lanes of a vector.
        """
        first = materialize(number * self.chain)
        values = [
            let(lhs.load({"m": row, "k": first + start}, "k", lanes, lane_mask(size - start, lanes)))
            for start in range(0, size, lanes)
        ]
        while len(values) * lanes < self.chain:
            values.append(constant(0.0, "float32", lanes))
        place = materialize(at * self.chains + number)
        scale, factor = self._scale(values, lanes)
        T.buffer_store(self.scales, scale, [place])
        integers = [let(_nearest(value * broadcast(factor, lanes), lanes)) for value in self._ordered(values, lanes)]
        if self.sums is not None:
            # Of the integers, not of the numbers: what rounding loses then meets weights, smaller than fields.
            total = _total(integers, lanes)
            low = tirx.const(self.low, "int32")
            T.buffer_store(self.sums, total * low if self.low else tirx.Cast("float32", total) * scale, [place])
        words = materialize(at * self.row_words + number * self.chain_words)
        eight = constant(8, "int32", lanes)
        for vector, integer in enumerate(integers):
            parts = [integer]
            if self.terms == 2:
                high = let(tirx.shift_right(integer + constant(128, "int32", lanes), eight))
                parts = [high, integer - tirx.shift_left(high, eight)]
            for term, byte in enumerate(parts):
                start = words + term * (self.chain // 4) + vector * (lanes // 4)
                packed = tirx.reinterpret(vector_type("int32", lanes // 4), tirx.Cast(vector_type("int8", lanes), byte))
                T.buffer_store(self.words, packed, [lane_indices(start, lanes // 4)])

    def _scale(self, values: list[Expr], lanes: int) -> tuple[Expr, Expr]:
        """Factors of integers and of numbers; not a number where one of them is none."""
        largest = None
        for value in values:
            bits = tirx.bitwise_and(
                tirx.reinterpret(vector_type("int32", lanes), value), constant(0x7FFFFFFF, "int32", lanes)
            )
            # As integers: of floats, a number may be larger than what is none.
            largest = let(bits) if largest is None else let(T.max(largest, bits))
        most = T.bind(tirx.reinterpret("float32", over_lanes(largest, T.max, lanes)))
        is_nothing = most < tirx.const(_LEAST, "float32")
        zero, top = tirx.const(0, "float32"), _LARGEST[self.terms]
        scale = T.bind(tirx.Select(is_nothing, zero, most * tirx.const(1 / top, "float32")))
        return scale, T.bind(tirx.Select(is_nothing, zero, tirx.const(top, "float32") / most))

    def _ordered(self, values: list[Expr], lanes: int) -> list[Expr]:
        """The numbers of a chain in the order of their bytes."""
        run = max(len(self.order), lanes)
        order = [start + at for start in range(0, run, len(self.order)) for at in self.order]
        if order == list(range(run)):
            return values
        found = []
        for first in range(0, len(values), run // lanes):
            some = values[first : first + run // lanes]
            for start in range(0, run, lanes):
                found.append(let(T.Shuffle(some, order[start : start + lanes])))
        return found


def _total(values: list[Expr], lanes: int) -> Expr:
    total = values[0]
    for value in values[1:]:
        total = let(total + value)
    return over_lanes(let(total), lambda a, b: a + b, lanes)


def _nearest(value: Expr, lanes: int) -> Expr:
    """The nearest integers."""
    moved = tirx.reinterpret(vector_type("int32", lanes), value + constant(_ROUND, "float32", lanes))
    return moved - constant(0x4B400000, "int32", lanes)
