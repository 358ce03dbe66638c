"""``placement="auto"``: the plan of least estimated time for one call.

A plan gives every node a device; its cost is the sum of what ops and transfers take by a `CostModel`, a value going to
a device at most once. For two devices the cheapest plan is a minimum cut, found exactly. For more, pairs of devices
exchange nodes by minimum cuts. The search starts from the best single device and never accepts a worse plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tvm
from tvm import relax

from ..errors import PlacementError
from ..vdevice import device_name, parse_vdevices
from .cost_model import CostModel
from .min_cut import INFINITE, Network
from .work_graph import OUTSIDE, WorkGraph, work_graph

if TYPE_CHECKING:
    from ..make_vdevice import VDeviceEntry
    from .onnx_importer import ImportedGraph
    from .onnx_model import ModelSource

# Cuts are found on whole numbers, so that they are the same everywhere: picoseconds.
_TICKS = 1e12

# Rounds over all pairs of devices; later ones gain next to nothing.
_MAX_ROUNDS = 5


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
        What one call takes by the cost model.
    single_device_estimates : mapping
        Device -> what a call takes with everything on it; none is below `estimate_seconds`.
    """

    assignments: Mapping[str, str]
    vdevices: Mapping[str, tvm.relax.VDevice]
    estimate_seconds: float
    single_device_estimates: Mapping[str, float]


def auto_placement(
    mod_or_model: tvm.IRModule | ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry],
    cost_model: CostModel | None = None,
) -> AutoPlacement:
    """Choose a device for every node.

    Parameters
    ----------
    mod_or_model : IRModule, or what `from_onnx` takes
        A module is planned by its function "main", per binding; an ONNX model per node.
    vdevices : as for `from_onnx`
    cost_model : CostModel, optional
        Default ``CostModel.for_vdevices(vdevices)``.

    Raises
    ------
    PlacementError
        If a module has no Relax function "main".
    FrontendError
        If an ONNX model cannot be imported.
    VDeviceError
        If the vdevices, or the cost model for them, are no good.
    """
    devices = parse_vdevices(vdevices)
    if not isinstance(mod_or_model, tvm.IRModule):
        from .onnx import import_onnx

        return place_graph(import_onnx(mod_or_model), devices, cost_model)
    found = {gv.name_hint: func for gv, func in mod_or_model.functions.items()}.get("main")
    if not isinstance(found, relax.Function):
        raise PlacementError('the module has no Relax function "main" to place')
    model = _checked(cost_model, devices)
    bindings = [binding for block in found.body.blocks for binding in block.bindings]
    graph = work_graph(found.params, bindings, [found.body.body], lambda var: str(var.name), model.symbolic_extent)
    return _plan(graph, devices, model)


def place_graph(
    imported: ImportedGraph, vdevices: Sequence[tvm.relax.VDevice], cost_model: CostModel | None
) -> AutoPlacement:
    """Choose a device for every node of an imported ONNX graph."""
    model = _checked(cost_model, vdevices)
    owners = imported.owners
    graph = work_graph(
        imported.params, imported.bindings, imported.outputs, lambda var: owners[var].name, model.symbolic_extent
    )
    return _plan(graph, vdevices, model)


def _checked(cost_model: CostModel | None, vdevices: Sequence[tvm.relax.VDevice]) -> CostModel:
    model = CostModel.for_vdevices(vdevices) if cost_model is None else cost_model
    model.check(len(vdevices))
    return model


def _plan(graph: WorkGraph, vdevices: Sequence[tvm.relax.VDevice], model: CostModel) -> AutoPlacement:
    planner = _Planner(graph, model)
    singles = [planner.cost([device] * len(graph.units)) for device in range(len(vdevices))]
    best = min(range(len(vdevices)), key=singles.__getitem__)
    chosen = planner.improve([best] * len(graph.units))
    names = [device_name(vdevice, vdevices) for vdevice in vdevices]
    placed = [(name, device) for unit, device in zip(graph.units, chosen, strict=True) for name in unit.names]
    return AutoPlacement(
        {name: names[device] for name, device in placed},
        {name: vdevices[device] for name, device in placed},
        planner.cost(chosen) / _TICKS,
        {name: single / _TICKS for name, single in zip(names, singles, strict=True)},
    )


