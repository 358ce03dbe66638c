"""Schedules: functions as graphs of steps on devices, as plain data.

`transform.partition.form_schedules` makes them for functions that use several devices. A step may run as soon as the
values that it reads are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .typed_data import fields_data, fields_from_data

Results: TypeAlias = "int | tuple[Results, ...]"  # the number of a value, or a nested tuple of numbers


@dataclass(frozen=True)
class Step:
    """A step: work of one queue.

    Attributes
    ----------
    device : int
        Manifest index of the device whose queue runs it; -1 for the implicit host.
    reads : tuple of int
        Values that it takes, in order.
    makes : tuple of int
        Values that it makes: several if `function` returns a tuple.
    function : str
        Function to run; empty for a transfer of one value to `device`.
    source : int
        Source device of a transfer.
    sizes : tuple of str
        Symbolic dimensions that the function takes as a shape, after its other arguments and before the constants.
    other_devices : tuple of int
        Further devices that the function uses.
    takes_constants : bool
        Whether the function takes the module's constants as its last parameter.
    calls : tuple of str
        Names of the command buffers, kernels and packed functions that the function calls.
    """

    device: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    function: str = ""
    source: int = -1
    sizes: tuple[str, ...] = ()
    other_devices: tuple[int, ...] = ()
    takes_constants: bool = False
    calls: tuple[str, ...] = ()

    @property
    def is_transfer(self) -> bool:
        """True for a transfer of a value to another device."""
        return not self.function

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices that it uses, its queue's first."""
        return self.device, *self.other_devices


@dataclass(frozen=True)
class Schedule:
    """The steps of one function.

    Attributes
    ----------
    function : str
        Name of the function.
    inputs : int
        Number of parameters, which are values 0 to ``inputs - 1``.
    values : int
        Number of values.
    steps : tuple of Step
        Steps in a topological order.
    results : int or nested tuple of int
        Values that the function returns.
    """

    function: str
    inputs: int
    values: int
    steps: tuple[Step, ...]
    results: Results

    def __post_init__(self) -> None:
        object.__setattr__(self, "results", _tuples(self.results))  # JSON has lists

    def with_takers(self, takers: set[str]) -> Schedule:
        """The schedule with `takes_constants` set.

        Parameters
        ----------
        takers : set of str
            Names of functions that take the constants.
        """
        steps = tuple(replace(step, takes_constants=step.function in takers) for step in self.steps)
        return replace(self, steps=steps)

    def overlaps(
        self,
        queues: Mapping[int, Hashable] | None = None,
        is_large: Callable[[Step], bool] = lambda step: True,
        occupies_host: Callable[[Step], bool] = lambda step: True,
    ) -> bool:
        """Return whether two large compute steps of a call can run at the same time.

        Parameters
        ----------
        queues : mapping, optional
            Key of the physical device by manifest index; by default all entries are different devices.
        is_large : callable, optional
            Whether a step is worth overlapping; by default every step is.
        occupies_host : callable, optional
            Whether a thread works until the end of a step, unlike that of a GPU. Two steps that do not occupy the host
            overlap without queues, and do not count.
        """
        keys = queues or {}
        devices = [{keys.get(device, device) for device in step.devices} for step in self.steps]
        predecessors = self._predecessors()
        work = [index for index, step in enumerate(self.steps) if not step.is_transfer and is_large(step)]
        return any(
            devices[a].isdisjoint(devices[b])
            and not predecessors[b] >> a & 1
            and (occupies_host(self.steps[a]) or occupies_host(self.steps[b]))
            for position, b in enumerate(work)
            for a in work[:position]
        )

    def _predecessors(self) -> list[int]:
        """The transitive predecessors of each step, as bit sets."""
        maker: dict[int, int] = {}
        predecessors: list[int] = []
        for index, step in enumerate(self.steps):
            bits = 0
            for value in step.reads:
                if value in maker:
                    bits |= predecessors[maker[value]] | 1 << maker[value]
            predecessors.append(bits)
            maker.update(dict.fromkeys(step.makes, index))
        return predecessors

    def to_json(self) -> dict[str, Any]:
        """The schedule as JSON data."""
        data: dict[str, Any] = fields_data(self)
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> Schedule:
        """The inverse of `to_json`; raises KeyError or TypeError for anything else.

        Parameters
        ----------
        data : dict of str to object
            JSON object.
        """
        schedule: Schedule = fields_from_data(Schedule, data)
        return schedule


def _tuples(results: Any) -> Results:
    return tuple(map(_tuples, results)) if isinstance(results, list) else results
