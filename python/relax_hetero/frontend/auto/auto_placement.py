"""``placement="auto"``: the plan that costs least by a cost model, for one call or for many in flight.

A plan gives every node a device. For latency its cost is the time of one call, in which independent work on different
devices overlaps: a list schedule (`plan_costs`). For throughput it is the time between calls that follow each other
through the queues: the work of the busiest queue for one call. Both sum the times of ops and transfers from a
`CostModel`; a value goes to a device at most once. The search (`plan_search`) starts from the best single device and
the plan of least work, and never ends with a worse one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import tvm
from tvm import relax

from ...errors import PlacementError
from ...target.vdevice import device_name, is_cpu, lookup, parse_vdevices, vdevice_index
from ...vm.device.memory_limit import bytes_of_text
from ..onnx.importer import import_onnx
from .cost_model import CostModel, Objective, check_objective
from .measure_devices import are_present
from .placement_reasons import plan_reasons, transfer_times
from .plan_costs import PADDING, TICKS, PlanCosts, call_ticks
from .plan_search import best_plan
from .work_graph import WorkGraph, work_graph

if TYPE_CHECKING:
    from ...target.make_vdevice import VDeviceEntry
    from ..onnx.importer import ImportedGraph
    from ..onnx.model import ModelSource


# Plans within limits of memory: as much of the program in a row as fits on a device, the rest on another.
#
# Where a model does not fit on its fastest device, what matters is which part of it runs there. Transfers are paid at
# the two ends of the part alone. Of all parts that fit and cannot be longer, those that spare most time are starting
# points of the search, which moves single units on.

_MAX_WINDOWS = 50


def best_window(costs: PlanCosts) -> list[list[int]]:
    """The best plan of this kind, in a list; none where no device has a limit, or no part fits."""
    found: list[list[int]] = []
    for limited in costs.limits:
        for other in range(costs.devices):
            if other != limited:
                found += _windows(costs, limited, other)
    return sorted(found, key=lambda plan: (costs.excess_bytes(plan), call_ticks(costs, plan)))[:1]


def _windows(costs: PlanCosts, limited: int, other: int) -> list[list[int]]:
    """Plans with a window on the limited device, those first that take most work from the other."""
    units = costs.graph.units
    room = costs.limits[limited] - costs.values_on(limited, [limited] * len(units))
    spared = [ticks[other] - ticks[limited] for ticks in costs.ops]
    readers: Counter[int] = Counter()  # of each constant, in the window
    begin, nbytes, gain = 0, 0.0, 0
    windows: list[tuple[int, int, int]] = []
    for end, unit in enumerate(units):
        gain += spared[end]
        for constant, size in unit.weights.items():
            readers[constant] += 1
            nbytes += size * PADDING if readers[constant] == 1 else 0.0
        while nbytes > room and begin <= end:
            gain -= spared[begin]
            for constant, size in units[begin].weights.items():
                readers[constant] -= 1
                nbytes -= size * PADDING if readers[constant] == 0 else 0.0
            begin += 1
        windows.append((gain, begin, end + 1))
    plans = []
    for gain, begin, end in sorted(windows, reverse=True)[:_MAX_WINDOWS]:
        if gain > 0:
            plans.append([limited if begin <= unit < end else other for unit in range(len(units))])
    return plans


# Several devices have to take a call down to this share of the time on one: the model knows nothing of kernels that are
# fused only where their nodes are on one device, nor of all that steps and transfers cost.
_MIN_GAIN = 0.9

# Percent of the memory of a GPU that a model may take where nobody says a limit: the driver, kernels and other calls in
# flight take some.
_GPU_MEMORY_FRACTION = 85

MemoryLimit: TypeAlias = int | str | Mapping[str, int | str]
"""As `auto_placement` takes it."""


@dataclass(frozen=True)
class AutoPlacement:
    """A plan.

    Attributes
    ----------
    assignments : mapping
        Node name -> device, ``"kind:i"``: a `placement=` for `from_onnx`, up to glob characters in names.
    vdevices : mapping
        The same as vdevices.
    estimate_seconds : float
        Estimate by the cost model: the time of one call for latency, the time between calls for throughput.
    single_device_estimates : mapping
        Device -> the same with everything on it; none is below `estimate_seconds`.
    objective : str
        "latency" or "throughput".
    busy_seconds : mapping
        Device -> how long its queue works for one call.
    reasons : mapping
        Node name -> why it is on its device, with the figures.
    transfers : mapping
        (node name, device) -> time of the transfer of the node's result to the device, as text.
    assumed_sizes : mapping
        Symbolic dimension -> the size that the estimate assumes.
    figures : str
        Source of the costs: `CostModel.figures`.
    """

    assignments: Mapping[str, str]
    vdevices: Mapping[str, tvm.relax.VDevice]
    estimate_seconds: float
    single_device_estimates: Mapping[str, float]
    objective: Objective
    busy_seconds: Mapping[str, float]
    reasons: Mapping[str, str] = field(default_factory=dict)
    transfers: Mapping[tuple[str, str], str] = field(default_factory=dict)
    assumed_sizes: Mapping[str, int] = field(default_factory=dict)
    figures: str = ""

    def to_json(self) -> dict[str, Any]:
        """The estimates as JSON data."""
        return {
            "objective": self.objective,
            "seconds": self.estimate_seconds,
            "busy_seconds": dict(self.busy_seconds),
            "single_device_seconds": dict(self.single_device_estimates),
            "assumed_sizes": dict(self.assumed_sizes),
            "figures": self.figures,
        }


def auto_placement(
    mod_or_model: tvm.IRModule | ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry],
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
    memory_limit: MemoryLimit | None = None,
) -> AutoPlacement:
    """Choose a device for every node.

    Parameters
    ----------
    mod_or_model : IRModule, or what `from_onnx` takes
        A module is planned by its function "main", per binding; an ONNX model per node.
    vdevices : VDeviceEntry or iterable of VDeviceEntry
        Devices as `from_onnx` takes them.
    cost_model : CostModel, optional
        Default ``CostModel.measured(vdevices, objective)``.
    objective : str, optional
        "latency": the least time for one call. "throughput": the least time between calls, of which several are in
        flight.
    memory_limit : int, str or mapping, optional
        The most that weights, inputs, results and values between nodes may take on each device: bytes or text
        (``"4GB"``), or a mapping from devices (``"cuda:0"``) to these. By default most of the memory of GPUs that are
        here.

    Raises
    ------
    PlacementError
        If a module has no Relax function "main", the objective is neither, or no plan that is found fits the limit.
    FrontendError
        If an ONNX model cannot be imported.
    VDeviceError
        If the vdevices, or the cost model for them, are no good.
    """
    check_objective(objective)
    devices = parse_vdevices(vdevices)
    if not isinstance(mod_or_model, tvm.IRModule):
        return place_graph(import_onnx(mod_or_model), devices, cost_model, objective, memory_limit)
    found = {gv.name_hint: func for gv, func in mod_or_model.functions.items()}.get("main")
    if not isinstance(found, relax.Function):
        raise PlacementError('the module has no Relax function "main" to place')
    model = _checked(cost_model, devices, objective)
    bindings = [binding for block in found.body.blocks for binding in block.bindings]
    graph = work_graph(found.params, bindings, [found.body.body], lambda var: str(var.name), model.symbolic_extent)
    return _plan(graph, devices, model, objective, memory_limit)


def place_graph(
    imported: ImportedGraph,
    vdevices: Sequence[tvm.relax.VDevice],
    cost_model: CostModel | None,
    objective: Objective,
    memory_limit: MemoryLimit | None = None,
) -> AutoPlacement:
    """Choose a device for every node of an imported ONNX graph."""
    model = _checked(cost_model, vdevices, objective)
    owners = imported.owners
    loops = {loop.gv: loop.bindings for loop in imported.loops}
    content = imported.params, imported.bindings, imported.outputs
    graph = work_graph(*content, lambda var: owners[var].name, model.symbolic_extent, loops)
    return _plan(graph, vdevices, model, objective, memory_limit)


def _checked(cost_model: CostModel | None, vdevices: Sequence[tvm.relax.VDevice], objective: Objective) -> CostModel:
    model = CostModel.measured(vdevices, objective) if cost_model is None else cost_model
    model.check(len(vdevices))
    return model


def _plan(
    graph: WorkGraph,
    vdevices: Sequence[tvm.relax.VDevice],
    model: CostModel,
    objective: Objective,
    memory_limit: MemoryLimit | None,
) -> AutoPlacement:
    cpus = [index for index, vdevice in enumerate(vdevices) if is_cpu(vdevice)]
    costs = PlanCosts(graph, model, memory_limits(memory_limit, vdevices), cpus)

    def ticks(plan: Sequence[int]) -> int:
        return call_ticks(costs, plan) if objective == "latency" else max(costs.busy_queues(plan))

    def order(plan: Sequence[int]) -> tuple[int, ...]:
        return (*costs.excess_bytes(plan), ticks(plan))

    singles = [[device] * len(graph.units) for device in range(len(vdevices))]
    start = min(singles, key=order)
    window = best_window(costs)
    chosen = best_plan(costs, start, objective, others=window)
    if objective == "latency":
        # From plans with few transfers to those with many.
        plans, chosen = [*window, chosen], start
        for plan in plans:
            if costs.excess_bytes(plan) < costs.excess_bytes(chosen) or (
                costs.excess_bytes(plan) == costs.excess_bytes(chosen) and ticks(plan) <= _MIN_GAIN * ticks(chosen)
            ):
                chosen = plan
    if any(costs.excess_bytes(chosen)):
        raise PlacementError(_too_large(costs, chosen, vdevices))
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    placed = [(name, device) for unit, device in zip(graph.units, chosen, strict=True) for name in unit.names]
    return AutoPlacement(
        {name: names[device] for name, device in placed},
        {name: vdevices[device] for name, device in placed},
        ticks(chosen) / TICKS,
        {name: ticks(single) / TICKS for name, single in zip(names, singles, strict=True)},
        objective,
        {name: busy / TICKS for name, busy in zip(names, costs.busy(chosen), strict=True)},
        plan_reasons(costs, chosen, names),
        transfer_times(costs, chosen, names),
        graph.assumed_sizes,
        model.figures,
    )


def memory_limits(memory_limit: MemoryLimit | None, vdevices: Sequence[tvm.relax.VDevice]) -> dict[int, int]:
    """The limits by position in the list; by default most of the memory of GPUs that are here."""
    if memory_limit is None:
        return {
            index: _GPU_MEMORY_FRACTION * total // 100 for index, total in enumerate(map(_memory_of, vdevices)) if total
        }
    if not isinstance(memory_limit, Mapping):
        return dict.fromkeys(range(len(vdevices)), bytes_of_text(memory_limit, "memory_limit"))
    return {
        vdevice_index(lookup(device, vdevices), vdevices): bytes_of_text(value, f"memory_limit[{device!r}]")
        for device, value in memory_limit.items()
    }


def _memory_of(vdevice: tvm.relax.VDevice) -> int:
    """Bytes of memory of a GPU that is here, 0 of other devices."""
    if is_cpu(vdevice) or not are_present([vdevice]):
        return 0
    return int(tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)).total_global_memory or 0)


def _too_large(costs: PlanCosts, plan: Sequence[int], vdevices: Sequence[tvm.relax.VDevice]) -> str:
    taken = {device: costs.bytes_on(device, plan) for device in costs.limits}
    found = ", ".join(
        f"{nbytes:,} bytes on {device_name(vdevices[device], vdevices)}, where the limit is {costs.limits[device]:,}"
        for device, nbytes in taken.items()
        if nbytes > costs.limits[device]
    )
    return f"no placement within memory_limit was found: the best one takes {found}; expected limits that leave more"
