"""Registers for a row: the operands that passes read again, and the value that they hand on."""

from __future__ import annotations

from collections.abc import Mapping

from ....encoding.row_program import operands_of
from ...rows.row_plan import RowPlan


def needed_late(plan: RowPlan, numbers: Mapping[int, int]) -> frozenset[int]:
    """The operands, of some, that one pass alone reads, and not the first: scale and shift of a norm."""
    uses = {number: _uses(plan, number) for number in numbers}
    return frozenset(number for number, steps in uses.items() if len(steps) == 1 and steps[0] > 0)


def live_bytes(plan: RowPlan, sizes: Mapping[int, int], kept: int) -> int:
    """Bytes of registers for an element of a row, at the pass where they are most.

    What a pass reads for the last time makes room for what it keeps: an exponential takes the place of its score.

    Parameters
    ----------
    sizes : mapping of int to int
        Bytes of an element of each operand that waits.
    kept : int
        Bytes of the value that waits for later passes.
    """
    made = [step for step, of in enumerate(plan.passes) if of.keep is not None]
    needed = _uses(plan, plan.kept)

    def before(step: int) -> int:
        operands = sum(size for number, size in sizes.items() if _uses(plan, number)[-1:] >= [step])
        return operands + (kept if made and made[0] < step and needed and needed[-1] >= step else 0)

    return max(before(step) for step in range(len(plan.passes)))


def _uses(plan: RowPlan, number: int) -> list[int]:
    """The passes that read an operand."""
    return [
        step
        for step, of in enumerate(plan.passes)
        if any(number in operands_of(expression) for expression in (of.expression, of.keep) if expression is not None)
    ]
