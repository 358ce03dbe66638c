"""Plan the transfers of one clone: one per (value, destination), placed so that all its uses can share it."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from tvm import relax

from .clones import Clone
from .graph import ANY, HOST, Tree, tensors_of
from .program import Program, Record, Scope


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy of one value to one device.

    Attributes
    ----------
    node : int
        The value.
    device : int
        The destination.
    scope : Scope
        The innermost scope that holds all uses.
    first, last : int
        Records of that scope which use it, or hold a use; one past the last record is the scope's result. The transfer
        stands before the first.
    provider : Record, optional
        A `to_vdevice` of the program that is this transfer, being its first use itself.
    needed_by : str
        The variable of the first use, for reports.
    captured : bool
        Whether a function inside the scope uses it, which cannot see dataflow variables around it.
    var : relax.Var, optional
        The copy, once it is written.
    """

    node: int
    device: int
    scope: Scope
    first: int
    last: int
    needed_by: str
    provider: Record | None = None
    captured: bool = False
    var: relax.Var | None = None

    def include(self, scope: Scope, index: int) -> None:
        """Widen to one more use, later in program order."""
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
        at = bisect.bisect_right(blocks, self.first, key=lambda entry: entry[2])
        if at == len(blocks) or self.captured:  # the result of the scope stands in no block
            return False
        block, _, stop = blocks[at]
        return self.last < stop and isinstance(block, relax.DataflowBlock)


@dataclass(slots=True)
class TransferPlan:
    """All transfers of one function.

    Attributes
    ----------
    by_use : dict
        (scope, record index, node, device) -> transfer.
    before : dict
        (scope, record index) -> transfers to write there.
    """

    by_use: dict[tuple[int, int, int, int], Transfer] = field(default_factory=dict)
    before: dict[tuple[int, int], list[Transfer]] = field(default_factory=dict)


def plan_transfers(program: Program, clone: Clone, body: Scope) -> TransferPlan:
    """Find what is used on another device than its own, in a function body.

    Without fixed devices that meet, only what the host reads is. Where they meet, transfers of the program itself count
    as uses, so that they are reused, too.
    """
    return _Planner(program, clone).run(body)


class _Planner:
    def __init__(self, program: Program, clone: Clone) -> None:
        self.program = program
        self.devices = clone.devices
        self.mixed = clone.mixed
        self.constants = clone.group.graph.constants
        self.opaque = clone.group.graph.opaque
        self.made_on_host = clone.group.graph.made_on_host
        self.plan = TransferPlan()
        self.transfers: dict[tuple[int, int, int], Transfer] = {}
        # Value node -> a number that changes when something may have written to it.
        self.version: dict[int, int] = {}
        self.writes = 0

    def run(self, body: Scope) -> TransferPlan:
        """Visit a body in program order."""
        # (scope, next record, values written in it): an explicit stack, for programs nested deeper than Python's.
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
            if self.mixed:
                self._uses(scope, len(scope.records), scope.body_tree, scope.body_device, "result")
            stack.pop()
            self._forget(written)
            if stack:
                _outer(stack, scope).update(written)
        for transfer in self.transfers.values():
            if transfer.provider is not None and _is_dataflow(transfer.provider.var) and not transfer.is_local():
                transfer.provider = None
            if transfer.provider is None:
                self.plan.before.setdefault((id(transfer.scope), transfer.first), []).append(transfer)
        return self.plan

    def _record(self, scope: Scope, record: Record, written: set[int]) -> None:
        if not (self.mixed or record.host_read):
            return
        name = record.var.name
        wants = record.operand_devices
        for position, tree in enumerate(record.trees):
            if tree is None:
                continue
            want = wants if isinstance(wants, int) else wants[position]
            self._uses(scope, record.index, tree, want, name)
            if record.device != ANY and isinstance(tree, int) and self.devices[tree] != record.device:
                transfer = self._use(scope, record.index, tree, record.device, name)
                if transfer.scope is scope and transfer.first == record.index:
                    transfer.provider = record
        if record.written and self.mixed:
            trees = [record.trees[position] for position in record.written]
            touched = [leaf for tree in trees for leaf in tensors_of(tree) if isinstance(leaf, int)]
            self._forget(touched)
            written.update(touched)

    def _forget(self, nodes: list[int] | set[int]) -> None:
        for node in nodes:
            self.writes += 1
            self.version[node] = self.writes

    def _uses(self, scope: Scope, index: int, tree: Tree, want: Tree, name: str) -> None:
        if isinstance(tree, int):
            device = self.wanted(want, self.devices[tree])
            if device >= 0 and device != self.devices[tree] and not self._at_hand(tree, device):
                self._use(scope, index, tree, device, name)
        elif isinstance(tree, tuple):
            for position, sub in enumerate(tree):
                sub_want = want[position] if isinstance(want, tuple) else want
                self._uses(scope, index, sub, sub_want, name)

    def _at_hand(self, node: int, device: int) -> bool:
        """Return whether no transfer is due: an object without a device, a constant, what the host made."""
        if node in self.made_on_host and device == self.program.host:
            return True
        return node in self.opaque or node in self.constants

    def wanted(self, want: Tree, at: int = ANY) -> int:
        """The device a node stands for, for a tensor that is on device `at`; negative where any will do."""
        if not isinstance(want, int) or want == ANY:
            return ANY
        return self.program.reader(at) if want == HOST else self.devices[want]

    def _use(self, scope: Scope, index: int, node: int, device: int, name: str) -> Transfer:
        key = (node, self.version.get(node, 0), device)
        transfer = self.transfers.get(key)
        if transfer is None:
            transfer = self.transfers[key] = Transfer(node, device, scope, index, index, name)
        else:
            transfer.include(scope, index)
        self.plan.by_use[id(scope), index, node, device] = transfer
        return transfer


def _outer(stack: list[tuple[Scope, Iterator[Record], set[int]]], scope: Scope) -> set[int]:
    """Values that the scope around `scope` has written so far; sibling branches stand between them on the stack."""
    for other, _, written in reversed(stack):
        if other is scope.parent:
            return written
    raise AssertionError("a nested scope stands above its parent")


def _is_dataflow(var: relax.Var) -> bool:
    return isinstance(var, relax.DataflowVar)
