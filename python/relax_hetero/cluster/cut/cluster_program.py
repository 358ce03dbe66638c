"""Makes the program of a module, for the hardware that its hosts have."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm.target import Target

from ...driver.link.parallel_codegen import Progress
from ...errors import BuildError, HeteroError, HostError
from ...target.hosts import hosts_of
from ...target.vdevice import vdevices_of
from ..bindings import HostBinding
from ..call_plan import Program
from .cut_module import Hardware, cut_module, native_hardware


def hosts_needed(program: object) -> list[str]:
    """Hosts of a program, or of a module's vdevices; HeteroError for other types, or if there are none."""
    if isinstance(program, Program):
        return list(program.parts)
    if not isinstance(program, tvm.IRModule):
        raise HeteroError(f"a cluster runs a module or a program, found {type(program).__name__}")
    hosts = hosts_of(vdevices_of(program))
    if not hosts:
        raise BuildError(
            "rh.cluster: the module's vdevices name no hosts; expected one for each, as in "
            "vdevices=['a/llvm', 'b/llvm'] or rh.VDevice('llvm', host='a')"
        )
    return hosts


def program_of(
    source: object,  # module or program
    ray: Any,  # the module ``ray``
    bindings: Mapping[str, HostBinding],  # bindings by host
    timeout: float,  # seconds that hosts may take to describe their hardware
    # As for `rh.compile`.
    params: Mapping[str, Any] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    progress: Progress | None = None,
) -> Program:
    """Cut a module for the hardware of its hosts; a program is returned as it is.

    Raises HostError if a host is not started in time, and the errors of `cut_module`.
    """
    if isinstance(source, Program):
        source.check()
        return source
    assert isinstance(source, tvm.IRModule)
    hardware = native_hardware(source)
    natives = _query_hardware(ray, {host: bindings[host] for host in hardware}, hardware, timeout)
    program = cut_module(source, params, accuracy, natives, progress)
    program.check()
    return program


def _query_hardware(
    ray: Any, bindings: Mapping[str, HostBinding], hardware: Mapping[str, Sequence[Hardware]], timeout: float
) -> dict[str, dict[Hardware, Target]]:
    """Targets of each host's hardware, found by a task with the options of the host's actor."""
    replies = {
        host: ray.remote(local_hardware)
        .options(max_retries=3, **binding.options(ray))
        .remote(list(hardware[host]), binding.threads)
        for host, binding in bindings.items()
    }
    end = time.monotonic() + timeout
    targets = {}
    for host, reference in replies.items():
        ready, _ = ray.wait([reference], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            for other in replies.values():
                ray.cancel(other, force=True)
            raise HostError(f"host {host!r} was not started within {timeout:g} s: it needs {bindings[host]}")
        targets[host] = {key: Target(config) for key, config in ray.get(reference).items()}
    return targets


def local_hardware(hardware: Sequence[Hardware], threads: int) -> dict[Hardware, dict[str, Any]]:
    """Targets of devices of this machine as data, without devices that are absent.

    `hardware`: devices to look for; `threads`: number of cores of CPU targets, 0 for those that this process may use.
    """
    import tvm

    from ...target.native_target import native

    configs = {}
    for kind, number in hardware:
        if kind not in ("llvm", "c") and not tvm.runtime.device(kind, number).exist:
            continue
        config = {key: value for key, value in native(kind, number).export().items() if key != "tag"}
        if kind == "llvm" and threads:
            config["num-cores"] = threads
        configs[kind, number] = config
    return configs
