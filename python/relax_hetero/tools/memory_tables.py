"""A memory plan, printed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..artifact.dims import DimValues
from ..artifact.memory_plan import FunctionUse, MemoryPlan
from ..artifact.signature import FunctionSignature, TensorSpec
from .console import bytes_text, console, print_table

_COLUMNS = ("weights", "transient", "arenas", "transfers", "results", "least")


def print_memory(plan: MemoryPlan) -> None:
    """Print what calls take on each device, and what takes most; functions of unknown sizes are named."""
    uses = [plan.at(name) for name in plan.functions if not plan.names(name)]
    if uses:
        print_table(
            "Memory of a call", ["function", "device", *_COLUMNS, "ratio"], _rows(uses), right=[*_COLUMNS, "ratio"]
        )
    for name in plan.functions:
        missing = plan.names(name)
        if missing:
            console().print(f"Memory of {name} depends on {', '.join(missing)}.", markup=False)


def _rows(uses: list[FunctionUse]) -> list[list[str]]:
    return [
        [
            use.function,
            memory.device,
            *(bytes_text(getattr(memory, column)) for column in _COLUMNS),
            f"{memory.ratio:.3f}" if memory.least else "",
        ]
        for use in uses
        for memory in use.devices
    ]


def use_with(plan: MemoryPlan, signature: FunctionSignature, inputs: Mapping[str, Any]) -> FunctionUse | None:
    """What a call with these arrays takes; None where that depends on more than their shapes."""
    dims = DimValues()
    for spec in signature.inputs:
        if isinstance(spec, TensorSpec) and spec.name in inputs:
            for dim, extent in zip(spec.shape or (), inputs[spec.name].shape, strict=False):
                dims.match(dim, extent, spec.name)
    dims.settle()
    missing = set(plan.names(signature.name)) - dims.values.keys()
    return None if missing else plan.at(signature.name, **dims.values)


def memory_line(use: FunctionUse) -> str:
    """What a call takes, all devices together, in one line."""
    weights = sum(memory.weights for memory in use.devices)
    ratio = f", {use.transient / use.least:.3f} times the least" if use.least else ""
    return f"Memory: weights {bytes_text(weights)}, transient {bytes_text(use.transient)} a call{ratio}."
