"""Clusters of two hosts on one machine: results, calls in flight, errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from tvm.script import relax as R

import relax_hetero as rh
from cluster.two_hosts import First, Second, expected, program
from modules import ir_module
from relax_hetero.cluster import CALL, CallPlan, HostStep, Program, Source

Make = Callable[..., Any]


def _arrays(result: Any) -> Any:
    return tuple(map(_arrays, result)) if isinstance(result, tuple) else result.numpy()


def _check(result: Any, x: np.ndarray) -> None:
    for actual, want in zip(_arrays(result), expected(x), strict=True):
        np.testing.assert_array_equal(actual, want)


def _random(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 4), dtype="float32")


def test_two_hosts(clusters: Make) -> None:
    """All ways to call a cluster; one start for them, as a start takes seconds."""
    cluster = clusters(program())
    x = _random(5)
    _check(cluster["main"](x), x)
    _check(cluster["main"](x=x), x)
    np.testing.assert_array_equal(cluster["round"](x).numpy(), sum(expected(x)))

    fences = [cluster.submit("main", _random(7, seed)) for seed in range(20)]  # more than may be in flight
    for seed, fence in enumerate(fences):
        _check(fence.result(60), _random(7, seed))

    changed = x.copy()
    fence = cluster.submit("main", changed)
    changed[:] = 0
    _check(fence.result(60), x)

    chained = cluster.submit("round", cluster.submit("round", x)).result(60)
    once = sum(expected(x))
    np.testing.assert_array_equal(chained.numpy(), sum(expected(once)))

    result, other = cluster["main"](x)  # the results' memory is the caller's, whatever comes after
    assert isinstance(result, tvm_ffi.core.Tensor)
    cluster["main"](_random(5, 1))
    _check((result, other), x)

    async def several() -> list[Any]:
        return await asyncio.gather(*(cluster.submit("main", _random(3, seed)) for seed in range(12)))

    for seed, one in enumerate(asyncio.run(several())):
        _check(one, _random(3, seed))

    with pytest.raises(rh.BindingError, match="host 'a': argument 'x' of 'main_0' has dtype float64"):
        cluster["main"](x.astype("float64"))
    with pytest.raises(rh.BindingError, match="'main' takes 1 input, found 2"):
        cluster["main"](x, x)
    with pytest.raises(rh.BindingError, match="mian"):
        cluster["mian"]
    _check(cluster["main"](x), x)

    (states,) = cluster.hosts
    assert {host: (state["state"], state["threads"], state["starts"]) for host, state in states.items()} == {
        "a": ("ready", "1", 1),
        "b": ("ready", "1", 1),
    }
    cluster.close()
    cluster.close()
    with pytest.raises(rh.HostError, match="closed"):
        cluster["main"](x)


@pytest.mark.slow
def test_large_tensors(clusters: Make) -> None:
    cluster = clusters(program())
    for rows in (1, 40_000, 700_000, 3):  # within the buffers of sockets, and beyond
        for seed in range(3):
            _check(cluster["main"](_random(rows, seed)), _random(rows, seed))


@pytest.mark.slow
def test_libraries_by_path_and_by_bytes(clusters: Make, tmp_path: Any) -> None:
    rh.compile(First).export_library(tmp_path / "first.so")
    rh.compile(Second).export_library(tmp_path / "second.so")
    parts = {"a": tmp_path / "first.so", "b": (tmp_path / "second.so").read_bytes()}
    cluster = clusters(Program(parts, program().functions))
    _check(cluster["main"](_random(5)), _random(5))


@pytest.mark.slow
def test_a_part_that_cannot_be_loaded_names_its_host(clusters: Make, tmp_path: Any) -> None:
    parts = {"a": First, "b": tmp_path / "none.so"}
    with pytest.raises(rh.BuildError, match=r"host 'b': .*none\.so"):
        clusters(Program(parts, program().functions))
    with pytest.raises(rh.HeteroError, match="host 'b' runs a int"):
        clusters(Program({"a": First, "b": 3}, program().functions))


@pytest.mark.slow
def test_a_host_that_nothing_can_take_is_refused(clusters: Make) -> None:
    hosts = {"a": {"resources": {"a": 1}}, "b": {"resources": {"gpu_box": 1}}}
    with pytest.raises(rh.HostError, match=r"host 'b' was not started within 6 s: it needs resources=\{'gpu_box': 1\}"):
        clusters(program(), hosts, timeout=6)
    with pytest.raises(rh.HostError, match=r"host 'b' is bound to node '10\.9\.9\.9', expected one of"):
        clusters(program(), {**hosts, "b": {"node": "10.9.9.9"}})


@pytest.mark.slow
def test_other_versions_are_refused(clusters: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_hetero.cluster.actors.installed_versions", lambda: {"tvm": "0.1"})
    with pytest.raises(rh.HostError, match=r"host 'a' \(.*\) has version .* of tvm, expected 0\.1"):
        clusters(program())


@pytest.mark.slow
def test_results_in_tuples_and_inputs_returned(clusters: Make) -> None:
    steps = program().functions["main"].steps
    result = ((Source(1, 0), (Source(CALL, 0),)), Source(0, 0), Source(1, 0))
    cluster = clusters(Program({"a": First, "b": Second}, {"main": CallPlan(steps, result, ("x",))}))
    x = _random(5)
    (squared, (same,)), more, again = cluster["main"](x)
    _check((squared, more), x)
    _check((again, more), x)
    np.testing.assert_array_equal(same.numpy(), x)
    assert squared.data_ptr() != again.data_ptr()


@pytest.mark.slow
def test_three_hosts_of_which_two_work_side_by_side(clusters: Make) -> None:
    steps = (
        HostStep("a", "main_0", (Source(CALL, 0),), 2),
        HostStep("b", "main_1", (Source(0, 0),), 1),
        HostStep("c", "main_1", (Source(0, 1),), 1),
        HostStep("a", "main_2", (Source(1, 0), Source(2, 0)), 1),
        HostStep("b", "main_1", (Source(3, 0),), 1),
    )
    plan = CallPlan(steps, Source(4, 0), ("x",))
    hosts = {host: {"resources": {host: 1}} for host in "abc"}
    cluster = clusters(Program({"a": First, "b": Second, "c": Second}, {"main": plan}), hosts, in_flight=16)
    fences = [cluster.submit("main", _random(5, seed)) for seed in range(40)]
    for seed, fence in enumerate(fences):
        squared, more = expected(_random(5, seed))
        np.testing.assert_array_equal(fence.result(60).numpy(), np.square(np.square(more) + squared))


@pytest.mark.slow
def test_replicas_share_the_calls(clusters: Make) -> None:
    cluster = clusters(program(), replicas=2, in_flight=2)
    fences = [cluster.submit("main", _random(5, seed)) for seed in range(50)]
    for seed, fence in enumerate(fences):
        _check(fence.result(60), _random(5, seed))
    assert len({state["a"]["pid"] for state in cluster.hosts}) == 2
    assert cluster.synchronize(60)


@ir_module({"kind": "llvm", "keys": ["cpu", "host:a", "native"]}, {"kind": "llvm", "keys": ["cpu", "host:b", "native"]})
def OneIdle(x: R.Tensor((4,), "float32", "a/llvm:0")):
    y = R.add(x, x)
    return y


@pytest.mark.slow
def test_a_host_without_work_is_not_started(clusters: Make) -> None:
    cluster = clusters(OneIdle)
    np.testing.assert_array_equal(cluster["main"](np.ones(4, "float32")).numpy(), np.full(4, 2, "float32"))
    assert list(cluster.hosts[0]) == ["a"]
