"""The memory of a call step by step: what is alive after each, and from when to when each storage is needed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from ..artifact.commands import Dispatch
from ..artifact.memory_use import Walk
from ..artifact.metadata import Metadata, device_names

if TYPE_CHECKING:
    from ..vm.file.executable import Executable

_KINDS = ("arena", "result", "transfer")


def memory_of(executable: Executable) -> list[dict[str, Any]]:
    """A row for each function and device; functions whose memory depends on sizes have none."""
    plan = executable.memory_plan
    found: list[dict[str, Any]] = []
    for name in plan.functions:
        if plan.names(name):
            continue
        use = plan.at(name)
        walk = Walk(executable.metadata)
        walk.function(name, use.sizes)
        for memory in use.devices:
            keys = ("device", "weights", "transient", "arenas", "transfers", "results", "lower_bound")
            row = {key: getattr(memory, key) for key in keys}
            steps = _steps(executable.metadata, name, walk, memory.device)
            found.append({"function": name, "sizes": dict(use.sizes), **row, **steps})
    return found


def _steps(metadata: Metadata, function: str, walk: Walk, device: str) -> Mapping[str, Any]:
    names = device_names(metadata.devices)
    number = names.index(device) if device in names else -1
    tensors = [use for use in walk.tensors if use.device == number]
    storages = [storage for storage in walk.allocations if storage.device == number]
    moments = sorted({use.begin for use in tensors} | {storage.begin for storage in storages})
    changes = [0] * (len(moments) + 1)
    for use in tensors:
        changes[bisect_left(moments, use.begin)] += use.nbytes
        changes[bisect_right(moments, use.end)] -= use.nbytes
    said = {storage.begin: storage.name for storage in reversed(storages)}
    kernels = _kernels(metadata, function)
    return {
        "steps": [kernels.get(now) or said.get(now) or f"step {now[0]:.0f}" for now in moments],
        "over_time": list(accumulate(changes[:-1])),
        "values": [
            {
                "name": storage.name,
                "kind": storage.use if storage.use in _KINDS else "storage",
                "bytes": storage.nbytes,
                "offset": None,
                "first": bisect_left(moments, storage.begin),
                "last": bisect_right(moments, storage.end) - 1,
            }
            for storage in storages
        ],
    }


def _kernels(metadata: Metadata, function: str) -> dict[tuple[float, ...], str]:
    """The kernels of a function's command buffers, by when they run."""
    regions = {region.name: region for region in metadata.regions}
    memory = next((memory for memory in metadata.memory if memory.name == function), None)
    return {
        (float(step.step), float(index)): command.kernel
        for step in (memory.regions if memory is not None else ())
        for index, command in enumerate(regions[step.region].commands)
        if isinstance(command, Dispatch)
    }
