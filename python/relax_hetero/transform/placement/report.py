"""Placement of each value, and its reason, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from ..ir.reports import PlacementEntry
from .clones import Clone
from .graph import HOST, Graph
from .operands import PlacementNote
from .solve import Path, shortest_paths


def entries_of(function: str, notes: Sequence[PlacementNote], clone: Clone, names: list[str]) -> list[PlacementEntry]:
    """Put the notes of one written function into words."""
    reasons = _Reasons(clone, names)
    return [
        PlacementEntry(
            function, note.name, note.op, names[note.device], note.device, reasons(note), _bytes(note.ty), note.kind
        )
        for note in notes
    ]


class _Reasons:
    def __init__(self, clone: Clone, names: list[str]) -> None:
        self.clone = clone
        self.names = names
        self.graph: Graph = clone.group.graph
        self.fixed, _ = shortest_paths(self.graph, self.graph.fixed)
        hints = {node: found[0] for node, found in self.graph.hints.items() if node not in self.fixed}
        self.hinted: dict[int, Path] = shortest_paths(self.graph, hints)[0] if hints else {}

    def __call__(self, note: PlacementNote) -> str:
        device = self.names[note.device]
        if note.reason:
            return note.reason
        if note.node == HOST:
            return "read or made by the host"
        path = self.fixed.get(note.node)
        if path is not None:
            if path.device == note.device:
                return self._follows(note.node, path, self.fixed)
            return "goes with its first use" if note.kind == "param" else "goes with its operands and users"
        if note.node in self.clone.group.solution.class_of and self.clone.caller:
            return f"called by '{self.clone.caller}' on {device}"
        path = self.hinted.get(note.node)
        if path is not None and path.device == note.device:
            return self._follows(note.node, path, self.hinted)
        return "default device"

    def _follows(self, node: int, path: Path, paths: dict[int, Path]) -> str:
        """The nearest fixed value, and the first op on the way to it."""
        start = self.graph.locations[path.start]
        if path.start == node or (self.graph.is_site(node) and path.start in self.graph.targets[node]):
            return f"fixed by {path.origin}"
        via = node if self.graph.is_site(node) else path.before
        op = f" through {self.graph.locations[via].op}" if via >= 0 and self.graph.locations[via].op else ""
        what = f"'{start.variable}'" if not start.op else f"the {start.op}"
        return f"follows {what}{op}, which is on {self.names[path.device]} by {path.origin}"


def _bytes(ty: tvm.ir.Type) -> int | None:
    """Size of a value of static shape; 0 for what holds no tensor."""
    if isinstance(ty, tvm.ir.TupleType):
        total = 0
        for field_ty in ty.fields:
            size = _bytes(field_ty)
            if size is None:
                return None
            total += size
        return total
    if not isinstance(ty, relax.TensorType):
        return 0
    shape, dtype = ty.shape, ty.dtype
    if dtype is None or not isinstance(shape, relax.ShapeExpr):
        return None
    elements = 1
    for dim in shape.values:
        if not isinstance(dim, tvm.tirx.IntImm):
            return None
        elements *= int(dim.value)
    data_type: Any = tvm.DataType(str(dtype.dtype) if isinstance(dtype, tvm.ir.PrimType) else str(dtype))
    return (elements * data_type.bits * data_type.lanes + 7) // 8
