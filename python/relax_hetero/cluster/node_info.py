"""Description of a host's process, and checks of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import HostError, MemoryLimitError
from ..system import allowed_cpus, free_memory
from ..target.element_types import bytes_for

if TYPE_CHECKING:
    from ..vm.file.executable import Executable


_UNKNOWN_MEMORY = 1 << 62


def node_info() -> dict[str, Any]:
    """Describe this process: versions, CPU, Ray node, free memory (bytes)."""
    import os

    import ray

    from ..vm.device.cpu_features import linux_features

    context = ray.get_runtime_context()
    return {
        "versions": installed_versions(),
        "processor": platform.machine(),
        "cpu_features": sorted(linux_features()),
        "cores": len(allowed_cpus()),
        "memory": free_memory() or _UNKNOWN_MEMORY,
        "node": context.get_node_id(),
        "address": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
        "threads": os.environ.get("TVM_NUM_THREADS", ""),
    }


def installed_versions() -> dict[str, str]:
    """Versions that all processes of a cluster must share."""
    import tvm
    import tvm_ffi

    from .. import __version__

    return {"relax_hetero": __version__, "tvm": str(tvm.__version__), "tvm_ffi": str(tvm_ffi.__version__)}


def check_versions(host: str, info: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    """Check that a host has the versions of this process; raises HostError."""
    for name, version in expected.items():
        actual = info["versions"].get(name, "none")
        if actual != version:
            raise HostError(
                f"host {host!r} ({info['address']}) has version {actual} of {name}, expected {version}, as this process"
            )


def check_memory(executable: Executable) -> None:
    """Check that there is memory for the weights of an executable; raises MemoryLimitError."""
    weights = sum(bytes_for(tuple(spec.shape), spec.dtype) for spec in executable.metadata.constants)
    free = free_memory() or _UNKNOWN_MEMORY
    if weights > free:
        raise MemoryLimitError(f"its part has {weights:,} bytes of weights, expected less than the {free:,} bytes free")
