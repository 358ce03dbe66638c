"""Which operands of nests are read only where a result of the same form is stored: candidates to be one memory.

Whether they may be is up to the code: it must compute no element twice, nor read for one what it stores for another.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from .nests import Nest
from .stages import Load, loads, sources

Pair = tuple[tirx.Buffer, tirx.Buffer]


def tied_in(nests: Sequence[Nest], params: Sequence[tirx.Buffer]) -> list[tuple[Pair, Nest]]:
    """Pairs of an operand and a result of one form, with the nest that reads the one and stores the other.

    The result is the last that its nest computes at a point, and no other nest touches either.

    Parameters
    ----------
    nests : sequence of Nest
        As `form_nests` gives them.
    params : sequence of Buffer
        Of the function.
    """
    made = [buffer for nest in nests for buffer in nest.made]
    read = [{source for value in nest.expressions() for source in sources(value)} for nest in nests]
    found = []
    for n, nest in enumerate(nests):
        result = nest.steps[-1][0] if nest.steps and not nest.sums else None
        if result not in params or made.count(result) != 1 or any(result in others for others in read):
            continue
        for operand in read[n]:
            elsewhere = operand in made or any(operand in others for others in read[:n] + read[n + 1 :])
            if operand in params and not elsewhere and all(_is_at(load, nest) for load in _loads_of(nest, operand)):
                found.append(((operand, result), nest))
    return found


def _loads_of(nest: Nest, operand: tirx.Buffer) -> list[Load]:
    return [load for value in nest.expressions() for load in loads(value) if load.source.same_as(operand)]


def _is_at(load: Load, nest: Nest) -> bool:
    return len(load.indices) == len(nest.axes) and all(
        axis.extent == 1 or index.same_as(axis.var) for index, axis in zip(load.indices, nest.axes, strict=True)
    )
