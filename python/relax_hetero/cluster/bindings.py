"""Bindings of logical hosts to machines: the options that Ray's actors have, checked before anything starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import HostError

_KEYS = ("resources", "label_selector", "node", "num_cpus", "num_gpus", "memory")


@dataclass(frozen=True)
class HostBinding:
    """Where the process of a host may run, and what it takes there.

    Attributes
    ----------
    host : str
        The logical name.
    resources : mapping of str to float
        Custom resources of a Ray node, and how much of each it takes.
    label_selector : mapping of str to str
        Labels that the node has.
    node : str
        The node's address or id; empty for any.
    num_cpus : float
        Cores that it takes; also the threads of its kernels. 0: none are counted, and kernels have as many threads as
        they were compiled for.
    num_gpus : float
        GPUs that it takes; it sees no others.
    memory : float
        Bytes that it takes, in Ray's accounts.
    """

    host: str
    resources: Mapping[str, float] = field(default_factory=dict)
    label_selector: Mapping[str, str] = field(default_factory=dict)
    node: str = ""
    num_cpus: float = 0
    num_gpus: float = 0
    memory: float = 0

    @property
    def threads(self) -> int:
        """Threads of its kernels; 0 for as many as they were compiled for."""
        return max(1, int(self.num_cpus)) if self.num_cpus else 0

    def __str__(self) -> str:
        """Resources that it needs, for messages."""
        needs = {name: getattr(self, name) for name in _KEYS if getattr(self, name)}
        return ", ".join(f"{name}={value!r}" for name, value in needs.items()) or "nothing"

    def options(self, ray: Any) -> dict[str, Any]:
        """The options of the host's actor.

        Raises
        ------
        HostError
            A `node` that is not in Ray's cluster now; names it and those that are.
        """
        found: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "resources": dict(self.resources),
        }
        if self.memory:
            found["memory"] = self.memory
        if self.label_selector:
            found["label_selector"] = dict(self.label_selector)
        if self.node:
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            found["scheduling_strategy"] = strategy(self._node_id(ray), soft=False)
        return found

    def _node_id(self, ray: Any) -> str:
        nodes = [node for node in ray.nodes() if node["Alive"]]
        for node in nodes:
            if self.node in (node["NodeID"], node["NodeManagerAddress"], node.get("NodeName")):
                return str(node["NodeID"])
        known = ", ".join(sorted({node["NodeManagerAddress"] for node in nodes}))
        raise HostError(f"host {self.host!r} is bound to node {self.node!r}, expected one of {known}")


def bind_hosts(hosts: object, needed: Iterable[str]) -> dict[str, HostBinding]:
    """The bindings of the hosts that a program needs.

    Raises
    ------
    HostError
        Hosts that are missing or that the program does not have, unknown options, and values of other kinds.
    """
    if not isinstance(hosts, Mapping):
        kind = type(hosts).__name__
        raise HostError(f"hosts= is a {kind}, expected a mapping from each host to its options, such as {{'a': {{}}}}")
    wanted = list(needed)
    missing = [name for name in wanted if name not in hosts]
    extra = [name for name in hosts if name not in wanted]
    if missing or extra:
        found = ", ".join(map(repr, hosts)) or "none"
        raise HostError(f"hosts= binds {found}, expected the program's: {', '.join(map(repr, wanted))}")
    return {name: _binding(name, hosts[name]) for name in wanted}


def _binding(host: str, options: object) -> HostBinding:
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
        fits, expected = _is_amount(value), "a number from 0 on"
    elif name == "resources":
        fits = isinstance(value, Mapping) and all(isinstance(k, str) and _is_amount(v) for k, v in value.items())
        expected = "a mapping from names to amounts"
    elif name == "label_selector":
        fits = isinstance(value, Mapping) and all(isinstance(k, str) and isinstance(v, str) for k, v in value.items())
        expected = "a mapping from labels to values"
    else:
        fits, expected = isinstance(value, str) and bool(value), "the address or the id of a node"
    if not fits:
        raise HostError(f"host {host!r} has {name}={value!r}, expected {expected}")


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
