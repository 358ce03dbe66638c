"""Programs compiled ahead of time, as folders: a library for each host, and the plans of calls.

Hosts that run them need no compiler. Vdevices without a full target are compiled for the hardware of this machine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tvm

from ...artifact.file_hints import describe_value
from ...artifact.signature import FunctionSignature
from ...driver.compile import compile as compile_module
from ...driver.link.parallel_codegen import Progress
from ...errors import BuildError, HeteroError
from ...target.native_target import native
from ..call_plan import CallPlan, HostRun, HostStep, Program, Source
from .cut_module import cut_module, native_hardware

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
