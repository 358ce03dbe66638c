"""Bindings of hosts: what is refused before anything starts."""

from __future__ import annotations

import sys

import pytest

import relax_hetero as rh
from cluster.two_hosts import program
from relax_hetero.cluster.bindings import bind_hosts


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (["a", "b"], "hosts= is a list"),
        ({"a": {}}, "binds 'a', expected the program's: 'a', 'b'"),
        ({"a": {}, "b": {}, "c": {}}, "binds 'a', 'b', 'c', expected"),
        ({"a": {"cpus": 1}, "b": {}}, "host 'a' has the unknown option 'cpus', expected some of resources"),
        ({"a": "10.0.0.1", "b": {}}, "host 'a' is bound to '10.0.0.1'"),
        ({"a": {"num_cpus": -1}, "b": {}}, "host 'a' has num_cpus=-1, expected a number"),
        ({"a": {"resources": {"x": "1"}}, "b": {}}, "host 'a' has resources="),
        ({"a": {"label_selector": ["x"]}, "b": {}}, "expected a mapping from labels"),
        ({"a": {"node": ""}, "b": {}}, "expected the address or the id"),
    ],
)
def test_wrong_bindings_are_refused(hosts: object, message: str) -> None:
    with pytest.raises(rh.HostError, match=message):
        rh.cluster.Cluster(program(), hosts)


@pytest.mark.parametrize("name", ["replicas", "in_flight"])
def test_wrong_numbers_are_refused(name: str) -> None:
    with pytest.raises(rh.BindingError, match=f"{name} is 0, expected a positive integer"):
        rh.cluster.Cluster(program(), {"a": {}, "b": {}}, **{name: 0})


def test_threads_are_the_cores_that_a_host_takes() -> None:
    bound = bind_hosts({"a": {"num_cpus": 3}, "b": {}}, ["a", "b"])
    assert (bound["a"].threads, bound["b"].threads) == (3, 0)
    assert "num_cpus=3" in str(bound["a"]) and str(bound["b"]) == "nothing"


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(rh.HeteroError, match=r"pip install 'relax-hetero\[cluster\]'"):
        rh.cluster.Cluster(program(), {"a": {}, "b": {}})
