"""Placement reasons in the words of the command line: which ``--place`` put a node where it is.

The import fixes every node to its device, so the placement report knows an annotation, and not the rule behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from .placing import Placing

if TYPE_CHECKING:
    import onnx

# What the import appends to a node's name for the further variables that it became.
_SUFFIX = re.compile(r"_[0-9a-z]+$")


def with_rules(entries: Sequence[Mapping[str, Any]], model: onnx.ModelProto, placing: Placing) -> list[dict[str, Any]]:
    """The report's entries, those of ops with the rule that matched their node as reason.

    Parameters
    ----------
    entries
        Of the report that the import of `model` made.
    model
        The ONNX model.
    placing
        The options it was imported with.

    Returns
    -------
    list of dict
        Entries of what is no node's (transfers, parameters, the host's work) keep their reason.
    """
    from ..frontend.onnx_names import name_nodes, variable_name, walk_nodes

    reasons: dict[str, str] = {}
    for node in walk_nodes(name_nodes(model)):
        reasons[variable_name(node.name)] = _reason((node.name, *node.aliases), placing)
    return [{**entry, "reason": _of_entry(entry, reasons)} for entry in entries]


def _reason(names: Iterable[str], placing: Placing) -> str:
    if placing.auto:
        return "chosen by the cost model"
    for pattern, _ in placing.rules:
        if any(name == pattern or fnmatchcase(name, pattern) for name in names):
            return f"rule {pattern!r}"
    return "no rule matches: default device" if placing.rules else "default device"


def _of_entry(entry: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    given = str(entry["reason"])
    if entry["kind"] != "op" or "host" in given:
        return given
    name = entry["variable"]
    while name not in reasons and _SUFFIX.search(name):
        name = _SUFFIX.sub("", name)
    return reasons.get(name, given)
