"""Which transfers come before a piece of work, and which after it.

Two pieces of work on one device that have the same transfers before and after them can be done together without making
anything wait that need not: the later one needs no other device that the earlier one does not need, and no other
device waits for the later one that does not wait for the earlier one. Work between two such pieces has the same
transfers around it too, so whatever is formed this way can be run as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from tvm import relax

from .blocks import used_vars
from .rewriting import op_name

Around: TypeAlias = tuple[int, int]
"""Sets of transfers, as bits: those before, those after."""


def crossings(bindings: Sequence[relax.Binding], crosses: Callable[[relax.Binding], bool]) -> list[Around]:
    """For each binding the transfers that it depends on, and those that depend on it.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        In order.
    crosses : callable
        Whether a binding is a transfer, or anything else that stands apart as one does.
    """
    bits = _bits(bindings, crosses)
    maker = {binding.var: index for index, binding in enumerate(bindings)}
    reads = [[maker[var] for var in used_vars(binding.value) if var in maker] for binding in bindings]
    before, after = [0] * len(bindings), [0] * len(bindings)
    for index, made in enumerate(reads):
        for source in made:
            before[index] |= before[source] | bits[source]
    for index in reversed(range(len(bindings))):
        for source in reads[index]:
            after[source] |= after[index] | bits[index]
    return list(zip(before, after, strict=True))


def is_transfer(binding: relax.Binding) -> bool:
    """Whether a binding takes a value to another device."""
    return op_name(binding.value) == "relax.to_vdevice"


def _bits(bindings: Sequence[relax.Binding], crosses: Callable[[relax.Binding], bool]) -> list[int]:
    bits, count = [], 0
    for binding in bindings:
        is_crossing = crosses(binding)
        bits.append(1 << count if is_crossing else 0)
        count += is_crossing
    return bits
