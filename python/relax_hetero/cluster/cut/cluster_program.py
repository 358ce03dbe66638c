"""Programs of a module: made for the hardware that its hosts have, saved in folders, and loaded.

A folder has a library for each host, and the plans of calls. Hosts that run them need no compiler. Vdevices without a
full target are compiled for the hardware of this machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm
from tvm.target import Target

from ...artifact.file_hints import describe_value
from ...artifact.signature import FunctionSignature
from ...driver.compile import compile as compile_module
from ...driver.link.parallel_codegen import Progress
from ...errors import BuildError, HeteroError, HostError
from ...target.hosts import hosts_of
from ...target.native_target import native
from ...target.vdevice import vdevices_of
from ..bindings import HostBinding
from ..call_plan import CallPlan, HostRun, HostStep, Program, Source
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


_FILE = "program.json"
_FORMAT = 1


def compile(
    mod: tvm.IRModule,
    folder: str | os.PathLike[str],
    params: Mapping[str, Any] | None = None,
    accuracy: str | Mapping[str, str] = "default",
    progress: Progress | None = None,
) -> Program:
    """Compile a module over hosts to a folder that `Cluster` runs.

    Parameters
    ----------
    mod, params, accuracy, progress
        As for `rh.compile`; every vdevice is on a host.
    folder : str or PathLike of str
        Folder; created if it does not exist. Existing files are replaced.

    Returns
    -------
    Program
        Program with the libraries in the folder.

    Raises
    ------
    HeteroError
        As for `rh.compile`, or if there is no C compiler, which exporting needs.
    """
    if not isinstance(mod, tvm.IRModule):
        raise BuildError(f"rh.cluster.compile: {describe_value(mod)}; expected a tvm.IRModule")
    natives = {host: {key: native(*key) for key in hardware} for host, hardware in native_hardware(mod).items()}
    program = cut_module(mod, params, accuracy, natives, progress)
    program.check()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {}
    for number, (host, part) in enumerate(program.parts.items()):
        names[host] = f"host_{number}.so"
        compile_module(part, progress=progress).export_library(folder / names[host])
    plans = {name: _plan_to_json(plan) for name, plan in program.functions.items()}
    text = json.dumps({"format": _FORMAT, "hosts": names, "functions": plans}, indent=1)
    (folder / _FILE).write_text(text, "utf-8")
    return load(folder)


def load(folder: str | os.PathLike[str]) -> Program:
    """Load a program from a folder that `compile` wrote.

    Running it runs the libraries' code: trust a folder as you trust a program.

    Parameters
    ----------
    folder : str or PathLike of str
        Folder of the program.

    Raises
    ------
    HeteroError
        If there is no program, or it has another format.
    """
    path = Path(folder) / _FILE
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != _FORMAT:
            raise HeteroError(f"{path}: found format {data['format']!r}, expected {_FORMAT}")
        parts = {host: (Path(folder) / name).read_bytes() for host, name in data["hosts"].items()}
        plans = {name: _plan_from_json(plan) for name, plan in data["functions"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HeteroError(
            f"{path}: found no program ({type(error).__name__}: {error}), expected one that rh.cluster.compile wrote"
        ) from error
    return Program(parts, plans)


def _plan_to_json(plan: CallPlan) -> dict[str, Any]:
    assert plan.signature is not None
    return {
        "steps": [asdict(step) | {"arguments": _tree_to_json(step.arguments)} for step in plan.steps],
        "runs": [asdict(run) | {"arguments": _tree_to_json(run.arguments)} for run in plan.runs],
        "result": _tree_to_json(plan.result),
        "sizes": plan.sizes,
        "signature": plan.signature.to_json(),
    }


def _plan_from_json(data: dict[str, Any]) -> CallPlan:
    def with_arguments(each: dict[str, Any]) -> dict[str, Any]:
        return each | {"arguments": _tree_from_json(each["arguments"])}

    return CallPlan(
        tuple(HostStep(**with_arguments(step)) for step in data["steps"]),
        _tree_from_json(data["result"]),
        signature=FunctionSignature.from_json(data["signature"]),
        sizes=tuple(map(tuple, data["sizes"])),
        runs=tuple(HostRun(**with_arguments(run)) for run in data["runs"]),
    )


def _tree_to_json(tree: Any) -> Any:
    if isinstance(tree, Source):
        return {"step": tree.step, "index": tree.index}
    return tree if tree is None else [_tree_to_json(element) for element in tree]


def _tree_from_json(tree: Any) -> Any:
    if isinstance(tree, dict):
        return Source(**tree)
    return tree if tree is None else tuple(map(_tree_from_json, tree))
