"""Functions, scopes and bindings of a module as placement reads them, and recursion groups of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
from tvm import relax

from ...errors import PlacementError, VDeviceError
from ...target.hosts import hosts_of
from ...target.vdevice import device_name, host_vdevice, vdevice_index, vdevices_of
from ..ir.op_names import IN_PLACE
from ..ir.rewriting import handle, op_name, relax_functions, walk_bindings
from .graph import ANY, HOST, FuncTree, Tree


@dataclass(slots=True, eq=False)
class Record:
    """One binding."""

    binding: relax.Binding
    var: relax.Var
    value: relax.Expr
    index: int  # index in its scope
    # "op", "call" (of a Relax function), "hint", "to_vdevice", "alias" (also match_cast), "tuple", "getitem", "const",
    # "if", "function" or "other".
    kind: str = "other"
    op: str = ""  # op for messages and reports
    # Expressions that may hold tensors: the arguments of a call, the condition of an ``If``.
    args: list[relax.Expr] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)  # nodes of the tensors of `args`
    # Nodes (or HOST, ANY) on whose devices the operands are needed: one node for all, or a tree for each operand.
    operand_devices: Any = ANY
    result_device: Tree = None  # nodes of the variable's tensors
    # Nodes on whose devices the value is computed; other nodes than `result_device` only if a transfer follows.
    produced: Tree = None
    site: int = ANY  # site of an op in the graph; ANY without one
    device: int = ANY  # target device of a hint or `to_vdevice`
    scopes: list[Scope] = field(default_factory=list)  # branches of an ``If``; body of a local function
    callees: list[CallRef] = field(default_factory=list)  # references to Relax functions in the value
    func: FuncTree | None = None  # parameters and result of a local function
    written: Sequence[int] = ()  # operands that the op may write to; later uses on other devices need new transfers
    host_read: bool = False  # True if the host reads the operands


@dataclass(slots=True, eq=False)
class Scope:
    """One ``SeqExpr``: the body of a function or a branch."""

    seq: relax.SeqExpr
    # Enclosing scope and record; None for the body of a module's function.
    parent: Scope | None
    parent_index: int
    depth: int
    body: Any = None  # expression after the last block, the value of the sequence
    records: list[Record] = field(default_factory=list)
    # Tuples of a block, the index of its first record, and the index after its last.
    blocks: list[tuple[relax.BindingBlock, int, int]] = field(default_factory=list)
    # Nodes of the tensors of `body`, and nodes on whose devices they are needed.
    body_tree: Tree = None
    body_device: Tree = None
    callees: list[CallRef] = field(default_factory=list)
    is_function: bool = False  # True for the body of a local function


@dataclass(slots=True, eq=False)
class CallRef:
    """One reference to a Relax function."""

    callee: Unit
    sites: dict[int, int]  # site in the caller that determines the device of each open component of the callee's group


@dataclass(slots=True, eq=False)
class Unit:
    """One Relax function of the module."""

    index: int  # index in the module
    gvar: tvm.ir.GlobalVar
    func: relax.Function
    name: str
    tree: FuncTree  # nodes of parameters and result
    scope: Scope  # body; a placeholder until it is read
    group: int = -1  # index of its recursion group
    # Variable that contains each value node, and the path into its tuple.
    access: dict[int, tuple[relax.Var, tuple[int, ...]]] = field(default_factory=dict)
    calls: list[CallRef] = field(default_factory=list)  # references to functions of other groups, in program order


class Program:
    """Functions and devices of a module.

    Parameters
    ----------
    mod : IRModule
        Module with at least one vdevice.

    Attributes
    ----------
    names : list of str
        Names of the vdevices, ``kind:i``.
    host : int
        Index of the last CPU of the host that runs the VM; ANY without one.
    writes_in_place : bool
        True if an op of the module writes into an operand.
    units : dict
        Relax functions by name.

    Raises
    ------
    VDeviceError
        If only some of the vdevices name a host.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.vdevices: Sequence[relax.VDevice] = vdevices_of(mod)
        hosts_of(self.vdevices)  # raises the error
        self.names = [device_name(vdevice, self.vdevices) for vdevice in self.vdevices]
        host = host_vdevice(self.vdevices)
        self.host = ANY if host is None else vdevice_index(host, self.vdevices)
        self._reading_cpus = [host_vdevice(self.vdevices, vdevice) for vdevice in self.vdevices]
        # Keyed by handle: equal entries of the list are different devices.
        self._index = {handle(vdevice): index for index, vdevice in reversed(list(enumerate(self.vdevices)))}
        self._other_vdevices: list[relax.VDevice] = []  # kept alive, since `_index` has their handles
        self.writes_in_place = any(
            op_name(binding.value) in IN_PLACE for _, func in relax_functions(mod) for binding in walk_bindings(func)
        )
        self.units: dict[str, Unit] = {}
        for gvar, func in mod.functions.items():
            if isinstance(func, relax.Function):
                name = str(gvar.name_hint)
                placeholder = Scope(func.body, None, 0, 0)
                self.units[name] = Unit(len(self.units), gvar, func, name, FuncTree((), None), placeholder)

    def reader(self, device: int) -> int:
        """The CPU that reads a tensor of `device` as a shape or condition: the last one of the device's own host.

        ANY if that host lacks a CPU. A negative `device` is unknown, and read on `host`.
        """
        if device < 0:
            return self.host
        vdevice = self._reading_cpus[device]
        return ANY if vdevice is None else vdevice_index(vdevice, self.vdevices)

    def required_device(self, devices: Sequence[int], required: Tree, device: int = ANY) -> int:
        """Device on which `required`, a node or HOST, needs a tensor that is on `device`; ANY if any device will do."""
        if not isinstance(required, int) or required == ANY:
            return ANY
        return self.reader(device) if required == HOST else devices[required]

    def index_of(self, vdevice: relax.VDevice, where: str) -> int:
        """Index of a vdevice in the module's list.

        Raises
        ------
        PlacementError
            If the list lacks an equal vdevice; the message starts with `where`.
        """
        key = handle(vdevice)
        index = self._index.get(key)
        if index is None:
            try:
                index = vdevice_index(vdevice, self.vdevices)
            except VDeviceError as error:
                raise PlacementError(f"{where}: {error}") from error
            self._index[key] = index
            self._other_vdevices.append(vdevice)
        return index


