"""Allocations of functions as plain data, which `memory_plan` evaluates.

Time is counted in *steps*: calls of kernels, command buffers, transfers and other functions, in program order. Sizes
are bytes: integers, or text over the function's symbolic dimensions in the grammar of `dims.parse_dim`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .signature import Dim

VALUE, ARENA, TRANSFER, RESULT = "value", "arena", "transfer", "result"


@dataclass(frozen=True)
class StorageSpec:
    """Memory that a function allocates."""

    IS_ROW = True  # here and below, because large models have many values
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

    IS_ROW = True
    storage: int  # index of the storage that contains it
    nbytes: Dim
    # Steps of the first writer and the last reader.
    begin: int
    end: int


@dataclass(frozen=True)
class RegionStep:
    """A step that runs a command buffer; `slots` has the index of the tensor in each slot, -1 for foreign memory."""

    IS_ROW = True
    step: int
    region: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class CallStep:
    """A step that calls another function; `sizes` are that function's symbolic dimensions."""

    IS_ROW = True
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
