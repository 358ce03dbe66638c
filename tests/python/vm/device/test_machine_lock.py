"""The locks of machines while the process forks."""

import os
import threading
import time
import weakref

import pytest

from relax_hetero.vm.device import machine_lock
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


def test_a_process_that_ends_gets_the_lock_of_a_thread_that_calls_in_a_loop(monkeypatch):
    """Whoever comes for a lock after `hold_all` has begun waits, though it let go of it a moment ago."""
    monkeypatch.setattr(machine_lock, "_all_locks", weakref.WeakSet())
    lock, begun, calls = MachineLock(), threading.Event(), []

    def call_again_and_again() -> None:
        while True:
            with lock.held, lock.held:
                begun.set()
                calls.append(None)
                time.sleep(0.001)

    threading.Thread(target=call_again_and_again, daemon=True).start()
    assert begun.wait(30)
    before = len(calls)
    machine_lock.hold_all(time.monotonic() + 30)
    count = len(calls)
    assert count - before < 50  # by luck alone it took hundreds
    with lock.held:  # this thread's own calls, of handlers that run later, go on
        time.sleep(0.02)
    assert len(calls) == count


def test_locks_that_refuse_are_left_alone():
    lock = MachineLock()
    lock.refuse("stayed behind")
    machine_lock.hold_to_fork()
    machine_lock.release_after_fork()
    assert not lock.is_free()
