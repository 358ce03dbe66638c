"""``placement="auto"``: the plan of least cost by a cost model, for one call or for many in flight.

A plan assigns every node a device. Its cost for latency is the makespan of one call, a list schedule in which
independent work overlaps (`plan_costs`); for throughput it is the time of the busiest queue for one call. Times of ops
and transfers come from a `CostModel`; a value is transferred to a device at most once. The search (`plan_search`)
starts from the best single device and the plan of least work, and its result is never worse than these.

If a model exceeds the memory limit of its fastest device, the choice of the part that runs there matters most. Of all
consecutive units that fit (windows), those that save most time are starting points of the search (`best_window`).
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
    from ..onnx.onnx_model import ModelSource


_MAX_WINDOWS = 50


def best_window(costs: PlanCosts) -> list[list[int]]:
    """The best plan with consecutive units on a limited device, in a list; empty without limits or if none fits."""
    plans: list[list[int]] = []
    for limited in costs.limits:
        for other in range(costs.devices):
            if other != limited:
                plans += _window_plans(costs, limited, other)
    return sorted(plans, key=lambda plan: (costs.excess_bytes(plan), call_ticks(costs, plan)))[:1]


def _window_plans(costs: PlanCosts, limited: int, other: int) -> list[list[int]]:
    """Plans with a window on the limited device and the rest on the other, sorted by saved time."""
    units = costs.graph.units
    capacity = costs.limits[limited] - costs.values_on(limited, [limited] * len(units))
    savings = [ticks[other] - ticks[limited] for ticks in costs.ops]
    readers: Counter[int] = Counter()  # of each constant, within the window
    start, nbytes, gain = 0, 0.0, 0
    windows: list[tuple[int, int, int]] = []
    for end, unit in enumerate(units):
        gain += savings[end]
        for constant, size in unit.weights.items():
            readers[constant] += 1
            nbytes += size * PADDING if readers[constant] == 1 else 0.0
        while nbytes > capacity and start <= end:
            gain -= savings[start]
            for constant, size in units[start].weights.items():
                readers[constant] -= 1
                nbytes -= size * PADDING if readers[constant] == 0 else 0.0
            start += 1
        windows.append((gain, start, end + 1))
    plans = []
    for gain, start, end in sorted(windows, reverse=True)[:_MAX_WINDOWS]:
        if gain > 0:
            plans.append([limited if start <= unit < end else other for unit in range(len(units))])
    return plans


# Latency on several devices must be at most this fraction of the best single device's, because the cost model neglects
# fusion across devices and part of the overhead of steps and transfers.
_MAX_TIME_RATIO = 0.9

# Default limit in percent of a GPU's memory; the driver, kernels and other calls in flight need the rest.
_GPU_MEMORY_PERCENT = 85

MemoryLimit: TypeAlias = int | str | Mapping[str, int | str]  # type of `memory_limit` in `auto_placement`


@dataclass(frozen=True)
class AutoPlacement:
    """A plan.

    Attributes
    ----------
    assignments : mapping
        Node name -> device, ``"kind:i"``: a `placement=` for `from_onnx` if glob characters in names are escaped.
    vdevices : mapping
        Node name -> vdevice.
    estimate_seconds : float
        Estimate by the cost model: the time of one call for latency, the time between calls for throughput.
    single_device_estimates : mapping
        Device -> estimate with all nodes on it; at least `estimate_seconds`.
    objective : str
        "latency" or "throughput".
    busy_seconds : mapping
        Device -> time that its queue works for one call.
    reasons : mapping
        Node name -> reason for its device, with the estimates.
    transfers : mapping
        (node name, device) -> time of the transfer of the node's result to the device, formatted.
    assumed_sizes : mapping
        Symbolic dimension -> size that the estimate assumes.
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
    mod_or_model : IRModule, or a model as in `from_onnx`
        For a module the bindings of its function "main" are placed, for an ONNX model its nodes.
    vdevices : VDeviceEntry or iterable of VDeviceEntry
        Devices, as in `from_onnx`.
    cost_model : CostModel, optional
        Default ``CostModel.measured(vdevices, objective)``.
    objective : str, optional
        "latency" minimizes the time of one call, "throughput" the time between calls with several in flight.
    memory_limit : int, str or mapping, optional
        Maximum memory for weights, inputs, results and intermediate values on each device: bytes or text (``"4GB"``),
        or a mapping from devices (``"cuda:0"``) to these. The default is most of the memory of GPUs of this machine.

    Raises
    ------
    PlacementError
        If a module lacks a Relax function "main", the objective is invalid, or no plan fits the limit.
    FrontendError
        If an ONNX model cannot be imported.
    VDeviceError
        If the vdevices are invalid or the cost model does not fit them.
    """
    check_objective(objective)
    devices = parse_vdevices(vdevices)
    if not isinstance(mod_or_model, tvm.IRModule):
        return place_graph(import_onnx(mod_or_model), devices, cost_model, objective, memory_limit)
    main = {gv.name_hint: func for gv, func in mod_or_model.functions.items()}.get("main")
    if not isinstance(main, relax.Function):
        raise PlacementError('the module has no Relax function "main" to place')
    model = _checked_model(cost_model, devices, objective)
    bindings = [binding for block in main.body.blocks for binding in block.bindings]
    graph = work_graph(main.params, bindings, [main.body.body], lambda var: str(var.name), model.symbolic_extent)
    return _plan(graph, devices, model, objective, memory_limit)


def place_graph(
    imported: ImportedGraph,
    vdevices: Sequence[tvm.relax.VDevice],
    cost_model: CostModel | None,
    objective: Objective,
    memory_limit: MemoryLimit | None = None,
) -> AutoPlacement:
    """Choose a device for every node of an imported ONNX graph."""
    model = _checked_model(cost_model, vdevices, objective)
    owners = imported.owners
    loops = {loop.gv: loop.bindings for loop in imported.loops}
    content = imported.params, imported.bindings, imported.outputs
    graph = work_graph(*content, lambda var: owners[var].name, model.symbolic_extent, loops)
    return _plan(graph, vdevices, model, objective, memory_limit)


def _checked_model(
    cost_model: CostModel | None, vdevices: Sequence[tvm.relax.VDevice], objective: Objective
) -> CostModel:
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

    single_device_plans = [[device] * len(graph.units) for device in range(len(vdevices))]
    start = min(single_device_plans, key=lambda plan: (*costs.excess_bytes(plan), ticks(plan)))
    window = best_window(costs)
    best = best_plan(costs, start, objective, extra_starts=window)
    if objective == "latency":
        # Plans with few transfers come first.
        plans, best = [*window, best], start
        for plan in plans:
            if costs.excess_bytes(plan) < costs.excess_bytes(best) or (
                costs.excess_bytes(plan) == costs.excess_bytes(best) and ticks(plan) <= _MAX_TIME_RATIO * ticks(best)
            ):
                best = plan
    if any(costs.excess_bytes(best)):
        raise PlacementError(_excess_message(costs, best, vdevices))
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    assignments = [(name, device) for unit, device in zip(graph.units, best, strict=True) for name in unit.names]
    return AutoPlacement(
        {name: names[device] for name, device in assignments},
        {name: vdevices[device] for name, device in assignments},
        ticks(best) / TICKS,
        {name: ticks(single) / TICKS for name, single in zip(names, single_device_plans, strict=True)},
        objective,
        {name: busy / TICKS for name, busy in zip(names, costs.busy(best), strict=True)},
        plan_reasons(costs, best, names),
        transfer_times(costs, best, names),
        graph.assumed_sizes,
        model.figures,
    )


def memory_limits(memory_limit: MemoryLimit | None, vdevices: Sequence[tvm.relax.VDevice]) -> dict[int, int]:
    """Index of a vdevice -> limit; by default most of the memory of GPUs of this machine."""
    if memory_limit is None:
        return {
            index: _GPU_MEMORY_PERCENT * total // 100 for index, total in enumerate(map(_gpu_memory, vdevices)) if total
        }
    if not isinstance(memory_limit, Mapping):
        return dict.fromkeys(range(len(vdevices)), bytes_of_text(memory_limit, "memory_limit"))
    return {
        vdevice_index(lookup(device, vdevices), vdevices): bytes_of_text(value, f"memory_limit[{device!r}]")
        for device, value in memory_limit.items()
    }


def _gpu_memory(vdevice: tvm.relax.VDevice) -> int:
    """Bytes of memory of a GPU of this machine, 0 for other devices."""
    if is_cpu(vdevice) or not are_present([vdevice]):
        return 0
    return int(tvm.runtime.device(vdevice.target.kind.name, int(vdevice.vdevice_id)).total_global_memory or 0)


def _excess_message(costs: PlanCosts, plan: Sequence[int], vdevices: Sequence[tvm.relax.VDevice]) -> str:
    bytes_by_device = {device: costs.bytes_on(device, plan) for device in costs.limits}
    excess = ", ".join(
        f"{nbytes:,} bytes on {device_name(vdevices[device], vdevices)}, where the limit is {costs.limits[device]:,}"
        for device, nbytes in bytes_by_device.items()
        if nbytes > costs.limits[device]
    )
    return f"no placement within memory_limit was found: the best one takes {excess}; expected limits that leave more"
