"""Shared tiles: layouts of operands in shared memory, and products of tensor cores that read them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES, SWIZZLED_BYTES
from ...core.builder import Expr
from ..core import ptx
from ..core.launch import SharedMemory, local, unrolled
from .operand_tiles import StageTile
from .register_tile import RegisterTile


@dataclass(frozen=True)
class SharedTile(ABC):
    """Lines in shared memory, in chunks of 16 bytes."""

    shared: SharedMemory
    offset: Expr  # offset of the tile in bytes
    # Whether lines are values of k, of 16-bit elements along the operand's rows; else lines are rows, along k.
    is_transposed: bool = field(default=False, kw_only=True)

    @abstractmethod
    def address(self, line: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a line."""

    def load_left(self, registers: Sequence[Expr], row: Expr, step: Expr, lane: Expr) -> None:
        """Load four registers of a left operand fragment: 16 rows from `row` on, 32 bytes of k."""
        self._load(registers, row, step, lane, tirx.floormod(tirx.floordiv(lane, 8), 2), tirx.floordiv(lane, 16))

    def load_right(self, registers: Sequence[Expr], row: Expr, step: Expr, lane: Expr) -> None:
        """Load four registers of a right operand: two fragments of 8 rows (columns of the product) from `row` on."""
        self._load(registers, row, step, lane, tirx.floordiv(lane, 16), tirx.floormod(tirx.floordiv(lane, 8), 2))

    def _load(
        self, registers: Sequence[Expr], row: Expr, step: Expr, lane: Expr, next_rows: Expr, next_k: Expr
    ) -> None:
        """Load four 8x8 matrices; a lane addresses a line of one of them, `next_rows` and `next_k` from the first."""
        line = tirx.floormod(lane, 8)
        if self.is_transposed:
            address = self.address(step * 16 + next_k * 8 + line, tirx.floordiv(row, 8) + next_rows)
        else:
            address = self.address(row + next_rows * 8 + line, step * 2 + next_k)
        ptx.load_matrices(registers, self.shared.at(address), self.is_transposed)


@dataclass(frozen=True)
class SwizzledTile(SharedTile):
    """Lines of 128 bytes with chunks swizzled to ``chunk ^ (line % 8)``; wider ones continue in the next stripe."""

    stripe_bytes: int  # bytes between stripes

    def address(self, line: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a line."""
        swizzled = T.bitwise_xor(tirx.floormod(chunk, 8), tirx.floormod(line, 8)) * CHUNK_BYTES
        return self.offset + tirx.floordiv(chunk, 8) * self.stripe_bytes + line * SWIZZLED_BYTES + swizzled


@dataclass(frozen=True)
class ChunkedTile(SharedTile):
    """Chunks in the order ``(chunks, lines, 16 bytes)``, without swizzle."""

    lines: int  # number of lines

    def address(self, line: Expr, chunk: Expr) -> Expr:
        """Offset in shared memory of a chunk of a line."""
        return self.offset + (chunk * self.lines + line) * CHUNK_BYTES


class MatrixOperand:
    """Operand of wgmma in shared memory; construct it within the launch."""

    def __init__(
        self,
        shared: SharedMemory,
        begin: Expr,  # offset in shared memory that the descriptor encodes
        leading: int,  # leading dimension offset, see `ptx.matrix_descriptor`
        advance: Callable[[int], int],  # offset of the k of a wgmma, in units of 16 bytes, given its number
        stride: int = 64,  # stride dimension offset, see `ptx.matrix_descriptor`
        is_swizzled: bool = True,
        is_transposed: bool = False,  # whether lines are values of k
    ) -> None:
        self.begin, self.advance, self.is_transposed = begin, advance, is_transposed
        self._base = local(1, "uint64")
        ptx.matrix_descriptor(self._base[0], shared.at(begin), leading, stride, is_swizzled)

    @staticmethod
    def of(shared: SharedMemory, begin: Expr, tile: StageTile) -> MatrixOperand:
        """Operand whose steps of k are tiles of a stage, one after the other."""
        steps = SWIZZLED_BYTES // ptx.CONTRACTION_BYTES

        def advance(step: int) -> int:
            return step // steps * (tile.size // 16) + step % steps * tile.advance

        return MatrixOperand(shared, begin, tile.leading, advance, is_transposed=tile.is_transposed)

    def at(self, offset: Expr) -> Callable[[int], Expr]:
        """Descriptors of the wgmmas of a tile at an offset of shared memory, by their number."""
        first = T.bind(self._base[0] + T.Cast("uint64", tirx.floordiv(offset - self.begin, 16)))
        return lambda step: first + T.uint64(self.advance(step))


def multiply_by_rows(
    sums: RegisterTile,
    # left, right: a tile and the first row in it, of the warp's 16 rows and of ``sums.columns`` rows.
    left: tuple[SharedTile, Expr],
    right: tuple[SharedTile, Expr],
    width_bytes: int,  # bytes of k
    types: tuple[str, str],
    lane: Expr,
    first_step: Expr = 0,  # first k, in units of 32 bytes
) -> None:
    """``sums = left @ right.T`` by mma.sync, as of queries and keys."""
    sums.fill(0)
    a, b = ([register[i] for i in range(4)] for register in (local(4, "uint32"), local(4, "uint32")))
    with unrolled(-(-width_bytes // ptx.CONTRACTION_BYTES)) as step:
        left[0].load_left(a, left[1], first_step + step, lane)
        with unrolled(sums.columns // 16) as pair:
            right[0].load_right(b, right[1] + pair * 16, first_step + step, lane)
            _multiply_pair(sums, pair, a, b, types)


def add_by_columns(
    sums: RegisterTile,
    left: Any,
    right: tuple[SharedTile, Expr],
    depth: int,
    types: tuple[str, str],
    lane: Expr,
    column: Expr = 0,
) -> None:
    """``sums += left @ right`` by mma.sync; the left operand is in registers, lines of the right one are values of k.

    Parameters
    ----------
    left : Buffer
        ``depth / 4`` registers of `RegisterTile.to_operand`, such as probabilities.
    right : tuple of SharedTile and PrimExpr
        Transposed tile, such as values, and its first k, a multiple of 16.
    depth : int
        Extent of k, a multiple of 16.
    column : PrimExpr or int
        First column of the right operand, a multiple of 16.
    """
    register = local(4, "uint32")
    b, first = [register[i] for i in range(4)], tirx.floordiv(right[1], 16)
    with unrolled(depth // 16) as step, unrolled(sums.columns // 16) as pair:
        right[0].load_right(b, column + pair * 16, first + step, lane)
        _multiply_pair(sums, pair, [left[step * 4 + i] for i in range(4)], b, types)


def _multiply_pair(
    sums: RegisterTile, pair: Expr, left: Sequence[Expr], right: Sequence[Expr], types: tuple[str, str]
) -> None:
    """Multiply 16 rows by 16 columns: two instructions of 8 columns each."""
    for block in range(2):
        ptx.multiply_fragments(
            [sums[pair * 8 + block * 4 + i] for i in range(4)],
            left,
            right[2 * block : 2 * block + 2],
            types,
        )
