"""Streams, events and copies in order with them, with a driver in Python that runs everything as late as it can."""

import ctypes
from functools import cache

import numpy as np
import pytest
import tvm

from relax_hetero.vm.device import cuda_copies, host_copies, memory_pools, pinned_staging, tensors
from relax_hetero.vm.device.cuda_copies import SENT_BYTES, begin_copy
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_streams import Event, Stream, copy_stream
from relax_hetero.vm.device.host_copies import CopiesToHost, EarlyCopies
from relax_hetero.vm.device.memory_pools import PinnedPool
from relax_hetero.vm.device.pinned_staging import Staging
from relax_hetero.vm.device.tensors import alias, copy_into, copy_to, from_numpy
from seeds import fresh_rng
from vm.fake_cuda import INVALID, LOST, FakeCuda, FakeLibrary, staging_loop

STAGED_BYTES = 50_000


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def library(cuda, monkeypatch):
    library = FakeLibrary(cuda)
    monkeypatch.setattr(cuda_copies, "cuda_library", lambda: library)
    monkeypatch.setattr(cuda_copies, "STAGED_BYTES", STAGED_BYTES)
    monkeypatch.setattr(
        cuda_copies, "staging", cache(lambda library, gpu: Staging(library, gpu, 3, staging_loop(), 10_000))
    )
    return library


def on_gpu(array, gpu=0):
    """Tensor that the fake driver takes for one of a GPU."""
    return alias(tvm.runtime.tensor(array), tvm.cuda(gpu))


def on_cpu(array):
    return tvm.runtime.tensor(array)


def values(tensor):
    return alias(tensor, tvm.cpu(0)).numpy()


def random(nbytes):
    return fresh_rng().integers(0, 256, nbytes, "uint8")


def test_events_order_streams(cuda, library):
    order = []
    first, second = Stream(library, 0), Stream(library, 1)
    cuda._push(first.handle, lambda: order.append("first"))
    event = first.record()
    second.wait(event)
    cuda._push(second.handle, lambda: order.append("second"))
    assert not (event.done() or first.done() or second.done()) and not order
    second.synchronize()
    assert order == ["first", "second"]
    assert event.done() and first.done() and second.done()
    event.synchronize()


def test_an_event_that_was_never_recorded_is_done(library):
    event = Event(library, 0)
    event.synchronize()
    assert event.done()


def test_failures_name_the_call(cuda, library):
    stream = Stream(library, 0)
    event = stream.record()
    for function, call in (
        ("cuEventSynchronize", event.synchronize),
        ("cuEventQuery", event.done),
        ("cuStreamQuery", stream.done),
        ("cuStreamSynchronize", stream.synchronize),
        ("cuStreamCreate", lambda: Stream(library, 0)),
    ):
        cuda.failing[function] = LOST
        with pytest.raises(CudaError, match=f"{function} failed: CUDA_ERROR_LAUNCH_FAILED"):
            call()
    cuda.failing["cuEventQuery"] = 12345  # a code without a name in the driver
    with pytest.raises(CudaError, match="cuEventQuery failed: 12345"):
        event.done()


def test_streams_and_events_are_destroyed(cuda, library):
    stream = Stream(library, 0)
    event = stream.record()
    assert event.milliseconds_since(event) == 1.5
    del stream, event
    assert not cuda.events and list(cuda.streams) == [0]
    Stream(library, 0, 0)  # of others
    assert list(cuda.streams) == [0]


@pytest.mark.parametrize("nbytes", [0, 1, STAGED_BYTES - 1, STAGED_BYTES, 3 * STAGED_BYTES + 5])
def test_copies_between_all_devices(cuda, library, nbytes):
    source = random(nbytes)
    devices = [tvm.cpu(0), tvm.cuda(0), tvm.cuda(1)]
    for start in devices:
        for end in devices:
            a, b = alias(on_cpu(source), start), alias(on_cpu(np.full(nbytes, 7, "uint8")), end)
            copy_into(a, b)
            np.testing.assert_array_equal(values(b), source)
    assert all(not waiting for waiting in cuda.streams.values())


@pytest.mark.parametrize("nbytes", [1, SENT_BYTES, SENT_BYTES + 1])
@pytest.mark.parametrize("is_pinned", [False, True])
def test_small_copies_to_a_gpu_need_not_end_but_have_read_their_source(cuda, library, nbytes, is_pinned):
    pool = PinnedPool(library, 0, 1 << 24)
    source = pool.tensor((nbytes,), "uint8", tvm.cpu(0)) if is_pinned else on_cpu(np.zeros(nbytes, "uint8"))
    host, target = np.from_dlpack(source), on_gpu(np.zeros(nbytes, "uint8"))
    host[:] = expected = random(nbytes)
    copy_into(source, target, wait=False)
    host[:] = 0
    is_issued = not is_pinned and nbytes <= SENT_BYTES
    assert bool(cuda.streams[0]) == is_issued
    if is_issued:
        Stream(library, 0, 0).synchronize()
    np.testing.assert_array_equal(values(target), expected)


