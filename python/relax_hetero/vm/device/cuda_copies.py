"""Copies from, to and between GPUs by address, in order with a stream."""

from __future__ import annotations

import ctypes
import functools
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tvm_ffi
from tvm import runtime

from .cuda_driver import CudaError
from .cuda_library import CUDA, CudaLibrary, cuda_library
from .cuda_streams import Event, Stream, copy_stream
from .error_records import raise_reported
from .pinned_staging import STAGED_BYTES, staging
from .tensors import is_host, nbytes_of


class Location(NamedTuple):
    """An address of a GPU or of the host.

    Attributes
    ----------
    gpu : int or None
        GPU; None for host memory.
    """

    address: int
    gpu: int | None


def issue_copy(
    library: CudaLibrary, source: Location, target: Location, nbytes: int, stream: Stream, begin: Event | None = None
) -> None:
    """Copy in order with `stream`, which belongs to a GPU of either location.

    Returns when pageable host memory has been read or written; other copies are asynchronous. A large copy of pageable
    memory to a GPU may begin after `begin`, an earlier event of the stream.
    """
    if not nbytes:
        return
    library.use(stream.gpu)
    if source.gpu is not None and target.gpu is not None:
        if source.gpu == target.gpu:
            library.call("cuMemcpyDtoDAsync_v2", target.address, source.address, nbytes, stream.handle)
        else:
            contexts = library.context(target.gpu), library.context(source.gpu)
            arguments = target.address, contexts[0], source.address, contexts[1]
            library.call("cuMemcpyPeerAsync", *arguments, nbytes, stream.handle)
        return
    host = target if source.gpu is not None else source
    buffers = None
    if nbytes >= STAGED_BYTES and not library.is_pinned(host.address):
        buffers = staging(library, stream.gpu)
    if buffers is not None and source.gpu is None:
        buffers.send(source.address, target.address, nbytes, stream, begin)
    elif buffers is not None:
        buffers.receive(source.address, target.address, nbytes, stream)
    else:
        name = "cuMemcpyHtoDAsync_v2" if source.gpu is None else "cuMemcpyDtoHAsync_v2"
        library.call(name, target.address, source.address, nbytes, stream.handle)


_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
SENT_BYTES = 64 << 10  # maximum bytes of pageable memory that the driver reads before a copy to a GPU returns


def copy_on_current_stream(source: runtime.Tensor, target: runtime.Tensor, wait: bool) -> bool:
    """Copy as `tensors.copy_into` does, with at least one tensor on a GPU; False if CUDA does not work."""
    library = cuda_library()
    if library is None:
        return False
    from_device, to_device = source.device, target.device
    from_host, to_host = is_host(from_device), is_host(to_device)
    stream = Stream.current(library, to_device if from_host else from_device)
    other = None
    if not from_host and not to_host and from_device.index != to_device.index:
        other = Stream.current(library, to_device)
        if not other.done():  # it may use the target
            stream.wait(other.record())
    location, nbytes = _location_of(source), nbytes_of(source)
    issue_copy(library, location, _location_of(target), nbytes, stream)
    stays = not from_host and not to_host and from_device.index == to_device.index
    is_read = from_host and nbytes <= SENT_BYTES and not library.is_pinned(location.address)
    if not wait and (stays or is_read):
        return True
    if not wait and other is not None:  # later work of either GPU is after the copy
        other.wait(stream.record())
        return True
    stream.synchronize()
    if to_host:
        raise_reported(from_device.index)
    return True


def end_of_work(device: runtime.Device) -> Event | None:
    """End of the work that was launched so far on a device's current stream; None for devices other than GPUs."""
    library = cuda_library() if device.dlpack_device_type() == CUDA else None
    return None if library is None else Stream.current(library, device).record()


def copy_after(source: runtime.Tensor, target: runtime.Tensor, end: Event) -> None:
    """Copy between two GPUs, while work that was launched after `end` may still run on the source's one.

    The copy is in order with the target's current stream, and later work of either GPU is after it. `end`: event of the
    source's GPU, after the work that computes the source.
    """
    library, gpu = end.library, target.device.index
    # The default stream would wait for all work of both GPUs.
    stream, after = copy_stream(library, gpu, "from other GPUs"), Stream.current(library, target.device)
    stream.wait(end)
    stream.wait(after.record())
    done = begin_copy(source, target, stream)
    after.wait(done)
    Stream.current(library, source.device).wait(done)


