"""Collectives of NCCL as numbers, which compiled code gives to the run time, and their places in a buffer.

A sum is ``(count,)``: numbers of float32 at the beginning of the buffer. An exchange is the source's rank, the target's
rank and the bytes of each tensor; a tensor has one place, in the buffers of both GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Collective = tuple[int, ...]

NCCL_MEMORY = "relax_hetero.nccl_memory"
"""Packed function of a device's index in the manifest, the number of the mesh's devices, their indices, and the
function's collectives (`to_numbers`), that returns the addresses of all buffers, (devices,) of int64, on the device."""

NCCL_COLLECTIVE = "relax_hetero.nccl_collective"
"""Packed function of the number of a collective, the rank of a GPU, and the indices of the mesh's devices, that adds
NCCL's kernels to the graph that the GPU's current stream captures."""

_ALIGNMENT = 256


def to_numbers(collectives: Iterable[Collective]) -> list[int]:
    """Each collective after the number of its numbers."""
    return [number for each in collectives for number in (len(each), *each)]


def from_numbers(numbers: Sequence[int]) -> tuple[Collective, ...]:
    """The inverse of `to_numbers`."""
    collectives, begin = [], 0
    while begin < len(numbers):
        end = begin + 1 + numbers[begin]
        collectives.append(tuple(numbers[begin + 1 : end]))
        begin = end
    return tuple(collectives)


def transfers(exchange: Collective) -> list[tuple[int, int, int]]:
    """Source, target and bytes of each tensor of an exchange."""
    return list(zip(exchange[0::3], exchange[1::3], exchange[2::3], strict=True))


def offsets(exchange: Collective) -> list[int]:
    """Offset of each tensor of an exchange in the buffers."""
    places, end = [], 0
    for _, _, nbytes in transfers(exchange):
        places.append(end)
        end += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    return places


def buffer_bytes(collectives: Iterable[Collective]) -> int:
    """Bytes of the buffer of each GPU."""
    ends = [4 * each[0] if len(each) == 1 else offsets(each)[-1] + each[-1] for each in collectives]
    return max(ends, default=0)
