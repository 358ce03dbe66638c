"""Texts of the reasons for the device of each unit of a plan: times on each device, saved transfers, memory limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...artifact.messages import AUTO
from ...display.text import time_text
from .plan_costs import TICKS, PlanCosts
from .work_graph import OUTSIDE


def choice(cause: str, seconds: Sequence[float], device: int, names: Sequence[str], details: str = "") -> str:
    """Format the reason for `device` with the seconds on each device."""
    times = [f"{time_text(seconds[device])} here"]
    times += [f"{time_text(time)} on {names[other]}" for other, time in enumerate(seconds) if other != device]
    return f"{AUTO}{cause}: {', '.join(times)}{details}"


def memory_limited(name: str, limit: int, free: float, needed: float) -> str:
    """Format the bytes of a memory limit, of which other work leaves `free` bytes."""
    leaves = f"other work leaves {max(0, round(free)):,}, and {needed:,.0f} are needed"
    return f"; of the limit of {limit:,} bytes on {name} {leaves}"


def plan_reasons(costs: PlanCosts, plan: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """The reason for the device of each node of a plan.

    `plan`: a device for each unit of the graph; `names`: names of the devices.
    """
    free = {device: limit - costs.bytes_on(device, plan) for device, limit in costs.limits.items()}
    reasons: dict[str, str] = {}
    for unit, device in enumerate(plan):
        reason = _unit_reason(costs, plan, unit, device, names, free)
        reasons.update(dict.fromkeys(costs.graph.units[unit].names, reason))
    return reasons


def _unit_reason(
    costs: PlanCosts, plan: Sequence[int], unit: int, device: int, names: Sequence[str], free: Mapping[int, float]
) -> str:
    seconds = [ticks / TICKS for ticks in costs.ops[unit]]
    if len(seconds) == 1:
        return f"{AUTO}the only device: {time_text(seconds[device])}"
    if not costs.graph.units[unit].ops:
        return f"{AUTO}nothing is computed: it stays with its neighbours"
    faster_devices = [other for other, time in enumerate(seconds) if time < seconds[device]]
    if not faster_devices:
        return choice("no device is faster", seconds, device, names)
    for other in faster_devices:
        needed = _unit_bytes(costs, unit)
        if other in free and needed > free[other]:
            limit = memory_limited(names[other], costs.limits[other], free[other], needed)
            return choice(f"the memory of {names[other]} is too small", seconds, device, names, limit)
    other = min(faster_devices, key=seconds.__getitem__)
    moved = list(plan)
    moved[unit] = other
    extra_seconds = (_transfers(costs, moved, unit) - _transfers(costs, plan, unit)) / TICKS
    if extra_seconds > 0:
        details = f"; transfers there and back would take {time_text(extra_seconds)} more"
        if extra_seconds >= seconds[device] - seconds[other]:
            return choice("staying saves transfers", seconds, device, names, details)
        return choice("moving saves too little", seconds, device, names, details)
    if len(set(plan)) == 1:
        return choice("a second device saves too little", seconds, device, names)
    return choice(f"{names[other]} has other work meanwhile", seconds, device, names)


def _transfers(costs: PlanCosts, plan: Sequence[int], unit: int) -> int:
    """Ticks of the transfers of all values that a unit writes or reads."""
    values = (costs.graph.values[index] for index in costs.around[unit])
    return sum(ticks for value in values for _, _, ticks in costs.transfers(value, plan))


def _unit_bytes(costs: PlanCosts, unit: int) -> float:
    """Bytes of a unit's weights and results."""
    result_bytes = sum(
        costs.graph.values[index].size for index in costs.around[unit] if costs.graph.values[index].producer == unit
    )
    return sum(costs.graph.units[unit].weights.values()) + result_bytes


def transfer_times(costs: PlanCosts, plan: Sequence[int], names: Sequence[str]) -> dict[tuple[str, str], str]:
    """(producing node, destination) -> formatted time of each transfer of a plan."""
    texts: dict[tuple[str, str], str] = {}
    for value in costs.graph.values:
        if value.producer == OUTSIDE:
            continue
        for destination, _, ticks in costs.transfers(value, plan):
            if destination >= 0:
                text = f"{time_text(ticks / TICKS)} for {value.size:,.0f} bytes"
                texts[costs.graph.units[value.producer].names[0], names[destination]] = text
    return texts
