"""When work is worth several threads, and how that of a product is cut into tasks, one for a core.

Generators and schedules have one rule: a kernel that one core is done with in `WORTH_THREADS` is compiled for one
thread. It then costs what its work costs, 0.3 us of the virtual machine included, however many threads there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx

from .builder import Expr, ceil_div, settled

# Nanoseconds. In a chain of kernels on two cores of a Zen 5, a kernel of 1.8 us took as long on one as on two, one of
# 0.3 us 0.7 us longer on two, and one of 7.7 us less than half as long.
WORTH_THREADS = 4_000
# The same in multiply-adds of float32.
WORTH_A_TASK = 250_000
# Up to so many rows, the right operand is what there is to read: cores then share its columns, else the rows.
FEW_ROWS = 128


@dataclass(frozen=True)
class Split:
    """Into how many parts each dimension is cut; a task is one part of each.

    Attributes
    ----------
    batch, rows, columns : PrimExpr or int
    tasks : int
        At least their product.
    """

    batch: Expr
    rows: Expr
    columns: Expr
    tasks: int

    def place(self, task: Expr) -> tuple[Expr, Expr, Expr]:
        """Which part of batch, rows and columns a task does."""
        return task // (self.rows * self.columns), task // self.columns % self.rows, task % self.columns


def part(units: Expr, parts: Expr, number: Expr) -> tuple[Expr, Expr]:
    """Begin and end of one of `parts` parts, of sizes that differ by one at most."""
    if isinstance(parts, int) and parts == 1:
        return 0, units
    return settled(number * units // parts), settled((number + 1) * units // parts)


def split_work(cores: int, batch: Expr, rows: Expr, columns: Expr, tile: tuple[int, int], k: Expr) -> Split:
    """The split of a product, static where its sizes are.

    Parameters
    ----------
    cores : int
    batch, rows, columns : PrimExpr or int
        How many products, tiles of rows and panels of columns there are.
    tile : tuple of int
        Rows and columns of a tile.
    k : PrimExpr or int
    """
    known = [size for size in (batch, rows, columns, k) if isinstance(size, int)]
    if cores == 1 or (len(known) == 4 and _volume(known) * tile[0] * tile[1] < WORTH_A_TASK):
        return Split(1, 1, 1, 1)
    if not isinstance(rows, int) and not isinstance(columns, int):
        wide = columns * tile[1] >= rows * tile[0]
        return Split(1, settled(_either(wide, 1, cores)), settled(_either(wide, cores, 1)), cores)
    # Unknown: batches may be one, rows may be few, columns are many.
    guess = [size if isinstance(size, int) else unknown for size, unknown in ((batch, 1), (rows, 2), (columns, 256))]
    few = guess[1] * tile[0] <= FEW_ROWS

    def cost(parts: tuple[int, int, int]) -> tuple[Any, ...]:
        longest = _volume([ceil_div(size, count) for size, count in zip(guess, parts, strict=True)])
        return longest, -parts[0], -parts[2] if few else -parts[1]

    best = min(
        ((b, r, cores // (b * r)) for b in range(1, cores + 1) for r in range(1, cores // b + 1)),
        key=cost,
    )
    used = [
        min(size, count) if isinstance(size, int) else count
        for size, count in zip((batch, rows, columns), best, strict=True)
    ]
    return Split(used[0], used[1], used[2], _volume(used))


def _either(condition: Expr, then: int, otherwise: int) -> Expr:
    return tirx.Select(condition, tirx.const(then, "int64"), tirx.const(otherwise, "int64"))


def _volume(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
