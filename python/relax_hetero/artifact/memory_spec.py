"""Allocations of functions, as plain data that the compiler writes and `memory_plan` evaluates.

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
    """Memory that a function allocates.

    Attributes
    ----------
    device : int
        Manifest index; -1: the implicit host.
    begin, end : int
        The step before which it is allocated, and the one after which it is given back; -1 for the end of the call.
    use : str
        ``"value"``, ``"arena"`` (of a command buffer), ``"transfer"`` (where one arrives) or ``"result"`` (leaves the
        call).
    name : str
        Name in messages of the first tensor that it holds.
    """

    device: int
    nbytes: Dim
    begin: int
    end: int
    use: str
    name: str


@dataclass(frozen=True)
class Live:
    """A tensor in memory that a function allocates: there from its first writer to its last reader.

    Attributes
    ----------
    storage : int
        Number of the storage it lies in.
    begin, end : int
        Steps.
    """

    storage: int
    nbytes: Dim
    begin: int
    end: int


@dataclass(frozen=True)
class RegionStep:
    """A step that runs a command buffer; `slots` gives the number of the tensor in each, -1 for what is not ours."""

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
    """The allocations of one function.

    Attributes
    ----------
    upper_bounds : dict of str to int
        Symbolic dimensions that the module says are never larger.
    results : tuple of Dim
        Bytes of what it returns, of a tuple field by field.
    """

    name: str
    storages: tuple[StorageSpec, ...] = ()
    tensors: tuple[Live, ...] = ()
    regions: tuple[RegionStep, ...] = ()
    calls: tuple[CallStep, ...] = ()
    upper_bounds: dict[str, int] = field(default_factory=dict)
    results: tuple[Dim, ...] = ()


def memory_to_json(memory: FunctionMemory) -> dict[str, Any]:
    """A function's memory as a JSON object, short: big models have many values."""
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
