"""Boxes with reductions: accumulators in registers, vectors along the results or along what is reduced."""

from __future__ import annotations

from ...target.cpu_target import Machine
from .along_reduced import AlongReduced
from .along_results import AlongResults
from .combining import combined
from .flat import FlatBox, is_step
from .vectors import varies_inside


def write_reduction(box: FlatBox, machine: Machine, tasks: int) -> None:
    """Write the loops of a box."""
    along = _reduced_vector(box, machine)
    if along is not None:
        AlongReduced(box, machine, along).write(tasks)
    else:
        AlongResults(box, machine).write(tasks)


def _reduced_vector(box: FlatBox, machine: Machine) -> int | None:
    """The reduced loop to cut into vectors, None where vectors lie along the results."""
    if any(combined(s) is None or s.buffer.dtype == "bool" for s in box.nest.sums):
        return None
    values = [s.value for s in box.nest.sums]
    if box.spatial:
        var = box.spatial[-1].var
        contiguous = any(is_step(step, 1) for value in values for step in box.strides(value, var))
        wide = not isinstance(box.spatial[-1].count, int) or box.spatial[-1].count >= 4
        if contiguous and wide:
            return None
    for d, loop in enumerate(box.reduced):
        long = not isinstance(loop.count, int) or loop.count >= 8
        if long and any(is_step(step, 1) for value in values for step in box.strides(value, loop.var)):
            return None if varies_inside(box, loop.var) else d
    return None
