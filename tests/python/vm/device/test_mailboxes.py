"""Memory of mailboxes with a driver in Python: waits, failures, and the machine's constants."""

import ctypes
import threading
import time

import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.artifact.mailboxes import DATA, MailboxSpec
from relax_hetero.vm.device import mailboxes
from relax_hetero.vm.device.cuda_driver import CudaError
from relax_hetero.vm.device.mailboxes import Mailboxes
from vm.fake_cuda import LOST, NOT_READY, FakeCuda, FakeLibrary

SPECS = [MailboxSpec(3, 100), MailboxSpec(5, 4096)]


class Driver(FakeCuda):
    """A driver whose stream ends when `ended` says so."""

    def __init__(self):
        super().__init__()
        self.ended = lambda: True

    def cuStreamQuery(self, stream):
        return 0 if self.ended() else NOT_READY


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    library = FakeLibrary(driver)
    monkeypatch.setattr(mailboxes, "cuda_library", lambda: library)
    return driver


def flag_of(made, spec):
    end = made.end(spec, tvm.runtime.device("cpu", 0))
    assert tuple(end.shape) == (DATA,)
    return np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(end.data_ptr())), end.data_ptr()


def test_memory_is_cleared_and_apart(driver):
    made = Mailboxes(SPECS, [tvm.runtime.device("cpu", 0)])
    (first, one), (second, other) = (flag_of(made, spec) for spec in SPECS)
    assert first[0] == second[0] == 0
    assert other - one >= DATA + SPECS[0].nbytes and made.contains(one) and not made.contains(one - 1)


def test_a_wait_ends_with_the_flag(driver):
    driver.ended = lambda: False
    made = Mailboxes(SPECS, [tvm.runtime.device("cpu", 0)])
    flag, address = flag_of(made, SPECS[1])
    thread = threading.Thread(target=lambda: (time.sleep(0.02), flag.__setitem__(0, 1)))
    thread.start()
    tvm.get_global_func("relax_hetero.await_mailbox")(address, 1)
    thread.join()
    assert flag[0] == 1


def test_a_gpu_that_ends_or_fails_ends_a_wait(driver):
    made = Mailboxes(SPECS, [tvm.runtime.device("cpu", 0)])
    _, address = flag_of(made, SPECS[0])
    with pytest.raises(rh.HeteroError, match="ended without sending"):
        made.await_flag(address, 1)
    driver.failing["cuStreamQuery"] = LOST
    with pytest.raises(CudaError, match="cuStreamQuery failed: CUDA_ERROR_LAUNCH_FAILED"):
        made.await_flag(address, 1)


def test_reset_lets_the_gpu_end(driver):
    """A GPU that waits for a value gets a flag until it has ended; afterwards all mailboxes are empty."""
    made = Mailboxes(SPECS, [tvm.runtime.device("cpu", 0)])
    (first, _), (second, _) = (flag_of(made, spec) for spec in SPECS)
    seen = []

    def ended():
        seen.append((int(first[0]), int(second[0])))
        return len(seen) > 3

    driver.ended = ended
    made.reset()
    assert seen[1:] == [(1, 1)] * 3 and first[0] == second[0] == 0


def test_without_a_driver_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(mailboxes, "cuda_library", lambda: None)
    with pytest.raises(rh.BindingError, match="found no CUDA driver"):
        Mailboxes(SPECS, [])


def test_launches_that_block_are_refused(driver, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(rh.BindingError, match="CUDA_LAUNCH_BLOCKING=1: launches would wait"):
        Mailboxes(SPECS, [])
