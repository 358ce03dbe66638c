"""Calls over GPUs that wait for each other: repeated if graphs were made, nested, and by one thread at a time."""

from __future__ import annotations

import gc
import threading

import pytest

import relax_hetero as rh
from relax_hetero.vm.device import peer_memory
from relax_hetero.vm.device.builtins import current_machine
from relax_hetero.vm.device.peer_memory import peer_call, run_over_peers


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """Calls are those of a machine; Python collects garbage after them."""
    monkeypatch.setattr(current_machine, "devices_and_scopes", ([], []))
    assert gc.isenabled()
    yield
    assert gc.isenabled()


def launching(*misses):
    """Compiled code that asks for memory of a mesh; its n-th run makes a graph if the n-th miss is true."""
    runs = []

    def function(value):
        peer_memory.devices_of_call()
        assert not gc.isenabled()
        if misses[len(runs)]:
            peer_call.is_incomplete, peer_call.missing = True, "'main_commands' on cuda:1"
        runs.append(value)
        return value + len(runs)

    return function, runs


def _try_lock():
    with_lock = peer_memory._launching.acquire(blocking=False)
    if with_lock:
        peer_memory._launching.release()
    return with_lock


def is_locked():
    """Return whether another thread cannot launch."""
    acquired = []
    thread = threading.Thread(target=lambda: acquired.append(_try_lock()))
    thread.start()
    thread.join()
    return not acquired[0]


def test_a_call_that_made_graphs_is_repeated():
    function, runs = launching(True, False, False)
    assert run_over_peers(function, [3], []) == 5 and runs == [3, 3]
    assert run_over_peers(function, [4], []) == 7 and len(runs) == 3
    assert not (peer_call.uses_peers or peer_call.is_incomplete or peer_call.has_lock)


def test_graphs_that_are_missing_after_all_are_named():
    with pytest.raises(rh.HeteroError, match=r"command buffer 'main_commands' on cuda:1 made its graph in a repeated"):
        run_over_peers(launching(True, True)[0], [0], [])
    assert not peer_call.uses_peers and not is_locked()


def test_nested_calls_leave_the_outer_one_as_it_was():
    inner, _ = launching(False)
    outer, _ = launching(False)

    def function(value):
        result = outer(value)
        assert run_over_peers(inner, [value], []) == value + 1
        assert peer_call.uses_peers and peer_call.has_lock and is_locked()
        return result

    assert run_over_peers(function, [1], []) == 2 and not is_locked()
