"""Epilogue of sums whose fragments have the result's columns as rows, and stores of the result's rows.

Where the operands of tensor cores are swapped, warp w of a warpgroup holds 16 of 64 columns of the result, and rows of
the result lie across its registers: lane l has, of every 8 rows, the pair ``2 * (l % 4)`` of columns ``l // 4`` and
``l // 4 + 8``. What belongs to a column, such as a bias, is two values a lane. A warpgroup turns its fragments together
in shared memory, some rows at a time, and stores 64 neighbours of each row.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import CHUNK_BYTES
from ....target.gpu_target import WARP, WARPGROUP
from ...core.builder import Expr, int64
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, unrolled
from .fragments import WARP_ROWS, FragmentStore, Staging, Team

COLUMNS = 64
"""Number of columns of the result that a warpgroup has at a time: the rows of one instruction."""


def staged_pitch(element: int) -> int:
    """Bytes from a staged row of `COLUMNS` to the next: rows of a warp's fragments begin in other banks each."""
    return COLUMNS * element + CHUNK_BYTES


class SwappedFragments:
    """Stores a tile of a product whose operands are swapped, as a `FragmentStore` does one that is not.

    Parameters
    ----------
    store : FragmentStore
        Opened: the epilogue and the result.
    shared : SharedMemory
    groups : int
        Warpgroups that store.
    rows : int
        Number of rows of the tile that the block stores: a multiple of 8.
    staged : int
        Number of them that are staged at a time: all, or a divisor that is a multiple of 8.
    is_repeated : bool
        Whether the block stores several tiles.
    """

    def __init__(
        self, store: FragmentStore, shared: SharedMemory, groups: int, rows: int, staged: int, is_repeated: bool
    ) -> None:
        self.store, self.rows, self.is_repeated = store, rows, is_repeated
        pitch = staged_pitch(store.element)
        self.staging = Staging(shared, shared.take(groups * staged * pitch), COLUMNS, pitch)
        self.team = Team(staged, WARPGROUP)
        self._of_columns: list[dict[tuple[int, int], Expr]] = []
        self._fetched: list[Any] | None = None

    def fetch(self, blocks: int, at: Coordinates, first: tuple[Expr, Expr], member: Expr) -> None:
        """Begin to read operands for `emit` of the same tile, whose parameters these are; see `FragmentStore.fetch`."""
        if self.store.in_rows:
            self._fetched = self.store.fetch_rows(at, first, 0, COLUMNS, member, self.team)
            return
        self._of_columns = [self._column_operands(at, first, block, member) for block in range(blocks)]

    def emit(
        self, sums: Any, blocks: int, at: Coordinates, first: tuple[Expr, Expr], group: Expr, member: Expr
    ) -> None:
        """Store the rows of `blocks` times `COLUMNS` columns.

        Parameters
        ----------
        sums : Buffer
            Buffer of ``blocks * rows / 2`` registers.
        at : Coordinates
            Coordinates of the batch.
        first : tuple of PrimExpr
            int64: first row of the tile, first column of the warpgroup.
        group, member : PrimExpr
            Number of the warpgroup among those that store, and of the thread in it.
        """
        store, staging, staged = self.store, self.staging, self.team.rows
        begin = T.bind(staging.offset + group * (staged * staging.pitch))
        fetched, self._fetched = self._fetched, None
        for block in range(blocks):
            for skipped in range(0, self.rows, staged):
                place = (first[0] + T.Cast("int64", tirx.const(skipped, "int32")), first[1] + int64(block * COLUMNS))
                if store.in_rows and (block or skipped):
                    fetched = store.fetch_rows(at, place, 0, COLUMNS, member, self.team)
                register = block * (self.rows // 2) + skipped // 2
                self._stage(sums, register, begin, at, place[0], block, member)
                ptx.named_barrier(group + 1, WARPGROUP)
                store.store_rows(staging, begin, at, place, 0, COLUMNS, member, fetched, self.team)
                is_last = block + 1 == blocks and skipped + staged == self.rows
                if not is_last or self.is_repeated:
                    ptx.named_barrier(group + 1, WARPGROUP)

    def _column_operands(
        self, at: Coordinates, first: tuple[Expr, Expr], block: int, member: Expr
    ) -> dict[tuple[int, int], Expr]:
        """Elements of operands that are the same for all rows, of a lane's two columns."""
        column = T.bind(first[1] + T.Cast("int64", block * COLUMNS + member // WARP * WARP_ROWS + member % WARP // 4))
        found: dict[tuple[int, int], Expr] = {}
        for number, view in enumerate(self.store.views):
            if view.runs_along("m"):
                continue
            for h in range(2):
                if h and not view.runs_along("n"):
                    found[number, h] = found[number, 0]
                else:
                    found[number, h] = T.bind(self.store.load(view, at, int64(0), column + 8 * h))
        return found

    def _stage(
        self, sums: Any, register: int, begin: Expr, at: Coordinates, row: Expr, block: int, member: Expr
    ) -> None:
        """Rows from `register` on to shared memory, computed and rounded where that is not left for later."""
        store, pitch = self.store, self.staging.pitch
        warp, lane = member // WARP, member % WARP
        matrices = self.team.rows // 8
        if not store.is_packed:
            target = T.bind(begin + lane % 4 * (2 * pitch) + (warp * WARP_ROWS + lane // 4) * store.element)
            with unrolled(matrices) as j:
                for h in range(2):
                    pair = self._pair(sums, register + j * 4 + 2 * h, at, row + self._row(j, lane), block, h)
                    for c, word in enumerate(store.words(pair)):
                        place = target + j * (8 * pitch) + (c * pitch + h * 8 * store.element)
                        ptx.store_shared(self.staging.shared.at(place), [word], f"u{8 * store.element}")
            return
        # Of two matrices of 8 rows each, both of a lane's columns.
        target = T.bind(
            begin + (lane // 16 * 8 + lane % 8) * pitch + (warp * WARP_ROWS + lane // 8 % 2 * 8) * store.element
        )
        for first, count, together in ((0, matrices // 2, 2), (matrices // 2 * 2, matrices % 2, 1)):
            if count == 0:
                continue
            with unrolled(count) as number:
                packed = []
                for i in range(together):
                    j = first + number * together + i
                    for h in range(2):
                        pair = self._pair(sums, register + j * 4 + 2 * h, at, row + self._row(j, lane), block, h)
                        packed.append(store.packed(pair))
                place = target + (first + number * together) * (8 * pitch)
                ptx.store_matrices(self.staging.shared.at(place), packed, transposed=True)

    def _row(self, j: Expr, lane: Expr) -> Expr:
        """First row of a lane's pair of rows of matrix j, in the part that is staged."""
        return T.Cast("int64", j * 8 + lane % 4 * 2)

    def _pair(
        self, sums: Any, register: Expr, at: Coordinates, row: Expr, block: int, h: int
    ) -> list[tuple[Expr, list[Expr]]]:
        """Sums of two neighbouring rows of a column, and what the epilogue reads beside each."""
        store = self.store
        values = []
        for c in range(2):
            operands = []
            if not store.in_rows:
                for number, view in enumerate(store.views):
                    is_row = view.runs_along("m")
                    held = None if is_row else self._of_columns[block][number, h]
                    operands.append(store.load(view, at, row + c, int64(0)) if is_row else held)
            values.append((store.sum(sums[register + c]), operands))
        return values
