"""Copies through pinned buffers, with a driver in Python that runs everything as late as it can."""

import ctypes
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.cuda_streams import Stream
from relax_hetero.vm.device.pinned_staging import CHUNK_BYTES, FIRST_CHUNK_BYTES, Staging, chunks_of
from seeds import fresh_rng
from vm.fake_cuda import LOST, FakeCuda, FakeLibrary, staging_loop

PART = 100


def random_bytes(nbytes):
    return fresh_rng().integers(0, 256, nbytes, "uint8")


def fake_staging(seed=None, threads=2, part=PART):
    cuda = FakeCuda(seed)
    library = FakeLibrary(cuda)
    return cuda, library, Staging(library, 0, threads, staging_loop(), part)


@given(nbytes=st.integers(1, 64 << 20))
def test_parts_cover_everything_once(nbytes):
    end, sizes = 0, []
    for offset, size in chunks_of(nbytes, CHUNK_BYTES):
        assert offset == end and 0 < size <= CHUNK_BYTES
        sizes.append(size)
        end += size
    assert end == nbytes and max(sizes[0], 1) <= FIRST_CHUNK_BYTES
    assert sizes[:-1] == sorted(sizes[:-1])


@given(
    nbytes=st.integers(1, 40 * PART),
    threads=st.integers(1, 4),
    seed=st.none() | st.integers(0, 99),
    misalignment=st.integers(0, 3),
)
def test_sent_data_were_read_at_return(nbytes, threads, seed, misalignment):
    cuda, library, staging = fake_staging(seed, threads)
    stream = Stream(library, 0)
    source, target = random_bytes(nbytes + misalignment), np.full(nbytes + misalignment + 1, 7, "uint8")
    expected = source[misalignment:].copy()
    staging.send(source.ctypes.data + misalignment, target.ctypes.data + misalignment, nbytes, stream)
    source[:] = 0
    stream.synchronize()
    np.testing.assert_array_equal(target[misalignment:-1], expected)
    assert target[-1] == 7 and set(target[:misalignment]) <= {7}


@given(nbytes=st.integers(1, 20 * PART), seed=st.none() | st.integers(0, 99))
def test_sends_follow_the_order_of_the_stream(nbytes, seed):
    cuda, library, staging = fake_staging(seed, threads=3)
    stream = Stream(library, 0)
    source, target, later = random_bytes(nbytes), np.zeros(nbytes, "uint8"), np.zeros(nbytes, "uint8")
    address = target.ctypes.data
    cuda._push(stream.handle, lambda: ctypes.memset(address, 7, nbytes))  # a kernel before
    staging.send(source.ctypes.data, address, nbytes, stream)
    cuda._push(stream.handle, lambda: ctypes.memmove(later.ctypes.data, address, nbytes))  # and one after
    stream.synchronize()
    np.testing.assert_array_equal(later, source)


@given(nbytes=st.integers(1, 9 * PART), threads=st.integers(1, 4), seed=st.none() | st.integers(0, 99))
def test_sends_that_begin_before_other_work_has_ended(nbytes, threads, seed):
    """Two buffers take turns: each copy waits for the reader of its own, and readers wait for copies."""
    cuda, library, staging = fake_staging(seed, threads)
    stream, events = Stream(library, 0), []
    sources, results = [random_bytes(nbytes) for _ in range(6)], [np.zeros(nbytes, "uint8") for _ in range(6)]
    buffers = [np.zeros(nbytes, "uint8") for _ in range(2)]
    for number, (source, result) in enumerate(zip(sources, results, strict=True)):
        buffer = buffers[number % 2]
        events.append(stream.record())
        begin = events[number - 1] if number > 1 else None
        staging.send(source.ctypes.data, buffer.ctypes.data, nbytes, stream, begin)
        cuda._push(stream.handle, partial(ctypes.memmove, result.ctypes.data, buffer.ctypes.data, nbytes))
    stream.synchronize()
    for source, result in zip(sources, results, strict=True):
        np.testing.assert_array_equal(result, source)


