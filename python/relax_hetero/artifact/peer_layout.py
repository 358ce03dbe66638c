"""Layout of the memory that the GPUs of a mesh write to: flags of each slot, the state, then slots for operands.

A slot has, for each GPU, words of short operands; of long ones, the address of the result, flags of tiles, and rows.
"""

from __future__ import annotations

SLOTS = 3  # slots, which consecutive kernels use in turn
FLAG_BLOCKS = 128  # maximum blocks of a kernel, each with a flag of each slot for every GPU

LAMPORT_BYTES = 512 << 10
"""Maximum bytes of a short operand; of more than four GPUs it is less (`tir.cuda.all_reduce.max_short_bytes`)."""

SENT_FLAGS_BYTES = 16 << 10  # bytes of a slot for the flags of the tiles that products send, for each GPU
RESULT_LINE_BYTES = 16  # bytes of a slot for the address of another GPU's result

LONG_OPERANDS = LAMPORT_BYTES + RESULT_LINE_BYTES + SENT_FLAGS_BYTES
"""Offset of a long operand in what a slot has for a GPU."""

PEER_MEMORY = "relax_hetero.peer_memory"
"""Packed function of a device's index in the manifest, the bytes of a slot, and the indices of the mesh's devices, that
returns the addresses of their memory, (devices,) of int64, on the first device."""

AWAIT_LAUNCHES = "relax_hetero.await_launches"
"""Packed function that returns once all command buffers that the call has submitted are launched."""

_ALIGNMENT = 256


def flags_offset(slot: int, ranks: int) -> int:
    """Offset of the flags of a slot."""
    return slot * ranks * FLAG_BLOCKS * 4


def state_offset(ranks: int) -> int:
    """Offset of the number of the slot that was used last, plus one, and of the epoch of each slot."""
    return flags_offset(SLOTS, ranks)


def data_offset(slot: int, ranks: int, slot_bytes: int) -> int:
    """Offset of a slot, which has `slot_bytes` for each GPU."""
    begin = -(-(state_offset(ranks) + 4 * (1 + SLOTS)) // _ALIGNMENT) * _ALIGNMENT
    return begin + slot * ranks * slot_bytes


def memory_bytes(ranks: int, slot_bytes: int) -> int:
    """Bytes of the memory of a GPU."""
    return data_offset(SLOTS, ranks, slot_bytes)


def initial_zeros(ranks: int, slot_bytes: int) -> list[tuple[int, int]]:
    """Begin and number of the bytes that are zero at first: all but long operands."""
    slots = [data_offset(slot, ranks, slot_bytes) + rank * slot_bytes for slot in range(SLOTS) for rank in range(ranks)]
    return [(0, data_offset(0, ranks, slot_bytes)), *((begin, min(slot_bytes, LONG_OPERANDS)) for begin in slots)]
