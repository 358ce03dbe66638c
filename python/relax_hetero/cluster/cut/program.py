"""Programs of modules: the one place where the cut of a module by hosts and its run meet."""

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
    """The hosts of a program, or of a module's vdevices; HeteroError for what is neither, or names none."""
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
    source: object,
    ray: Any,
    bindings: Mapping[str, HostBinding],
    timeout: float,
    params: Mapping[str, Any] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    progress: Progress | None = None,
) -> Program:
    """The program of a module for the hardware of its hosts, or a program as it is.

    Parameters
    ----------
    source : object
        As `hosts_needed` takes it.
    timeout : float
        Seconds that a host may take to say what hardware it has.
    params, accuracy, progress
        As `rh.compile` takes them.

    Raises
    ------
    HostError
        A host that nothing can take in time.
    HeteroError
        An error of `cut_module`.
    """
    if isinstance(source, Program):
        source.check()
        return source
    assert isinstance(source, tvm.IRModule)
    wanted = native_hardware(source)
    natives = _natives(ray, {host: bindings[host] for host in wanted}, wanted, timeout)
    program = cut_module(source, params, accuracy, natives, progress)
    program.check()
    return program


def _natives(
    ray: Any, bindings: Mapping[str, HostBinding], hardware: Mapping[str, Sequence[Hardware]], timeout: float
) -> dict[str, dict[Hardware, Target]]:
    """Targets of each host's hardware, asked there by a task that runs as the host's process will."""
    asked = {
        host: ray.remote(local_hardware)
        .options(max_retries=3, **binding.options(ray))
        .remote(list(hardware[host]), binding.threads)
        for host, binding in bindings.items()
    }
    end = time.monotonic() + timeout
    found = {}
    for host, reference in asked.items():
        ready, _ = ray.wait([reference], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            for other in asked.values():
                ray.cancel(other, force=True)
            raise HostError(f"host {host!r} was not started within {timeout:g} s: it needs {bindings[host]}")
        found[host] = {hardware: Target(config) for hardware, config in ray.get(reference).items()}
    return found


def local_hardware(hardware: Sequence[Hardware], threads: int) -> dict[Hardware, dict[str, Any]]:
    """The targets of devices of this machine, as data; those that are absent are left out.

    Parameters
    ----------
    threads : int
        Cores that a CPU counts as; 0 for those that this process may use.
    """
    import tvm

    from ...target.native_target import native

    found = {}
    for kind, number in hardware:
        if kind not in ("llvm", "c") and not tvm.runtime.device(kind, number).exist:
            continue
        config = {key: value for key, value in native(kind, number).export().items() if key != "tag"}
        if kind == "llvm" and threads:
            config["num-cores"] = threads
        found[kind, number] = config
    return found
