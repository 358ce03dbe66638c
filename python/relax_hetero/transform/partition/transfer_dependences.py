"""Which transfers come before a piece of work, and which after it.

Two pieces of work on one device that have the same transfers around them can be done together without making anything
wait that need not: the later one needs no other device that the earlier one does not need, and no other device waits
for the later one that does not wait for the earlier one. Work between two such pieces has the same transfers around it
too, so whatever is formed this way can be run as one.

A transfer counts as coming before work that needs it in effect: one whose source is there whenever that of another one
is, which does come before the work, makes nothing wait. Nor does one whose every reader waits for another transfer
that comes after the work: it counts as coming after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from ..ir.blocks import used_vars
from ..ir.op_names import TRANSFER
from ..ir.rewriting import op_name

Around: TypeAlias = tuple[int, int]
"""Sets of transfers, as bits: those before, those after."""


@dataclass(frozen=True)
class Reads:
    """Reads among some bindings.

    Attributes
    ----------
    direct : list of list of int
        Bindings that each reads, by index.
    makers : list of list of int
        The same without what costs nothing: instead, what that shows.
    """

    direct: list[list[int]]
    makers: list[list[int]]

    @staticmethod
    def of(bindings: Sequence[relax.Binding], is_free: Callable[[relax.Binding], bool]) -> Reads:
        """Reads of bindings in order; `is_free` says which bindings cost nothing."""
        position = {binding.var: index for index, binding in enumerate(bindings)}
        free = [is_free(binding) for binding in bindings]
        direct = [[position[var] for var in used_vars(binding.value) if var in position] for binding in bindings]
        makers: list[list[int]] = []
        for read in direct:
            found = [maker for index in read for maker in (makers[index] if free[index] else [index])]
            makers.append(list(dict.fromkeys(found)))
        return Reads(direct, makers)


def transfer_dependences(
    bindings: Sequence[relax.Binding], reads: Reads, devices: Sequence[int | None], apart: Sequence[bool]
) -> list[Around]:
    """For each binding the transfers that it depends on, and those that depend on it.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        In order.
    reads : Reads
        Reads among them.
    devices : sequence of (int or None)
        Where each does its work; None for what costs nothing.
    apart : sequence of bool
        Whether each is a transfer, or anything else that stands apart as one does.

    Returns
    -------
    list of Around
        Means something for what does work and does not stand apart. Work that reads what another device made without
        a transfer (a shape) counts as a transfer before itself.
    """
    makers, count = reads.makers, len(bindings)
    bits = _numbered(apart)
    enters = _numbered([_enters(index, makers, devices, apart) for index in range(count)], sum(apart))
    moves = [is_transfer(binding) for binding in bindings]

    needs = list(enters)  # the transfer_dependences that each depends on
    fed = [0] * count  # the transfers whose source is there when it has run
    from_inputs = 0
    for index in range(count):
        if moves[index] and len(makers[index]) == 1:
            fed[makers[index][0]] |= bits[index]
        elif moves[index] and not makers[index]:
            from_inputs |= bits[index]
    before = list(enters)
    come_with = [0] * count
    for index in range(count):
        for maker in makers[index]:
            needs[index] |= needs[maker] | bits[maker]
            before[index] |= before[maker] | come_with[maker]
            fed[index] |= fed[maker]
        if apart[index]:
            come_with[index] = bits[index] | from_inputs
            if moves[index]:
                for maker in makers[index]:
                    come_with[index] |= fed[maker]

    covered = _covered(makers, needs, bits, moves)
    after = [0] * count
    for index in reversed(range(count)):
        for maker in makers[index]:
            after[maker] |= after[index] | covered[index] | enters[index]
    return list(zip(before, after, strict=True))


def is_transfer(binding: relax.Binding) -> bool:
    """Return whether a binding takes a value to another device."""
    return op_name(binding.value) == TRANSFER


def _numbered(chosen: Sequence[bool], first: int = 0) -> list[int]:
    """A bit for each that is chosen."""
    bits, number = [], first
    for is_chosen in chosen:
        bits.append(1 << number if is_chosen else 0)
        number += is_chosen
    return bits


def _enters(index: int, makers: list[list[int]], devices: Sequence[int | None], apart: Sequence[bool]) -> bool:
    """Return whether work reads what other work made on another device."""
    if apart[index] or devices[index] is None:
        return False
    return any(devices[maker] != devices[index] for maker in makers[index] if not apart[maker])


def _covered(makers: list[list[int]], needs: list[int], bits: list[int], moves: list[bool]) -> list[int]:
    """For each crossing its bit, and the transfers whose readers all wait for it anyway."""
    readers: dict[int, list[int]] = {index: [] for index, moved in enumerate(moves) if moved}
    for index, read in enumerate(makers):
        for maker in read:
            if maker in readers:
                readers[maker].append(index)
    covered = list(bits)
    owner = {bit: index for index, bit in enumerate(bits) if bit}
    for index, found in readers.items():
        common = -1
        for reader in found:
            common &= needs[reader]
        for bit, other in owner.items():
            if common & bit:
                covered[other] |= bits[index]
    return covered
