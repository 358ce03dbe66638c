"""Copies from and to GPUs by address, as work of a stream."""

from __future__ import annotations

from typing import NamedTuple

from .cuda_library import CudaLibrary
from .cuda_streams import Stream
from .pinned_staging import STAGED_BYTES, staging


class Place(NamedTuple):
    """Memory.

    Attributes
    ----------
    address : int
    gpu : int or None
        None: memory of the host.
    """

    address: int
    gpu: int | None


def issue_copy(library: CudaLibrary, source: Place, target: Place, nbytes: int, stream: Stream) -> None:
    """Copy in order with `stream`, of a GPU that is concerned; one of the places is on a GPU.

    From memory of the host that is not pinned, it returns when that has been read; to such memory, when the copy has
    ended. Otherwise it returns at once.
    """
    if not nbytes:
        return
    library.use(stream.gpu)
    if source.gpu is not None and target.gpu is not None:
        if source.gpu == target.gpu:
            library.call("cuMemcpyDtoDAsync_v2", target.address, source.address, nbytes, stream.handle)
        else:
            contexts = library.context(target.gpu), library.context(source.gpu)
            places = target.address, contexts[0], source.address, contexts[1]
            library.call("cuMemcpyPeerAsync", *places, nbytes, stream.handle)
        return
    host = target if source.gpu is not None else source
    staged = None
    if nbytes >= STAGED_BYTES and not library.is_pinned(host.address):
        staged = staging(library, stream.gpu)
    if staged is not None:
        copy = staged.send if source.gpu is None else staged.receive
        copy(source.address, target.address, nbytes, stream)
    else:
        name = "cuMemcpyHtoDAsync_v2" if source.gpu is None else "cuMemcpyDtoHAsync_v2"
        library.call(name, target.address, source.address, nbytes, stream.handle)
