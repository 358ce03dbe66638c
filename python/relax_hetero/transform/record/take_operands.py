"""Results of a run that take the memory of an operand: a kernel ties the two, and nothing reads the operand later.

Before, where each kernel ties its first operand and its result (`tir.core.ties`)::

    a = first(x);  b = second(a, y);  c = third(b)        # a, b: transient, c: read after the run

After, `a` and `b` lie where `c` is to be found after the run::

    c = first(x);  second_in_place(c, y);  third_in_place(c)

An operand that the run makes is taken if nothing else reads it from the kernel on, and nothing after the run. One that
the run is given is taken only if it may be overwritten, and only for a result that is read after the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import tvm

from ...tir.core.ties import Tie
from ..ir.blocks import same_shape
from .region_ir import RegionValue


@dataclass
class Draft:
    """A call of a kernel in a run, before it is known which results take the memory of an operand.

    Attributes
    ----------
    kernel : tvm.ir.GlobalVar
    reads, makes : list of RegionValue
    scalars : tuple
    variable : str
    over : dict
        From a result's number to that of the operand whose memory it takes. Of a kernel that works in place anyway
        this is given; of any other it has one pair at most.
    """

    kernel: tvm.ir.GlobalVar
    reads: list[RegionValue]
    makes: list[RegionValue]
    scalars: tuple[object, ...]
    variable: str
    over: dict[int, int] = field(default_factory=dict)

    def take(self, result: int, operand: int) -> None:
        """Have a result take the memory of an operand."""
        self.over[result] = operand
        self.makes[result].over = self.reads[operand]


def take_operands(
    drafts: Sequence[Draft],
    ties: Callable[[tvm.ir.GlobalVar], list[Tie]],
    made: Collection[RegionValue],
    free: Collection[RegionValue],
) -> list[Draft]:
    """Have results take the memory of operands; the drafts of which one does now.

    Parameters
    ----------
    drafts : sequence of Draft
        In order; `RegionValue.end` and `RegionValue.is_result` are final.
    ties : callable
        Function that gives the ties of a kernel: numbers of its tensors, operands first.
    made : collection of RegionValue
        Values that the run makes.
    free : collection of RegionValue
        Those that the run is given and may overwrite.
    """
    made, free = frozenset(made), frozenset(free)
    taken: list[Draft] = []
    for now, draft in enumerate(drafts):
        if draft.over:
            continue
        pairs = ties(draft.kernel)
        for operand, result in pairs:
            value, number = draft.reads[operand], result - len(draft.reads)
            is_free = value.home in free and _same_form(value.home, draft.makes[number])
            if (is_free or value.home in made) and _is_last_reader(draft, operand, result, now, pairs):
                draft.take(number, operand)
                taken.append(draft)
                break
    kept = _without_unused(taken, free)
    if len(kept) < len(taken):
        RegionValue.forget_homes(made)
    return kept


def _is_last_reader(draft: Draft, operand: int, result: int, now: int, pairs: Sequence[Tie]) -> bool:
    """Return whether nothing else reads an operand from a kernel on, the kernel's other operands included."""
    value = draft.reads[operand]
    others = [i for i, other in enumerate(draft.reads) if other.home is value.home]
    return value.end == now and not value.is_result and all((other, result) in pairs for other in others)


def _same_form(one: RegionValue, other: RegionValue) -> bool:
    """Return whether two values have one shape: an operand may be shown in another than it has."""
    return same_shape(one.ty.shape.values, other.ty.shape.values)


def _without_unused(taken: list[Draft], free: Collection[RegionValue]) -> list[Draft]:
    """Less those at the end of a chain that overwrites what the run was given for nothing that is read after it."""
    kept: list[Draft] = []
    needed: set[RegionValue] = set()
    for draft in reversed(taken):
        ((number, operand),) = draft.over.items()
        result = draft.makes[number]
        if result.home in free and not (result.is_result or result in needed):
            draft.over, result.over = {}, None
            continue
        needed.add(draft.reads[operand])
        kept.append(draft)
    return kept[::-1]
