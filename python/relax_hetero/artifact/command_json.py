"""Regions and kernels as JSON data, and back: short, since a model has a command for every kernel call."""

from __future__ import annotations

from typing import Any

from .commands import (
    Barrier,
    Command,
    Copy,
    Dispatch,
    Fill,
    KernelSpec,
    Reference,
    RegionSpec,
    ScalarParam,
    SlotSpec,
    TensorParam,
)

_GRID = (1,)


def region_to_json(region: RegionSpec) -> dict[str, Any]:
    """A region as a JSON object."""
    return {
        **vars(region),
        "slots": [dict(vars(slot)) for slot in region.slots],
        "commands": [_command_to_json(command) for command in region.commands],
    }


def region_from_json(data: dict[str, Any]) -> RegionSpec:
    """The inverse of `region_to_json`; KeyError, TypeError or ValueError for anything else."""
    slots = (SlotSpec(**{**slot, "shape": _tuple(slot["shape"])}) for slot in data["slots"])
    commands = tuple(map(_command_from_json, data["commands"]))
    parameters, directs = tuple(data["parameters"]), tuple(data["directs"])
    made = {"slots": tuple(slots), "commands": commands, "parameters": parameters, "directs": directs}
    return RegionSpec(**{**data, **made})


def kernel_to_json(kernel: KernelSpec) -> dict[str, Any]:
    """A kernel as a JSON object."""
    tensors, scalars = ([dict(vars(param)) for param in params] for params in (kernel.tensors, kernel.scalars))
    return {**vars(kernel), "tensors": tensors, "scalars": scalars}


def kernel_from_json(data: dict[str, Any]) -> KernelSpec:
    """The inverse of `kernel_to_json`; KeyError or TypeError for anything else."""
    tensors = tuple(TensorParam(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in data["tensors"])
    scalars = tuple(ScalarParam(**scalar) for scalar in data["scalars"])
    return KernelSpec(**{**data, "tensors": tensors, "scalars": scalars, "ops": tuple(data["ops"])})


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _reference_to_json(reference: Reference) -> list[Any]:
    return [reference.space, reference.index, reference.offset, reference.length]


def _command_to_json(command: Command) -> dict[str, Any]:
    if isinstance(command, Copy):
        return {"copy": _reference_to_json(command.source), "to": _reference_to_json(command.target)}
    if isinstance(command, Fill):
        return {"fill": _reference_to_json(command.target), "pattern": command.pattern}
    if isinstance(command, Barrier):
        return {"barrier": True}
    data: dict[str, Any] = {"dispatch": command.kernel, "operands": list(map(_reference_to_json, command.operands))}
    if command.scalars:
        data["scalars"] = list(command.scalars)
    if command.grid != _GRID:
        data["grid"] = list(command.grid)
    for name in ("count", "when", "unless"):
        reference = getattr(command, name)
        if reference is not None:
            data[name] = _reference_to_json(reference)
    if command.variable:
        data["variable"] = command.variable
    return data


def _command_from_json(data: dict[str, Any]) -> Command:
    if "copy" in data:
        return Copy(Reference(*data["copy"]), Reference(*data["to"]))
    if "fill" in data:
        return Fill(Reference(*data["fill"]), data["pattern"])
    if "barrier" in data:
        return Barrier()
    references = {name: Reference(*data[name]) for name in ("count", "when", "unless") if name in data}
    return Dispatch(
        kernel=data["dispatch"],
        operands=tuple(Reference(*operand) for operand in data["operands"]),
        scalars=tuple(data.get("scalars", ())),
        grid=tuple(data.get("grid", _GRID)),
        variable=data.get("variable", ""),
        **references,
    )
