"""Binding tables: the memory bound to the slots of a command buffer, checked once."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tvm import runtime

from ...artifact.commands import READ, SlotSpec
from ...artifact.dims import parse_dim
from ...errors import BindingError
from .borrowed_buffer import BYTES, BorrowedBuffer, borrow, check_device
from .operands import size_name
from .recorder import Recording


class BindingTable:
    """The memory of each slot of a command buffer; made by `CommandBuffer.bind`, for any number of submissions.

    Parameters
    ----------
    recording : Recording
        Recorded commands that the table is for.
    borrowed : sequence of BorrowedBuffer or None
        Memory of each slot; None for an empty one.

    Attributes
    ----------
    recording : Recording
        Recorded commands that the table is for.
    addresses, sizes : tuple of int
        Addresses and sizes in bytes by slot; 0 for an empty slot.
    values : dict of str to int
        Sizes by their names (`size_name`) in the text of a `Number`.
    pointer : int
        Address of an int64 array of all addresses, then all sizes.
    """

    __slots__ = ("_borrowed", "_memory", "addresses", "pointer", "recording", "sizes", "values")

    def __init__(self, recording: Recording, borrowed: Sequence[BorrowedBuffer | None]) -> None:
        self.recording = recording
        self._borrowed = tuple(borrowed)  # keeps the memory alive
        self.addresses = tuple(buffer.address if buffer else 0 for buffer in borrowed)
        self.sizes = tuple(buffer.nbytes if buffer else 0 for buffer in borrowed)
        self.values = {size_name(slot): size for slot, size in enumerate(self.sizes)}
        self._memory = (ctypes.c_int64 * max(1, 2 * len(borrowed)))(*self.addresses, *self.sizes)
        self.pointer = ctypes.addressof(self._memory)

    def __reduce__(self) -> NoReturn:
        raise BindingError("a BindingTable cannot be pickled or copied: it refers to memory of this process")

    def __repr__(self) -> str:
        bindings = (
            f"{slot}: {buffer.nbytes} bytes of {buffer.dtype}" for slot, buffer in enumerate(self._borrowed) if buffer
        )
        return f"<BindingTable {{{', '.join(bindings)}}}>"


def bind(recording: Recording, bindings: object, device: runtime.Device, device_name: str) -> BindingTable:
    """Make a binding table; see `CommandBuffer.bind`."""
    borrowed: list[BorrowedBuffer | None] = [None] * len(recording.slots)
    for slot, binding in _by_slot(bindings, len(recording.slots)).items():
        borrowed[slot] = buffer = _borrow(binding, f"slot {slot}")
        check_device(buffer, device, device_name, f"slot {slot}")
    for slot, spec in enumerate(recording.slots):
        if spec.access:
            _check_binding(borrowed[slot], spec)
    table = BindingTable(recording, borrowed)
    for slot, spec in enumerate(recording.slots):
        if isinstance(spec.nbytes, int) or parse_dim(spec.nbytes).names <= table.values.keys():
            check_size(table, slot, table.values)
    _refuse_overlap(recording, borrowed)
    return table


def check_size(table: BindingTable, slot: int, values: Mapping[str, int]) -> None:
    """Require that a slot's binding has the bytes that commands need; BindingError if it has fewer."""
    needed = table.recording.slots[slot].nbytes
    if isinstance(needed, str):
        evaluate = parse_dim(needed).evaluate
        assert evaluate is not None, f"{needed} is arithmetic by construction"
        text, needed = f" = {needed}", evaluate(values)
    else:
        text = ""
    if table.sizes[slot] < needed:
        raise BindingError(f"slot {slot} is bound to {table.sizes[slot]} bytes, expected at least {needed}{text}")


def _by_slot(bindings: object, slots: int) -> dict[int, object]:
    if isinstance(bindings, Mapping):
        by_slot = dict(bindings)
    elif isinstance(bindings, Sequence) and not isinstance(bindings, str | bytes):
        by_slot = dict(enumerate(bindings))
    else:
        raise BindingError(
            f"bindings are a {type(bindings).__name__}, expected a mapping from slots, a sequence of buffers by slot, "
            "or a BindingTable"
        )
    for slot in by_slot:
        if not isinstance(slot, int) or isinstance(slot, bool) or not 0 <= slot < slots:
            raise BindingError(f"bindings name slot {slot!r}, expected one of {slots}: 0 to {slots - 1}")
    return {slot: binding for slot, binding in by_slot.items() if binding is not None}


