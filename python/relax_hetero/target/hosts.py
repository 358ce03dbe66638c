"""Hosts: the logical names of the machines that a module's vdevices are on.

A host is part of a vdevice, so that devices of two hosts that are alike in all else are two devices. TVM's vdevice has
no field for it; its target carries the name as a key, ``host:b``. TVMScript prints and reads keys, structural equality
compares them, and TVM's own passes, which look for the keys that they know ("cpu", "gpu"), pass over it.

A second list of global infos beside ``vdevice`` would not do: entries of two hosts would be structurally equal, and TVM
takes equal entries for one; its printer numbers the entries of all lists together, so names would not read back.

A target made from the name of a kind alone (``"b/llvm"``) means whatever hardware host `b` has: it carries the key
``native`` until that host says what it is (`relax_hetero.cluster`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import tvm
from tvm.target import Target

from ..errors import VDeviceError

# What is assumed of a link between two hosts that nobody measured: 10 Gb/s Ethernet, and half of what a call over two
# actors of Ray costs (apps/bench/cluster_bench).
NETWORK_BYTES_PER_SECOND = 1.25e9
NETWORK_LATENCY_SECONDS = 1e-3

_KEY = "host:"
_NATIVE = "native"
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")


def host_of(vdevice: tvm.relax.VDevice | Target) -> str | None:
    """The host that a vdevice (or a target of one) is on; None where it names none."""
    target = vdevice.target if isinstance(vdevice, tvm.relax.VDevice) else vdevice
    return next((str(key)[len(_KEY) :] for key in target.keys if str(key).startswith(_KEY)), None)


def hosts_of(vdevices: Iterable[tvm.relax.VDevice]) -> list[str]:
    """The hosts that vdevices are on, in the order of the list; empty where none names one.

    Raises
    ------
    VDeviceError
        If some vdevices name a host and others do not.
    """
    found = [host_of(vdevice) for vdevice in vdevices]
    if None in found and any(host is not None for host in found):
        raise VDeviceError(
            f"vdevice {found.index(None)} of the list names no host, and others do "
            f"({', '.join(repr(host) for host in dict.fromkeys(found) if host)}): expected a host for each, or for none"
        )
    return [host for host in dict.fromkeys(found) if host is not None]


def check_host(host: object) -> str:
    """`host` itself; VDeviceError if it is not the name of one."""
    if not isinstance(host, str) or not _HOST.fullmatch(host):
        raise VDeviceError(
            f"host must be a name of letters, digits, '_', '-' and '.', such as 'b', got {host!r} "
            f"({type(host).__name__})"
        )
    return host


def split_host(name: str) -> tuple[str | None, str]:
    """``"b/cuda:0"`` as ``("b", "cuda:0")``; the host is None where the name has no "/"."""
    host, divider, rest = name.partition("/")
    return (check_host(host), rest) if divider else (None, name)


def on_host(target: Target, host: str | None, native: bool = False) -> Target:
    """The target on a host, or on none.

    Parameters
    ----------
    target : Target
    host : str, optional
        None takes the target off its host.
    native : bool
        Whether the host's own hardware is meant, which is known when it runs.
    """
    keys = [str(key) for key in target.keys if not str(key).startswith(_KEY) and str(key) != _NATIVE]
    if host is not None:
        keys += [f"{_KEY}{check_host(host)}", *([_NATIVE] if native else [])]
    if keys == [str(key) for key in target.keys]:
        return target
    config = {**target.export(), "keys": keys}
    return Target(config).with_host(target.host) if target.host else Target(config)


def is_native(target: Target) -> bool:
    """Return whether the target stands for whatever hardware its host has."""
    return _NATIVE in target.keys


def vdevices_on(host: str | None, vdevices: Sequence[tvm.relax.VDevice]) -> list[tvm.relax.VDevice]:
    """The vdevices of a list that are on `host`, in order."""
    return [vdevice for vdevice in vdevices if host_of(vdevice) == host]
