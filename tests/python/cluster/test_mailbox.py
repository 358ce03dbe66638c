"""Functions whose hosts exchange messages while they run: errors of one host, deaths, and attempts that end once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tvm.script import relax as R

import relax_hetero as rh
from modules import ir_module
from relax_hetero.cluster.call_plan import CallPlan
from relax_hetero.cluster.calls import ClusterCall
from relax_hetero.cluster.replica import MailboxCalls
from relax_hetero.vm.queue.fence import Fence

Make = Callable[..., Any]

A = {"kind": "llvm", "keys": ["cpu", "host:a", "native"]}
B = {"kind": "llvm", "keys": ["cpu", "host:b", "native"]}


@ir_module(A, B)
class Rounds:
    @R.function(pure=False)
    def main(
        n: R.Tensor((), "int64", "a/llvm:0"),
        fits: R.Tensor((), "bool", "b/llvm:0"),
        x: R.Tensor((4,), "float32", "a/llvm:0"),
    ) -> R.Tensor((4,), "float32", "a/llvm:0"):
        cls = Rounds
        left = R.subtract(n, R.const(1, "int64"))
        there = R.to_vdevice(x, "b/llvm:0")
        _ = R.assert_op(fits, format="it does not fit")
        more = R.add(there, R.const(1.0, "float32"))
        y = R.to_vdevice(more, "a/llvm:0")
        stop = R.less_equal(left, R.const(0, "int64"))
        if stop:
            out = R.add(y, R.const(0.0, "float32"))
        else:
            out = cls.main(left, fits, y)
        return out


X = np.arange(4, dtype="float32")


def _submit(cluster: Any, rounds: int, fits: bool = True) -> Fence:
    fence: Fence = cluster.submit("main", np.int64(rounds), np.array(fits), X)
    return fence


def test_an_attempt_ends_once_and_a_later_one_of_the_same_call_is_another() -> None:
    calls, call = MailboxCalls(), ClusterCall("main", CallPlan((), ()), (), Fence(lambda fence: None), 1)
    calls.add(call, 1)
    assert calls.finish_all() == [call]
    assert not calls.is_running(call, 1) and not calls.finish(call, 1)
    calls.add(call, 2)
    assert not calls.finish(call, 1), "what is left of the first attempt would end the second"
    assert calls.finish(call, 2) and not calls.finish(call, 2)
    assert calls.finish_all() == []


@pytest.mark.slow
def test_an_error_of_one_host_ends_the_call_on_the_other(clusters: Make) -> None:
    cluster = clusters(Rounds, retries=3)
    for _ in range(3):
        error = _submit(cluster, 3, fits=False).exception(60)
        assert isinstance(error, rh.HeteroError) and "host 'b'" in str(error) and "it does not fit" in str(error)
        np.testing.assert_array_equal(_submit(cluster, 3).result(60).numpy(), X + 3)
    assert [state["starts"] for state in cluster.hosts[0].values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("retries", [0, 3])
def test_a_death_ends_the_calls_under_way_and_no_later_one(clusters: Make, retries: int) -> None:
    cluster = clusters(Rounds, retries=retries)
    for host in "ab":
        fences = [_submit(cluster, rounds) for rounds in (2000, 5, 6)]
        os.kill(cluster.hosts[0][host]["pid"], signal.SIGKILL)
        for rounds, fence in zip((2000, 5, 6), fences, strict=True):
            error = fence.exception(120)
            if retries:
                np.testing.assert_array_equal(fence.result().numpy(), X + rounds)
            else:
                assert isinstance(error, rh.HostError) and f"host {host!r}" in str(error)
        np.testing.assert_array_equal(_submit(cluster, 7).result(120).numpy(), X + 7)
