"""A module as placement reads it: functions, scopes and bindings, and the groups of functions that call each other."""

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
from .graph import ANY, FuncTree, Tree


@dataclass(slots=True, eq=False)
class Record:
    """One binding.

    Attributes
    ----------
    binding : relax.Binding
    kind : str
        "op", "call" (of a Relax function), "hint", "to_vdevice", "alias" (also match_cast), "tuple", "getitem",
        "const", "if", "function" or "other".
    op : str
        For messages and reports.
    args : list of Expr
        The expressions that may hold tensors: of a call its arguments, of an ``If`` its condition.
    trees : list of Tree
        Trees of those.
    operand_devices : int, or list of Tree
        The node (HOST, ANY) whose device they are wanted on: one for all, or one tree for each.
    result_device : Tree
        Where the variable's tensors live.
    produced : Tree
        Where the value makes them; differs from `result_device` only where a transfer follows.
    scopes : list of Scope
        Branches of an ``If``; body of a local function.
    device : int
        Target device of a hint or `to_vdevice`.
    callee : list of CallRef
        Clones of Relax functions that the value refers to.
    func : FuncTree
        Parameters and result of a local function.
    written : sequence of int
        Operands that the op may write to: transfers of them made before it are not reused after it.
    host_read : bool
        Whether the host reads the operands.
    """

    binding: relax.Binding
    var: relax.Var
    value: relax.Expr
    index: int
    kind: str = "other"
    op: str = ""
    args: list[relax.Expr] = field(default_factory=list)
    trees: list[Tree] = field(default_factory=list)
    operand_devices: Any = ANY
    result_device: Tree = None
    produced: Tree = None
    site: int = ANY
    device: int = ANY
    scopes: list[Scope] = field(default_factory=list)
    callees: list[CallRef] = field(default_factory=list)
    func: FuncTree | None = None
    written: Sequence[int] = ()
    host_read: bool = False


@dataclass(slots=True, eq=False)
class Scope:
    """One ``SeqExpr``: the body of a function or a branch.

    Attributes
    ----------
    body : relax.Expr
        The value of the sequence.
    blocks : list
        (block, index of its first record, index past its last).
    body_tree, body_device : Tree
        Trees of the value of the sequence, and of where it is wanted.
    parent, parent_index
        The scope and record it is nested in; None for the body of a module's function.
    is_function : bool
        Whether it is the body of a local function.
    """

    seq: relax.SeqExpr
    parent: Scope | None
    parent_index: int
    depth: int
    body: Any = None
    records: list[Record] = field(default_factory=list)
    blocks: list[tuple[relax.BindingBlock, int, int]] = field(default_factory=list)
    body_tree: Tree = None
    body_device: Tree = None
    callees: list[CallRef] = field(default_factory=list)
    is_function: bool = False


@dataclass(slots=True, eq=False)
class CallRef:
    """One mention of a Relax function outside the caller's own recursion group.

    Attributes
    ----------
    callee : Unit
    classes : dict
        Open class of the callee's group -> the site in the caller that decides its device.
    """

    callee: Unit
    classes: dict[int, int]


@dataclass(slots=True, eq=False)
class Unit:
    """One Relax function of the module.

    Attributes
    ----------
    index : int
        Position in the module.
    tree : FuncTree
    scope : Scope
        Its body; a placeholder until it is read.
    group : int
        Its recursion group.
    access : dict
        Value node -> the variable, and the path into its tuple, that holds it.
    calls : list of CallRef
        Its mentions of functions of other groups, in program order.
    """

    index: int
    gvar: tvm.ir.GlobalVar
    func: relax.Function
    name: str
    tree: FuncTree
    scope: Scope
    group: int = -1
    access: dict[int, tuple[relax.Var, tuple[int, ...]]] = field(default_factory=dict)
    calls: list[CallRef] = field(default_factory=list)


