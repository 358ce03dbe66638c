"""One Ray for all tests of a module: on this machine, with resources by which hosts are bound."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATHS = [str(Path(__file__).resolve().parents[3] / "python"), str(Path(__file__).resolve().parents[1])]

HOSTS = {"a": {"resources": {"a": 1}, "num_cpus": 1}, "b": {"resources": {"b": 1}, "num_cpus": 1}}
"""Bindings of two hosts."""

LIMIT = 60.0
"""Seconds after which something that a test waits for counts as hanging."""


@pytest.fixture(scope="module")
def ray_here() -> Iterator[Any]:
    """Ray on this machine, with room for four processes of each host."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(PATHS))  # processes that Ray starts find this checkout
        ray.init(
            address="local", num_cpus=8, resources={"a": 4, "b": 4, "c": 4}, include_dashboard=False,
            object_store_memory=500 << 20, log_to_driver=False, logging_level="ERROR",
        )  # fmt: skip
        yield ray
        ray.shutdown()


@pytest.fixture
def clusters(ray_here: Any) -> Iterator[Callable[..., Any]]:
    """Function that makes clusters, which end with the test."""
    from relax_hetero.cluster import Cluster

    started: list[Cluster] = []

    def make(program: Any, hosts: Any = None, **options: Any) -> Cluster:
        started.append(Cluster(program, HOSTS if hosts is None else hosts, **{"timeout": LIMIT, **options}))
        return started[-1]

    yield make
    for cluster in started:
        cluster.close()
