"""Layout of the memory that the GPUs of a mesh write to: flags, the epoch, then slots for operands."""

from __future__ import annotations

SLOTS = 3
"""Slots, which consecutive kernels use in turn."""

FLAG_BLOCKS = 128
"""Maximum blocks of a kernel, each with a flag for every GPU."""

PEER_MEMORY = "relax_hetero.peer_memory"
"""Packed function of a device's index in the manifest, the bytes of a slot, and the indices of the mesh's devices, that
returns the addresses of their memory, (devices,) of int64, on the first device."""

_ALIGNMENT = 256


def epoch_offset(ranks: int) -> int:
    """Offset of the epoch and of the number of blocks that have ended it, after the flags."""
    return ranks * FLAG_BLOCKS * 4


def data_offset(slot: int, ranks: int, slot_bytes: int) -> int:
    """Offset of a slot, which has `slot_bytes` for each GPU."""
    begin = -(-(epoch_offset(ranks) + 8) // _ALIGNMENT) * _ALIGNMENT
    return begin + slot * ranks * slot_bytes


def memory_bytes(ranks: int, slot_bytes: int) -> int:
    """Bytes of the memory of a GPU."""
    return data_offset(SLOTS, ranks, slot_bytes)
