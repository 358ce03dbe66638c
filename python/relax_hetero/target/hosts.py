"""Hosts: logical names of the computers that a module's vdevices are on.

A host is part of a vdevice, so that otherwise equal devices of two hosts differ. TVM's vdevice lacks a field for it, so
the target has the name as a key, ``host:b``. TVMScript prints and parses keys, structural equality compares them, and
TVM's own passes ignore unknown keys.

A second list of global infos would not work: TVM merges structurally equal entries, such as equal devices of two hosts,
and its printer numbers the entries of all lists together, so that names would not parse back.

A target that is just the name of a kind (``"b/llvm"``) stands for the hardware of host `b`: it has the key ``native``
until that host describes itself (`relax_hetero.cluster`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import tvm
from tvm.target import Target

from ..errors import VDeviceError

# Assumed link between two hosts: 10 Gb/s Ethernet, and half the latency of a call over two Ray actors
# (apps/bench/cluster_bench).
NETWORK_BYTES_PER_SECOND = 1.25e9
NETWORK_LATENCY_SECONDS = 1e-3

_KEY = "host:"
_NATIVE = "native"
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def host_of(vdevice: tvm.relax.VDevice | Target) -> str | None:
    """The host of a vdevice or its target, or None."""
    target = vdevice.target if isinstance(vdevice, tvm.relax.VDevice) else vdevice
    return next((str(key)[len(_KEY) :] for key in target.keys if str(key).startswith(_KEY)), None)


def hosts_of(vdevices: Iterable[tvm.relax.VDevice]) -> list[str]:
    """The distinct hosts of vdevices, in order. Raises VDeviceError if only some name a host."""
    hosts = [host_of(vdevice) for vdevice in vdevices]
    if None in hosts and any(host is not None for host in hosts):
        raise VDeviceError(
            f"vdevice {hosts.index(None)} of the list names no host, and others do "
            f"({', '.join(repr(host) for host in dict.fromkeys(hosts) if host)}): expected a host for each, or for none"
        )
    return [host for host in dict.fromkeys(hosts) if host is not None]


def check_host(host: object) -> str:
    """Require a valid host name; VDeviceError otherwise."""
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise VDeviceError(
            f"host must be a name of letters, digits, '_', '-' and '.', such as 'b', got {host!r} "
            f"({type(host).__name__})"
        )
    return host


def split_host(name: str) -> tuple[str | None, str]:
    """Split ``"b/cuda:0"`` into ``("b", "cuda:0")``; the host is None for names without "/"."""
    host, divider, rest = name.partition("/")
    return (check_host(host), rest) if divider else (None, name)


def on_host(
    target: Target,  # target of any host
    host: str | None,  # name of the host; None removes the host
    native: bool = False,  # whether the target stands for the host's own hardware, which is known at run time
) -> Target:
    """Move a target to a host."""
    keys = [str(key) for key in target.keys if not str(key).startswith(_KEY) and str(key) != _NATIVE]
    if host is not None:
        keys += [f"{_KEY}{check_host(host)}", *([_NATIVE] if native else [])]
    if keys == [str(key) for key in target.keys]:
        return target
    config = {**target.export(), "keys": keys}
    return Target(config).with_host(target.host) if target.host else Target(config)


def is_native(target: Target) -> bool:
    """Return whether a target stands for the hardware of its host."""
    return _NATIVE in target.keys
