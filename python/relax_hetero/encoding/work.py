"""How much arithmetic a problem is: the multiplications and additions of its products."""

from __future__ import annotations

from math import prod
from typing import Any

from .problem import AttentionProblem, BlockProductProblem, ConvProblem, Dim, MatmulProblem


def operations(problem: Any) -> int:
    """Multiplications and additions of a problem's products, a multiply-add being two.

    Places of a window that lie in the padding count as others do, as is usual; epilogues and softmax do not count.

    Parameters
    ----------
    problem : MatmulProblem, ConvProblem, BlockProductProblem, AttentionProblem or anything else

    Returns
    -------
    int
        0 where the problem has no products, and where an extent is symbolic.
    """
    if isinstance(problem, MatmulProblem):
        return 2 * _count(*problem.result.shape, problem.lhs.size("k"))
    if isinstance(problem, ConvProblem):
        return 2 * _count(*problem.result.shape, *problem.weight.shape[1:])
    if isinstance(problem, BlockProductProblem):
        return 2 * _count(*problem.result.shape, problem.depth)
    if isinstance(problem, AttentionProblem):
        sizes = dict(problem.sizes)
        scores = _count(*(sizes[name] for name in ("b", "h", "m", "n")))
        return 2 * scores * (_count(sizes["d"]) + _count(sizes["e"]))
    return 0


def _count(*extents: Dim) -> int:
    """Their product; 0 if one is symbolic."""
    return prod(extent if isinstance(extent, int) else 0 for extent in extents)
