"""ONNX import that keeps node names and takes placement rules.

Stock TVM's importer converts single ops well, but loses two things that a placement needs: the names of the nodes, and
the device on which a shape is read. This importer keeps its converters (with corrections, in ``ops/``) and replaces the
walk over the graph.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import tvm

from ..errors import FrontendError
from ..target.vdevice import parse_vdevices, with_vdevices
from ..transform.ir.findings import with_findings
from ..transform.ir.reports import PlacementEntry, PlacementReport
from ..transform.placement.realize_vdevice import realize_vdevice
from .auto.auto_placement import AutoPlacement, place_graph
from .auto.cost_model import check_objective
from .import_limits import ImportLimits
from .onnx.importer import ImportedGraph, import_nodes
from .onnx.inputs import Shapes
from .onnx.model import ModelSource, OnnxModel, errors_of, load_model
from .onnx.name_bindings import DeviceOf, build_function, build_loops
from .onnx.node_names import NodeInfo, name_nodes, variable_name, walk_nodes
from .onnx.placement_rules import PlacementRules, assign_devices, matching_patterns

if TYPE_CHECKING:
    from ..target.make_vdevice import VDeviceEntry
    from .auto.auto_placement import MemoryLimit
    from .auto.cost_model import CostModel, Objective

# The import appends a number to a node's name for each further variable that it becomes.
_SUFFIX = re.compile(r"_[0-9a-z]+$")


def from_onnx(
    model_or_path: ModelSource,
    vdevices: VDeviceEntry | Iterable[VDeviceEntry] | None = None,
    placement: PlacementRules | Literal["auto"] | None = None,
    shapes: Shapes | None = None,
    cost_model: CostModel | None = None,
    objective: Objective = "latency",
    limits: ImportLimits | None = None,
    memory_limit: MemoryLimit | None = None,
) -> tvm.IRModule:
    """Import an ONNX model as a Relax module, placed over several devices if any are named.

    Parameters
    ----------
    model_or_path : str, PathLike, bytes or onnx.ModelProto
        External data lies in the file's folder; bytes and protos have none, and so no external data.
    vdevices : list of str, dict, Target or VDevice, optional
        The devices, the first one the default. Without them the module is free, and compiles for the native CPU.
    placement : mapping, or list of (pattern, device) pairs, or "auto", optional
        Glob patterns over node names and op types, in order: the first that matches a node fixes the
        bindings made from it to its device; a node that none matches goes to the default device. ``"auto"`` lets
        `cost_model` choose.
    shapes : mapping, optional
        ``{"input": [1, 128]}`` or ``{"batch": 1}``: sizes of inputs, or of named dimensions. Others stay
        symbolic.
    cost_model : CostModel, optional
        For ``placement="auto"``; default ``CostModel.measured(vdevices, objective)``.
    objective : str, optional
        For ``placement="auto"``. "latency": the least time for one call. "throughput": the least time between calls,
        of which several are in flight (``vm.submit``).
    limits : ImportLimits, optional
        The most nodes and computed constants that the model may become, default ``rh.ImportLimits()``. A small file can
        ask for more than any machine has; raise them for a large model that you trust.
    memory_limit : int, str or mapping, optional
        For ``placement="auto"``: the most that weights and values may take on each device, bytes or text (``"4GB"``),
        or a mapping from devices to these, as ``VirtualMachine(memory_limit=)`` takes it.

    Returns
    -------
    mod : tvm.IRModule
        With one function, "main". Its parameters are the graph's inputs, in order, under their names; its attributes
        "input_names" and "output_names" hold the ONNX names. A binding has the name of the node it comes from, a
        nameless node being ``OpType_index`` (its position in the graph). Weights are constants. With vdevices,
        transfers are in place: an input lives on the device of its first use, an output where it is made.

    Raises
    ------
    FrontendError
        If the model cannot be read or imported (naming file, node and op), or a shape or pattern does not fit it, or it
        becomes larger than `limits` allow.
    VDeviceError
        If a device string names nothing in `vdevices`.
    PlacementError
        If `objective` is neither, or no placement that is found fits `memory_limit`.
    """
    check_objective(objective)
    if vdevices is None and (placement is not None or cost_model is not None):
        raise FrontendError("placement and cost_model choose among vdevices, which are not given")
    if isinstance(placement, str) and placement != "auto":
        raise FrontendError(f"placement is {placement!r}; expected a mapping of patterns to devices, or 'auto'")
    if cost_model is not None and placement != "auto":
        raise FrontendError("cost_model is given, which only placement='auto' reads")
    if objective != "latency" and placement != "auto":
        raise FrontendError(f"objective is {objective!r}, which only placement='auto' reads")
    if memory_limit is not None and placement != "auto":
        raise FrontendError("memory_limit is given, which only placement='auto' reads")
    devices = None if vdevices is None else parse_vdevices(vdevices)
    model = load_model(model_or_path, limits)
    with errors_of(model.source):
        return _imported(model, devices, placement, shapes, cost_model, objective, memory_limit)


def _imported(
    model: OnnxModel,
    devices: list[tvm.relax.VDevice] | None,
    placement: PlacementRules | Literal["auto"] | None,
    shapes: Shapes | None,
    cost_model: CostModel | None,
    objective: Objective,
    memory_limit: MemoryLimit | None,
) -> tvm.IRModule:
    nodes = name_nodes(model.proto)
    # Patterns are looked at before the work of importing.
    rules = None if isinstance(placement, str) else placement or {}
    by_rule = None if devices is None or rules is None else assign_devices(nodes, rules, devices)
    graph = import_nodes(model, nodes, shapes)
    if devices is None:
        return _module(model, graph)
    plan = place_graph(graph, devices, cost_model, objective, memory_limit) if by_rule is None else None
    assigned = plan.vdevices if plan is not None else by_rule or {}
    mod = _module(model, graph, lambda node: assigned[node.name])
    placed, report = realize_vdevice(with_vdevices(mod, devices), insert_copies=True)
    return _with_reasons(placed, report, nodes, plan or rules or {})


def _module(model: OnnxModel, graph: ImportedGraph, device_of: DeviceOf | None = None) -> tvm.IRModule:
    func = build_function(graph, device_of)
    names = {
        "global_symbol": "main",
        "num_input": len(func.params),
        "input_names": list(graph.input_names),
        "output_names": [output.name for output in model.proto.graph.output],
    }
    if graph.bounds:
        names["tir_var_upper_bound"] = graph.bounds
    mod = graph.module.clone()
    mod["main"] = func.with_attrs(names)
    for gv, loop in build_loops(graph, device_of).items():
        mod[gv] = loop
    return mod


def _with_reasons(
    mod: tvm.IRModule, report: PlacementReport, nodes: list[NodeInfo], placement: PlacementRules | AutoPlacement
) -> tvm.IRModule:
    """`mod` with its placement report among its findings, the reason of each op the rule that matched its node.

    RealizeVDevice's own report names the annotations that the import made from rules. Where a cost model chose, its
    estimates are another attribute.
    """
    rules: Mapping[str, str] = {}
    otherwise = "default device"
    if isinstance(placement, AutoPlacement):
        otherwise = f"chosen by the cost model for {placement.objective}"
        mod = with_findings(mod, placement_estimate=placement.to_json())
    else:
        rules = matching_patterns(nodes, placement)
    if rules:
        otherwise = f"no rule matches: {otherwise}"
    reasons = {
        variable_name(node.name): f"rule {rules[node.name]!r}" if node.name in rules else otherwise
        for node in walk_nodes(nodes)
    }
    entries = [replace(entry, reason=_reason_of(entry, reasons)) for entry in report.entries]
    return with_findings(mod, placement=PlacementReport(entries))


def _reason_of(entry: PlacementEntry, reasons: Mapping[str, str]) -> str:
    """The reason of an entry; transfers, parameters and work of the host belong to no node and keep theirs."""
    if entry.kind != "op" or "host" in entry.reason:
        return entry.reason
    name = entry.variable
    while name not in reasons and _SUFFIX.search(name):
        name = _SUFFIX.sub("", name)
    return reasons.get(name, entry.reason)