def copies_within(target: runtime.Tensor) -> Callable[[int, int], None] | None:
    """`Backend.copies_within` of CUDA; None if it does not work."""
    library = cuda_library()
    if library is None:
        return None
    device, address, use, quick = target.device, target.data_ptr(), library.use, library.quick
    gpu, stream_of = device.index, tvm_ffi.get_raw_stream

    def copy(source: int, nbytes: int) -> None:
        use(gpu)
        quick("cuMemcpyDtoDAsync_v2", address, source, nbytes, int(stream_of(device)))

    return copy


class _Streamed(threading.local):
    """Events before the last streamed copies of this thread, by GPU."""

    def __init__(self) -> None:
        self.events: defaultdict[int, deque[Event]] = defaultdict(lambda: deque(maxlen=_MAX_STREAM_AGE + 1))


_MAX_STREAM_AGE = 7
_streamed = _Streamed()


def stream_constant(source: runtime.Tensor, target: runtime.Tensor, age: int) -> bool:
    """Copy a constant on the host to a GPU, while work that was launched before may still run.

    `age`: the copy begins after all work that was launched before an earlier streamed copy: the one `age` copies ago,
    on this thread and GPU. 0: before this one. Returns False if CUDA does not work.
    """
    library = cuda_library()
    if library is None:
        return False
    stream = Stream.current(library, target.device)
    events = _streamed.events[target.device.index]
    events.append(stream.record())
    begin = events[-1 - age] if age < len(events) else events[-1]
    issue_copy(library, _location_of(source), _location_of(target), nbytes_of(source), stream, begin)
    return True


def begin_copy(source: runtime.Tensor, target: runtime.Tensor, stream: Stream) -> Event:
    """Copy between contiguous tensors of equal size, at least one on a GPU, in order with `stream`.

    Returns when pageable host memory has been read or written. Other copies are asynchronous, and the caller keeps both
    tensors until the copy has ended. `source`, `target`: tensors on the stream's GPU, another GPU, or a CPU. `stream`:
    stream of either GPU. Returns the end of the copy.
    """
    issue_copy(stream.library, _location_of(source), _location_of(target), nbytes_of(source), stream)
    return stream.record()


def _location_of(tensor: runtime.Tensor) -> Location:
    device = tensor.device
    return Location(tensor.data_ptr(), device.index if device.dlpack_device_type() == CUDA else None)


def enable_peer_access(devices: Sequence[runtime.Device]) -> None:
    """Enable peer access between all pairs of CUDA devices that support it."""
    gpus = sorted({device.index for device in devices if device.dlpack_device_type() == CUDA})
    library = cuda_library() if len(gpus) > 1 else None
    if library is not None:
        for gpu, peer in itertools.permutations(gpus, 2):
            _enable_peer(library, gpu, peer)


def has_peer_access(gpu: int, peer: int) -> bool:
    """Return whether a GPU can access the memory of another one, after `enable_peer_access`."""
    library = cuda_library()
    return library is not None and _enable_peer(library, gpu, peer)


def can_access_peer(gpu: int, peer: int) -> bool | None:
    """Return whether a GPU of this machine can access the memory of another one; None without these GPUs."""
    library = cuda_library()
    try:
        return None if library is None else _can_access(library, gpu, peer)
    except CudaError:
        return None


def _can_access(library: CudaLibrary, gpu: int, peer: int) -> bool:
    can_access = ctypes.c_int(0)
    library.call("cuDeviceCanAccessPeer", ctypes.byref(can_access), gpu, peer)
    return bool(can_access.value)


@functools.cache
def _enable_peer(library: CudaLibrary, gpu: int, peer: int) -> bool:
    """Let `gpu` access memory of `peer`, once per process; returns whether it can."""
    try:
        if not _can_access(library, gpu, peer):
            return False
        library.call("cuCtxPushCurrent_v2", library.context(gpu))
        try:
            status = library.status("cuCtxEnablePeerAccess", library.context(peer), 0)
            if status not in (0, _ALREADY_ENABLED):
                raise library.error("cuCtxEnablePeerAccess", status)
        finally:
            library.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
    except CudaError:  # a lost GPU
        return False
    return True
