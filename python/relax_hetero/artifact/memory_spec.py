"""Allocations of functions as plain data, which `memory_plan` evaluates.

Time is counted in *steps*: calls of kernels, command buffers, transfers and other functions, in program order. Sizes
are bytes: integers, or text over the function's symbolic dimensions in the grammar of `dims.parse_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .signature import Dim

VALUE, ARENA, TRANSFER, RESULT = "value", "arena", "transfer", "result"


@dataclass(frozen=True)
class StorageSpec:
    """Memory that a function allocates."""

    device: int  # manifest index; -1 for the implicit host
    nbytes: Dim
    # Step before which it is allocated, and step after which it is freed; -1 for the end of the call.
    begin: int
    end: int
    # ``"value"``, ``"arena"`` (of a command buffer), ``"transfer"`` (target of a transfer) or ``"result"`` (of the
    # call).
    use: str
    name: str  # name in messages of the first tensor that it holds


@dataclass(frozen=True)
class Live:
    """A tensor in memory that a function allocates, live from its first writer to its last reader."""

    storage: int  # index of the storage that contains it
    nbytes: Dim
    # Steps of the first writer and the last reader.
    begin: int
    end: int


@dataclass(frozen=True)
class RegionStep:
    """A step that runs a command buffer; `slots` has the index of the tensor in each slot, -1 for foreign memory."""

    step: int
    region: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class CallStep:
    """A step that calls another function; `sizes` are that function's symbolic dimensions."""

    step: int
    function: str
    sizes: dict[str, Dim]


@dataclass(frozen=True)
class FunctionMemory:
    """The allocations of one function."""

    name: str
    storages: tuple[StorageSpec, ...] = ()
    tensors: tuple[Live, ...] = ()
    regions: tuple[RegionStep, ...] = ()
    calls: tuple[CallStep, ...] = ()
    upper_bounds: dict[str, int] = field(default_factory=dict)  # upper bounds of symbolic dimensions in the module
    results: tuple[Dim, ...] = ()  # bytes of the result, or of each field of a tuple


def memory_to_json(memory: FunctionMemory) -> dict[str, Any]:
    """A function's memory as a compact JSON object, because large models have many values."""
    parts = ("storages", "tensors", "regions", "calls")
    lists = {part: [list(vars(item).values()) for item in getattr(memory, part)] for part in parts}
    return {"name": memory.name, "upper_bounds": memory.upper_bounds, "results": memory.results, **lists}


def memory_from_json(data: dict[str, Any]) -> FunctionMemory:
    """The inverse of `memory_to_json`; KeyError or TypeError for anything else."""
    return FunctionMemory(
        data["name"],
        tuple(StorageSpec(*item) for item in data["storages"]),
        tuple(Live(*item) for item in data["tensors"]),
        tuple(RegionStep(step, region, tuple(slots)) for step, region, slots in data["regions"]),
        tuple(CallStep(*item) for item in data["calls"]),
        dict(data["upper_bounds"]),
        tuple(data["results"]),
    )
