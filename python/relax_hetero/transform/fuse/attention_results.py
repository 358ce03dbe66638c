"""Where the result of an attention goes, through the permutations, reshapes and roundings behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import relax

from ..ir.axes import permutation
from ..ir.blocks import Block, shape_of
from ..ir.op_names import PERMUTE, RESHAPE
from ..ir.rewriting import op_name
from .attention_chain import rounds
from .attention_views import Dims, View, regrouped


def followed(block: Block, view: View, sizes: Mapping[str, Any]) -> tuple[View, list[int]]:
    """The last value that is the view's elements in another order, and the bindings that are passed on the way.

    Each is the only user of the one before; the last one's neighbours are neighbours in the view.
    """
    best, innermost = view, view.innermost
    passed: list[int] = []
    steps: list[int] = []
    while True:
        index = block.sole_user(view.value)
        if index is None or not isinstance(block.bindings[index], relax.VarBinding):
            return best, passed
        call, var = block.bindings[index].value, block.bindings[index].var
        name = op_name(call)
        dims: Dims | None = None
        if rounds(call):
            dims = view.dims
        elif name == PERMUTE:
            dims = tuple(view.dims[axis] for axis in permutation(call))
        elif name == RESHAPE and shape_of(var) is not None:
            dims = regrouped(view.dims, shape_of(var) or [], sizes)
        if dims is None:
            return best, passed
        view = View.of(var, dims)
        steps.append(index)
        if view.innermost == innermost:
            best, passed = view, list(steps)
