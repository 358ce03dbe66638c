"""On a machine with NVIDIA GPUs: staged, pinned and peer copies, their order with streams, and their rates."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tvm
import tvm_ffi

from relax_hetero.cpu_cores import num_cores
from relax_hetero.vm.builtins import running_on, to_device
from relax_hetero.vm.cuda_library import cuda_library
from relax_hetero.vm.cuda_streams import Stream
from relax_hetero.vm.peer_access import enable_peer_access
from relax_hetero.vm.pinned_pool import PINNED_BYTES, PinnedPool
from relax_hetero.vm.pinned_staging import FIRST_PART_BYTES, PART_BYTES, STAGED_BYTES
from relax_hetero.vm.tensors import begin_copy, copy_into, copy_to, empty, from_array, from_numpy

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CPU, GPU = tvm.cpu(0), tvm.cuda(0)
SIZES = [1, STAGED_BYTES - 1, STAGED_BYTES, FIRST_PART_BYTES + 1, PART_BYTES * 7 - 3, PART_BYTES * 40 + 12_345]
LARGE = 256_000_000


def random(nbytes):
    return np.random.default_rng().integers(0, 256, nbytes, "uint8")


@pytest.fixture(scope="module")
def pool():
    return PinnedPool(cuda_library(), 0, 1 << 30)


def pinned(pool, array):
    tensor = pool.tensor(array.shape, str(array.dtype), CPU)
    np.from_dlpack(tensor)[...] = array
    return tensor


@pytest.mark.parametrize("nbytes", SIZES)
def test_there_and_back(nbytes):
    for gpu in range(min(GPUS, 2)):
        array, back = random(nbytes + 3), np.full(nbytes + 1, 7, "uint8")
        there = copy_to(from_array(array[3:]), tvm.cuda(gpu))
        copy_into(there, from_array(back[:-1]))
        np.testing.assert_array_equal(back[:-1], array[3:])
        assert back[-1] == 7
        np.testing.assert_array_equal(there.numpy(), array[3:])


@two_gpus
@pytest.mark.parametrize("nbytes", SIZES)
def test_from_gpu_to_gpu(nbytes):
    array = random(nbytes)
    other = copy_to(from_numpy(array, GPU), tvm.cuda(1))
    np.testing.assert_array_equal(other.numpy(), array)
    for stream in (Stream(cuda_library(), 0), Stream(cuda_library(), 1)):
        again = from_numpy(np.zeros(nbytes, "uint8"), GPU)
        begin_copy(other, again, stream).synchronize()
        np.testing.assert_array_equal(again.numpy(), array)


def test_copies_run_in_the_order_of_their_streams(pool):
    """Many copies of three streams, each after the one before; the last buffer holds what the first held."""
    library = cuda_library()
    streams = [Stream(library, 0) for _ in range(3)]
    array = random(8 << 20)
    source, result = pinned(pool, array), pool.tensor(array.shape, "uint8", CPU)
    buffers = [empty(array.shape, "uint8", GPU) for _ in range(12)]
    event = begin_copy(source, buffers[0], streams[0])
    for at in range(1, len(buffers)):
        streams[at % 3].wait(event)
        event = begin_copy(buffers[at - 1], buffers[at], streams[at % 3])
    streams[2].wait(event)
    end = begin_copy(buffers[-1], result, streams[2])
    end.synchronize()
    assert end.done() and streams[2].done()
    np.testing.assert_array_equal(result.numpy(), array)


def test_pinned_copies_return_before_they_end(pool):
    stream = Stream(cuda_library(), 0)
    tensors = pool.tensor((LARGE,), "uint8", CPU), empty((LARGE,), "uint8", GPU)
    for source, target in (tensors, tensors[::-1]):
        begin_copy(source, target, stream).synchronize()
        start = time.perf_counter()
        event = begin_copy(source, target, stream)
        issued = time.perf_counter() - start
        assert not event.done()
        event.synchronize()
        assert issued < (time.perf_counter() - start) / 4


def test_timed_events(pool):
    stream = Stream(cuda_library(), 0)
    source, target = pool.tensor((LARGE,), "uint8", CPU), empty((LARGE,), "uint8", GPU)
    begin_copy(source, target, stream)
    start = stream.record(timed=True)
    begin_copy(source, target, stream)
    end = stream.record(sleeps=True, timed=True)
    end.synchronize()
    assert 1 < end.milliseconds_since(start) < 200


def test_copies_follow_the_stream_of_the_thread():
    """Copies between host and GPU run on the stream that TVM's kernels run on, also where that is not the default."""
    stream = Stream(cuda_library(), 0)
    array, back = random(PART_BYTES * 5), np.empty(PART_BYTES * 5, "uint8")
    with tvm_ffi.use_raw_stream(GPU, stream.handle):
        there = copy_to(from_array(array), GPU)
        copy_into(there, from_array(back))
    np.testing.assert_array_equal(back, array)


def test_transfers_arrive_in_pinned_memory():
    for nbytes, pinned in ((PINNED_BYTES - 1, False), (PINNED_BYTES, True), (LARGE, True)):
        array = random(nbytes)
        with running_on((CPU, GPU), ("global", "global")):
            result = to_device(from_numpy(array, GPU), 0, 0, empty((nbytes,), "uint8", CPU))
        np.testing.assert_array_equal(result.numpy(), array)
        assert cuda_library().is_pinned(result.data_ptr()) == pinned


def test_many_threads_at_once():
    def there_and_back(number):
        gpu = tvm.cuda(number % GPUS)
        for _ in range(5):
            array = random(int(np.random.default_rng().integers(1, 20 << 20)))
            back = np.empty_like(array)
            copy_into(copy_to(from_array(array), gpu), from_array(back))
            np.testing.assert_array_equal(back, array)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(there_and_back, range(16)))


def rate(copy):
    """GB/s, best of seven."""
    times = []
    for _ in range(8):
        start = time.perf_counter()
        copy()
        times.append(time.perf_counter() - start)
    return LARGE / min(times[1:]) / 1e9


@pytest.mark.skipif(num_cores() < 16, reason="fewer than 16 cores")
def test_rates(pool):
    """Bounds with room for a busy host; apps/bench/transfers.py measures."""
    stream = Stream(cuda_library(), 0)
    device, direct, array = empty((LARGE,), "uint8", GPU), pool.tensor((LARGE,), "uint8", CPU), np.ones(LARGE, "uint8")
    host = from_array(array)
    sent = rate(lambda: copy_into(host, device)), rate(lambda: begin_copy(direct, device, stream).synchronize())
    came = rate(lambda: copy_into(device, host)), rate(lambda: begin_copy(device, direct, stream).synchronize())
    print(
        f"to the GPU {sent[0]:.1f} of {sent[1]:.1f} GB/s from pinned memory, to the host {came[0]:.1f} of {came[1]:.1f}"
    )
    assert sent[0] > sent[1] / 2 and came[0] > came[1] / 2


@two_gpus
def test_rate_between_gpus():
    enable_peer_access([GPU, tvm.cuda(1)])
    source, target = empty((LARGE,), "uint8", GPU), empty((LARGE,), "uint8", tvm.cuda(1))
    between = rate(lambda: copy_into(source, target))
    print(f"from GPU to GPU {between:.0f} GB/s")
    assert between > 20
