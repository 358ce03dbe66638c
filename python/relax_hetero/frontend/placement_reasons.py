"""Placement reports of imported models: each op with the rule, or the objective, that put it on its device.

The import fixes every node to its device before it asks for transfers, so RealizeVDevice's report names an annotation
instead of a rule. The report with rules travels with the module, as an attribute that `rh.compile` reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

import tvm

from ..transform.ir.module_attrs import ESTIMATE, PLACEMENT
from ..transform.placement.realize_vdevice import PlacementEntry, PlacementReport
from .auto.auto_placement import AutoPlacement
from .onnx.node_names import NodeInfo, variable_name, walk_nodes
from .onnx.placement_rules import PlacementRules, matching_patterns

# The import appends a number to a node's name for each further variable that it becomes.
_SUFFIX = re.compile(r"_[0-9a-z]+$")


def with_reasons(
    mod: tvm.IRModule, report: PlacementReport, nodes: list[NodeInfo], placement: PlacementRules | AutoPlacement
) -> tvm.IRModule:
    """`mod` with its placement report as an attribute, the reason of each op the rule that matched its node.

    Where a cost model chose, its estimates are another attribute.
    """
    rules: Mapping[str, str] = {}
    otherwise = "default device"
    if isinstance(placement, AutoPlacement):
        otherwise = f"chosen by the cost model for {placement.objective}"
        mod = mod.with_attr(ESTIMATE, json.dumps(placement.to_json()))
    else:
        rules = matching_patterns(nodes, placement)
    if rules:
        otherwise = f"no rule matches: {otherwise}"
    reasons = {
        variable_name(node.name): f"rule {rules[node.name]!r}" if node.name in rules else otherwise
        for node in walk_nodes(nodes)
    }
    entries = [replace(entry, reason=_of_entry(entry, reasons)) for entry in report.entries]
    return mod.with_attr(PLACEMENT, PlacementReport(entries).to_json())


def _of_entry(entry: PlacementEntry, reasons: Mapping[str, str]) -> str:
    """The reason of an entry; transfers, parameters and work of the host belong to no node and keep theirs."""
    if entry.kind != "op" or "host" in entry.reason:
        return entry.reason
    name = entry.variable
    while name not in reasons and _SUFFIX.search(name):
        name = _SUFFIX.sub("", name)
    return reasons.get(name, entry.reason)