class _Planner:
    """Costs of one graph under one model, in whole ticks, and the search over plans (a device per unit)."""

    def __init__(self, graph: WorkGraph, model: CostModel) -> None:
        self._graph = graph
        self._model = model
        self._op_cost = [
            [
                sum(_ticks(model.op_seconds(flops, moved, device)) for flops, moved in unit.ops)
                for device in range(len(model.devices))
            ]
            for unit in graph.units
        ]

    def cost(self, plan: Sequence[int]) -> int:
        """Ticks one call takes by this plan."""
        total = sum(costs[device] for costs, device in zip(self._op_cost, plan, strict=True))
        for value in self._graph.values:
            source = self._where(value.maker, plan)
            total += sum(
                self._transfer(value.size, source, destination)
                for destination in {self._where(reader, plan) for reader in value.readers}
            )
        return total

    def improve(self, plan: list[int]) -> list[int]:
        """The best plan that exchanges between pairs of devices lead to from this one."""
        cost = self.cost(plan)
        pairs = list(itertools.combinations(range(len(self._model.devices)), 2))
        # With two devices the first cut is the best one: nothing is left to improve.
        for _ in range(_MAX_ROUNDS if len(pairs) > 1 else 1):
            before = cost
            for first, second in pairs:
                candidate = self._exchange(plan, first, second)
                candidate_cost = self.cost(candidate)
                if candidate_cost < cost:
                    plan, cost = candidate, candidate_cost
            if cost == before:
                break
        return plan

    def _exchange(self, plan: list[int], first: int, second: int) -> list[int]:
        """The best plan among those that move units of two devices between these two: a minimum cut.

        The source's side is `first`. A value made there costs its transfer once if any reader is on the other side:
        an extra node behind its maker, which each such reader pulls over to itself; likewise in the other direction.
        What does not move (units elsewhere, the caller) stands on neither side: its transfers are paid to the
        source or the sink.
        """
        active = [unit for unit, device in enumerate(plan) if device in (first, second)]
        node_of = {unit: node for node, unit in enumerate(active)}
        values = [value for value in self._graph.values if not node_of.keys().isdisjoint((value.maker, *value.readers))]
        source = len(node_of) + 2 * len(values)
        sink = source + 1
        network = Network(sink + 1)
        # What it costs a node to be on each side, transfers to readers that do not move included.
        costs = [[self._op_cost[unit][first], self._op_cost[unit][second]] for unit in node_of]
        for index, value in enumerate(values):
            movable = [node_of[reader] for reader in value.readers if reader in node_of]
            fixed = {self._where(reader, plan) for reader in value.readers if reader not in node_of}
            maker = node_of.get(value.maker)
            if maker is None:
                place = self._where(value.maker, plan)
                before, after, on_first, on_second = source, sink, place, place
            else:
                before, after, on_first, on_second = maker, maker, first, second
                costs[maker][0] += sum(self._transfer(value.size, first, place) for place in fixed)
                costs[maker][1] += sum(self._transfer(value.size, second, place) for place in fixed)
            extra = len(node_of) + 2 * index
            if second not in fixed:  # else it goes there anyway
                network.add_arc(before, extra, self._transfer(value.size, on_first, second))
                for reader in movable:
                    network.add_arc(extra, reader, INFINITE)
            if first not in fixed:
                network.add_arc(extra + 1, after, self._transfer(value.size, on_second, first))
                for reader in movable:
                    network.add_arc(reader, extra + 1, INFINITE)
        for node, (cost_first, cost_second) in enumerate(costs):
            common = min(cost_first, cost_second)
            network.add_arc(source, node, cost_second - common)
            network.add_arc(node, sink, cost_first - common)
        with_source = network.source_side(source, sink)
        return [
            device if unit not in node_of else first if with_source[node_of[unit]] else second
            for unit, device in enumerate(plan)
        ]

    def _where(self, unit: int, plan: Sequence[int]) -> int:
        return self._model.host if unit == OUTSIDE else plan[unit]

    def _transfer(self, size: float, source: int, destination: int) -> int:
        return _ticks(self._model.transfer_seconds(size, source, destination))


def _ticks(seconds: float) -> int:
    return round(seconds * _TICKS)
