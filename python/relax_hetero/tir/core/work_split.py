"""Sharing of work among cores: the minimum work that is worth sharing, and the parts of a kernel's loops.

A kernel with little work is compiled for one thread: waking another core would take longer. `MIN_WORK` has the limit
for each kind of kernel, in the kernel's unit of work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ...target.cpu_target import CpuTarget
from .builder import Expr, ceil_div, int64, loop, materialize, minimum

Unit = Literal["nanoseconds", "multiply-adds", "bytes", "vector instructions a task", "elements"]
"""Unit in which the work of a kernel is counted."""

MIN_WORK: dict[Unit, int] = {
    # Loops of stock kernels. In a chain of kernels on two cores of a Zen 5, a kernel of 1.8 us took as long on one as
    # on two, one of 0.3 us 0.7 us longer on two, and one of 7.7 us less than half as long.
    "nanoseconds": 4_000,
    # Products, convolutions and attention: the same time in multiply-adds of float32.
    "multiply-adds": 250_000,
    # Copies and elementwise work: waking another core takes about as long as copying a quarter of a MiB.
    "bytes": (1 << 18) + 1,
    # Row operations such as softmax: as long as handing work to another core and waiting for it (about 2 us).
    "vector instructions a task": 10_001,
    # Scatter: elements that a task copies, 128 KiB of float32.
    "elements": 1 << 15,
}
"""Minimum work that is shared among cores."""


def is_worth_tasks(unit: Unit, work: Any) -> bool:
    """Return whether to share work among cores; work that is known only at run time (a PrimExpr, None) is shared."""
    return not isinstance(work, (int, float)) or work >= MIN_WORK[unit]


def tasks_for(cores: int, unit: Unit, work: Any) -> int:
    """One task for each core, or one where that is not worth it."""
    return cores if cores > 1 and is_worth_tasks(unit, work) else 1


FEW_ROWS = 128
"""Maximum number of rows for which reading the right operand dominates: cores then share its columns, else the rows."""


@dataclass(frozen=True)
class Split:
    """Number of parts of each dimension; a task is one part of each."""

    batch: Expr
    rows: Expr
    columns: Expr
    tasks: int  # at least the product of the three numbers

    def parts_of(self, task: Expr) -> tuple[Expr, Expr, Expr]:
        """A task's part of batch, rows and columns."""
        return task // (self.rows * self.columns), task // self.columns % self.rows, task % self.columns

    def ranges(self, task: Expr, batch: Expr, rows: Expr, columns: Expr) -> list[tuple[Expr, Expr]]:
        """Begin and end of a task's part of so many products, tiles of rows and panels of columns."""
        counts = zip((batch, rows, columns), (self.batch, self.rows, self.columns), self.parts_of(task), strict=True)
        return [part(units, parts, number) for units, parts, number in counts]


