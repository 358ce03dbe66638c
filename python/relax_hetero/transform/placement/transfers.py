"""Plan of the transfers of one clone: one for each value and destination, at a point that dominates all its uses."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm import relax

from .clones import Clone
from .graph import ANY, Tree, subtree, tensors_of
from .program import Program, Record, Scope


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy of one value to one device."""

    node: int  # value node
    device: int  # destination
    scope: Scope  # innermost scope that contains all uses
    # First and last record of that scope with a use, perhaps nested; the number of records stands for the scope's
    # result. The transfer is written before the first.
    first: int
    last: int
    needed_by: str  # variable of the first use, for reports
    # `to_vdevice` of the program that serves as this transfer, because it is the first use.
    provider: Record | None = None
    captured: bool = False  # whether a local function uses it, which cannot capture dataflow variables
    var: relax.Var | None = None  # variable of the copy, after it is written

    def include(self, scope: Scope, index: int) -> None:
        """Include one more use, later in program order."""
        while self.scope is not scope:
            if self.scope.depth > scope.depth or (self.scope.depth == scope.depth and scope.parent is not None):
                self.captured = self.captured or self.scope.is_function
                self.first = self.last = self.scope.parent_index
                assert self.scope.parent is not None, "all scopes of a function share its body"
                self.scope = self.scope.parent
                self.provider = None
            if scope.depth > self.scope.depth:
                self.captured = self.captured or scope.is_function
                index = scope.parent_index
                assert scope.parent is not None, "all scopes of a function share its body"
                scope = scope.parent
        self.last = max(self.last, index)

    def is_local(self) -> bool:
        """Return whether all uses are in one dataflow block, so that the copy can be a dataflow variable."""
        blocks = self.scope.blocks
        index = bisect.bisect_right(blocks, self.first, key=lambda entry: entry[2])
        if index == len(blocks) or self.captured:  # the result of the scope is outside of all blocks
            return False
        block, _, stop = blocks[index]
        return self.last < stop and isinstance(block, relax.DataflowBlock)


@dataclass(slots=True)
class TransferPlan:
    """All transfers of one function."""

    # Transfer by scope, record index, node and device of a use.
    by_use: dict[tuple[int, int, int, int], Transfer] = field(default_factory=dict)
    # Transfers to write before a record, by scope and record index.
    before: dict[tuple[int, int], list[Transfer]] = field(default_factory=dict)


def plan_transfers(program: Program, clone: Clone, body: Scope) -> TransferPlan:
    """Plan transfers for all values of a function body that are used on a device other than their own.

    If no fixed devices meet, these are only values that the host reads. Otherwise the program's own transfers count as
    uses, so that they are shared, too.
    """
    return _Planner(program, clone).run(body)


class _Planner:
    def __init__(self, program: Program, clone: Clone) -> None:
        self.program = program
        self.devices = clone.devices
        self.needs_transfers = clone.needs_transfers
        self.constants = clone.group.graph.constants
        self.opaque = clone.group.graph.opaque
        self.host_values = clone.group.graph.host_values
        self.plan = TransferPlan()
        self.transfers: dict[tuple[int, int, int], Transfer] = {}
        # Version of each value node, which changes when an op may have written to it.
        self.version: dict[int, int] = {}
        self.writes = 0

    def run(self, body: Scope) -> TransferPlan:
        """Visit a body in program order."""
        # Explicit stack of (scope, next record, values written in it), for deeply nested programs.
        stack: list[tuple[Scope, Iterator[Record], set[int]]] = [(body, iter(body.records), set())]
        while stack:
            scope, records, written = stack[-1]
            descended = False
            for record in records:
                self._record(scope, record, written)
                if record.scopes:
                    stack += [(inner, iter(inner.records), set()) for inner in reversed(record.scopes)]
                    descended = True
                    break
            if descended:
                continue
            if self.needs_transfers:
                self._uses(scope, len(scope.records), scope.body_tree, scope.body_device, "result")
            stack.pop()
            self._invalidate(written)
            if stack:
                _written_outside(stack, scope).update(written)
        for transfer in self.transfers.values():
            if transfer.provider is not None and _is_dataflow(transfer.provider.var) and not transfer.is_local():
                transfer.provider = None
            if transfer.provider is None:
                self.plan.before.setdefault((id(transfer.scope), transfer.first), []).append(transfer)
        return self.plan

    def _record(self, scope: Scope, record: Record, written: set[int]) -> None:
        if not (self.needs_transfers or record.host_read):
            return
        name = record.var.name
        required = record.operand_devices
        for position, tree in enumerate(record.trees):
            if tree is None:
                continue
            self._uses(scope, record.index, tree, required if isinstance(required, int) else required[position], name)
            if record.device != ANY and isinstance(tree, int) and self.devices[tree] != record.device:
                transfer = self._use(scope, record.index, tree, record.device, name)
                if transfer.scope is scope and transfer.first == record.index:
                    transfer.provider = record
        if record.written and self.needs_transfers:
            trees = [record.trees[position] for position in record.written]
            leaves = [leaf for tree in trees for leaf in tensors_of(tree) if isinstance(leaf, int)]
            self._invalidate(leaves)
            written.update(leaves)

    def _invalidate(self, nodes: list[int] | set[int]) -> None:
        for node in nodes:
            self.writes += 1
            self.version[node] = self.writes

    def _uses(self, scope: Scope, index: int, tree: Tree, required: Tree, name: str) -> None:
        if isinstance(tree, int):
            device = self.program.required_device(self.devices, required, self.devices[tree])
            if device >= 0 and device != self.devices[tree] and not self._is_available(tree, device):
                self._use(scope, index, tree, device, name)
        elif isinstance(tree, tuple):
            for position, sub in enumerate(tree):
                self._uses(scope, index, sub, subtree(required, position), name)

    def _is_available(self, node: int, device: int) -> bool:
        """Return whether a value needs no transfer: an object without a device, a constant, or a value of the host."""
        if node in self.host_values and device == self.program.host:
            return True
        return node in self.opaque or node in self.constants

    def _use(self, scope: Scope, index: int, node: int, device: int, name: str) -> Transfer:
        key = (node, self.version.get(node, 0), device)
        transfer = self.transfers.get(key)
        if transfer is None:
            transfer = self.transfers[key] = Transfer(node, device, scope, index, index, name)
        else:
            transfer.include(scope, index)
        self.plan.by_use[id(scope), index, node, device] = transfer
        return transfer


def _written_outside(stack: list[tuple[Scope, Iterator[Record], set[int]]], scope: Scope) -> set[int]:
    """Values that the parent scope has written so far; sibling branches may be between both on the stack."""
    return next(written for parent, _, written in reversed(stack) if parent is scope.parent)


def _is_dataflow(var: relax.Var) -> bool:
    return isinstance(var, relax.DataflowVar)