def recursion_groups(program: Program) -> list[list[Unit]]:
    """Strongly connected components of the call graph (Tarjan's algorithm), callees before their callers.

    Returns the units of each group in module order.
    """
    units = list(program.units.values())
    callees = {unit.index: _callees(program, unit) for unit in units} if len(units) > 1 else {0: []}
    order: dict[int, int] = {}
    low_link: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    groups: list[list[Unit]] = []
    for root in units:
        if root.index in order:
            continue
        pending = [(root.index, 0)]  # a unit, and its first callee that is not visited yet
        while pending:
            index, edge = pending.pop()
            if edge == 0:
                order[index] = low_link[index] = len(order)
                stack.append(index)
                on_stack.add(index)
            descended = False
            for next_edge, callee in enumerate(callees[index][edge:], edge + 1):
                if callee not in order:
                    pending += [(index, next_edge), (callee, 0)]
                    descended = True
                    break
                if callee in on_stack:
                    low_link[index] = min(low_link[index], order[callee])
            if descended:
                continue
            if low_link[index] == order[index]:
                start = stack.index(index)
                members = sorted(stack[start:])
                on_stack.difference_update(members)
                del stack[start:]
                groups.append([units[member] for member in members])
            if pending:
                caller = pending[-1][0]
                low_link[caller] = min(low_link[caller], low_link[index])
    for group_index, group in enumerate(groups):
        for unit in group:
            unit.group = group_index
    return groups


def _callees(program: Program, unit: Unit) -> list[int]:
    names = {str(gvar.name_hint) for gvar in relax.analysis.all_global_vars(unit.func)}
    return sorted(program.units[name].index for name in names if name in program.units)
