"""The parameters of an attention kernel, and which of the keys its blocks read."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.script.ir_builder import tirx as T

from ....encoding.problem import AttentionProblem
from ...core.builder import Expr, Function, ceil_div, int64
from ..core.launch import at_least_one
from .attention_plan import AttentionPlan
from .heads import GpuHeads, Rows


class AttentionTensors:
    """The parameters of a kernel and how its work is cut.

    Attributes
    ----------
    query, key, value, result : GpuHeads
    masks : tuple of GpuHeads
    sizes : dict of str to PrimExpr or int
        Of iteration dimensions.
    """

    def __init__(
        self, problem: AttentionProblem, sizes: dict[str, Expr], plan: AttentionPlan, views: Sequence[GpuHeads]
    ) -> None:
        self.problem, self.sizes, self.plan = problem, sizes, plan
        self.query, self.key, self.value, *masks, self.result = views
        self.masks = tuple(masks)
        self.rows = Rows(sizes, plan.together)

    @staticmethod
    def of(function: Function, problem: AttentionProblem, plan: AttentionPlan) -> AttentionTensors:
        """Declares the parameters, all of them."""
        sizes = {name: size if isinstance(size, int) else function.symbol(size) for name, size in problem.sizes}
        rows = Rows(sizes, plan.together)
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
        """Groups of heads, of each batch."""
        return int(self.sizes["h"]) // self.rows.together

    @property
    def ahead(self) -> Expr:
        """Keys that query 0 sees, less one, of a causal attention."""
        n, m = self.sizes["n"], self.sizes["m"]
        return to_int32(n - m) if self.problem.causal == "bottom_right" else 0

    def blocks(self, height: int) -> Expr:
        """Blocks of a launch that gives one to each `height` rows, of symbolic extents; at least one."""
        tiles = ceil_div(int64(self.rows.count), height) * (int64(self.sizes["b"]) * self.groups)
        return at_least_one(tiles)

    def visible(self, row: Expr, height: int) -> Expr:
        """Keys that some of `height` rows from an int32 row on see."""
        n = to_int32(self.sizes["n"])
        if not self.problem.causal:
            return n
        is_one = self.rows.together == 1
        last = T.min(row + height, to_int32(self.rows.count)) - 1 if is_one else to_int32(self.sizes["m"]) - 1
        return T.max(T.min(last + (1 + self.ahead), n), 0)


def to_int32(value: Expr) -> Expr:
    """An extent as an int32; ints as they are."""
    return value if isinstance(value, int) else T.Cast("int32", value)


def tiles_of(extent: Expr, size: int) -> Expr:
    """How many tiles an int32 extent fills."""
    return ceil_div(extent, size) if isinstance(extent, int) else T.truncdiv(extent + (size - 1), size)
