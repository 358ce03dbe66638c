"""Short sums: products of float16 are added in float16 for a few steps, and their sums in float32.

Instructions that multiply and add float16 do so in float16. A chain of `DotInstruction.short` steps runs in one
register, sums of `CHAINS` chains in another, then even and odd k meet, and join the accumulators of float32. For terms like random numbers the error is 7.5e-4 of the result (root mean squares), however long the sum: as
if each operand were rounded to float16 twice more. (Operands rounded to bfloat16 make 2.5e-3; a whole sum of 1,024
terms in float16, 3e-3.) One register for 64 steps would be as fast and 1.5 times as inexact.

float16 ends at 65,504 and keeps fewer digits below 2^-14. Sums have to be right there, too: a short sum that was
infinite leaves an accumulator that is infinite or NaN, and products that are too small leave small accumulators. A tile
where either is found is computed once more, with every product in float32 (`is_out_of_range`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.dot_instructions import DotInstruction
from ..core.builder import Expr, Registers, ceil_div, constant, int64, let, loop, minimum, opaque, over_lanes, when, zeros
from ..math.casts import cast

CHAINS = 8
"""Chains whose sums are added in the operands' type."""

LEAST_SQUARE = 2.0**-29
"""The least mean square of products that short sums are kept for: these are then 2^-14.5, the least normal number of
float16 about, and what is lost below is a tenth of what rounding loses."""

_INFINITE = 0x7F800000


def add_short_sums(
    dot: DotInstruction,
    sums: Registers,
    count: int,
    lanes: int,
    span: tuple[Expr, int],
    emit: Callable[[Expr, Expr, Registers], None],
    banks: int = 1,
) -> None:
    """Add products to the first `count` of the accumulators `sums`.

    Parameters
    ----------
    lanes : int
        Of an accumulator.
    span : tuple of (PrimExpr or int, int)
        How far the sum goes, and a chain.
    emit : callable
        Writes the steps from a place on, so many, into registers of the operands' type, `count` times `banks` of them.
    banks : int
        Registers of each accumulator, used in turn: where accumulators are too few to keep instructions in flight.
    """
    size, length = span
    dtype = dot.types[0]
    steps = Registers(count * banks, dtype, lanes * dot.k0)
    chains = Registers(count, dtype, lanes * dot.k0)

    def clear(registers: Registers) -> None:
        for number in range(len(registers)):
            registers[number] = zeros(dtype, lanes * dot.k0)

    def chain(first: Expr, size: Expr) -> None:
        clear(steps)
        emit(first, size, steps)
        for number in range(count * banks):
            chains[number % count] = chains[number % count] + steps[number]

    def widen() -> None:
        words, pairs = f"int32x{lanes}", f"{dtype}x{lanes * dot.k0}"
        for number in range(count):
            value = let(chains[number])
            odd = tirx.shift_right(tirx.reinterpret(words, value), constant(16, "int32", lanes))
            both = let(value + tirx.reinterpret(pairs, odd))
            sums[number] = sums[number] + cast(T.Shuffle([both], list(range(0, lanes * dot.k0, dot.k0))), dot.types[2])

    whole = opaque(size // length)
    with loop(opaque(ceil_div(whole, CHAINS))) as block:
        clear(chains)
        first = 0 if isinstance(whole, int) and whole <= CHAINS else opaque(block * CHAINS)
        with loop(CHAINS if isinstance(whole, int) and whole % CHAINS == 0 else minimum(whole - first, CHAINS)) as c:
            chain(opaque((first + c) * length), length)
        widen()
    left = opaque(size - whole * length)
    if isinstance(left, int) and left == 0:
        return
    with when(True if isinstance(left, int) else left > 0):
        clear(chains)
        chain(opaque(whole * length), left)
        widen()


def is_out_of_range(values: Sequence[Expr], terms: Expr, lanes: int) -> Expr:
    """Whether short sums left the range of their type, by the accumulators that they made.

    Parameters
    ----------
    values : sequence of PrimExpr
        All accumulators of a tile; lanes of columns that do not exist are zero.
    terms : PrimExpr or int
        Products in each of them.
    """
    squares = Registers(1, "float32", lanes)
    squares[0] = zeros("float32", lanes)
    for value in values:
        squares[0] = squares[0] + let(value) * let(value)
    # As bits, which order positive floats: TVM takes "not at least" for "less", which NaN is not.
    total = tirx.reinterpret("int32", let(over_lanes(squares[0], lambda a, b: a + b, lanes)))
    register = Registers(1, "int32", 1)
    register[0] = total
    least = tirx.const(LEAST_SQUARE * len(values) * lanes, "float32")
    bound = tirx.reinterpret("int32", let(least * tirx.Cast("float32", int64(terms))))
    return tirx.Or(register[0] < bound, register[0] >= tirx.const(_INFINITE, "int32"))
