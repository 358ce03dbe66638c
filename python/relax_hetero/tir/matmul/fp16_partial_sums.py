"""Short sums: products of float16 are added in float16 for a few steps, and their sums in float32.

Instructions that multiply and add float16 do so in float16. A chain of `DotInstruction.short` steps runs in one
register, sums of `CHAINS` chains in another; then even and odd k meet, and join the accumulators of float32. For terms
like random numbers the error is 7.5e-4 of the result (root mean squares), however long the sum: as if each operand were
rounded to float16 twice more. (Operands rounded to bfloat16 make 2.5e-3; a whole sum of 1,024 terms in float16, 3e-3.)
One register for 64 steps would be as fast and 1.5 times as inexact.

float16 ends at 65,504 and keeps fewer digits below 2^-14. Sums have to be right there, too: a short sum that was
infinite leaves an accumulator that is infinite or NaN, and products that are too small leave small accumulators. A tile
where either is found is computed once more, with every product in float32 (`is_out_of_range`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...encoding.arithmetic import FP16_PARTIAL_SUMS
from ...target.dot_instructions import DotInstruction
from ..core.builder import (
    Expr,
    Registers,
    ceil_div,
    constant,
    int64,
    let,
    loop,
    materialize,
    minimum,
    over_lanes,
    when,
    zeros,
)
from ..math.casts import cast

CHAINS = 8
"""Chains whose sums are added in the operands' type."""

MIN_SQUARE = 2.0**-29
"""The least mean square of products that short sums are kept for: these are then 2^-14.5, the least normal number of
float16 about, and what is lost below is a tenth of what rounding loses."""

_INFINITE = 0x7F800000


def marked(function: tirx.PrimFunc, dot: DotInstruction) -> tirx.PrimFunc:
    """A kernel, with a note for reports if it has short sums."""
    return function.with_attr(FP16_PARTIAL_SUMS, dot.types[0]) if dot.short else function


class Fp16PartialSums:
    """Short sums on their way to accumulators.

    Parameters
    ----------
    sums : Registers
        The accumulators, the first `count` of them.
    lanes : int
        Lanes of an accumulator.
    banks : int
        Registers of each accumulator, used in turn: where accumulators are too few to keep instructions in flight.
    """

    def __init__(self, dot: DotInstruction, sums: Registers, count: int, lanes: int, banks: int = 1) -> None:
        self._dot, self._sums, self._count, self._lanes = dot, sums, count, lanes
        self._steps = Registers(count * banks, dot.types[0], lanes * dot.k0)
        self._chains = Registers(count, dot.types[0], lanes * dot.k0)
        self.length = dot.short * banks
        """Steps of a chain."""
        self._together = max(1, CHAINS // banks)

    def begin(self) -> None:
        """Start sums of chains."""
        self._clear(self._chains)

    def chain(self, emit: Callable[[Registers], None]) -> None:
        """One chain; `emit` writes its steps, which add to registers of the operands' type."""
        self._clear(self._steps)
        emit(self._steps)
        for number in range(len(self._steps)):
            at = number % self._count
            self._chains[at] = self._chains[at] + self._steps[number]

    def finish(self) -> None:
        """Add the sums of chains to the accumulators."""
        lanes, k0 = self._lanes, self._dot.k0
        for number in range(self._count):
            value = let(self._chains[number])
            words = tirx.reinterpret(f"int32x{lanes}", value)
            odd = tirx.shift_right(words, constant(16, "int32", lanes))
            both = let(value + tirx.reinterpret(str(value.ty.dtype), odd))
            pairs = cast(T.Shuffle([both], list(range(0, lanes * k0, k0))), self._dot.types[2])
            self._sums[number] = self._sums[number] + pairs

    def add_chains(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
        """The chains of a sum, between `begin` and `finish`.

        Parameters
        ----------
        size, length : PrimExpr or int
            How far the sum goes, and a chain, in the unit of `emit`.
        emit : callable
            Writes the steps from a place on, so far, into registers.
        """
        whole = materialize(size // length)
        with loop(whole) as number:
            self.chain(lambda steps: emit(materialize(number * length), length, steps))
        self._add_rest(size, length, emit)

    def add(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
        """A sum of any length, from `begin` to `finish`; parameters as of `add_chains`."""
        whole, together = materialize(size // length), self._together
        with loop(materialize(ceil_div(whole, together))) as block:
            self.begin()
            first = materialize(block * together)
            here = together if isinstance(whole, int) and whole % together == 0 else minimum(whole - first, together)
            with loop(here) as number:
                self.chain(lambda steps: emit(materialize((first + number) * length), length, steps))
            self.finish()
        left = size - whole * length
        if isinstance(left, int) and left == 0:
            return
        self.begin()
        self._add_rest(size, length, emit)
        self.finish()

    def _add_rest(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
        done = materialize(size // length * length)
        left = materialize(size - done)
        if isinstance(left, int):
            if left:
                self.chain(lambda steps: emit(done, left, steps))
            return
        with when(left > 0):
            self.chain(lambda steps: emit(done, left, steps))

    def _clear(self, registers: Registers) -> None:
        for number in range(len(registers)):
            registers[number] = zeros(self._dot.types[0], self._lanes * self._dot.k0)


def is_out_of_range(values: Sequence[Expr], terms: Expr, lanes: int, min_square: float = MIN_SQUARE) -> Expr:
    """Return whether short sums left the range of their type, by the accumulators that they made.

    Parameters
    ----------
    values : sequence of PrimExpr
        All accumulators of a tile; lanes of columns that do not exist are zero.
    terms : PrimExpr or int
        Products in each of them.
    min_square : float
        The least mean square of products; 0 where what is lost of small ones does not matter.
    """
    squares = Registers(1, "float32", lanes)
    squares[0] = zeros("float32", lanes)
    for value in values:
        squares[0] = squares[0] + let(value) * let(value)
    # As bits, which order positive floats: TVM takes "not at least" for "less", which NaN is not.
    total = tirx.reinterpret("int32", let(over_lanes(squares[0], lambda a, b: a + b, lanes)))
    register = Registers(1, "int32", 1)
    register[0] = total
    least = tirx.const(min_square * len(values) * lanes, "float32")
    bound = tirx.reinterpret("int32", let(least * tirx.Cast("float32", int64(terms))))
    return tirx.Or(register[0] < bound, register[0] >= tirx.const(_INFINITE, "int32"))
