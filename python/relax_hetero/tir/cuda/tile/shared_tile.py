"""Shared tiles: layouts of operands in shared memory, and products of tensor cores that read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local, unrolled
from .register_tile import WARP_ROWS, RegisterTile


@dataclass(frozen=True)
class SharedTile(ABC):
    """Rows in shared memory, in chunks of 16 bytes.

    Attributes
    ----------
    shared : SharedMemory
    offset : PrimExpr or int
        Offset of the tile in bytes.
    """

    shared: SharedMemory
    offset: Expr

    @abstractmethod
    def address(self, row: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a row."""

    def load_matrices(self, registers: Any, row: Expr, chunk: Expr, is_transposed: bool = False) -> None:
        """Load four 8x8 matrices of 16-bit elements into four registers; each lane addresses a row of one of them."""
        ptx.load_matrices([registers[i] for i in range(4)], self.shared.at(self.address(row, chunk)), is_transposed)


@dataclass(frozen=True)
class SwizzledTile(SharedTile):
    """Lines of 128 bytes with chunks swizzled to ``chunk ^ (row % 8)``; wider rows continue in the next stripe.

    Attributes
    ----------
    stripe_bytes : int
        Bytes between stripes.
    """

    stripe_bytes: int

    def address(self, row: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a row."""
        swizzled = T.bitwise_xor(tirx.floormod(chunk, 8), tirx.floormod(row, 8)) * CHUNK_BYTES
        return self.offset + tirx.floordiv(chunk, 8) * self.stripe_bytes + row * SWIZZLED_BYTES + swizzled


@dataclass(frozen=True)
class ChunkedTile(SharedTile):
    """Chunks in the order ``(chunks, rows, 16 bytes)``, without swizzle.

    Attributes
    ----------
    rows : int
        Number of rows.
    """

    rows: int

    def address(self, row: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a row."""
        return self.offset + (chunk * self.rows + row) * CHUNK_BYTES


def multiply_by_rows(
    sums: RegisterTile,
    left: tuple[SharedTile, Expr],
    right: tuple[SharedTile, Expr],
    width_bytes: int,
    types: tuple[str, str],
    lane: Expr,
) -> None:
    """``sums = left @ right.T`` by mma.sync; k is contiguous in both operands, as in queries and keys.

    Parameters
    ----------
    left, right : tuple of SharedTile and PrimExpr
        Tile and first row: of the warp's 16 rows, and of ``sums.columns`` rows.
    width_bytes : int
        Bytes of k.
    """
    sums.fill(0)
    a, b = local(4, "uint32"), local(4, "uint32")
    left_row = T.bind(left[1] + tirx.floormod(lane, WARP_ROWS))
    right_row = T.bind(right[1] + tirx.floordiv(lane, 16) * 8 + tirx.floormod(lane, 8))
    with unrolled(-(-width_bytes // ptx.CONTRACTION_BYTES)) as step:
        left[0].load_matrices(a, left_row, step * 2 + tirx.floordiv(lane, 16))
        with unrolled(sums.columns // 16) as pair:
            chunk = step * 2 + tirx.floormod(tirx.floordiv(lane, 8), 2)
            right[0].load_matrices(b, right_row + pair * 16, chunk)
            _multiply_pair(sums, pair, [a[i] for i in range(4)], b, types)


def add_by_columns(
    sums: RegisterTile, left: Any, right: tuple[SharedTile, Expr], depth: int, types: tuple[str, str], lane: Expr
) -> None:
    """``sums += left @ right`` by mma.sync; the left operand is in registers, rows of the right one are values of k.

    Parameters
    ----------
    left : Buffer
        ``depth / 4`` registers of `RegisterTile.to_operand`, such as probabilities.
    right : tuple of SharedTile and PrimExpr
        Tile of 16-bit elements, such as values, and its first row.
    depth : int
        Rows of the right tile, a multiple of 16.
    """
    b = local(4, "uint32")
    row = T.bind(right[1] + tirx.floormod(lane, 16))
    with unrolled(depth // 16) as step, unrolled(sums.columns // 16) as pair:
        right[0].load_matrices(b, row + step * 16, pair * 2 + tirx.floordiv(lane, 16), is_transposed=True)
        _multiply_pair(sums, pair, [left[step * 4 + i] for i in range(4)], b, types)


def _multiply_pair(sums: RegisterTile, pair: Expr, left: Sequence[Expr], right: Any, types: tuple[str, str]) -> None:
    """Multiply 16 rows by 16 columns: two instructions of 8 columns each."""
    for block in range(2):
        ptx.multiply_fragments(
            [sums[pair * 8 + block * 4 + i] for i in range(4)],
            left,
            [right[block * 2 + i] for i in range(2)],
            types,
        )
