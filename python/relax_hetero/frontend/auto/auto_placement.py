"""``placement="auto"``: the plan that costs least by a cost model, for one call or for many in flight.

A plan gives every node a device. For latency its cost is the time of one call, in which independent work on different
devices overlaps: a list schedule (`plan_costs`). For throughput it is the time between calls that follow each other
through the queues: the work of the busiest queue for one call. Both sum the times of ops and transfers from a
`CostModel`; a value goes to a device at most once. The search (`plan_search`) starts from the best single device and
the plan of least work, and never ends with a worse one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import tvm
from tvm import relax

from ...errors import PlacementError
from ...target.vdevice import device_name, parse_vdevices
from ..onnx.importer import import_onnx
from .cost_model import CostModel, Objective, check_objective
from .least_work import least_work
from .plan_costs import TICKS, PlanCosts, call_ticks
from .plan_search import best_plan
from .work_graph import WorkGraph, work_graph

if TYPE_CHECKING:
    from ...target.make_vdevice import VDeviceEntry
    from ..onnx.importer import ImportedGraph
    from ..onnx.model import ModelSource


# Overlap within a call has to take it down to this share of the time without: the model knows nothing of kernels that
# are fused only where their nodes are on one device.
_BELIEVED = 0.9


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
        By the cost model: the time of one call for latency, the time between calls for throughput.
    single_device_estimates : mapping
        Device -> the same with everything on it; none is below `estimate_seconds`.
    objective : str
        "latency" or "throughput".
    busy_seconds : mapping
        Device -> how long its queue works for one call.
    """

    assignments: Mapping[str, str]
    vdevices: Mapping[str, tvm.relax.VDevice]
    estimate_seconds: float
    single_device_estimates: Mapping[str, float]
    objective: Objective
    busy_seconds: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """The estimates as JSON data."""
        return {
            "objective": self.objective,
            "seconds": self.estimate_seconds,
            "busy_seconds": dict(self.busy_seconds),
            "single_device_seconds": dict(self.single_device_estimates),
        }


def auto_placement(
    mod_or_model: tvm.IRModule | ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry],
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
) -> AutoPlacement:
    """Choose a device for every node.

    Parameters
    ----------
    mod_or_model : IRModule, or what `from_onnx` takes
        A module is planned by its function "main", per binding; an ONNX model per node.
    vdevices : as for `from_onnx`
    cost_model : CostModel, optional
        Default ``CostModel.for_vdevices(vdevices, objective)``.
    objective : str, optional
        "latency": the least time for one call. "throughput": the least time between calls, of which several are in
        flight.

    Raises
    ------
    PlacementError
        If a module has no Relax function "main", or the objective is neither.
    FrontendError
        If an ONNX model cannot be imported.
    VDeviceError
        If the vdevices, or the cost model for them, are no good.
    """
    check_objective(objective)
    devices = parse_vdevices(vdevices)
    if not isinstance(mod_or_model, tvm.IRModule):
        return place_graph(import_onnx(mod_or_model), devices, cost_model, objective)
    found = {gv.name_hint: func for gv, func in mod_or_model.functions.items()}.get("main")
    if not isinstance(found, relax.Function):
        raise PlacementError('the module has no Relax function "main" to place')
    model = _checked(cost_model, devices, objective)
    bindings = [binding for block in found.body.blocks for binding in block.bindings]
    graph = work_graph(found.params, bindings, [found.body.body], lambda var: str(var.name), model.symbolic_extent)
    return _plan(graph, devices, model, objective)


def place_graph(
    imported: ImportedGraph,
    vdevices: Sequence[tvm.relax.VDevice],
    cost_model: CostModel | None,
    objective: Objective,
) -> AutoPlacement:
    """Choose a device for every node of an imported ONNX graph."""
    model = _checked(cost_model, vdevices, objective)
    owners = imported.owners
    graph = work_graph(
        imported.params, imported.bindings, imported.outputs, lambda var: owners[var].name, model.symbolic_extent
    )
    return _plan(graph, vdevices, model, objective)


def _checked(cost_model: CostModel | None, vdevices: Sequence[tvm.relax.VDevice], objective: Objective) -> CostModel:
    model = CostModel.for_vdevices(vdevices, objective) if cost_model is None else cost_model
    model.check(len(vdevices))
    return model


def _plan(
    graph: WorkGraph, vdevices: Sequence[tvm.relax.VDevice], model: CostModel, objective: Objective
) -> AutoPlacement:
    costs = PlanCosts(graph, model)

    def ticks(plan: Sequence[int]) -> int:
        return call_ticks(costs, plan) if objective == "latency" else max(costs.busy_queues(plan))

    singles = [[device] * len(graph.units) for device in range(len(vdevices))]
    start = min(singles, key=ticks)
    chosen = best_plan(costs, start, objective)
    if objective == "latency":
        plain = min(start, least_work(costs, start), key=ticks)
        chosen = chosen if ticks(chosen) <= _BELIEVED * ticks(plain) else plain
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    placed = [(name, device) for unit, device in zip(graph.units, chosen, strict=True) for name in unit.names]
    return AutoPlacement(
        {name: names[device] for name, device in placed},
        {name: vdevices[device] for name, device in placed},
        ticks(chosen) / TICKS,
        {name: ticks(single) / TICKS for name, single in zip(names, singles, strict=True)},
        objective,
        {name: busy / TICKS for name, busy in zip(names, costs.busy(chosen), strict=True)},
    )
