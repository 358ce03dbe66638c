"""The steps by which functions go through queues, printed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..artifact.schedule import Schedule, Step
from .console import console, plural, print_table


@dataclass(frozen=True)
class Schedules:
    """How functions go through queues.

    Attributes
    ----------
    devices : sequence of str
        Device names, in manifest order.
    schedules : sequence of Schedule
    """

    devices: Sequence[str]
    schedules: Sequence[Schedule]

    def to_json(self) -> list[dict[str, Any]]:
        """As JSON data, with whether steps can overlap."""
        return [{**schedule.to_json(), "overlaps": schedule.overlaps()} for schedule in self.schedules]

    def print(self) -> None:
        """Print a table for each function of more than one step."""
        for schedule in self.schedules:
            if len(schedule.steps) > 1:
                columns = ["step", "device", "runs", "waits for"]
                print_table(f"Steps of {schedule.function}", columns, self._rows(schedule), right=["step"])
                transfers = sum(step.is_transfer for step in schedule.steps)
                overlap = "some can overlap" if schedule.overlaps() else "none can overlap"
                console().print(
                    f"{plural(len(schedule.steps) - transfers, 'step')} of work and {plural(transfers, 'transfer')}; "
                    f"within one call {overlap}.",
                    markup=False,
                )

    def _rows(self, schedule: Schedule) -> list[list[str]]:
        makers = {value: number for number, step in enumerate(schedule.steps) for value in step.makes}
        rows = []
        for number, step in enumerate(schedule.steps):
            waits = dict.fromkeys(makers[value] for value in step.reads if value in makers)
            rows.append(
                [
                    str(number),
                    ", ".join(map(self._name, step.devices)),
                    self._what(step),
                    ", ".join(map(str, waits)) or "-",
                ]
            )
        return rows

    def _what(self, step: Step) -> str:
        return (
            f"transfer from {self._name(step.source)}" if step.is_transfer else ", ".join(step.calls) or step.function
        )

    def _name(self, device: int) -> str:
        return self.devices[device] if device >= 0 else "host"