def test_a_copy_within_a_gpu_need_not_end(cuda, library):
    source, target = on_gpu(np.zeros(100, "uint8")), on_gpu(np.zeros(100, "uint8"))
    library.use(0)
    cuda._push(0, lambda: ctypes.memset(source.data_ptr(), 5, 100))
    copy_into(source, target, wait=False)
    assert len(cuda.streams[0]) == 2 and not values(target).any()
    Stream(library, 0, 0).synchronize()
    assert (values(target) == 5).all()


def test_copies_to_the_host_wait_for_earlier_work_only(cuda, library, monkeypatch):
    monkeypatch.setattr(host_copies, "cuda_library", lambda: library)
    monkeypatch.setattr(memory_pools, "cuda_library", lambda: library)
    monkeypatch.setattr(memory_pools, "_pools", {})
    source, before, later = on_gpu(np.zeros(100, "uint8")), np.full(100, 7, "uint8"), []
    library.use(0)
    cuda._push(0, lambda: ctypes.memset(source.data_ptr(), 7, 100))
    to_host = CopiesToHost(source)
    wait = to_host.begin(source)
    cuda._push(0, lambda: later.append(ctypes.memset(source.data_ptr(), 0, 100)))
    np.testing.assert_array_equal(wait(), before)
    assert not later and cuda.copies == [("to the host", 100)]
    np.testing.assert_array_equal(CopiesToHost(on_cpu(before)).begin(on_cpu(before))(), before)
    copies = cuda.streams[copy_stream(library, 0, "to the host").handle]
    waits = [to_host.begin(source), to_host.begin(source)]  # while the first copy has its memory
    assert copies
    waits.clear()  # before the end of the copies, for which the memory of both tensors has to wait
    assert not copies
    events, memory = len(cuda.events), len(cuda.pinned)
    np.testing.assert_array_equal([to_host.begin(source)() for _ in range(9)], np.zeros((9, 100)))
    assert (len(cuda.events), len(cuda.pinned)) == (events, memory) == (6, 3)  # of three copies at a time


def test_an_early_copy_waits_for_work_before_the_last_one(cuda, library, monkeypatch):
    """Steps take turns with two targets: a copy runs while the last step, which reads the other target, still waits."""
    monkeypatch.setattr(host_copies, "cuda_library", lambda: library)
    library.use(0)
    copies, host = EarlyCopies(tvm.cuda(0)), on_cpu(np.zeros(4, "uint8"))
    targets, seen = [on_gpu(np.zeros(4, "uint8")) for _ in range(2)], []
    for step in range(4):
        np.from_dlpack(host)[:] = step + 1
        copies.send(copies.prepare(host, targets[step % 2]))
        if step > 1:
            copy_stream(library, 0, "from the host").synchronize()
            assert (values(targets[step % 2]) == step + 1).all() and len(seen) == step - 1
        cuda._push(0, lambda step=step: seen.append(values(targets[step % 2]).copy()))
    Stream(library, 0, 0).synchronize()
    np.testing.assert_array_equal(seen, [[step + 1] * 4 for step in range(4)])


def test_an_early_copy_to_a_cpu_is_a_plain_one():
    source, target = on_cpu(random(10)), on_cpu(np.zeros(10, "uint8"))
    copies = EarlyCopies(tvm.cpu(0))
    copies.send(copies.prepare(source, target))
    np.testing.assert_array_equal(target.numpy(), source.numpy())


def test_copies_come_after_the_streams_of_both_gpus(cuda, library):
    """Memory that a GPU still reads is not overwritten by another one."""
    source, target = on_gpu(random(100), 0), on_gpu(np.zeros(100, "uint8"), 1)
    copies = []
    cuda.streams[0] = []
    with tvm_stream(tvm.cuda(1), 55, cuda):
        cuda.streams[55].append(lambda: copies.append(values(target).copy()))
        copy_into(source, target)
    np.testing.assert_array_equal(copies, np.zeros((1, 100)))
    np.testing.assert_array_equal(values(target), values(source))
    assert ((100, 101), 100) in cuda.copies


