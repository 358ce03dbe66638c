"""Why each op of an imported model is where it is, in the words of the placement it was given.

The import fixes every node to its device before it asks for transfers, so RealizeVDevice's report knows an annotation
and not the rule behind it. The report with rules travels with the module, as an attribute that `rh.compile` reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import tvm

from ..transform.ir.findings import with_findings
from ..transform.ir.reports import PlacementEntry, PlacementReport
from .auto.auto_placement import AutoPlacement
from .onnx.node_names import NodeInfo, variable_name, walk_nodes
from .onnx.placement_rules import PlacementRules, matching_patterns

# What the import appends to a node's name for the further variables that it became.
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
        mod = with_findings(mod, placement_estimate=placement.to_json())
    else:
        rules = matching_patterns(nodes, placement)
    if rules:
        otherwise = f"no rule matches: {otherwise}"
    reasons = {
        variable_name(node.name): f"rule {rules[node.name]!r}" if node.name in rules else otherwise
        for node in walk_nodes(nodes)
    }
    entries = [replace(entry, reason=_of_entry(entry, reasons)) for entry in report.entries]
    return with_findings(mod, placement=PlacementReport(entries))


def _of_entry(entry: PlacementEntry, reasons: Mapping[str, str]) -> str:
    """Entries of what is no node's (transfers, parameters, the host's work) keep their reason."""
    if entry.kind != "op" or "host" in entry.reason:
        return entry.reason
    name = entry.variable
    while name not in reasons and _SUFFIX.search(name):
        name = _SUFFIX.sub("", name)
    return reasons.get(name, entry.reason)