def part(units: Expr, parts: Expr, number: Expr) -> tuple[Expr, Expr]:
    """Begin and end of part `number` of `parts`, whose sizes differ by one at most."""
    if isinstance(parts, int) and parts == 1:
        return 0, units
    return materialize(number * units // parts), materialize((number + 1) * units // parts)


def split_work(cores: int, batch: Expr, rows: Expr, columns: Expr, tile: tuple[int, int], k: Expr) -> Split:
    """The split of a product, static where its sizes are.

    `batch`, `rows`, `columns`: numbers of products, tiles of rows and panels of columns. `tile`: rows and columns of a
    tile.
    """
    sizes = [size for size in (batch, rows, columns, k) if isinstance(size, int)]
    work = prod(sizes) * tile[0] * tile[1] if len(sizes) == 4 else None
    if tasks_for(cores, "multiply-adds", work) == 1:
        return Split(1, 1, 1, 1)
    if not isinstance(rows, int) and not isinstance(columns, int):
        is_wide = columns * tile[1] >= rows * tile[0]
        return Split(1, materialize(_select(is_wide, 1, cores)), materialize(_select(is_wide, cores, 1)), cores)
    # Guesses for symbolic sizes: one batch, few rows, many columns.
    estimate = [size if isinstance(size, int) else guess for size, guess in ((batch, 1), (rows, 2), (columns, 256))]
    has_few_rows = estimate[1] * tile[0] <= FEW_ROWS

    def cost(parts: tuple[int, int, int]) -> tuple[Any, ...]:
        max_part = prod([ceil_div(size, count) for size, count in zip(estimate, parts, strict=True)])
        return max_part, -parts[0], -parts[2] if has_few_rows else -parts[1]

    best = min(
        ((b, r, cores // (b * r)) for b in range(1, cores + 1) for r in range(1, cores // b + 1)),
        key=cost,
    )
    parts_used = [
        min(size, count) if isinstance(size, int) else count
        for size, count in zip((batch, rows, columns), best, strict=True)
    ]
    return Split(parts_used[0], parts_used[1], parts_used[2], prod(parts_used))


def for_parts(
    counts: Sequence[Expr],  # extents of the loops, outermost first
    size: Expr,  # bytes that the whole nest touches; little work stays on one core
    cpu: CpuTarget,
    body: Callable[[list[Expr]], None],  # function of the positions
) -> None:
    """Run `body` with every position of a nest of loops, cut into equal parts for the CPU's cores."""
    total: Expr = prod(counts)
    if any(isinstance(count, int) and count == 0 for count in counts):
        return
    # TVM's analyzer refuses a division by zero even in code that never runs.
    extents = [int64(count) if isinstance(count, int) else T.max(count, int64(1)) for count in counts]
    parts = tasks_for(cpu.cores, "bytes", size)
    if parts == 1 or (isinstance(total, int) and total < 2):
        with loop(total) as index:
            body(unravel(index, extents))
        return
    share = ceil_div(total, parts)
    with loop(parts, parallel=True) as number:
        start = number * share
        with loop(T.max(T.min(int64(share), int64(total) - start), int64(0))) as index:
            body(unravel(start + index, extents))


@contextmanager
def loop_blocks(begin: Expr, end: Expr, size: int) -> Iterator[tuple[Expr, Expr]]:
    """A loop over blocks of `size` from `begin` up to `end`; its context gives a block's begin and end."""
    with loop(materialize(ceil_div(end - begin, size))) as block:
        first = materialize(begin + block * size)
        yield first, materialize(minimum(first + size, end))


def nest_loops(counts: Sequence[Expr], body: Callable[[list[Expr]], None]) -> None:
    """Run `body` with every position of a nest of loops, on one core."""

    def nest(positions: list[Expr]) -> None:
        if len(positions) == len(counts):
            body(positions)
            return
        with loop(counts[len(positions)]) as position:
            nest([*positions, position])

    nest([])


def ravel(position: Sequence[Expr], extents: Sequence[Expr]) -> Expr:
    """The number of a position in row-major order."""
    number: Expr = 0
    for coordinate, extent in zip(position, extents, strict=True):
        number = number * extent + coordinate
    return number


def unravel(
    number: Expr,
    extents: Sequence[Expr],  # the first is not used: the last quotient is the coordinate along it
    # place, rest: functions that are applied to each coordinate, and to each quotient: `materialize` for values that
    # are used more than once.
    place: Callable[[Expr], Expr] = lambda value: value,
    rest: Callable[[Expr], Expr] = lambda value: value,
) -> list[Expr]:
    """The position of a number in row-major order."""
    inner: list[Expr] = []
    for extent in reversed(extents[1:]):
        inner.append(place(tirx.floormod(number, extent)))
        number = rest(tirx.floordiv(number, extent))
    return [place(number), *reversed(inner)] if extents else []


def _select(condition: Expr, then: int, otherwise: int) -> Expr:
    return tirx.Select(condition, tirx.const(then, "int64"), tirx.const(otherwise, "int64"))
