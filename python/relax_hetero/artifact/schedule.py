"""Schedules: a function as steps on devices, with the values between them, as plain data.

Written by the compiler (`transform.partition.form_schedules`) for functions that use several devices. A step reads
values that steps before it made; it may run as soon as they are there, whatever else waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

Results: TypeAlias = "int | tuple[Results, ...]"
"""The number of a value, or a tuple of such."""


@dataclass(frozen=True)
class Step:
    """Work on one device.

    Attributes
    ----------
    device : int
        Manifest index of the device whose queue runs it; -1: the implicit host.
    reads : tuple of int
        The values it takes, in order.
    makes : tuple of int
        The values it gives: several where `function` returns a tuple.
    function : str
        Function that runs; empty for a transfer, which takes one value to `device`.
    source : int
        Device where the value of a transfer is.
    sizes : tuple of str
        Symbolic dimensions whose values the function takes last but for the constants, as a shape.
    other_devices : tuple of int
        Further devices that the function uses.
    takes_constants : bool
        Whether the function takes the module's constants as its last parameter.
    calls : tuple of str
        The command buffers, kernels and packed functions that the function calls, by name.
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

    def __post_init__(self) -> None:
        for name in ("reads", "makes", "sizes", "other_devices", "calls"):  # JSON has lists
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def is_transfer(self) -> bool:
        """True if this takes a value to another device, and computes nothing."""
        return not self.function

    @property
    def devices(self) -> tuple[int, ...]:
        """All devices it uses, that of its queue first."""
        return self.device, *self.other_devices


@dataclass(frozen=True)
class Schedule:
    """The steps of one function.

    Attributes
    ----------
    function : str
        Name of the function.
    inputs : int
        How many parameters it has: values 0 to ``inputs - 1``.
    values : int
        How many values there are.
    steps : tuple of Step
        In an order in which they may run one after the other.
    results : int or nested tuple of int
        Values that the function returns.
    """

    function: str
    inputs: int
    values: int
    steps: tuple[Step, ...]
    results: Results

    def with_takers(self, takers: set[str]) -> Schedule:
        """The schedule once it is known which functions take the constants.

        Parameters
        ----------
        takers : set of str
            Names of functions that take the constants.
        """
        steps = tuple(replace(step, takes_constants=step.function in takers) for step in self.steps)
        return replace(self, steps=steps)

    def overlaps(
        self, queues: Mapping[int, Hashable] | None = None, is_large: Callable[[Step], bool] = lambda step: True
    ) -> bool:
        """Return whether two large steps that compute can run at the same time within one call.

        Parameters
        ----------
        queues : mapping, optional
            Manifest index to what says which entries are one device; by itself each is one of its own.
        is_large : callable, optional
            Whether a step's work is worth overlapping; by default every step's is.
        """
        known = queues or {}
        used = [{known.get(device, device) for device in step.devices} for step in self.steps]
        after = self._predecessors()
        work = [index for index, step in enumerate(self.steps) if not step.is_transfer and is_large(step)]
        return any(
            used[a].isdisjoint(used[b]) and not after[b] >> a & 1
            for position, b in enumerate(work)
            for a in work[:position]
        )

    def _predecessors(self) -> list[int]:
        """The set (as bits) of the steps that come before each step."""
        maker: dict[int, int] = {}
        found: list[int] = []
        for index, step in enumerate(self.steps):
            before = 0
            for value in step.reads:
                if value in maker:
                    before |= found[maker[value]] | 1 << maker[value]
            found.append(before)
            maker.update(dict.fromkeys(step.makes, index))
        return found

    def to_json(self) -> dict[str, Any]:
        """The schedule as JSON data."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Schedule:
        """The inverse of `to_json`; raises KeyError or TypeError for anything else.

        Parameters
        ----------
        data : dict of str to object
            JSON object.
        """
        steps = tuple(Step(**step) for step in data["steps"])
        return Schedule(**{**data, "steps": steps, "results": _tuples(data["results"])})


def _tuples(results: Any) -> Results:
    return tuple(map(_tuples, results)) if isinstance(results, list) else results