def test_the_host_does_not_wait_for_a_copy_between_gpus(cuda, library, monkeypatch):
    """Later work of both GPUs comes after the copy."""
    source, target = on_gpu(random(100), 0), on_gpu(np.zeros(100, "uint8"), 1)
    seen = []
    cuda.streams[0] = []
    with tvm_stream(tvm.cuda(1), 55, cuda):
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "synchronize", lambda stream: pytest.fail("the host waits"))
            copy_into(source, target, wait=False)
        cuda.streams[55].append(lambda: seen.append(values(target).copy()))
        Stream(library, 1, 55).synchronize()
    np.testing.assert_array_equal(seen, [values(source)])


def tvm_stream(device, handle, cuda):
    cuda.current.context = 0
    cuda.streams[handle] = []
    return tensors.tvm_ffi.use_raw_stream(device, handle)


def test_pinned_memory_is_copied_directly_and_without_waiting(cuda, library):
    pool = PinnedPool(library, 0, 1 << 24)
    stream = Stream(library, 0)
    nbytes = 4 * STAGED_BYTES
    source, back = (pool.tensor((nbytes,), "uint8", tvm.cpu(1)) for _ in range(2))
    device = on_gpu(np.zeros(nbytes, "uint8"))
    values(source)[:] = 0
    np.from_dlpack(alias(source, tvm.cpu(0)))[:] = expected = random(nbytes)
    there = begin_copy(source, device, stream)
    here = begin_copy(device, back, stream)
    assert not there.done() and not here.done()
    assert cuda.copies == [("to the GPU", nbytes), ("to the host", nbytes)]
    here.synchronize()
    assert there.done()
    np.testing.assert_array_equal(values(back), expected)


def test_large_pageable_memory_is_staged(cuda, library):
    nbytes = 4 * STAGED_BYTES
    stream = Stream(library, 0)
    device = on_gpu(np.zeros(nbytes, "uint8"))
    array = random(nbytes)
    source, back = on_cpu(array), on_cpu(np.zeros(nbytes, "uint8"))
    event = begin_copy(source, device, stream)
    ctypes.memset(source.data_ptr(), 0, nbytes)
    assert not event.done()
    begin_copy(device, back, stream)
    np.testing.assert_array_equal(values(back), array)


def test_arrays_become_tensors_of_a_gpu(cuda, library, monkeypatch):
    monkeypatch.setattr(tensors, "_empty", lambda shape, dtype, device, scope: on_gpu(np.zeros(shape, dtype)))
    array = fresh_rng().random((31, 47), "float32")
    np.testing.assert_array_equal(values(from_numpy(array.T, tvm.cuda(0))), array.T)
    np.testing.assert_array_equal(values(copy_to(on_cpu(array), tvm.cuda(0))), array)
    assert cuda.copies == [("to the GPU", array.nbytes)] * 2


def test_peer_access_is_asked_for_once_in_each_direction(cuda, library):
    devices = [tvm.cuda(1), tvm.cpu(0), tvm.cuda(0), tvm.cuda(1)]
    for _ in range(2):
        cuda_copies.enable_peer_access(devices)
    assert sorted(cuda.copies) == [("peer access", 100), ("peer access", 101)]
    cuda_copies.enable_peer_access(devices[:2])
    assert len(cuda.copies) == 2


def test_access_without_contexts(cuda, library, monkeypatch):
    assert cuda_copies.can_access_peer(0, 1) is True
    cuda.failing["cuDeviceCanAccessPeer"] = INVALID  # a GPU that is not there
    assert cuda_copies.can_access_peer(0, 7) is None
    monkeypatch.setattr(cuda_copies, "cuda_library", lambda: None)
    assert cuda_copies.can_access_peer(0, 1) is None
    assert not cuda.copies


def test_few_cores_leave_copies_to_the_driver(cuda, library, monkeypatch):
    pinned_staging._staging.cache_clear()
    monkeypatch.setattr(pinned_staging, "_loops", [staging_loop()])
    monkeypatch.setattr(cuda_copies, "staging", pinned_staging.staging)
    monkeypatch.setattr(pinned_staging, "num_cores", lambda: 6)
    nbytes = 2 * STAGED_BYTES
    source, target = on_cpu(random(nbytes)), on_gpu(np.zeros(nbytes, "uint8"))
    copy_into(source, target)
    assert cuda.copies == [("to the GPU", nbytes)]
    np.testing.assert_array_equal(values(target), values(source))
    pinned_staging._staging.cache_clear()
    monkeypatch.setattr(pinned_staging, "num_cores", lambda: 8)
    copy_into(source, target)
    assert sum(size for _, size in cuda.copies[1:]) == nbytes and len(cuda.pinned) == (3 + 2) * 2
    pinned_staging._staging.cache_clear()
