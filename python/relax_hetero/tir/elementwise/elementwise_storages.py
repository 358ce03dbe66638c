"""The parameters of a kernel of an elementwise expression alone, of any device: how they are opened and laid out."""

from __future__ import annotations

from ...encoding.problem import ElementwiseProblem
from ...errors import EncodingError
from ..core.builder import Expr, Function
from ..core.packed_storage import PackedStorage


class ElementwiseStorages:
    """The parameters of a kernel, in order: operands, then the result.

    Attributes
    ----------
    operands : list of PackedStorage
    result : PackedStorage
    alike : list of bool
        Whether each operand lies exactly as the result does.
    extents : list of (int or PrimExpr)
        Extents of the result's dimensions: whole tiles where no parameter shows where the last one ends.

    Raises
    ------
    EncodingError
        If an operand is packed in another way than the result.
    """

    def __init__(self, function: Function, problem: ElementwiseProblem) -> None:
        bound: set[str] = set()
        named = [(f"x{i}", operand) for i, operand in enumerate(problem.operands)] + [("result", problem.result)]
        *self.operands, self.result = (
            PackedStorage(function, name, operand.shape, operand.dtype, operand.layout, bound)
            for name, operand in named
        )
        index_map, layout = problem.result.index_map, problem.result.layout
        self.alike = [o.index_map == index_map and o.layout == layout for o in problem.operands]
        for i, operand in enumerate(problem.operands):
            if not operand.layout.is_identity and not self.alike[i]:
                raise EncodingError(
                    f"elementwise {problem.expression}: x{i} is stored as {operand.layout}; expected the result's "
                    f"{layout}, or row-major"
                )
        self.extents = [self._extent(problem, d, name) for d, name in enumerate(index_map)]

    def _extent(self, problem: ElementwiseProblem, d: int, name: str) -> Expr:
        shown = [self.result.extents[d]]
        for operand, storage in zip(problem.operands, self.operands, strict=True):
            if name in operand.index_map:
                shown.append(storage.extents[operand.index_map.index(name)])
        known = [extent for extent in shown if extent is not None]
        return known[0] if known else self.result.tiles[d] * self.result.layout.tile(d)
