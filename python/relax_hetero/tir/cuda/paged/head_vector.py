"""A head of one row in the registers of a warp: normalized, rotated, and stored where it is read next.

A lane has pairs of elements that are rotated together, so that no element goes from lane to lane.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div, when
from ..core import ptx
from ..core.launch import local, unrolled
from ..tile.register_tile import add, reduce_lanes
from .paged_work import PagedTensors

Store = Callable[[Expr, Expr], None]
"""Takes an element's number and its bits, uint16."""


class HeadVector:
    """Code that prepares heads, one after the other; declared within the launch.

    Parameters
    ----------
    tensors : PagedTensors
        Opened.
    lane : PrimExpr
        Number of the lane in its warp.
    """

    def __init__(self, tensors: PagedTensors, lane: Expr) -> None:
        self.tensors, self.work, self.lane = tensors, tensors.work, lane
        self._turns = ceil_div(self.work.size // 2, WARP)
        self._held, self._total = local(2 * self._turns, "float32"), local(1, "float32")
        self._turn = local(2 * self._turns, "float32")  # cosines and sines
        self._packed = local(1, "uint32")

    def emit(self, row: Expr, head: Expr, norm: Any, is_rotated: bool, store: Store) -> None:
        """A head of a row, from the projection to `store`.

        Parameters
        ----------
        head : PrimExpr
            Its number among all heads of the projection.
        norm : Buffer or None
            Weights of the norm before everything else.
        is_rotated : bool
            Whether its elements are rotated by the row's position: those of queries and keys.
        store : callable
        """
        self.load(row, head, is_rotated)
        self.finish(norm, is_rotated, store)

    def load(self, row: Expr, head: Expr, is_rotated: bool) -> None:
        """Ask for a head of a row, and for its rotation; parameters as of `emit`."""
        size = self.work.size
        begin = T.bind(self.tensors.head_of_row(row, head))
        rotary = self.work.rotary if is_rotated else ""
        qkv = self.tensors.qkv
        with unrolled(self._turns) as turn:
            pair = turn * WARP + self.lane
            for i, element in enumerate(self._elements(pair, rotary)):
                inside = self._is_pair(pair)
                value = T.Cast("float32", qkv[begin + (element if inside is None else T.min(element, size - 1))])
                kept = value if inside is None else T.if_then_else(inside, value, T.float32(0))
                T.buffer_store(self._held, kept, [turn * 2 + i])
        if rotary:
            self._load_rotation(row)

    def finish(self, norm: Any, is_rotated: bool, store: Store) -> None:
        """Normalize, rotate and store what was loaded; parameters as of `emit`."""
        rotary = self.work.rotary if is_rotated else ""
        if norm is not None:
            self._normalize(norm, rotary)
        if rotary:
            self._rotate()
        with unrolled(self._turns) as turn:
            pair = turn * WARP + self.lane
            first, second = self._elements(pair, rotary)
            ptx.pack_pair(self._packed[0], self._held[turn * 2], self._held[turn * 2 + 1], self.work.page_dtype)
            inside = self._is_pair(pair)
            with when(True if inside is None else inside):
                store(first, T.Cast("uint16", self._packed[0] & T.uint32(0xFFFF)))
                store(second, T.Cast("uint16", self._packed[0] >> T.uint32(16)))

    def _is_pair(self, pair: Expr) -> Expr | None:
        half = self.work.size // 2
        return None if half % WARP == 0 else pair < half

    def _elements(self, pair: Expr, rotary: str) -> tuple[Expr, Expr]:
        """Those of a pair: what is rotated together, then neighbours."""
        if rotary != "halves":
            return pair * 2, pair * 2 + 1
        half = self.work.rotated // 2
        if self.work.rotated == self.work.size:
            return pair, pair + half
        is_rotated = pair < half
        return T.Select(is_rotated, pair, pair * 2), T.Select(is_rotated, pair + half, pair * 2 + 1)

    def _normalize(self, norm: Any, rotary: str) -> None:
        held, total = self._held, self._total
        T.buffer_store(total, T.float32(0), [0])
        with unrolled(2 * self._turns) as i:
            T.buffer_store(total, total[0] + held[i] * held[i], [0])
        reduce_lanes(total, 0, add)
        mean = total[0] * T.float32(1.0 / self.work.size) + T.float32(self.work.eps)
        T.buffer_store(total, T.float32(1) / T.sqrt(mean), [0])
        with unrolled(self._turns) as turn:
            for i, element in enumerate(self._elements(turn * WARP + self.lane, rotary)):
                at = T.min(element, self.work.size - 1)
                T.buffer_store(held, held[turn * 2 + i] * total[0] * norm[at], [turn * 2 + i])

    def _load_rotation(self, row: Expr) -> None:
        half, rotation = self.work.rotated // 2, self.tensors.rotation
        begin = T.bind(T.Cast("int64", row) * self.work.rotated)
        with unrolled(self._turns) as turn:
            pair = turn * WARP + self.lane
            # Pairs of "halves" beyond the rotated ones are neighbours that stay; those of "pairs" alike.
            at = T.min(pair, half - 1)
            for i, unmoved in enumerate((1, 0)):
                value = T.Select(pair < half, rotation[begin + (at + i * half)], T.float32(unmoved))
                T.buffer_store(self._turn, value, [turn * 2 + i])

    def _rotate(self) -> None:
        held = self._held
        with unrolled(self._turns) as turn:
            cosine, sine = self._turn[turn * 2], self._turn[turn * 2 + 1]
            first, second = held[turn * 2], held[turn * 2 + 1]
            turned = T.bind(first * cosine - second * sine)
            T.buffer_store(held, first * sine + second * cosine, [turn * 2 + 1])
            T.buffer_store(held, turned, [turn * 2])
