"""Counts of what a process holds of the CUDA driver; other processes on the same GPU do not matter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from relax_hetero.vm.device.cuda_library import CudaLibrary

MADE = ("cuMemAlloc", "cuMemHostAlloc", "cuStreamCreate", "cuEventCreate", "cuGraphInstantiateWithFlags")
ENDED = {
    "cuMemFree": "cuMemAlloc",
    "cuMemFreeHost": "cuMemHostAlloc",
    "cuStreamDestroy": "cuStreamCreate",
    "cuEventDestroy": "cuEventCreate",
    "cuGraphExecDestroy": "cuGraphInstantiateWithFlags",
}


@contextmanager
def allocations() -> Iterator[Counter[str]]:
    """Count the objects of each kind that were created and not destroyed since, within the block."""
    counts: Counter[str] = Counter()

    def counted(call):
        def count(self, name, *args):
            result = call(self, name, *args)
            name = name.removesuffix("_v2")
            counts[ENDED.get(name, name)] += (name in MADE) - (name in ENDED)
            return result

        return count

    with (
        patch.object(CudaLibrary, "call", counted(CudaLibrary.call)),
        patch.object(CudaLibrary, "quick", counted(CudaLibrary.quick)),
        patch.object(CudaLibrary, "status", counted(CudaLibrary.status)),
    ):
        yield counts
