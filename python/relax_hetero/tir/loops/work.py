"""How long a nest takes, roughly, and whether that is worth several threads."""

from __future__ import annotations

import tvm
from tvm_ffi import structural_walk

from ...target.cpu_target import Machine
from ...target.element_types import bytes_of
from ..core import work_split
from .nests import Nest
from .stages import loads

# One core: bytes read or written in a nanosecond, and vectors of simple operations.
_BYTES, _VECTORS = 20.0, 2.0
# Nanoseconds that a call of a transcendental function takes for a vector.
_CALL = 2.0


def tasks_for(nest: Nest, machine: Machine) -> int:
    """Into how many tasks a nest is cut: one for each core, or one if it is done soon."""
    return work_split.tasks_for(machine.cores, "nanoseconds", nanoseconds(nest, machine))


def nanoseconds(nest: Nest, machine: Machine) -> float | None:
    """An estimate of a nest's time on one core; None where extents are unknown."""
    points = 1
    for axis in nest.axes:
        if not isinstance(axis.extent, int):
            return None
        points *= axis.extent
    total = 0.0
    for s in nest.sums:
        inside = points
        for axis in nest.reduced:
            if not isinstance(axis.extent, int):
                return None
            inside *= axis.extent
        total += inside * _point(s.value, machine)
    for _, value in nest.steps:
        total += points * _point(value, machine)
    return total


def _point(value: tvm.ir.Expr, machine: Machine) -> float:
    lanes = machine.lanes("float32")
    nodes = calls = 0

    def on_node(node: tvm.ir.Expr) -> None:
        nonlocal nodes, calls
        nodes += 1
        if isinstance(node, tvm.ir.Call) and node.op.name not in ("prim.if_then_else", "prim.likely"):
            calls += 1

    structural_walk(value, (tvm.ir.Expr, on_node))
    read = sum(bytes_of(str(load.ty.dtype)) for load in loads(value))
    return read / _BYTES + (nodes / _VECTORS / 4 + calls * _CALL) / lanes
