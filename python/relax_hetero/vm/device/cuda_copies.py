"""Copies from and to GPUs by address, as work of a stream; and direct copies between GPUs."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tvm import runtime

from .cuda_driver import CudaError
from .cuda_library import CUDA, CudaLibrary, cuda_library
from .cuda_streams import Event, Stream
from .error_records import raise_reported
from .pinned_staging import STAGED_BYTES, staging
from .tensors import is_host, nbytes_of


class Location(NamedTuple):
    """Memory.

    Attributes
    ----------
    gpu : int or None
        None: memory of the host.
    """

    address: int
    gpu: int | None


def issue_copy(library: CudaLibrary, source: Location, target: Location, nbytes: int, stream: Stream) -> None:
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


SENT_BYTES = 64 << 10
"""Tensors of at most so many bytes, in memory that is not pinned, the driver reads before a copy to a GPU returns."""


def copy_on_current_stream(source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
    """Copy as `tensors.copy_into` does, where at least one tensor is on a GPU; False where the driver does not work."""
    library = cuda_library()
    if library is None:
        return False
    from_device, to_device = source.device, target.device
    is_sent, arrives = is_host(from_device), is_host(to_device)
    stream = Stream.current(library, to_device if is_sent else from_device)
    if not is_sent and not arrives and from_device.index != to_device.index:
        other = Stream.current(library, to_device)
        if not other.done():  # it may use the target
            stream.wait(other.record())
    location, nbytes = _location_of(source), nbytes_of(source)
    issue_copy(library, location, _location_of(target), nbytes, stream)
    if not wait and is_sent and nbytes <= SENT_BYTES and not library.is_pinned(location.address):
        return True
    stream.synchronize()
    if arrives:
        raise_reported(from_device.index)
    return True


def begin_copy(source: runtime.Tensor, target: runtime.Tensor, stream: Stream) -> Event:
    """Copy between contiguous tensors of equal size, of which at least one is on a GPU, in order with `stream`.

    From memory of the host that is not pinned, it returns when that has been read; to such memory, when the copy has
    ended. Otherwise it returns at once, and the caller keeps both tensors until the copy has ended.

    Parameters
    ----------
    source, target : runtime.Tensor
        On the stream's GPU, another GPU, or a CPU.
    stream : Stream
        Stream of the GPU; of either, where there are two.

    Returns
    -------
    Event
        The end of the copy.
    """
    issue_copy(stream.library, _location_of(source), _location_of(target), nbytes_of(source), stream)
    return stream.record()


def _location_of(tensor: runtime.Tensor) -> Location:
    device = tensor.device
    return Location(tensor.data_ptr(), device.index if device.dlpack_device_type() == CUDA else None)


def enable_peer_access(devices: Sequence[runtime.Device]) -> None:
    """Let every pair of CUDA devices among `devices` read each other, where the hardware can; else nothing happens."""
    gpus = sorted({device.index for device in devices if device.dlpack_device_type() == CUDA})
    library = cuda_library() if len(gpus) > 1 else None
    if library is not None:
        for gpu, peer in itertools.permutations(gpus, 2):
            _enable(library, gpu, peer)


@functools.cache
def _enable(library: CudaLibrary, gpu: int, peer: int) -> bool:
    """True if `gpu` can now read memory of `peer` (asked for once: the driver keeps it for the whole process)."""
    able = ctypes.c_int(0)
    try:
        library.call("cuDeviceCanAccessPeer", ctypes.byref(able), gpu, peer)
        if not able.value:
            return False
        library.call("cuCtxPushCurrent_v2", library.context(gpu))
        try:
            library.call("cuCtxEnablePeerAccess", library.context(peer), 0)
        finally:
            library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    except CudaError:  # a GPU that is lost, or access that others have enabled
        return False
    return True
