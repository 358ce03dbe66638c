"""Register tiles: accumulator fragments of tensor cores, and operations on their rows.

wgmma and ``mma.sync`` have the same accumulator layout. A warp has 16 rows; register ``4 * j + 2 * h + c`` of lane l is
row ``l // 4 + 8 * h``, column ``8 * j + 2 * (l % 4) + c``. Four lanes share a row, and a lane has two rows. Rounded to
16 bits in pairs, the registers are a left operand fragment of the next product.

Source: PTX ISA 9.0, "Matrix fragments for mma.m16n8k16", "Register fragments for wgmma".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import ALL_LANES, WARP
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import local, unrolled

WARP_ROWS = 16  # rows of a warp in a tile
ROW_LANES = (1, 2)  # distances between the lanes that share a row
WARP_LANES = (16, 8, 4, 2, 1)  # distances between the lanes of a warp


def reduce_lanes(
    buffer: Any, index: Expr, combine: Callable[[Expr, Expr], Expr], distances: Sequence[int] = WARP_LANES
) -> None:
    """Reduce an element of a register buffer over lanes, by a butterfly of shuffles; every lane gets the result.

    `combine`: expression of two values, such as ``T.max``. `distances`: distances between the lanes that are combined,
    in order: `ROW_LANES` for those of a row of a tile.
    """
    other = local(1, str(buffer.dtype))
    for distance in distances:
        # In a register, as `combine` may read it in a divergent branch: TVM lowers selections to branches.
        T.buffer_store(other, T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), buffer[index], distance, WARP, WARP), [0])
        T.buffer_store(buffer, combine(buffer[index], other[0]), [index])


def add_lanes_before(value: Any, lane: Expr) -> None:
    """Replace the only element of a register buffer by the sum of those of the lanes up to this one."""
    distance = 1
    while distance < WARP:
        other = T.bind(T.tvm_warp_shuffle_up(T.uint32(ALL_LANES), value[0], distance, WARP, WARP))
        T.buffer_store(value, value[0] + T.Select(lane >= distance, other, 0), [0])
        distance *= 2


def add(left: Expr, right: Expr) -> Expr:
    """Sum, as a `combine` of `reduce_lanes`."""
    return left + right


def sums_dtype(dtype: str) -> str:
    """Register type of the accumulators of a product of `dtype`: float32, or uint32 that hold int32."""
    return "uint32" if dtype in ("int8", "uint8") else "float32"


def reinterpreted(value: Expr, dtype: str) -> Expr:
    """Reinterpret the bits of a value, unless it has the type."""
    return value if str(value.ty.dtype) == dtype else tirx.reinterpret(dtype, value)


def row_of(register: Expr) -> Expr:
    """Which of the lane's two rows a register belongs to: 0 or 1."""
    return tirx.floormod(tirx.floordiv(register, 2), 2)


def column_of(register: Expr) -> Expr:
    """Column of a register, counted from `first_column` of its lane."""
    return tirx.floordiv(register, 4) * 8 + tirx.floormod(register, 2)


def first_column(lane: Expr) -> Expr:
    """First column of a lane."""
    return tirx.floormod(lane, 4) * 2


class RegisterTile:
    """A warp's 16 rows of accumulators; construct it within the launch.

    Parameters
    ----------
    columns : int
        Number of columns, a multiple of 8.
    dtype : str
        "float32", or "uint32" that hold int32.

    Attributes
    ----------
    data : Buffer
        ``columns / 2`` registers of a thread.
    """

    def __init__(self, columns: int, dtype: str = "float32") -> None:
        self.columns, self.dtype, self.data = columns, dtype, local(columns // 2, dtype)

    def __getitem__(self, register: Expr) -> Expr:
        """Get a register."""
        return self.data[register]

    @property
    def registers(self) -> list[Expr]:
        """All registers, as operands of an instruction."""
        return [self.data[i] for i in range(self.columns // 2)]

    def fill(self, value: float) -> None:
        """Set all elements."""
        with unrolled(self.columns // 2) as i:
            T.buffer_store(self.data, tirx.const(value, self.dtype), [i])

    def map(self, function: Callable[[Expr, Expr], Expr]) -> None:
        """Replace each element by a function of it and of its register index."""
        with unrolled(self.columns // 2) as i:
            T.buffer_store(self.data, function(self.data[i], i), [i])

    def scale_rows(self, factors: Any) -> None:
        """Multiply both rows of a lane by their factors."""
        self.map(lambda value, i: value * factors[row_of(i)])

    def keep_columns(self, limits: Sequence[Expr], is_below: bool = True) -> None:
        """Mask columns by row, with minus infinity.

        `limits`: limits of both rows, int32: columns below are kept, or from it on if not `is_below`. They are relative
        to the lane's first column, so that the compiler compares them with constants.
        """

        def masked(value: Expr, i: Expr) -> Expr:
            limit = T.Select(row_of(i) == 0, limits[0], limits[1])
            is_kept = column_of(i) < limit if is_below else column_of(i) >= limit
            return T.if_then_else(is_kept, value, T.float32(-math.inf))

        self.map(masked)

    def row_max(self, values: Any) -> None:
        """Update maxima of a lane's two rows by its elements."""
        with unrolled(self.columns // 2) as i:
            T.buffer_store(values, T.max(values[row_of(i)], self.data[i]), [row_of(i)])

    def to_operand(self, operand: Any, dtype: str) -> None:
        """Round pairs to 16 bits: ``columns / 4`` registers of a left operand fragment."""
        with unrolled(self.columns // 4) as i:
            ptx.pack_pair(operand[i], self.data[2 * i], self.data[2 * i + 1], dtype)