def _borrow(binding: object, where: str) -> BorrowedBuffer:
    if not isinstance(binding, tuple):
        return borrow(binding, where)
    if len(binding) not in (2, 3):
        raise BindingError(f"{where} is bound to {len(binding)} things, expected a buffer or (buffer, offset, length)")
    buffer, *numbers = binding
    offset, length = (_byte_count(number, where) for number in [*numbers, None][:2])
    return borrow(buffer, where).subrange(offset or 0, length, where)


def _byte_count(number: Any, where: str) -> int | None:
    try:
        if isinstance(number, bool):
            raise TypeError
        return None if number is None else operator.index(number)
    except TypeError:
        expected = "expected (buffer, offset, length) in bytes"
        raise BindingError(
            f"{where} has the offset or length {number!r} ({type(number).__name__}), {expected}"
        ) from None


def _check_binding(borrowed: BorrowedBuffer | None, spec: SlotSpec) -> None:
    if borrowed is None:
        raise BindingError(f"{spec.name} is empty, expected a buffer: commands {spec.access} it")
    if spec.dtype and borrowed.dtype not in (spec.dtype, BYTES):
        raise BindingError(
            f"{spec.name} has dtype {borrowed.dtype}, expected {spec.dtype}, or {BYTES} for untyped bytes"
        )
    if spec.access != READ and not borrowed.writable:
        raise BindingError(f"{spec.name} is bound to read-only memory, expected writable: commands {spec.access} it")
    if borrowed.nbytes and borrowed.address % spec.alignment:
        raise BindingError(
            f"{spec.name} has the address {borrowed.address:#x}, expected an alignment of {spec.alignment} bytes "
            f"(it is off by {borrowed.address % spec.alignment})"
        )


def _refuse_overlap(recording: Recording, borrowed: Sequence[BorrowedBuffer | None]) -> None:
    """Refuse overlapping bindings of which one is written, unless `may_overlap` permits the pair."""
    # Ranges are (begin, end, number, whether it is written).
    ranges = [
        (buffer.address, buffer.address + buffer.nbytes, slot, recording.slots[slot].access != READ)
        for slot, buffer in enumerate(borrowed)
        if buffer is not None and buffer.nbytes and recording.slots[slot].access
    ]
    # Direct buffers have the negative numbers -1, -2, ...
    ranges += [
        (buffer.address, buffer.address + buffer.nbytes, -1 - index, index in recording.written_directs)
        for index, buffer in enumerate(recording.directs)
        if buffer.nbytes
    ]
    for (first, is_written), (second, is_other_written) in _overlapping_pairs(ranges):
        if first < 0 and second < 0:
            continue  # checked while recording
        pair = (first, second)
        if (is_written or is_other_written) and pair not in recording.may_overlap:
            a, b = sorted(pair, reverse=True) if min(pair) < 0 else sorted(pair)  # slots before direct buffers
            written = first if is_written else second
            hint = f" unless may_overlap has ({a}, {b})" if b >= 0 else ""
            raise BindingError(
                f"{_name(a)} and {_name(b)} share bytes, and commands write {_name(written)}; "
                f"expected disjoint ranges{hint}"
            )


def _overlapping_pairs(ranges: list[tuple[int, int, int, bool]]) -> Iterator[tuple[tuple[int, bool], tuple[int, bool]]]:
    """The pairs of ranges that share bytes."""
    ranges.sort()
    for index, (_, end, first, is_written) in enumerate(ranges):
        for begin, _, second, is_other_written in ranges[index + 1 :]:
            if begin >= end:
                break
            yield (first, is_written), (second, is_other_written)


def _name(number: int) -> str:
    return f"slot {number}" if number >= 0 else f"buffer {-1 - number}"
