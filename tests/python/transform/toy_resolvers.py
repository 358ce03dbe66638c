"""Resolvers with small, fixed layouts, so that tests of passes do not change with the tile sizes of real machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tvm
from tvm import tirx

from relax_hetero.encoding import (
    ElementwiseProblem,
    Encoding,
    EncodingResolver,
    MatmulProblem,
    Operand,
    PackedLayout,
    register_resolver,
)
from relax_hetero.tir.core.builder import Function

PANELS = PackedLayout((1, 0), (1,), (4,))
TILES = (PackedLayout((0, 1), (0,), (2,)), PackedLayout((1, 0), (1,), (2,)), PackedLayout((0, 1), (0, 1), (2, 2)))


class Toy(EncodingResolver):
    """Answers with the given layouts for matmul, and writes kernels that do nothing."""

    def __init__(self, name: str, layouts: Sequence[PackedLayout | None]) -> None:
        self.name = name
        self._layouts = layouts
        self._solved: list[MatmulProblem | ElementwiseProblem] = []

    def resolve(self, encoding: Encoding, target: tvm.target.Target) -> PackedLayout | None:
        return self._layouts[encoding.operand_index] if encoding.op_type == "matmul" else None

    def storage_size(self, encoding: Encoding, shape: Sequence[Any], target: tvm.target.Target) -> Any:
        return self._layouts[encoding.operand_index].storage_bytes(shape, encoding.element_type)

    def kernel(self, problem: MatmulProblem | ElementwiseProblem, target: tvm.target.Target) -> tirx.PrimFunc:
        self._solved.append(problem)
        return empty_kernel(problem.parameters)


def empty_kernel(operands: Sequence[Operand]) -> tirx.PrimFunc:
    """A PrimFunc with the right parameters."""
    function = Function("toy")
    with function:
        for index, operand in enumerate(operands):
            shape = operand.layout.packed_shape([function.extent(dim) for dim in operand.shape])
            function.argument(
                f"p{index}", [tirx.IntImm("int64", e) if isinstance(e, int) else e for e in shape], operand.dtype
            )
        tvm.script.ir_builder.tirx.evaluate(0)
    return function.result


@contextmanager
def toy_resolvers() -> Iterator[dict[str, Toy]]:
    """llvm: identity, panels of 4 columns, identity. c: everything in tiles of two."""
    identity = PackedLayout.identity(2)
    toys = {"llvm": Toy("toy", (identity, PANELS, identity)), "c": Toy("toy_c", TILES)}
    undo = [register_resolver(toy, kind, priority=100) for kind, toy in toys.items()]
    try:
        yield toys
    finally:
        for take_back in undo:
            take_back()
