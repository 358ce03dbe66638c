"""Constant folding: torch computes values that depend on weights and numbers alone when a program is imported."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from .exporting import torch_package


class Folding:
    """The nodes of a program's graph that depend on no input.

    Parameters
    ----------
    graph : object
        Graph of an exported program, functional and without random numbers.
    weights : mapping of str to object
        Placeholder name -> tensor of a parameter, buffer or constant.
    """

    def __init__(self, graph: Any, weights: Mapping[str, Any]) -> None:
        self._values = {node: weights[node.name] for node in graph.nodes if node.name in weights}
        self._fixed = set(self._values)
        for node in graph.nodes:
            if node.op == "call_function" and self._fixed.issuperset(node.all_input_nodes):
                if hasattr(node.target, "_schema") or node.target is operator.getitem:
                    self._fixed.add(node)

    def __contains__(self, node: Any) -> bool:
        return node in self._fixed

    def value(self, node: Any) -> Any:
        """The tensor, or several, that torch computes for a node."""
        torch, pending = torch_package(), [node]
        while pending:  # a chain may be longer than Python's stack is deep
            missing = [before for before in pending[-1].all_input_nodes if before not in self._values]
            if missing and pending[-1] not in self._values:
                pending += missing
                continue
            last = pending.pop()
            if last not in self._values:
                args, kwargs = torch.fx.node.map_arg((last.args, last.kwargs), self._values.__getitem__)
                with torch.no_grad():
                    self._values[last] = last.target(*args, **kwargs)
        return self._values[node]
