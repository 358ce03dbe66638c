"""The locks of machines while the process forks."""

import os
import threading

import pytest

from relax_hetero.vm.device import forks, machine_lock
from relax_hetero.vm.device.machine_lock import MachineLock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def is_free_in_a_new_process(lock: MachineLock) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.is_free() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def held():
    """A lock that another thread holds until the event is set, or the test ends."""
    lock, begun, end = MachineLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.held:
            begun.set()
            end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    begun.wait()
    yield lock, end
    end.set()
    thread.join()


def test_a_fork_waits_for_a_call_that_ends_soon(held, monkeypatch):
    lock, end = held
    monkeypatch.setattr(machine_lock, "FORK_SECONDS", 30.0)
    threading.Timer(0.05, end.set).start()
    assert is_free_in_a_new_process(lock)
    assert lock.is_free()


def test_a_fork_does_not_wait_for_ever(held, monkeypatch):
    lock, end = held
    monkeypatch.setattr(machine_lock, "FORK_SECONDS", 0.01)
    assert not is_free_in_a_new_process(lock)
    end.set()
    assert lock.held.acquire(timeout=30)
    lock.held.release()


def test_locks_that_refuse_are_left_alone():
    lock = MachineLock()
    lock.refuse("stayed behind")
    forks.hold_to_fork()
    forks.release_after_fork()
    assert not lock.is_free()
