"""Tables about a call: its steps in queues, and its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...artifact.dims import DimValues
from ...artifact.memory_plan import FunctionUse, MemoryPlan
from ...artifact.schedule import Schedule, Step
from ...artifact.signature import FunctionSignature, TensorSpec
from ...artifact.typed_data import to_data
from ...display.console import Shown, table
from ...display.text import bytes_text, plural

_COLUMNS = ("weights", "transient", "arenas", "transfers", "results", "lower_bound")


@dataclass(frozen=True)
class Schedules:
    """Schedules of functions as tables."""

    devices: Sequence[str]  # names of devices in manifest order
    schedules: Sequence[Schedule]  # schedules of functions

    def to_json(self) -> list[dict[str, Any]]:
        """Convert to JSON data, with whether steps can overlap."""
        return [{**to_data(schedule), "overlaps": schedule.overlaps()} for schedule in self.schedules]

    def tables(self) -> Iterator[Shown]:
        """Table and summary of each function with more than one step."""
        for schedule in self.schedules:
            if len(schedule.steps) > 1:
                columns = ["step", "device", "runs", "waits for"]
                yield table(f"Steps of {schedule.function}", columns, self._rows(schedule), right=["step"])
                yield _steps_line(schedule)

    def lines(self) -> list[str]:
        """Summary of each function with more than one step."""
        return [_steps_line(schedule) for schedule in self.schedules if len(schedule.steps) > 1]

    def _rows(self, schedule: Schedule) -> list[list[str]]:
        producers = {value: index for index, step in enumerate(schedule.steps) for value in step.makes}
        rows = []
        for index, step in enumerate(schedule.steps):
            devices = ", ".join(map(self._device_name, step.devices))
            waits = dict.fromkeys(producers[value] for value in step.reads if value in producers)
            rows.append([str(index), devices, self._describe_work(step), ", ".join(map(str, waits)) or "-"])
        return rows

    def _describe_work(self, step: Step) -> str:
        return (
            f"transfer from {self._device_name(step.source)}"
            if step.is_transfer
            else ", ".join(step.calls) or step.function
        )

    def _device_name(self, device: int) -> str:
        return self.devices[device] if device >= 0 else "host"


def _steps_line(schedule: Schedule) -> str:
    transfers = sum(step.is_transfer for step in schedule.steps)
    overlap = "some can overlap" if schedule.overlaps() else "none can overlap"
    return (
        f"{plural(len(schedule.steps) - transfers, 'step')} of work and {plural(transfers, 'transfer')}; "
        f"within one call {overlap}."
    )


def memory_tables(plan: MemoryPlan) -> Iterator[Shown]:
    """Table of the memory of calls on each device, and a line for each function with symbolic sizes."""
    uses = [plan.at(name) for name in plan.functions if not plan.symbolic_dims(name)]
    if uses:
        columns = ["function", "device", *(column.replace("_", " ") for column in _COLUMNS), "ratio"]
        yield table("Memory of a call", columns, _rows(uses), right=columns[2:])
    yield from _symbolic_lines(plan)


def memory_lines(plan: MemoryPlan) -> list[str]:
    """Memory of a call of each function, summed over devices."""
    lines = {name: memory_line(plan.at(name)) for name in plan.functions if not plan.symbolic_dims(name)}
    if len(plan.functions) > 1:
        lines = {name: f"{name}: {line}" for name, line in lines.items()}
    return [*lines.values(), *_symbolic_lines(plan)]


def _symbolic_lines(plan: MemoryPlan) -> list[str]:
    symbolic = {name: plan.symbolic_dims(name) for name in plan.functions if plan.symbolic_dims(name)}
    return [f"Memory of {name} depends on {', '.join(missing)}." for name, missing in symbolic.items()]


def _rows(uses: list[FunctionUse]) -> list[list[str]]:
    return [
        [
            use.function,
            memory.device,
            *(bytes_text(getattr(memory, column)) for column in _COLUMNS),
            f"{memory.ratio:.3f}" if memory.lower_bound else "",
        ]
        for use in uses
        for memory in use.devices
    ]


def use_with(plan: MemoryPlan, signature: FunctionSignature, inputs: Mapping[str, Any]) -> FunctionUse | None:
    """Memory of a call with these inputs; None if it depends on more than their shapes."""
    dims = DimValues()
    for spec in signature.inputs:
        if isinstance(spec, TensorSpec) and spec.name in inputs:
            for dim, extent in zip(spec.shape or (), inputs[spec.name].shape, strict=False):
                dims.match(dim, extent, spec.name)
    dims.settle()
    missing = set(plan.symbolic_dims(signature.name)) - dims.values.keys()
    return None if missing else plan.at(signature.name, **dims.values)


def memory_line(use: FunctionUse) -> str:
    """Memory of a call, summed over devices, in one line."""
    weights = sum(memory.weights for memory in use.devices)
    ratio = f", {use.transient / use.lower_bound:.3f} times the lower bound" if use.lower_bound else ""
    return f"Memory: weights {bytes_text(weights)}, transient {bytes_text(use.transient)} per call{ratio}."
