"""Memory plans as HTML: the providers of `_repr_html_` of `MemoryPlan` and `FunctionUse`."""

from __future__ import annotations

from ..artifact.memory_plan import FunctionUse, MemoryPlan
from .html_elements import Column, bytes_text, device, folded, paragraph, table, view

_COLUMNS = [
    *(Column("device"), Column("weights", True), Column("transient", True), Column("of it arenas", True)),
    *(Column("of it transfers", True), Column("results", True), Column("least", True), Column("over least", True)),
]
_LARGEST = 12


def memory_plan_html(plan: MemoryPlan) -> str:
    """A table for each function whose memory is known, and what the others depend on."""
    parts: list[str] = []
    for name in plan.functions:
        missing = plan.names(name)
        if missing:
            sizes = ", ".join(f"{size}=1" for size in missing)
            known = f"The memory of {name!r} depends on {', '.join(missing)}: memory_plan.at({name!r}, {sizes})."
            parts.append(paragraph(known))
        else:
            parts += _tables(plan.at(name))
    return view(*parts)


def function_use_html(use: FunctionUse) -> str:
    """A table with a row for each device, and the largest buffers of each."""
    return view(*_tables(use))


def _tables(use: FunctionUse) -> list[str]:
    names = [memory.device for memory in use.devices if memory.device != "host"]
    sizes = ", ".join(f"{name}={size}" for name, size in use.sizes.items())
    rows = [
        (
            device(memory.device, names),
            *map(bytes_text, (memory.weights, memory.transient, memory.arenas, memory.transfers)),
            *map(bytes_text, (memory.results, memory.least)),
            f"{memory.ratio:.3f}" if memory.least else "",
        )
        for memory in use.devices
    ]
    largest = [
        (device(memory.device, names), what, bytes_text(nbytes))
        for memory in use.devices
        for what, nbytes in memory.largest[:_LARGEST]
    ]
    parts: list[str] = [table(f"Memory of a call of {use.function}({sizes})", _COLUMNS, rows)]
    if largest:
        columns = [Column("device"), Column("what"), Column("bytes", True)]
        parts.append(folded("What takes the transient bytes", table("", columns, largest)))
    return parts
