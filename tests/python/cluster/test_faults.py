"""Hosts that die: calls fail or begin again, and the cluster is usable afterwards."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import relax_hetero as rh
from cluster.two_hosts import expected, program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

Make = Callable[..., Any]

KILLS = int(os.environ.get("RELAX_HETERO_KILLS", "10"))
"""Number of processes that the test under load kills."""


def _kill(cluster: Any, host: str, replica: int = 0) -> None:
    os.kill(cluster.hosts[replica][host]["pid"], signal.SIGKILL)


def _random(seed: int) -> np.ndarray:
    """Values that go through sockets if `seed` is odd, else through shared memory."""
    return np.random.default_rng(seed).random((50 if seed % 2 else 5000, 4), dtype="float32")


def _is_right(result: Any, seed: int) -> bool:
    return all(np.array_equal(f.numpy(), w) for f, w in zip(result, expected(_random(seed)), strict=True))


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_cluster_whose_host_died_starts_it_again(clusters: Make, host: str) -> None:
    cluster = clusters(program(), retries=1)
    before = cluster.hosts[0]
    for seed in range(3):
        _kill(cluster, host)
        assert _is_right(cluster["main"](_random(seed)), seed)
        assert np.array_equal(cluster["round"](_random(seed)).numpy(), sum(expected(_random(seed))))
    other = "b" if host == "a" else "a"
    after = cluster.hosts[0]
    assert after[other]["pid"] == before[other]["pid"]  # it kept its machine
    assert after[host]["starts"] == 4


def test_calls_under_way_fail_with_an_error_that_names_the_host(clusters: Make) -> None:
    cluster = clusters(program(), in_flight=8)
    for _ in range(5):
        fences = [cluster.submit("main", _random(seed)) for seed in range(8)]
        _kill(cluster, "b")
        for seed, fence in enumerate(fences):
            error = fence.exception(60)
            if error is None:
                assert _is_right(fence.result(), seed)
            else:
                assert isinstance(error, rh.HostError) and "host 'b'" in str(error)
        assert _is_right(cluster.submit("main", _random(9)).result(60), 9)


def test_one_replica_that_fails_does_not_disturb_another(clusters: Make) -> None:
    cluster = clusters(program(), replicas=2)
    pid = cluster.hosts[1]["a"]["pid"]
    _kill(cluster, "a")
    for seed in range(30):
        fence = cluster.submit("main", _random(seed))
        if fence.exception(60) is None:
            assert _is_right(fence.result(), seed)
        else:  # it was under way where the kill was
            assert seed == 0
    assert cluster.hosts[1]["a"]["pid"] == pid


def test_errors_of_steps_are_not_retried(clusters: Make) -> None:
    cluster = clusters(program(), retries=5)
    with pytest.raises(rh.BindingError, match="host 'a'"):
        cluster["round"](np.ones((3, 5), "float32"))
    assert [state["starts"] for state in cluster.hosts[0].values()] == [1, 1]
    assert _is_right(cluster["main"](_random(0)), 0)


def test_kills_at_random_times_under_load(clusters: Make) -> None:
    cluster = clusters(program(), retries=100, replicas=2, in_flight=4)
    rng, over, wrong, right = random.Random(0), threading.Event(), [], []

    def load(name: str) -> None:
        seed = 0
        while not over.is_set():
            seed += 1
            result = cluster.submit(name, _random(seed)).result(120)
            good = _is_right(result, seed) if name == "main" else np.array_equal(
                result.numpy(), sum(expected(_random(seed)))
            )  # fmt: skip
            (right if good else wrong).append(seed)

    errors: list[BaseException] = []

    def watched(name: str) -> None:
        try:
            load(name)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=watched, args=(name,)) for name in ("main", "main", "main", "round")]
    for thread in threads:
        thread.start()
    pause = threading.Event()
    for _ in range(KILLS):
        pause.wait(rng.uniform(0, 2))
        pids = [state["pid"] for hosts in cluster.hosts for state in hosts.values() if state["state"] == "ready"]
        if pids:
            try:
                os.kill(rng.choice(pids), signal.SIGKILL)
            except ProcessLookupError:  # killed before, and not noticed yet
                pass
    over.set()
    for thread in threads:
        thread.join(180)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors and not wrong and right
    assert _is_right(cluster["main"](_random(1)), 1)


def _unix_sockets() -> int:
    """Number of Unix sockets that this process has open."""
    gc.collect()
    inodes = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    links = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    return sum(link.removeprefix("socket:[").removesuffix("]") in inodes for link in links)


def _shared_memories() -> int:
    """Number of mappings of shared memory of connections."""
    return Path("/proc/self/maps").read_text().count("memfd:relax_hetero")


def test_nothing_is_left(ray_here: Any, clusters: Make) -> None:
    threads, sockets, memories = threading.active_count(), _unix_sockets(), _shared_memories()
    for _ in range(2):
        cluster = clusters(program(), retries=1)
        assert _unix_sockets() >= sockets + 2
        pids = [state["pid"] for state in cluster.hosts[0].values()]
        for host in "ab":
            _kill(cluster, host)
            cluster["main"](_random(0))
            pids += [state["pid"] for state in cluster.hosts[0].values()]
            assert _unix_sockets() == sockets + 2  # those of the killed hosts are closed
            assert _shared_memories() == memories + 2
        cluster.close()
        ended = threading.Event()
        for _ in range(100):
            if not any(os.path.exists(f"/proc/{pid}") for pid in pids):
                break
            ended.wait(0.1)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    assert _unix_sockets() == sockets and _shared_memories() == memories
    assert threading.active_count() <= threads + 2  # of Ray's own


@pytest.fixture
def two_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two Ray nodes on this machine: a driver's with resource a, and one with resource b."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        ray.shutdown()
    from ray.cluster_utils import Cluster

    from cluster.conftest import PATHS

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(PATHS))
    nodes = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "resources": {"a": 2},
            "object_store_memory": 300 << 20,
            "include_dashboard": False,
        },
    )
    nodes.second = nodes.add_node(num_cpus=2, resources={"b": 2}, object_store_memory=300 << 20)
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield nodes
    ray.shutdown()
    nodes.shutdown()


def test_a_node_that_goes_and_comes_back(two_nodes: Any) -> None:
    hosts = {"a": {"resources": {"a": 1}}, "b": {"resources": {"b": 1}}}
    with rh.cluster.Cluster(program(), hosts, timeout=30) as cluster:
        assert cluster.hosts[0]["a"]["node"] != cluster.hosts[0]["b"]["node"]
        fences = [cluster.submit("main", _random(seed)) for seed in range(20)]
        assert all(_is_right(fence.result(60), seed) for seed, fence in enumerate(fences))
        large = np.random.default_rng(0).random((700_000, 4), dtype="float32")
        assert np.array_equal(cluster["main"](large)[0].numpy(), expected(large)[0])

        cluster._timeout = 3
        two_nodes.remove_node(two_nodes.second, allow_graceful=False)
        error, end = None, time.monotonic() + 60
        while error is None and time.monotonic() < end:  # the process may outlive its node for a moment
            fence = cluster.submit("main", _random(0))
            error = fence.exception(120)
            assert error or _is_right(fence.result(), 0)
        assert isinstance(error, rh.HostError) and "host 'b'" in str(error)
        error = cluster.submit("main", _random(0)).exception(120)
        assert isinstance(error, rh.HostError) and "could take the call within 3 s: host 'b'" in str(error)

        cluster._timeout = 60
        two_nodes.add_node(num_cpus=2, resources={"b": 2}, object_store_memory=300 << 20)
        assert _is_right(cluster.submit("main", _random(1)).result(120), 1)


def test_hosts_are_bound_to_nodes_by_address_and_id(two_nodes: Any) -> None:
    import ray

    nodes = {name: node["NodeID"] for node in ray.nodes() for name in "ab" if name in node["Resources"]}
    hosts = {"a": {"node": nodes["b"]}, "b": {"node": nodes["a"]}}
    with rh.cluster.Cluster(program(), hosts, timeout=30) as cluster:
        assert [cluster.hosts[0][host]["node"] for host in "ab"] == [nodes["b"], nodes["a"]]
        assert _is_right(cluster["main"](_random(0)), 0)
