"""Tensors of an attention in kernels of GPUs: their heads, and rows of queries that share a key head."""

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
    """As `HeadsView`, but nothing is written before the launch: strides are expressions, not held in memory.

    It is read as operands of products are (`matmul.operand_tiles`): "k" is what a product adds over, and "row" counts
    the queries of a "group": of the heads that `Rows` puts together.

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
        """Declare the elements, conditions as bytes."""
        self.open(raw=self.nominal == "bool")

    def address(self, at: Coordinates) -> Expr:
        """Position of an element in the flat view; coordinates of dimensions it lacks are ignored."""
        places = dict(at)
        if "k" in places:
            places[self._depth] = places.pop("k")
        if "row" in places:
            assert self._rows is not None, "only queries and results are found by rows"
            places.update(self._rows.place(places.pop("row"), places["group"]))
        return super().address(places)

    def is_contiguous(self, name: str) -> bool:
        """Return whether neighbours along an iteration dimension lie side by side, known to."""
        if name == "row":
            return self._rows is not None and self._rows.heads_per_tile == 1 and self.is_contiguous("m")
        stride = self.stride(self._depth if name == "k" else name)
        return isinstance(stride, int) and stride == 1

    def alignment(self, along: str, most: int) -> int:
        """The largest power of two, up to `most` bytes, at multiples of which runs along a dimension begin."""
        element, width = bytes_of(self.nominal), max(most, bytes_of(self.nominal))
        name = {"k": self._depth, "row": "m"}.get(along, along)
        others = [stride for other, stride in self._strides.items() if other != name]
        while width > element and not all(is_multiple(value, width // element) for value in (*others, self._start)):
            width //= 2
        return width


class Rows:
    """The queries that a block may have: those of all heads that share a key head, or of one head.

    Few queries leave most rows of a tile empty; where several heads read the same keys, their queries are rows of one
    tile, one head after the other.

    Attributes
    ----------
    heads_per_tile : int
        Heads whose queries are rows of one tile: all that share a key head, or one.
    count : PrimExpr or int
        Rows of such heads.
    """

    def __init__(self, sizes: Mapping[str, Expr], heads_per_tile: int) -> None:
        self.sizes, self.heads_per_tile = sizes, heads_per_tile
        self.count = sizes["m"] * heads_per_tile

    def place(self, row: Expr, group: Expr) -> dict[str, Expr]:
        """Head and query of a row of a group of heads, int64."""
        if self.heads_per_tile == 1:
            return {"h": group, "m": row}
        queries = int64(self.sizes["m"])
        return {"h": group * self.heads_per_tile + tirx.floordiv(row, queries), "m": tirx.floormod(row, queries)}

    def query(self, row: Expr) -> Expr:
        """Its query, of an int32 row."""
        return row if self.heads_per_tile == 1 else T.truncmod(row, int(self.sizes["m"]))

    def key_head(self, group: Expr) -> Expr:
        """The head of keys and values that a group reads."""
        shared = int(self.sizes["h"]) // int(self.sizes["g"])
        return group if self.heads_per_tile == shared else tirx.floordiv(group, shared)
