"""fp16 partial accumulation: products of float16 are added in float16 for a few steps, and the partial sums in float32.

A chain of `DotInstruction.short` steps accumulates in one float16 register, the sums of `CHAINS` chains in another;
then the sums of even and odd k are added to the float32 accumulators. For random terms the error is 7.5e-4 of the
result (root mean square), however long the sum: as if each operand were rounded to float16 twice more. (Operands
rounded to bfloat16 give 2.5e-3; a sum of 1,024 terms in float16, 3e-3.) One register for 64 steps would be as fast and
1.5 times as inexact.

float16 overflows at 65,504 and loses digits below 2^-14. An overflow leaves an accumulator that is infinite or NaN,
and products that are too small leave small accumulators. Such a tile is computed again, with every product in float32
(`is_out_of_range`).
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

CHAINS = 8  # chains whose sums are added in the operands' type

MIN_SQUARE = 2.0**-29
"""Minimum mean square of products: these are then about 2^-14.5, near the smallest normal float16, and the loss below
is a tenth of the rounding error."""

_INFINITE = 0x7F800000


def mark_fp16_partial_sums(function: tirx.PrimFunc, dot: DotInstruction) -> tirx.PrimFunc:
    """The kernel, with an attribute for reports if it has fp16 partial sums."""
    return function.with_attr(FP16_PARTIAL_SUMS, dot.types[0]) if dot.short else function


class Fp16PartialSums:
    """Partial sums in float16 registers, which are added to float32 accumulators."""

    def __init__(
        self,
        dot: DotInstruction,
        sums: Registers,  # the accumulators; the first `count` are used
        count: int,
        lanes: int,  # lanes of an accumulator
        # Alternating registers of each accumulator, if accumulators are too few to keep instructions in flight.
        banks: int = 1,
    ) -> None:
        self._dot, self._sums, self._count, self._lanes = dot, sums, count, lanes
        self._steps = Registers(count * banks, dot.types[0], lanes * dot.k0)
        self._chains = Registers(count, dot.types[0], lanes * dot.k0)
        self.length = dot.short * banks
        """Steps of a chain."""
        self._chains_per_sum = max(1, CHAINS // banks)

    def begin(self) -> None:
        """Clear the sums of chains."""
        self._clear(self._chains)

    def chain(self, emit: Callable[[Registers], None]) -> None:
        """Write a chain; `emit` writes its steps, which add to registers of the operands' type."""
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
            odd = tirx.shift_right(tirx.reinterpret(f"int32x{lanes}", value), constant(16, "int32", lanes))
            even_and_odd = let(value + tirx.reinterpret(str(value.ty.dtype), odd))
            pairs = cast(T.Shuffle([even_and_odd], list(range(0, lanes * k0, k0))), self._dot.types[2])
            self._sums[number] = self._sums[number] + pairs

    def add_chains(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
        """Write the chains of a sum, between `begin` and `finish`.

        `size`, `length`: lengths of the sum and of a chain, in the unit of `emit`. `emit`: function of a start, a
        length and registers that writes the steps.
        """
        whole = materialize(size // length)
        with loop(whole) as number:
            self.chain(lambda steps: emit(materialize(number * length), length, steps))
        self._add_tail(size, length, emit)

    def add(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
        """Write a sum of any length, `begin` and `finish` included; for the parameters see `add_chains`."""
        whole, chains_per_sum = materialize(size // length), self._chains_per_sum
        with loop(materialize(ceil_div(whole, chains_per_sum))) as block:
            self.begin()
            first = materialize(block * chains_per_sum)
            block_chains = (
                chains_per_sum
                if isinstance(whole, int) and whole % chains_per_sum == 0
                else minimum(whole - first, chains_per_sum)
            )
            with loop(block_chains) as number:
                self.chain(lambda steps: emit(materialize((first + number) * length), length, steps))
            self.finish()
        left = size - whole * length
        if isinstance(left, int) and left == 0:
            return
        self.begin()
        self._add_tail(size, length, emit)
        self.finish()

    def _add_tail(self, size: Expr, length: int, emit: Callable[[Expr, Expr, Registers], None]) -> None:
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


def is_out_of_range(
    values: Sequence[Expr],  # all accumulators of a tile; lanes of columns that do not exist are zero
    terms: Expr,  # number of products in each accumulator
    lanes: int,
    min_square: float = MIN_SQUARE,  # minimum mean square of products; 0 if the loss of small products does not matter
) -> Expr:
    """Return whether partial sums left the range of their type, judged by the accumulators."""
    squares = Registers(1, "float32", lanes)
    squares[0] = zeros("float32", lanes)
    for value in values:
        squares[0] = squares[0] + let(value) * let(value)
    # Compared as bits, which order positive floats: TVM rewrites "not >=" to "<", which is wrong for NaN.
    total = tirx.reinterpret("int32", let(over_lanes(squares[0], lambda a, b: a + b, lanes)))
    register = Registers(1, "int32", 1)
    register[0] = total
    min_total = tirx.const(min_square * len(values) * lanes, "float32")
    bound = tirx.reinterpret("int32", let(min_total * tirx.Cast("float32", int64(terms))))
    return tirx.Or(register[0] < bound, register[0] >= tirx.const(_INFINITE, "int32"))
