"""Parameters of an attention kernel, and the tiles of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.script.ir_builder import tirx as T

from ....encoding.problem import AttentionProblem
from ....target.element_types import HALF_TYPES, TF32
from ....target.gpu_target import GpuTarget
from ...core.builder import Expr, Function, ceil_div, int64, when
from ...core.view import Coordinates
from ..core import ptx
from ..core.launch import SharedMemory, at_least_one, launch, to_int32
from .attention_plan import AttentionPlan
from .heads import GpuHeads, Rows

MAX_HEAD_SIZE = 256
"""Maximum head size on tensor cores."""
MAX_HEAD_SIZE_TF32 = 128
"""Maximum head size of float32, limited by shared memory."""


def tensor_core_unsupported_reason(problem: AttentionProblem, gpu: GpuTarget, with_tf32: bool = False) -> str:
    """Reason why no tensor core kernel supports a problem; empty if one does, by tf32 if `with_tf32`."""
    types = {operand.dtype for operand in (problem.query, problem.key, problem.value, problem.result)}
    supported = gpu.mma_types & set(HALF_TYPES)
    if with_tf32 and problem.tf32 and TF32 in gpu.mma_types:
        supported = supported | {"float32"}
    if len(types) > 1 or not types <= supported:
        return f"element types {sorted(types)}, expected one of {sorted(supported)}"
    sizes, max_size = dict(problem.sizes), MAX_HEAD_SIZE_TF32 if "float32" in types else MAX_HEAD_SIZE
    if int(sizes["d"]) > max_size or int(sizes["e"]) > max_size:
        return f"heads of {sizes['d']} and {sizes['e']}, expected at most {max_size}"
    return "an extent is 0" if 0 in sizes.values() else ""


class AttentionTensors:
    """Parameters and tiling of a kernel.

    Attributes
    ----------
    query, key, value, result : GpuHeads
    masks : tuple of GpuHeads
    sizes : dict of str to PrimExpr or int
        Extents of iteration dimensions.
    """

    def __init__(
        self, problem: AttentionProblem, sizes: dict[str, Expr], plan: AttentionPlan, views: Sequence[GpuHeads]
    ) -> None:
        self.problem, self.sizes, self.plan = problem, sizes, plan
        self.query, self.key, self.value, *masks, self.result = views
        self.masks = tuple(masks)
        self.rows = Rows(sizes, plan.heads_per_tile)

    @staticmethod
    def of(function: Function, problem: AttentionProblem, plan: AttentionPlan) -> AttentionTensors:
        """Declare all parameters."""
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        rows = Rows(sizes, plan.heads_per_tile)
        starts = dict(zip(("query", "key", "value"), problem.starts, strict=True))
        operands = [("query", problem.query), ("key", problem.key), ("value", problem.value)]
        operands += [(f"x{i + 1}", operand) for i, operand in enumerate(problem.scores.operands)]
        operands += [("result", problem.result)]
        views = []
        for name, operand in operands:
            depth = "e" if name in ("value", "result") else "d"
            begin = starts.get(name, (0,) * len(operand.shape))
            views.append(GpuHeads(function, name, operand, begin, sizes, depth, rows))
        return AttentionTensors(problem, sizes, plan, views)

    @property
    def groups(self) -> int:
        """Groups of heads per batch."""
        return int(self.sizes["h"]) // self.rows.heads_per_tile

    @property
    def last_key_of_first_query(self) -> Expr:
        """Index of the last key visible to query 0 in causal attention."""
        n, m = self.sizes["n"], self.sizes["m"]
        return to_int32(n - m) if self.problem.causal == "bottom_right" else 0

    def open(self, raw: bool) -> None:
        """Declare the elements, those of query, key and value as bits if `raw`."""
        operands = (self.query, self.key, self.value)
        for view in operands if raw else ():
            view.open(raw=True)
        for view in (*(() if raw else operands), *self.masks, self.result):
            view.open_for_gpu()

    def row_tiles(self, height: int) -> Expr:
        """Tiles of `height` rows per group, int32."""
        return to_int32(ceil_div(self.rows.count, height))

    def tiles(self, height: int) -> Expr:
        """Tiles of all groups, int32."""
        return self.row_tiles(height) * self.groups * to_int32(self.sizes["b"])

    def blocks(self, height: int) -> Expr:
        """Grid size for a block per tile of `height` rows; at least one."""
        tiles = self.tiles(height)
        if isinstance(tiles, int):
            return at_least_one(tiles)
        return at_least_one(ceil_div(int64(self.rows.count), height) * (int64(self.sizes["b"]) * self.groups))

    def launch(
        self, height: int, threads: int, shared: SharedMemory, uses_pdl: bool, body: Callable[[Expr, Expr], None]
    ) -> None:
        """Write a launch with a block per tile; `body` gets the thread and the tile number."""
        tiles = self.tiles(height)
        with launch(self.blocks(height), threads) as place:
            shared.open()
            if uses_pdl:
                ptx.griddepcontrol_wait()
                ptx.launch_dependents()
            block = T.bind(T.Cast("int32", place.block))
            if isinstance(tiles, int):
                body(place.thread, block)
            else:
                with when(block < tiles):
                    body(place.thread, block)

    def locate(self, tile: Expr, height: int) -> tuple[Expr, Coordinates, Coordinates]:
        """First row of a tile, and coordinates of queries and of keys of its group."""
        row_tiles, heads_per_group = self.row_tiles(height), self.plan.heads_per_group
        if heads_per_group:
            first = T.bind(T.truncdiv(tile, heads_per_group * row_tiles) * heads_per_group)
            heads = T.min(heads_per_group, self.groups * to_int32(self.sizes["b"]) - first)
            index_in_group = T.bind(T.truncmod(tile, heads_per_group * row_tiles))
            number, outer = T.truncdiv(index_in_group, heads), T.bind(first + T.truncmod(index_in_group, heads))
        else:
            number, outer = T.truncmod(tile, row_tiles), T.bind(T.truncdiv(tile, row_tiles))
        if self.problem.causal:  # long rows first
            number = row_tiles - 1 - number
        row = T.bind(number * height)
        group = T.bind(T.Cast("int64", T.truncmod(outer, self.groups)))
        batch = T.bind(T.Cast("int64", T.truncdiv(outer, self.groups)))
        at: Coordinates = {"b": batch, "group": group}
        return row, at, {"b": batch, "g": T.bind(self.rows.key_head(group))}

    def visible(self, row: Expr, height: int) -> Expr:
        """Number of keys visible to any of `height` rows from `row` on, int32."""
        n = to_int32(self.sizes["n"])
        if not self.problem.causal:
            return n
        is_one = self.rows.heads_per_tile == 1
        last = T.min(row + height, to_int32(self.rows.count)) - 1 if is_one else to_int32(self.sizes["m"]) - 1
        return T.max(T.min(last + (1 + self.last_key_of_first_query), n), 0)

    def visible_to(self, row: Expr, end: Expr) -> Expr:
        """Number of keys below `end` that are visible to a row, int32."""
        if not self.problem.causal:
            return end
        return T.min(end, self.rows.query(row) + (1 + self.last_key_of_first_query))


def tiles_of(extent: Expr, size: int) -> Expr:
    """Number of tiles of an int32 extent."""
    return ceil_div(extent, size) if isinstance(extent, int) else T.truncdiv(extent + (size - 1), size)
