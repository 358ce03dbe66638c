"""Bindings of logical hosts to Ray nodes, by options of actors, which are checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import HostError

_KEYS = ("resources", "label_selector", "node", "num_cpus", "num_gpus", "memory")


@dataclass(frozen=True)
class HostBinding:
    """Scheduling options of a host's actor."""

    host: str  # logical name
    resources: Mapping[str, float] = field(default_factory=dict)  # amounts of custom Ray resources
    label_selector: Mapping[str, str] = field(default_factory=dict)  # required labels of the node
    node: str = ""  # address or id of the node; empty for any
    # Cores to reserve, and threads of kernels. 0: none are reserved, and kernels use as many threads as they were
    # compiled for.
    num_cpus: float = 0
    num_gpus: float = 0  # GPUs to reserve; no others are visible
    memory: float = 0  # bytes to reserve

    @property
    def threads(self) -> int:
        """Threads of kernels; 0 for as many as they were compiled for."""
        return max(1, int(self.num_cpus)) if self.num_cpus else 0

    def __str__(self) -> str:
        """Format the options for messages."""
        options = {name: getattr(self, name) for name in _KEYS if getattr(self, name)}
        return ", ".join(f"{name}={value!r}" for name, value in options.items()) or "nothing"

    def options(self, ray: Any) -> dict[str, Any]:
        """Options for Ray's ``Actor.options``. Raises HostError if `node` is not in Ray's cluster."""
        options: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
        }
        if self.memory:
            options["memory"] = self.memory
        if self.label_selector:
            options["label_selector"] = dict(self.label_selector)
        if self.node:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            options["scheduling_strategy"] = strategy(self._node_id(ray), soft=False)
        return options

    def _node_id(self, ray: Any) -> str:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for node in nodes:
            if self.node in (node["NodeID"], node["NodeManagerAddress"], node.get("NodeName")):
                return str(node["NodeID"])
        addresses = ", ".join(sorted({node["NodeManagerAddress"] for node in nodes}))
        raise HostError(f"host {self.host!r} is bound to node {self.node!r}, expected one of {addresses}")


def bind_hosts(hosts: object, needed: Iterable[str]) -> dict[str, HostBinding]:
    """Check options and make the bindings of a program's hosts.

    Raises HostError if hosts are missing or unknown, or options are unknown or have values of another type.
    """
    if not isinstance(hosts, Mapping):
        kind = type(hosts).__name__
        raise HostError(f"hosts= is a {kind}, expected a mapping from each host to its options, such as {{'a': {{}}}}")
    expected = list(needed)
    missing = [name for name in expected if name not in hosts]
    extra = [name for name in hosts if name not in expected]
    if missing or extra:
        names = ", ".join(map(repr, hosts)) or "none"
        raise HostError(f"hosts= binds {names}, expected the program's: {', '.join(map(repr, expected))}")
    return {name: _bind_host(name, hosts[name]) for name in expected}


def _bind_host(host: str, options: object) -> HostBinding:
    if not isinstance(options, Mapping):
        raise HostError(f"host {host!r} is bound to {options!r}, expected a mapping with some of {', '.join(_KEYS)}")
    unknown = [name for name in options if name not in _KEYS]
    if unknown:
        raise HostError(f"host {host!r} has the unknown option {unknown[0]!r}, expected some of {', '.join(_KEYS)}")
    for name, value in options.items():
        _check_option(host, name, value)
    return HostBinding(host, **options)


def _check_option(host: str, name: str, value: object) -> None:
    if name in ("num_cpus", "num_gpus", "memory"):
        is_valid, expected = _is_amount(value), "a number from 0 on"
    elif name == "resources":
        is_valid = isinstance(value, Mapping) and all(isinstance(k, str) and _is_amount(v) for k, v in value.items())
        expected = "a mapping from names to amounts"
    elif name == "label_selector":
        is_valid = isinstance(value, Mapping) and all(
            isinstance(k, str) and isinstance(v, str) for k, v in value.items()
        )
        expected = "a mapping from labels to values"
    else:
        is_valid, expected = isinstance(value, str) and bool(value), "the address or the id of a node"
    if not is_valid:
        raise HostError(f"host {host!r} has {name}={value!r}, expected {expected}")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