class Program:
    """A module's functions and devices.

    Parameters
    ----------
    mod : IRModule
        With at least one vdevice.

    Raises
    ------
    VDeviceError
        If some vdevices name a host and others do not.
    """

    def __init__(self, mod: tvm.IRModule) -> None:
        self.mod = mod
        self.vdevices: Sequence[relax.VDevice] = vdevices_of(mod)
        hosts_of(self.vdevices)
        self.names = [device_name(vdevice, self.vdevices) for vdevice in self.vdevices]
        host = host_vdevice(self.vdevices)
        self.host = ANY if host is None else vdevice_index(host, self.vdevices)
        self._readers = [host_vdevice(self.vdevices, vdevice) for vdevice in self.vdevices]
        # By identity first: entries of the list that equal each other stay two devices.
        self._index = {handle(vdevice): index for index, vdevice in reversed(list(enumerate(self.vdevices)))}
        self._foreign: list[relax.VDevice] = []  # kept alive, so that their handles stay theirs
        self.writes_in_place = any(
            op_name(binding.value) in IN_PLACE for _, func in relax_functions(mod) for binding in walk_bindings(func)
        )
        self.units: dict[str, Unit] = {}
        for gvar, func in mod.functions.items():
            if isinstance(func, relax.Function):
                name = str(gvar.name_hint)
                unread = Scope(func.body, None, 0, 0)
                self.units[name] = Unit(len(self.units), gvar, func, name, FuncTree((), None), unread)

    def reader(self, device: int) -> int:
        """The CPU that reads a tensor of `device` as a shape or condition, on the device's own machine.

        ANY where that has none; a negative `device` is on no machine in particular.
        """
        if device < 0:
            return self.host
        found = self._readers[device]
        return ANY if found is None else vdevice_index(found, self.vdevices)

    def index_of(self, vdevice: relax.VDevice, where: str) -> int:
        """Position of a vdevice in the module's list.

        Raises
        ------
        PlacementError
            If the list has none that equals it; the message starts with `where`.
        """
        key = handle(vdevice)
        found = self._index.get(key)
        if found is None:
            try:
                found = vdevice_index(vdevice, self.vdevices)
            except VDeviceError as error:
                raise PlacementError(f"{where}: {error}") from error
            self._index[key] = found
            self._foreign.append(vdevice)
        return found


def recursion_groups(program: Program) -> list[list[Unit]]:
    """Functions that call each other, directly or not, as one group each; callees before their callers.

    Returns
    -------
    groups : list of list of Unit
        Units of a group in module order (Tarjan's algorithm, without recursion).
    """
    units = list(program.units.values())
    callees = {unit.index: _callees(program, unit) for unit in units} if len(units) > 1 else {0: []}
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    open_units: list[int] = []
    is_open: set[int] = set()
    groups: list[list[Unit]] = []
    for root in units:
        if root.index in order:
            continue
        work = [(root.index, 0)]
        while work:
            index, position = work.pop()
            if position == 0:
                order[index] = low[index] = len(order)
                open_units.append(index)
                is_open.add(index)
            descended = False
            for at in range(position, len(callees[index])):
                callee = callees[index][at]
                if callee not in order:
                    work += [(index, at + 1), (callee, 0)]
                    descended = True
                    break
                if callee in is_open:
                    low[index] = min(low[index], order[callee])
            if descended:
                continue
            if low[index] == order[index]:
                start = open_units.index(index)
                members = sorted(open_units[start:])
                is_open.difference_update(members)
                del open_units[start:]
                groups.append([units[member] for member in members])
            if work:
                caller = work[-1][0]
                low[caller] = min(low[caller], low[index])
    for number, group in enumerate(groups):
        for unit in group:
            unit.group = number
    return groups


def _callees(program: Program, unit: Unit) -> list[int]:
    names = {str(gvar.name_hint) for gvar in relax.analysis.all_global_vars(unit.func)}
    return sorted(program.units[name].index for name in names if name in program.units)
