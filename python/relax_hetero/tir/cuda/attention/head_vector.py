"""Preparation of a head of one row in the registers of a warp: norm, rotary embedding and conversion.

A lane has both elements of a rotated pair, so that rotation needs no shuffles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script.ir_builder import tirx as T

from ....target.gpu_target import WARP
from ...core.builder import Expr, ceil_div, when
from ...core.view import raw_type
from ...math.casts import cast
from ..core import ptx
from ..core.dialect import has_ptx
from ..core.launch import local, unrolled
from ..tile.register_tile import add, reduce_lanes
from .attention_tensors import PagedTensors

Store = Callable[[Expr, Expr], None]
"""Callback that stores an element, given its index and its bits (an unsigned integer), or its value in float32."""


class HeadVector:
    """Writer of the preparation of heads; construct it within the launch.

    Parameters
    ----------
    tensors : PagedTensors
        Opened.
    lane : PrimExpr
        Index of the lane in its warp.
    """

    def __init__(self, tensors: PagedTensors, lane: Expr) -> None:
        self.tensors, self.problem, self.lane = tensors, tensors.problem, lane
        self._num_pairs = ceil_div(self.problem.size // 2, WARP)
        self._values, self._total = local(2 * self._num_pairs, "float32"), local(1, "float32")
        self._scales = local(2 * self._num_pairs, "float32")  # weights of the norm
        self._num_rotated = min(self._num_pairs, ceil_div(max(self.problem.rotary_size // 2, 1), WARP))
        self._rotation = local(2 * self._num_rotated, "float32")  # cosines and sines
        self._packed = local(1, "uint32")

    def load(self, row: Expr, head: Expr, kind: str) -> None:
        """Load a head of a row of the projection, and its rotation.

        Parameters
        ----------
        head : PrimExpr
            Index of the head among all of the projection.
        kind : str
            "query", "key" or "value"; values are neither normalized nor rotated.
        """
        size = self.problem.size
        begin = T.bind(self.tensors.head_of_row(row, head))
        rotary = self._rotary(kind)
        qkv = self.tensors.qkv
        with unrolled(self._num_pairs) as index:
            pair = index * WARP + self.lane
            for i, element in enumerate(self._pair_elements(pair, rotary)):
                inside = self._is_pair(pair)
                value = T.Cast("float32", qkv[begin + (element if inside is None else T.min(element, size - 1))])
                masked = value if inside is None else T.if_then_else(inside, value, T.float32(0))
                T.buffer_store(self._values, masked, [index * 2 + i])
        norm = self._norm(kind)
        if norm is not None:
            with unrolled(self._num_pairs) as index:
                for i, element in enumerate(self._pair_elements(index * WARP + self.lane, rotary)):
                    T.buffer_store(self._scales, norm[T.min(element, size - 1)], [index * 2 + i])
        if rotary:
            self._load_rotation(row)

    def _norm(self, kind: str) -> Any:
        """Weights of the norm of a kind of heads; None without a norm."""
        return {"query": self.tensors.q_norm, "key": self.tensors.k_norm}.get(kind)

    def _rotary(self, kind: str) -> str:
        return "" if kind == "value" else self.problem.rotary

    def finish(self, kind: str, store: Store, in_float32: bool = False) -> None:
        """Normalize, rotate and store the loaded head, of the `kind` of `load`, as bits of pages or `in_float32`."""
        rotary = self._rotary(kind)
        if self._norm(kind) is not None:
            self._normalize()
        if rotary:
            self._rotate()
        with unrolled(self._num_pairs) as index:
            pair = index * WARP + self.lane
            first, second = self._pair_elements(pair, rotary)
            inside = self._is_pair(pair)
            if in_float32 or not has_ptx():
                bits = (lambda value: value) if in_float32 else self._page_bits
                with when(True if inside is None else inside):
                    store(first, bits(self._values[index * 2]))
                    store(second, bits(self._values[index * 2 + 1]))
                return
            ptx.pack_pair(self._packed[0], self._values[index * 2], self._values[index * 2 + 1], self.problem.page_type)
            with when(True if inside is None else inside):
                store(first, T.Cast("uint16", self._packed[0] & T.uint32(0xFFFF)))
                store(second, T.Cast("uint16", self._packed[0] >> T.uint32(16)))

    def _page_bits(self, value: Expr) -> Expr:
        dtype = self.problem.page_type
        return T.reinterpret(raw_type(dtype), cast(value, dtype))

    def _is_pair(self, pair: Expr) -> Expr | None:
        half = self.problem.size // 2
        return None if half % WARP == 0 else pair < half

    def _pair_elements(self, pair: Expr, rotary: str) -> tuple[Expr, Expr]:
        """Element indices of a pair: rotated pairs first, then neighbours."""
        if rotary != "halves":
            return pair * 2, pair * 2 + 1
        half = self.problem.rotary_size // 2
        if self.problem.rotary_size == self.problem.size:
            return pair, pair + half
        is_rotated = pair < half
        return T.Select(is_rotated, pair, pair * 2), T.Select(is_rotated, pair + half, pair * 2 + 1)

    def _normalize(self) -> None:
        elements, total = self._values, self._total
        T.buffer_store(total, T.float32(0), [0])
        with unrolled(2 * self._num_pairs) as i:
            T.buffer_store(total, total[0] + elements[i] * elements[i], [0])
        reduce_lanes(total, 0, add)
        mean = total[0] * T.float32(1.0 / self.problem.size) + T.float32(self.problem.eps)
        T.buffer_store(total, T.float32(1) / T.sqrt(mean), [0])
        with unrolled(2 * self._num_pairs) as i:
            T.buffer_store(elements, elements[i] * total[0] * self._scales[i], [i])

    def _load_rotation(self, row: Expr) -> None:
        half, rotation = self.problem.rotary_size // 2, self.tensors.rotation
        begin = T.bind(T.Cast("int64", row) * self.problem.rotary_size)
        with unrolled(self._num_rotated) as index:
            pair = index * WARP + self.lane
            # Pairs beyond the rotated elements get the identity.
            clamped = T.min(pair, half - 1)
            for i, identity in enumerate((1, 0)):
                value = T.Select(pair < half, rotation[begin + (clamped + i * half)], T.float32(identity))
                T.buffer_store(self._rotation, value, [index * 2 + i])

    def _rotate(self) -> None:
        elements = self._values
        with unrolled(self._num_rotated) as index:
            cosine, sine = self._rotation[index * 2], self._rotation[index * 2 + 1]
            first, second = elements[index * 2], elements[index * 2 + 1]
            rotated = T.bind(first * cosine - second * sine)
            T.buffer_store(elements, first * sine + second * cosine, [index * 2 + 1])
            T.buffer_store(elements, rotated, [index * 2])


def from_page(bits: Expr, dtype: str) -> Expr:
    """Number in float32 of the bits of a page."""
    return cast(T.reinterpret(dtype, bits), "float32")
