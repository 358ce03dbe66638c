"""Arguments of a cluster's calls: checked as a machine checks them, before anything travels, and safe from changes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm

import relax_hetero as rh
from relax_hetero.artifact.signature import (
    FunctionSignature,
    ObjectSpec,
    PrimSpec,
    ShapeSpec,
    TensorSpec,
    TupleSpec,
    ValueSpec,
)
from relax_hetero.cluster import CALL, CallPlan, HostStep, Source
from relax_hetero.cluster.calls import ClusterCall, bind
from relax_hetero.cluster.cluster import Cluster
from relax_hetero.cluster.wire import decode_copy
from relax_hetero.vm.queue.fence import Fence
from relax_hetero.vm.queue.queued_calls import CallsInFlight

FIRST = Source(0, 0)


def _plan(*inputs: ValueSpec, result: Any = FIRST, outputs: Sequence[ValueSpec] = ()) -> CallPlan:
    return CallPlan(
        (HostStep("a", "main_0", (Source(CALL, 0),), 1),), result, signature=FunctionSignature("main", inputs, outputs)
    )


X = TensorSpec("x", ("n", 4), "float32", 0)


@pytest.mark.parametrize(
    "spec, value, message",
    [
        (X, np.zeros((3, 4)), "argument 'x' of 'main' has dtype float64, expected float32"),
        (X, np.zeros((3, 5), "float32"), "argument 'x' of 'main'.* 5, expected 4"),
        (X, np.zeros(4, "float32"), "has 1 dimensions"),
        (X, (1, 2), "argument 'x' of 'main' is a tuple, expected a tensor"),
        (X, 1.5, r"is the Python float 1.5, expected float32\[n, 4\]"),
        (X, np.array([["a", "b", "c", "d"]]), "has numpy dtype <U1"),
        (X, np.ma.masked_array(np.zeros((3, 4), "float32"), mask=True), "is a masked array"),
        (X, "text", "is a str, expected a tensor"),
        (X, None, "is a NoneType, expected a tensor"),
        (ShapeSpec("s", None, 2), (1, -1), "extents from 0"),
        (ShapeSpec("s", None, 2), ("1", "2"), "a sequence of integers"),
        (PrimSpec("p", "int64"), 1.5, r"is 1.5 \(float\), expected scalar int64"),
        (TupleSpec("t", (X,)), (np.zeros((1, 4)),), r"argument 't' of 'main'\[0\] has dtype float64"),
        (TupleSpec("t", (X,)), "x", "is a str, expected a tuple"),
    ],
)
def test_arguments_are_checked_as_those_of_a_machine(spec: ValueSpec, value: Any, message: str) -> None:
    with pytest.raises(rh.BindingError, match=message):
        bind("main", _plan(spec), (value,), {})


def test_arguments_of_all_kinds_travel() -> None:
    fields = TupleSpec("t", (X, TensorSpec("s", (), "float32", 1), ShapeSpec("d", ("n",))))
    bfloat = TensorSpec("b", (2,), "bfloat16", -1)
    plan = _plan(fields, bfloat, PrimSpec("p", "int64"))
    x = np.arange(24, dtype="float32").reshape(6, 4)[::2]  # not contiguous
    b = np.array([1, 2], ml_dtypes.bfloat16)
    *encoded, dims, packed, number = bind("main", plan, ((x, 0.5, (3,)), b, np.int64(7)), {})
    np.testing.assert_array_equal(encoded[0], x)
    assert encoded[1].shape == () and encoded[1].dtype == np.float32 and encoded[1] == 0.5
    assert dims == (3,) and number == 7
    np.testing.assert_array_equal(decode_copy(packed).numpy(), b)


def test_a_call_that_owns_its_inputs_does_not_see_later_changes() -> None:
    plan = _plan(X, TensorSpec("b", (2,), "bfloat16", -1))
    x, b = np.ones((1, 4), "float32"), np.array([1, 2], ml_dtypes.bfloat16)
    call = ClusterCall("main", plan, bind("main", plan, (x, b), {}), Fence(lambda fence: None), 0)
    call.copy_values()
    x[:], b[:] = 0, 0
    assert (call.values[0] == 1).all()
    np.testing.assert_array_equal(decode_copy(call.values[1]).numpy().astype("float32"), [1, 2])


def test_objects_cannot_be_sent() -> None:
    with pytest.raises(rh.HeteroError, match="function 'main' takes 'cache', an object that stays on its host"):
        _plan(TupleSpec("t", (X, ObjectSpec("cache")))).check("main")
    with pytest.raises(rh.HeteroError, match="function 'main' returns 'cache', an object"):
        _plan(X, outputs=[ObjectSpec("cache")]).check("main")


def test_strings_are_refused() -> None:
    plan = _plan(X)
    assert plan.signature is not None
    with pytest.raises(rh.HeteroError, match=r"function 'main' takes or returns strings \('x'\), expected tensors"):
        replace(plan, signature=replace(plan.signature, string_inputs=("x",))).check("main")


class _Replica:
    """A replica that takes one call at a time and keeps it."""

    def __init__(self) -> None:
        self.in_flight, self.taken, self.asked = 0, [], 0
        self.came = threading.Semaphore(0)
        self.is_ready = True

    @property
    def has_capacity(self) -> bool:
        self.asked += 1
        return self.in_flight < 1

    def submit(self, call: ClusterCall, waits: bool, taken: list[Any]) -> None:
        self.taken.append(call)
        taken.append(self)
        self.came.release()


@pytest.fixture
def one_replica() -> Any:
    """A cluster of one such replica, without Ray, and the replica."""
    cluster, replica = Cluster.__new__(Cluster), _Replica()
    cluster._replicas, cluster._is_closed, cluster._lock = [replica], False, threading.Lock()
    cluster._calls, cluster._retries, cluster._timeout = CallsInFlight(8), 0, 60.0
    cluster._sender = ThreadPoolExecutor(1)
    plan = _plan(X, result=(Source(0, 0), Source(CALL, 0)))
    cluster._program = rh.cluster.Program({"a": b""}, {"main": plan})
    cluster._waiting = deque()
    yield cluster, replica
    cluster._sender.shutdown()


def _end_first(cluster: Any, replica: _Replica) -> ClusterCall:
    call = replica.taken.pop(0)
    cluster._release(replica)
    call.fence.settle(None)
    cluster._send_next()
    return call


def test_a_call_that_is_cancelled_while_it_waits_leaves_its_turn_to_the_next(one_replica: Any) -> None:
    cluster, replica = one_replica
    x = np.ones((1, 4), "float32")
    first, second, third = (cluster.submit("main", x) for _ in range(3))
    assert replica.came.acquire(timeout=30)
    assert second.cancel()
    _end_first(cluster, replica)
    assert replica.came.acquire(timeout=30), "the third call was forgotten"
    _end_first(cluster, replica)
    assert first.done() and third.done()


def test_calls_that_wait_for_a_full_replica_take_no_core(one_replica: Any) -> None:
    cluster, replica = one_replica
    fences = [cluster.submit("main", np.ones((1, 4), "float32")) for _ in range(3)]
    for _ in range(20):  # were calls sent round and round, each round would take its turn between these
        cluster._sender.submit(lambda: None).result(30)
    assert len(replica.taken) == 1 and replica.asked <= 10
    for _ in fences:
        assert replica.came.acquire(timeout=30)
        _end_first(cluster, replica)
    assert all(fence.done() for fence in fences)


def test_inputs_that_are_results_or_come_with_fences_are_copied(one_replica: Any) -> None:
    cluster, replica = one_replica
    x = np.ones((1, 4), "float32")
    cluster.submit("main", x)
    x[:] = 0
    assert (replica.taken[0].values[0] == 1).all()

    two = _plan(X, TensorSpec("y", (1,), "float32", 0))
    cluster._program = rh.cluster.Program({"a": b""}, {"main": two})
    before = Fence(lambda fence: None)
    y = np.ones(1, "float32")
    _end_first(cluster, replica)
    cluster.submit("main", before, y)
    y[:] = 0
    before.settle(tvm.runtime.tensor(np.ones((1, 4), "float32")))
    assert replica.came.acquire(timeout=30) and replica.came.acquire(timeout=30)
    assert replica.taken[0].values[1] == 1
