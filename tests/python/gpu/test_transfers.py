"""On a machine with NVIDIA GPUs: staged, pinned and peer copies, their order with streams, and their rates."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax

import relax_hetero as rh
from relax_hetero.target.cpu_cores import num_cores
from relax_hetero.target.vdevice import with_vdevices
from relax_hetero.vm.device import cuda_copies
from relax_hetero.vm.device.builtins import running_on, to_device
from relax_hetero.vm.device.cuda_copies import begin_copy, enable_peer_access
from relax_hetero.vm.device.cuda_library import CUDA_HOST, cuda_library
from relax_hetero.vm.device.cuda_streams import Stream
from relax_hetero.vm.device.memory_pools import PINNED_BYTES, PinnedPool
from relax_hetero.vm.device.pinned_staging import CHUNK_BYTES, FIRST_CHUNK_BYTES, STAGED_BYTES
from relax_hetero.vm.device.tensors import alias, copy_into, copy_to, empty, from_array, from_numpy
from seeds import fresh_rng

GPUS = sum(tvm.cuda(i).exist for i in range(8)) if tvm.runtime.enabled("cuda") else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="fewer than two NVIDIA GPUs")

CPU, GPU = tvm.cpu(0), tvm.cuda(0)
SIZES = [1, FIRST_CHUNK_BYTES + 1, STAGED_BYTES - 1, STAGED_BYTES, STAGED_BYTES + 3, CHUNK_BYTES * 40 + 12_345]
LARGE = 256_000_000


@pytest.fixture(scope="module", autouse=True)
def loop():
    """Load the loop for large copies, which comes with the first machine that has code for a GPU."""
    x = relax.Var("x", relax.TensorType((4,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.negative(x)))
    rh.vm.VirtualMachine(rh.compile(with_vdevices(builder.get(), [rh.VDevice(rh.native("cuda"))])))


def random(nbytes):
    return fresh_rng().integers(0, 256, nbytes, "uint8")


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
    for index in range(1, len(buffers)):
        streams[index % 3].wait(event)
        event = begin_copy(buffers[index - 1], buffers[index], streams[index % 3])
    streams[2].wait(event)
    end = begin_copy(buffers[-1], result, streams[2])
    end.synchronize()
    assert end.done() and streams[2].done()
    np.testing.assert_array_equal(result.numpy(), array)


@pytest.mark.timing
def test_pinned_copies_return_at_once(pool):
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


def test_pinned_copies_return_before_they_end(pool):
    stream = Stream(cuda_library(), 0)
    tensors = pool.tensor((LARGE,), "uint8", CPU), empty((LARGE,), "uint8", GPU)
    for source, target in (tensors, tensors[::-1]):
        begin_copy(source, target, stream).synchronize()
        event = begin_copy(source, target, stream)
        assert not event.done()
        event.synchronize()
        assert event.done()


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
    array, back = random(STAGED_BYTES + 5), np.empty(STAGED_BYTES + 5, "uint8")
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


@pytest.fixture
def sent(monkeypatch):
    """Copies from a CPU to a GPU, by bytes: True for each from pinned memory; staging of these is an error."""
    pinned, issue, staging = {}, cuda_copies.issue_copy, cuda_copies.staging

    def watched(library, source, target, nbytes, stream):
        cuda_copies.staging = staging
        if source.gpu is None:
            pinned.setdefault(nbytes, []).append(library.is_pinned(source.address))
            cuda_copies.staging = refuse
        issue(library, source, target, nbytes, stream)

    def refuse(*_):
        raise AssertionError("a copy was staged")

    monkeypatch.setattr(cuda_copies, "issue_copy", watched)
    monkeypatch.setattr(cuda_copies, "staging", staging)  # put back at the end
    return pinned


def sending(rows, is_made):
    """`main(x)`: x, or exp of it, which then is returned too, goes from the CPU to the GPU, which adds it to itself."""
    cpu, gpu = rh.VDevice(rh.native("llvm")), rh.VDevice({"kind": "cuda", "arch": "sm_90"})
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((rows, 1024), "float32", cpu))
    with builder.function("main", [x]):
        with builder.dataflow():
            results = [builder.emit_output(relax.op.exp(x))] if is_made else []
            there = builder.emit(relax.op.to_vdevice(results[0] if is_made else x, gpu))
            doubled = builder.emit_output(relax.op.add(there, there))
        builder.emit_func_output(relax.Tuple([*results, doubled]))
    return rh.vm.VirtualMachine(rh.compile(with_vdevices(builder.get(), [cpu, gpu])))


@pytest.mark.parametrize("is_symbolic", [False, True])
def test_values_that_a_cpu_sends_to_a_gpu_are_in_pinned_memory(is_symbolic, sent):
    for rows in (8, 32, 2 * STAGED_BYTES // 4096):
        vm = sending(tvm.tirx.Var("n", "int64") if is_symbolic else rows, True)
        x = fresh_rng().random((rows, 1024), "float32")
        results = [vm["main"](x) for _ in range(3)]
        results += [fence.result() for fence in [vm.submit("main", x) for _ in range(6)]]
        for y, z in results:
            np.testing.assert_allclose(y.numpy(), np.exp(x), rtol=1e-5)
            np.testing.assert_array_equal(z.numpy(), 2 * y.numpy())
        assert sent.pop(rows * 4096) == [rows * 4096 >= PINNED_BYTES] * 9
    assert not sent


def test_pinned_arguments_are_sent_from_where_they_are(sent):
    vm = sending(STAGED_BYTES // 4096, False)
    array = rh.vm.pinned_array((STAGED_BYTES // 4096, 1024))
    array[...] = fresh_rng().random(array.shape, "float32")
    arguments = [array, tvm_ffi.from_dlpack(array), alias(tvm_ffi.from_dlpack(array), tvm_ffi.Device(CUDA_HOST, 0))]
    with suppress(ImportError):
        import torch

        arguments.append(torch.from_numpy(array.copy()).pin_memory())
    for x in arguments:
        for (result,) in (vm["main"](x), vm.submit("main", x, copy=False).result()):
            np.testing.assert_array_equal(result.numpy(), 2 * array)
    assert sent == {STAGED_BYTES: [True] * 2 * len(arguments)}


def test_many_threads_at_once():
    def there_and_back(number):
        gpu = tvm.cuda(number % GPUS)
        for _ in range(5):
            array = random(int(fresh_rng().integers(1, 2 * STAGED_BYTES)))
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
@pytest.mark.timing
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
@pytest.mark.timing
def test_rate_between_gpus():
    enable_peer_access([GPU, tvm.cuda(1)])
    source, target = empty((LARGE,), "uint8", GPU), empty((LARGE,), "uint8", tvm.cuda(1))
    between = rate(lambda: copy_into(source, target))
    print(f"from GPU to GPU {between:.0f} GB/s")
    assert between > 20