@given(nbytes=st.integers(1, 40 * PART), threads=st.integers(1, 4), seed=st.none() | st.integers(0, 99))
def test_received_data_are_complete_at_return(nbytes, threads, seed):
    cuda, library, staging = fake_staging(seed, threads)
    stream = Stream(library, 0)
    expected, source, target = random_bytes(nbytes), np.zeros(nbytes, "uint8"), np.full(nbytes + 1, 7, "uint8")
    cuda._push(stream.handle, lambda: ctypes.memmove(source.ctypes.data, expected.ctypes.data, nbytes))  # a kernel
    staging.receive(source.ctypes.data, target.ctypes.data, nbytes, stream)
    np.testing.assert_array_equal(target[:-1], expected)
    assert target[-1] == 7


@given(seed=st.none() | st.integers(0, 99))
def test_copies_of_several_threads_share_the_buffers(seed):
    cuda, library, staging = fake_staging(seed, threads=2)

    def there_and_back(_):
        stream = Stream(library, 0)
        source, target = random_bytes(1037), np.empty(1037, "uint8")
        device = np.empty(1037, "uint8")
        staging.send(source.ctypes.data, device.ctypes.data, 1037, stream)
        staging.receive(device.ctypes.data, target.ctypes.data, 1037, stream)
        np.testing.assert_array_equal(target, source)

    with ThreadPoolExecutor(5) as threads:
        list(threads.map(there_and_back, range(10)))
    assert len(staging._free) == 2


@pytest.mark.parametrize("way, function", [("send", "cuMemcpyHtoDAsync_v2"), ("receive", "cuEventSynchronize")])
def test_a_copy_that_fails_leaves_the_buffers_usable(way, function):
    cuda, library, staging = fake_staging()
    stream = Stream(library, 0)
    source, target = random_bytes(1000), np.empty(1000, "uint8")
    cuda.failing[function] = LOST
    with pytest.raises(CudaError, match=f"{function} failed: CUDA_ERROR_LAUNCH_FAILED"):
        getattr(staging, way)(source.ctypes.data, target.ctypes.data, 1000, stream)
    cuda.failing.clear()
    getattr(staging, way)(source.ctypes.data, target.ctypes.data, 1000, stream)
    stream.synchronize()
    np.testing.assert_array_equal(target, source)


def test_threads_end_with_their_buffers():
    before = set(threading.enumerate())
    cuda, library, staging = fake_staging(threads=4)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 3
    del staging
    gc.collect()
    for helper in helpers:
        helper.join(20)
        assert not helper.is_alive()


def test_a_second_copy_does_not_wait_for_the_first():
    """The first may wait for a stream that waits for the second."""
    cuda, library, staging = fake_staging(threads=1)
    begun, go_on = threading.Event(), threading.Event()
    copy = cuda.library.cuMemcpyHtoDAsync_v2

    def slow(*args):
        if args[1] in {lane._blocks[0].address for lane in staging._lanes[:1]}:
            begun.set()
            go_on.wait(20)
        return copy(*args)

    library._by_address["cuMemcpyHtoDAsync_v2"] = ctypes.CFUNCTYPE(ctypes.c_int, *copy.argtypes)(slow)
    source, first, second = random_bytes(1000), np.empty(1000, "uint8"), np.empty(1000, "uint8")
    streams = Stream(library, 0), Stream(library, 0)
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(staging.send, source.ctypes.data, first.ctypes.data, 1000, streams[0])
        assert begun.wait(20)
        staging.send(source.ctypes.data, second.ctypes.data, 1000, streams[1])
        streams[1].synchronize()
        np.testing.assert_array_equal(second, source)
        go_on.set()
        waiting.result()
    streams[0].synchronize()
    np.testing.assert_array_equal(first, source)
