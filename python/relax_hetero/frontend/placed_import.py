"""Conversion of an imported graph to a module with names, a signature, and a placement if there are devices."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import tvm

from ..artifact.messages import AUTO
from ..errors import FrontendError
from ..target.vdevice import parse_vdevices, with_vdevices
from ..transform.ir.module_attrs import DEFAULTS
from ..transform.ir.remarks import remarks_of, with_remarks
from ..transform.ir.reports import PlacementEntry, PlacementReport
from ..transform.placement.realize_vdevice import realize_vdevice
from ..transform.shard.partition_by_mesh import partition_by_mesh
from .auto.auto_placement import AutoPlacement, place_graph
from .auto.cost_model import check_objective
from .narrow_storage import with_narrow_storage
from .onnx.coded_strings import Strings
from .onnx.importer import ImportedGraph
from .onnx.name_bindings import DeviceOf, build_function, build_loops, origins_of
from .onnx.node_names import NodeInfo, variable_name, walk_nodes
from .onnx.placement_rules import PlacementRules, assign_devices, matching_patterns
from .parallel_devices import with_split_batches

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .auto.cost_model import CostModel, Objective

_ONLY_AUTO = "which only placement='auto' reads; leave it out, or give that placement"

# Suffix of further variables of a node.
_SUFFIX = re.compile(r"(_[0-9a-z]+|@[0-9]+)$")


@dataclass(frozen=True)
class ImportSource:
    """Result of a front end."""

    graph: ImportedGraph  # the bindings with their nodes
    nodes: list[NodeInfo]  # the nodes in order
    output_names: list[str]
    strings: Strings | None = None  # table of coded strings, or None


def check_placement(
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None,
    placement: PlacementRules | Literal["auto"] | None,
    cost_model: CostModel | None,
    objective: Objective,
    memory_limit: MemoryLimit | None,
) -> list[tvm.relax.VDevice] | None:
    """Check the placement arguments of an import and return its devices, or None.

    Raises FrontendError, PlacementError, VDeviceError if the arguments contradict each other, or one has no effect.
    """
    check_objective(objective)
    if vdevices is None and (placement is not None or cost_model is not None):
        raise FrontendError("placement and cost_model choose among vdevices, which are not given; give vdevices, too")
    if isinstance(placement, str) and placement != "auto":
        raise FrontendError(
            f"placement is {placement!r}; expected a mapping of patterns to devices ({{'*': 'cuda:0'}}), or 'auto'"
        )
    if cost_model is not None and placement != "auto":
        raise FrontendError(f"cost_model is given, {_ONLY_AUTO}")
    if objective != "latency" and placement != "auto":
        raise FrontendError(f"objective is {objective!r}, {_ONLY_AUTO}")
    if memory_limit is not None and placement != "auto":
        raise FrontendError(f"memory_limit is given, {_ONLY_AUTO}")
    return None if vdevices is None else parse_vdevices(vdevices)


def placed_module(
    source: ImportSource,
    devices: list[tvm.relax.VDevice] | None,
    placement: PlacementRules | Literal["auto"] | None,
    cost_model: CostModel | None,
    objective: Objective,
    memory_limit: MemoryLimit | None,
    parallel: tuple[int, int] = (1, 1),
) -> tvm.IRModule:
    """Build and place the module of an imported graph; the arguments passed `check_placement`.

    `parallel` is the number of parts of a batch, and of devices that share each.
    """
    source = replace(source, graph=with_narrow_storage(source.graph))
    graph, nodes = source.graph, source.nodes
    if devices is None:
        return _module(source)
    rules = None if isinstance(placement, str) else placement or {}
    devices_by_node = None if rules is None else assign_devices(nodes, rules, devices)
    plan = place_graph(graph, devices, cost_model, objective, memory_limit) if devices_by_node is None else None
    assigned = plan.vdevices if plan is not None else devices_by_node or {}
    mod = _module(source, lambda node: assigned[node.name])
    mod = with_vdevices(mod, devices)
    if parallel[0] > 1:
        mod = with_split_batches(mod, *parallel)
    placed, report = realize_vdevice(partition_by_mesh(mod), insert_copies=True)
    return with_reasons(placed, report, nodes, plan or rules or {})


def _module(source: ImportSource, device_of: DeviceOf | None = None) -> tvm.IRModule:
    graph = source.graph
    func = build_function(graph, device_of)
    names = {
        "global_symbol": "main",
        "num_input": len(func.params) - len(graph.defaults),
        "input_names": list(graph.input_names),
        "output_names": source.output_names,
    }
    if source.strings is not None:
        names["strings"] = source.strings.table
        names["string_inputs"], names["string_outputs"] = source.strings.inputs, source.strings.outputs
    if graph.defaults:
        names[DEFAULTS] = {
            param.name: graph.defaults[name]
            for name, param in zip(graph.input_names, func.params, strict=True)
            if name in graph.defaults
        }
    if graph.bounds:
        names["tir_var_upper_bound"] = graph.bounds
    mod = graph.module.clone()
    mod["main"] = func.with_attrs(names)
    for gv, loop in build_loops(graph, device_of).items():
        mod[gv] = loop
    return with_remarks(mod, origins=origins_of(graph))


def with_reasons(
    mod: tvm.IRModule, report: PlacementReport, nodes: list[NodeInfo], placement: PlacementRules | AutoPlacement
) -> tvm.IRModule:
    """Add the placement report to a module's remarks; the reason of an op is the rule that matched its node.

    RealizeVDevice's reasons are the annotations that the import created from rules. Estimates of a cost model are
    another remark.
    """
    if isinstance(placement, AutoPlacement):
        reasons = {variable_name(node): reason for node, reason in placement.reasons.items()}
        times = {(variable_name(node), device): text for (node, device), text in placement.transfers.items()}
        entries = [replace(entry, reason=_auto_reason(entry, reasons, times)) for entry in report.entries]
        return with_remarks(mod, placement=PlacementReport(entries), placement_estimate=placement.to_json())
    rules = matching_patterns(nodes, placement)
    default_reason = "no rule matches: default device" if rules else "default device"
    reasons = {
        variable_name(node.name): f"rule {rules[node.name]!r}" if node.name in rules else default_reason
        for node in walk_nodes(nodes)
    }
    entries = [replace(entry, reason=_rule_reason(entry, reasons)) for entry in report.entries]
    return with_remarks(mod, placement=PlacementReport(entries))


def with_rule_reasons(mod: tvm.IRModule, reasons: Mapping[str, str]) -> tvm.IRModule:
    """Give a module placed by generated rules the reason for each pattern."""
    report = remarks_of(mod).placement or PlacementReport()
    texts = {f"rule {pattern!r}": reason for pattern, reason in reasons.items()}
    entries = [replace(entry, reason=texts.get(entry.reason, entry.reason)) for entry in report.entries]
    return with_remarks(mod, placement=PlacementReport(entries))


def _rule_reason(entry: PlacementEntry, reasons: Mapping[str, str]) -> str:
    """The reason of an entry by its node's rule; transfers, parameters and host work keep theirs."""
    if entry.kind != "op" or "host" in entry.reason:
        return entry.reason
    name = node_of_variable(entry.variable, reasons)
    return entry.reason if name is None else reasons[name]


def _auto_reason(entry: PlacementEntry, reasons: Mapping[str, str], times: Mapping[tuple[str, str], str]) -> str:
    """The cost model's reason for an entry; a transfer gets its time appended."""
    if entry.kind == "op":
        return _rule_reason(entry, reasons)
    reason = entry.reason.replace("by the annotation of", "by the automatic placement of")
    name = node_of_variable(entry.variable, reasons) if entry.kind == "transfer" else None
    time = times.get((name or "", entry.device))
    return f"{reason}; {AUTO}about {time}" if time else reason


def node_of_variable(variable: str, names: Container[str]) -> str | None:
    """The name that an imported variable was derived from, or None."""
    while variable not in names and _SUFFIX.search(variable):
        variable = _SUFFIX.sub("", variable)
    return variable if variable in names else None
