"""Attention operands by heads, and rows of queries that share a key head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from ....encoding.packed_layout import PackedLayout
from ....encoding.problem import Operand
from ....target.element_types import bytes_of
from ...attention.attention_spec import HeadsView
from ...core.builder import Expr, Function, int64
from ...core.view import Coordinates, raw_type
from ..core.operand import is_multiple


class GpuHeads(HeadsView):
    """`HeadsView` for GPUs: strides are expressions, as host code must not compute them before the launch.

    It has the interface of `tile.operand_tiles.TileView`: "k" is the reduction dimension, and "row" counts the
    queries of a "group", the heads that `Rows` combines.

    Parameters
    ----------
    depth : str
        Name of "k": "d" of query and key, "e" of value and result.
    rows : Rows, optional
        Meaning of "row" in the query.
    """

    _materialize = staticmethod(lambda value: value)

    def __init__(
        self,
        function: Function,
        name: str,
        operand: Operand,
        starts: Sequence[int],
        sizes: Mapping[str, Expr],
        depth: str = "d",
        rows: Rows | None = None,
    ) -> None:
        super().__init__(function, name, operand, starts, sizes)
        self._depth, self._rows = depth, rows
        self.layout = PackedLayout.identity(len(operand.shape))

    def open(self, raw: bool = False) -> None:
        """Declare the elements, as their bits if `raw`."""
        self.open_as(raw_type(self.nominal) if raw else self.nominal)

    def open_for_gpu(self) -> None:
        """Declare the elements, bool as bytes."""
        self.open(raw=self.nominal == "bool")

    def address(self, at: Coordinates) -> Expr:
        """Offset of an element in the flat view; coordinates of missing dimensions are ignored."""
        coordinates = dict(at)
        if "k" in coordinates:
            coordinates[self._depth] = coordinates.pop("k")
        if "row" in coordinates:
            assert self._rows is not None, "only queries and results have rows"
            coordinates.update(self._rows.place(coordinates.pop("row"), coordinates["group"]))
        return super().address(coordinates)

    def is_contiguous(self, name: str) -> bool:
        """Return whether the stride along an iteration dimension is known to be 1."""
        if name == "row":
            return self._rows is not None and self._rows.heads_per_tile == 1 and self.is_contiguous("m")
        stride = self.stride(self._depth if name == "k" else name)
        return isinstance(stride, int) and stride == 1

    def alignment(self, along: str, max_bytes: int) -> int:
        """Alignment in bytes, a power of two up to `max_bytes`, of rows along a contiguous dimension."""
        element, width = bytes_of(self.nominal), max(max_bytes, bytes_of(self.nominal))
        name = {"k": self._depth, "row": "m"}.get(along, along)
        outer = [stride for other, stride in self._strides.items() if other != name]
        while width > element and not all(is_multiple(value, width // element) for value in (*outer, self._start)):
            width //= 2
        return width


class Rows:
    """Rows of tiles: queries of one head, or of all heads that share a key head.

    Few queries would leave most rows of a tile empty. In grouped-query attention, the queries of heads with the same
    keys are rows of one tile, one head after the other.

    Attributes
    ----------
    heads_per_tile : int
        Heads whose queries are rows of one tile: all that share a key head, or a divisor of their number.
    count : PrimExpr or int
        Number of rows of a group.
    """

    def __init__(self, sizes: Mapping[str, Expr], heads_per_tile: int) -> None:
        self.sizes, self.heads_per_tile = sizes, heads_per_tile
        self.count = sizes["m"] * heads_per_tile

    def place(self, row: Expr, group: Expr) -> dict[str, Expr]:
        """Head and query of a row of a group, int64."""
        if self.heads_per_tile == 1:
            return {"h": group, "m": row}
        queries = int64(self.sizes["m"])
        return {"h": group * self.heads_per_tile + tirx.floordiv(row, queries), "m": tirx.floormod(row, queries)}

    def query(self, row: Expr) -> Expr:
        """Query of a row, int32."""
        return row if self.heads_per_tile == 1 else T.truncmod(row, int(self.sizes["m"]))

    def key_head(self, group: Expr) -> Expr:
        """Key and value head of a group."""
        shared = int(self.sizes["h"]) // int(self.sizes["g"])
        return group if self.heads_per_tile == shared else tirx.floordiv(group, shared // self.heads_per_tile)
