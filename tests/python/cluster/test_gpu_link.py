"""Links between GPUs without any: what they ask of NCCL and of CUDA, in which order, and what they do when one ends."""

from __future__ import annotations

import ctypes
import sys
import threading

import ml_dtypes
import numpy as np
import pytest
import tvm

import relax_hetero as rh
from cluster.fake_nccl import FakeDriver, FakeNccl
from relax_hetero.cluster.host_links import RECEIVER, SENDER, GpuLink
from relax_hetero.vm.device import memory_pools, nccl
from relax_hetero.vm.device.tensors import alias, bytes_of, empty, from_numpy, nbytes_of

HOST = tvm.runtime.device("cpu", 0)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without elements get no memory of a GPU, as this machine may have none."""
    monkeypatch.setattr(memory_pools, "empty", lambda shape, dtype, gpu: alias(empty(shape, dtype, HOST), gpu))


def _pair(limit: float = 20.0) -> tuple[GpuLink, GpuLink, FakeDriver, FakeDriver]:
    """Both ends of a link that is connected, and their drivers."""
    world, drivers = FakeNccl(), (FakeDriver(), FakeDriver())
    ends = [GpuLink(0, limit, world.seen_from(driver), driver) for driver in drivers]  # type: ignore[arg-type]
    link_id = ends[SENDER].create_id()
    thread = threading.Thread(target=ends[SENDER].connect, args=(SENDER, link_id))
    thread.start()
    ends[RECEIVER].connect(RECEIVER, link_id)
    thread.join()
    for driver in drivers:
        driver.notes.clear()
    return ends[SENDER], ends[RECEIVER], *drivers


def _bytes_at(tensor: tvm.runtime.Tensor) -> bytes:
    """Bytes of a tensor that claims to be on a GPU."""
    return ctypes.string_at(tensor.data_ptr(), nbytes_of(tensor))


@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "float32", "bfloat16", "float8_e4m3fn", "int4"])
def test_tensors_arrive_in_order(dtype: str) -> None:
    sender, receiver, *_ = _pair()
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    tensors = [from_numpy(np.arange(size).astype("int8").reshape(shape).astype(kind), HOST)
               for size, shape in ((1, ()), (6, (2, 3)), (0, (0, 4)), (5000, (50, 100)))]  # fmt: skip
    for tensor in tensors:
        sender.send(tensor)
    for tensor in tensors:
        arrived = receiver.receive(tuple(tensor.shape), str(tensor.dtype))
        receiver.synchronize()
        assert (str(arrived.dtype), tuple(arrived.shape)) == (str(tensor.dtype), tuple(tensor.shape))
        assert arrived.__dlpack_device__() == (2, 0)
        assert _bytes_at(arrived) == bytes_of(tensor).tobytes()
    sender.synchronize()


def test_operations_run_after_writers_and_before_readers() -> None:
    sender, receiver, left, right = _pair()
    tensors = [from_numpy(np.ones(shape, "float32"), HOST) for shape in ((3,), (0,), (4,))]
    sender.send(*tensors)
    machine, own = (note[-1] for note in left.notes if note[0] == "cuEventRecord")
    before, after = (note[1] for note in left.notes if note[0] == "cuEventRecord")
    assert machine != own
    assert left.notes == [
        ("cuEventRecord", before, machine),
        ("cuStreamWaitEvent", own, before, 0),
        ("start",),
        ("send", 12, own),
        ("send", 16, own),
        ("end",),
        ("cuEventRecord", after, own),
    ]
    receiver.receive_all([(tuple(tensor.shape), "float32") for tensor in tensors])
    machine, own = (note[-1] for note in right.notes if note[0] == "cuEventRecord")
    read, arrived = (note[1] for note in right.notes if note[0] == "cuEventRecord")
    assert right.notes == [
        ("cuEventRecord", read, machine),
        ("cuStreamWaitEvent", own, read, 0),
        ("start",),
        ("recv", 12, own),
        ("recv", 16, own),
        ("end",),
        ("cuEventRecord", arrived, own),
        ("cuStreamWaitEvent", machine, arrived, 0),
    ]
    left.notes.clear()
    sender.finish()
    assert left.notes == [("cuStreamWaitEvent", machine, after, 0)]


def test_a_missing_tensor_ends_with_an_error() -> None:
    _, receiver, _, driver = _pair()
    receiver.receive((4,), "float32")
    with pytest.raises(rh.HostError, match=r"GPU 0 failed: the other process did not answer within 0\.05 s"):
        receiver.synchronize(0.05)
    assert ("abort",) in driver.notes
    with pytest.raises(rh.HostError, match="has failed"):
        receiver.receive((4,), "float32")
    receiver.close()  # again, without harm


def test_a_failure_of_nccl_ends_a_link() -> None:
    _, receiver, _, driver = _pair()
    receiver.receive((4,), "float32")
    receiver._communicator.error = RuntimeError("remote process exited")
    with pytest.raises(rh.HostError, match="remote process exited"):
        receiver.synchronize()
    assert ("abort",) in driver.notes


def test_an_operation_that_is_refused_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sender, receiver, _, driver = _pair()
    first = receiver.receive((4,), "float32")

    def refuse(*args: int) -> None:
        raise RuntimeError("invalid usage")

    monkeypatch.setattr(receiver._communicator, "recv", refuse)
    with pytest.raises(rh.HostError, match="failed: invalid usage"):
        receiver.receive((4,), "float32")
    assert ("abort",) not in driver.notes
    sender.send(from_numpy(np.arange(4, dtype="float32"), HOST))
    for thread in driver.busy:
        thread.join(20)
    assert _bytes_at(first) == np.arange(4, dtype="float32").tobytes()
    with pytest.raises(rh.HostError, match="has failed: invalid usage"):
        receiver.receive((4,), "float32")
    receiver.close()
    assert ("abort",) in driver.notes


def test_a_wait_ends_when_another_thread_aborts() -> None:
    _, receiver, *_ = _pair(60.0)
    receiver.receive((4,), "float32")
    failures: list[Exception] = []

    def wait() -> None:
        try:
            receiver.synchronize()
        except rh.HostError as error:
            failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    receiver.abort()
    thread.join(30)
    assert not thread.is_alive()


def test_nobody_at_the_other_end() -> None:
    world, driver = FakeNccl(), FakeDriver()
    link = GpuLink(0, 0.05, world.seen_from(driver), driver)  # type: ignore[arg-type]
    with pytest.raises(rh.HostError, match=r"connect GPU 0: the other process did not come within 0\.05 s"):
        link.connect(RECEIVER, link.create_id())
    with pytest.raises(rh.HostError, match="has ended"):
        link.send(from_numpy(np.ones(1, "float32"), HOST))


def test_links_have_to_be_connected() -> None:
    driver = FakeDriver()
    link = GpuLink(0, 1.0, FakeNccl().seen_from(driver), driver)  # type: ignore[arg-type]
    with pytest.raises(rh.HostError, match="is not connected"):
        link.receive((1,), "float32")


def test_without_nccl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    nccl.load_nccl.cache_clear()
    try:
        with pytest.raises(rh.HostError, match=r"cupy-cuda13x .*pip install 'relax-hetero\[nccl\]'"):
            nccl.require_nccl()
    finally:
        nccl.load_nccl.cache_clear()
