"""Transfers that each binding depends on, and transfers that depend on it.

Two bindings on one device with the same transfers before and after them can run together without additional waiting:
the later one needs no device that the earlier one does not need, and no device waits only for the later one. Work
between them has the same transfers before and after it too, so such a set of bindings can run as one step.

A transfer also counts as coming before work if its source is ready whenever that of another transfer before the work
is: it adds no waiting. Likewise a transfer counts as coming after work if all its readers wait for another transfer
that comes after the work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from ..ir.blocks import used_vars
from ..ir.op_names import TRANSFERS
from ..ir.rewriting import op_name

Dependences: TypeAlias = tuple[int, int]  # bit masks of the transfers before and after a binding


@dataclass(frozen=True)
class Reads:
    """Reads among bindings."""

    direct: list[list[int]]  # indices of the bindings that each binding reads
    # The same, with bindings without cost, such as views, replaced by the bindings that they read.
    producers: list[list[int]]

    @staticmethod
    def of(bindings: Sequence[relax.Binding], is_zero_cost: Callable[[relax.Binding], bool]) -> Reads:
        """Reads of bindings in order; `is_zero_cost` tells which bindings have no cost."""
        position = {binding.var: index for index, binding in enumerate(bindings)}
        zero_cost = [is_zero_cost(binding) for binding in bindings]
        direct = [[position[var] for var in used_vars(binding.value) if var in position] for binding in bindings]
        producers: list[list[int]] = []
        for reads in direct:
            expanded = [producer for index in reads for producer in (producers[index] if zero_cost[index] else [index])]
            producers.append(list(dict.fromkeys(expanded)))
        return Reads(direct, producers)


def transfer_dependences(
    bindings: Sequence[relax.Binding], reads: Reads, devices: Sequence[int | None], isolated: Sequence[bool]
) -> list[Dependences]:
    """For each binding the transfers that it depends on, and those that depend on it.

    Parameters
    ----------
    bindings : sequence of relax.Binding
        Bindings in program order.
    reads : Reads
        Reads among them.
    devices : sequence of (int or None)
        Device of each binding; None for bindings without cost.
    isolated : sequence of bool
        True for transfers, and for other bindings that are parts of their own.

    Returns
    -------
    list of Dependences
        Valid for bindings with a device that are not isolated. Work that reads a result of another device without
        a transfer (a shape) counts as a transfer before itself.
    """
    producers, count = reads.producers, len(bindings)
    bits = _numbered(isolated)
    entries = _numbered([_enters(index, producers, devices, isolated) for index in range(count)], sum(isolated))
    transfers = [is_transfer(binding) for binding in bindings]

    needs = list(entries)  # transfers that each binding depends on
    sourced = [0] * count  # transfers whose source is ready after it
    from_inputs = 0
    for index in range(count):
        if transfers[index] and len(producers[index]) == 1:
            sourced[producers[index][0]] |= bits[index]
        elif transfers[index] and not producers[index]:
            from_inputs |= bits[index]
    before = list(entries)
    ready_with = [0] * count
    for index in range(count):
        for producer in producers[index]:
            needs[index] |= needs[producer] | bits[producer]
            before[index] |= before[producer] | ready_with[producer]
            sourced[index] |= sourced[producer]
        if isolated[index]:
            ready_with[index] = bits[index] | from_inputs
            if transfers[index]:
                for producer in producers[index]:
                    ready_with[index] |= sourced[producer]

    covered = _covered(producers, needs, bits, transfers)
    after = [0] * count
    for index in reversed(range(count)):
        for producer in producers[index]:
            after[producer] |= after[index] | covered[index] | entries[index]
    return list(zip(before, after, strict=True))


def is_transfer(binding: relax.Binding) -> bool:
    """Return whether a binding is a transfer to another device."""
    return op_name(binding.value) in TRANSFERS


def _numbered(flags: Sequence[bool], first: int = 0) -> list[int]:
    """A distinct bit for each true flag, 0 for the others."""
    bits, number = [], first
    for flag in flags:
        bits.append(1 << number if flag else 0)
        number += flag
    return bits


def _enters(index: int, producers: list[list[int]], devices: Sequence[int | None], isolated: Sequence[bool]) -> bool:
    """Return whether work reads a result of work on another device."""
    if isolated[index] or devices[index] is None:
        return False
    return any(devices[producer] != devices[index] for producer in producers[index] if not isolated[producer])


def _covered(producers: list[list[int]], needs: list[int], bits: list[int], moves: list[bool]) -> list[int]:
    """For each isolated binding its bit, and those of the transfers whose readers all wait for it."""
    readers: dict[int, list[int]] = {index: [] for index, is_move in enumerate(moves) if is_move}
    for index, read in enumerate(producers):
        for producer in read:
            if producer in readers:
                readers[producer].append(index)
    covered = list(bits)
    owner = {bit: index for index, bit in enumerate(bits) if bit}
    for index, all_readers in readers.items():
        common = -1
        for reader in all_readers:
            common &= needs[reader]
        for bit, waited_for in owner.items():
            if common & bit:
                covered[waited_for] |= bits[index]
    return covered
