"""Expressions on the device they are wanted on, inside one function that is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import tvm
from tvm import relax

from ..ir.rewriting import handle
from .clones import Clone
from .graph import ANY, HOST, ConstLeaf, FuncTree, Tree
from .program import CallRef, Program, Unit
from .transfers import TransferPlan

# Write devices into types.

# The vdevice of one tensor.
Resolve = Callable[["int | ConstLeaf"], relax.VDevice]


def tensor_on(ty: relax.TensorType, vdevice: relax.VDevice) -> relax.TensorType:
    """The tensor type on that vdevice; itself if it names this very object."""
    old = ty.vdevice
    if old is not None and handle(old) == handle(vdevice):
        return ty
    shape = ty.shape
    if shape is not None:
        return relax.TensorType(shape, ty.dtype, vdevice, span=ty.span)
    return relax.TensorType(None, ty.dtype, vdevice, int(ty.ndim), ty.span)


def on_devices(ty: tvm.ir.Type, tree: Tree, resolve: Resolve) -> tvm.ir.Type:
    """A type with the device of every tensor in it, taken from a tree of its structure.

    Returns
    -------
    ty : Type
        The very argument if nothing changes.
    """
    if isinstance(ty, relax.TensorType):
        return tensor_on(ty, resolve(tree)) if isinstance(tree, (int, ConstLeaf)) else ty
    if isinstance(ty, tvm.ir.TupleType):
        if not isinstance(tree, tuple):
            return ty
        old = list(ty.fields)
        fields = [on_devices(field, sub, resolve) for field, sub in zip(old, tree, strict=True)]
        changed = any(new is not field for new, field in zip(fields, old, strict=True))
        return tvm.ir.TupleType(fields, ty.span) if changed else ty
    if isinstance(ty, relax.FuncType) and ty.params is not None and isinstance(tree, FuncTree):
        old = list(ty.params)
        params = [on_devices(param, sub, resolve) for param, sub in zip(old, tree.params, strict=True)]
        old_ret = ty.ret
        ret = on_devices(old_ret, tree.ret, resolve)
        if ret is old_ret and all(new is param for new, param in zip(params, old, strict=True)):
            return ty
        return relax.FuncType(params, ret, bool(ty.purity), ty.span)
    return ty


def same_devices(ty: tvm.ir.Type, other: tvm.ir.Type) -> bool:
    """Return whether two types of one structure name the same vdevice objects; a missing type has none."""
    if isinstance(ty, relax.TensorType) and isinstance(other, relax.TensorType):
        here, there = ty.vdevice, other.vdevice
        if here is None or there is None:
            return here is there
        return handle(here) == handle(there)
    if isinstance(ty, tvm.ir.TupleType) and isinstance(other, tvm.ir.TupleType):
        return all(same_devices(sub, other_sub) for sub, other_sub in zip(ty.fields, other.fields, strict=True))
    return type(ty) is type(other)


_VARS = (relax.Var, relax.DataflowVar)


class PlacementNote(NamedTuple):
    """One thing the report tells about.

    Attributes
    ----------
    kind : str
        "op", "transfer", "param" or "constant".
    name : str
        The variable; of a constant the one that uses it first.
    ty : Type
    op : str
    device : int
    node : int
        Where to ask why; HOST for what the host reads or makes, ANY where a use decides.
    reason : str
        A sentence; empty where `node` tells.
    """

    kind: str
    name: str
    ty: tvm.ir.Type
    op: str
    device: int
    node: int
    reason: str


class Operands:
    """Variables as they are now, and the bindings written so far.

    What does not change stays the very Python object it was read as (TVM makes a new one at every access).

    Attributes
    ----------
    out : list of Binding
        Bindings of the block that is being written.
    dataflow : bool
        Whether the block is a dataflow block.
    mentions : iterator of CallRef
        The Relax functions that the current binding mentions, in order.
    notes : list of PlacementNote
        Notes of transfers and copies that were written, for the report.
    current : str
        The variable whose binding is being written.
    """

    def __init__(self, program: Program, unit: Unit, clone: Clone, plan: TransferPlan) -> None:
        self.program = program
        self.vdevices = program.vdevices
        self.unit = unit
        self.devices = clone.devices
        self.constants = clone.group.graph.constants
        self.opaque = clone.group.graph.opaque
        self.mixed = clone.mixed
        self.plan = plan
        self.env: dict[int, relax.Expr] = {}
        self.out: list[relax.Binding] = []
        self.dataflow = False
        self.mentions: Iterator[CallRef] = iter(())
        self.notes: list[PlacementNote] = []
        self.current = "result"
        # Values that the host made and that live elsewhere: the variable on the host.
        self.on_host: dict[int, relax.Var] = {}
        self._constants: dict[tuple[int, int], relax.Expr] = {}

    def callee(self, ref: CallRef) -> tvm.ir.GlobalVar:
        """The function that a mention means."""
        raise NotImplementedError

    def device(self, leaf: int | ConstLeaf) -> int:
        """Where a tensor lives."""
        if isinstance(leaf, int):
            return self.program.host if leaf == HOST else self.devices[leaf]
        if leaf.pinned >= 0:
            return leaf.pinned
        return max(0, self.wanted(leaf.first_use))

    def wanted(self, want: Tree, at: int = ANY) -> int:
        """The device a node stands for, for a tensor that is on device `at`; negative where any will do."""
        if not isinstance(want, int) or want == ANY:
            return ANY
        return self.program.reader(at) if want == HOST else self.devices[want]

    def vdevice(self, leaf: int | ConstLeaf) -> relax.VDevice:
        """The vdevice object a tensor lives on."""
        return self.vdevices[self.device(leaf)]

    def retyped(self, ty: tvm.ir.Type, tree: Tree) -> tvm.ir.Type:
        """A type with the devices of a tree."""
        return on_devices(ty, tree, self.vdevice)

    def define(self, var: relax.Var, tree: Tree) -> relax.Var:
        """The variable with its devices; later uses of the old one become it."""
        old = var.ty
        ty = self.retyped(old, tree)
        if ty is old:
            return var
        new = type(var)(var.name, ty, var.span)
        self.env[handle(var)] = new
        return new

    def bind(self, name: str, value: relax.Expr, dataflow: bool) -> relax.Var:
        """Write a new binding; the value has its type."""
        var = (relax.DataflowVar if dataflow else relax.Var)(name, value.ty)
        self.out.append(relax.VarBinding(var, value))
        return var

    def transferred(self, value: relax.Expr, device: int) -> relax.Call:
        """A copy of a tensor, typed."""
        vdevice = self.vdevices[device]
        call = relax.op.to_vdevice(value, vdevice)
        relax.expr._update_type(call, tensor_on(value.ty, vdevice))
        return call

    def constant(self, expr: relax.Expr, device: int) -> relax.Expr:
        """A constant on a device. Its data is shared, and so is the expression among uses on that device."""
        key = (handle(expr), device)
        known = self._constants.get(key)
        if known is None:
            old = expr.ty
            ty = tensor_on(old, self.vdevices[device])
            known = expr if ty is old else relax.expr._ffi_api.MakeTensorConst(expr.value, ty, expr.span)
            self._constants[key] = known
            why = f"constant: used by '{self.current}' on {self.program.names[device]}"
            self.notes.append(PlacementNote("constant", self.current, ty, "constant", device, ANY, why))
        return expr if handle(known) == key[0] else known

    def mapped(self, expr: relax.Expr) -> relax.Expr:
        """An expression in terms of the new variables, on whatever device it is."""
        kind = type(expr)
        if kind in _VARS:
            return self.env.get(handle(expr), expr)
        if kind is relax.Tuple:
            old = list(expr.fields)
            fields = [self.mapped(field) for field in old]
            return _same_or_tuple(expr, old, fields)
        if kind is relax.TupleGetItem:
            old_whole = expr.tuple_value
            whole = self.mapped(old_whole)
            item = relax.TupleGetItem(whole, int(expr.index), expr.span)
            return expr if whole is old_whole and same_devices(expr.ty, item.ty) else item
        if kind is tvm.ir.GlobalVar and str(expr.name_hint) in self.program.units:
            new = self.callee(next(self.mentions))
            return expr if handle(new) == handle(expr) else new
        return expr

    def coerce(self, expr: relax.Expr, tree: Tree, want: Tree, place: tuple[int, int]) -> relax.Expr:
        """An operand, every tensor of it on the device where it is wanted.

        Parameters
        ----------
        expr, tree
            The expression in the source module, and where its tensors are.
        want : Tree
            Where they are wanted: one node for all, or a tree; None and ANY mean where they are.
        place : tuple
            (scope, record index) of the use.
        """
        kind = type(expr)
        if kind is relax.Tuple and isinstance(tree, tuple):
            old = list(expr.fields)
            fields = [
                self.coerce(field, sub, _field(want, index), place)
                for index, (field, sub) in enumerate(zip(old, tree, strict=True))
            ]
            return _same_or_tuple(expr, old, fields)
        if kind is tvm.ir.GenericConst and isinstance(tree, ConstLeaf):
            device = self.wanted(want)
            return self.constant(expr, self.device(tree) if device < 0 else device)
        return self._moved(self.mapped(expr), tree, want, place)

    def _moved(self, value: relax.Expr, tree: Tree, want: Tree, place: tuple[int, int]) -> relax.Expr:
        if tree is None or isinstance(tree, FuncTree) or not self._differs(tree, want):
            return value
        if isinstance(tree, tuple):
            fields = []
            for index, sub in enumerate(tree):
                sub_want = _field(want, index)
                if isinstance(sub, (int, ConstLeaf)) and self._differs(sub, sub_want):
                    fields.append(self._moved(value, sub, sub_want, place))
                else:
                    item = self.bind(f"{value.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
                    fields.append(self._moved(item, sub, sub_want, place))
            return relax.Tuple(fields)
        device = self.wanted(want, self.device(tree))
        if isinstance(tree, ConstLeaf):
            return self.constant(tree.expr, device)
        if tree in self.constants:
            return self.constant(self.constants[tree], device)
        if device == self.program.host and tree in self.on_host:
            return self.on_host[tree]
        copy = self.plan.by_use[place[0], place[1], tree, device].var
        assert copy is not None, "a transfer is written before its uses"
        return copy

    def _differs(self, tree: Tree, want: Tree) -> bool:
        if isinstance(tree, tuple):
            return any(self._differs(sub, _field(want, index)) for index, sub in enumerate(tree))
        if not isinstance(tree, (int, ConstLeaf)) or tree in self.opaque:
            return False
        here = self.device(tree)
        device = self.wanted(want, here)
        return device >= 0 and device != here


def _field(want: Tree, index: int) -> Tree:
    return want[index] if isinstance(want, tuple) else want


def _same_or_tuple(expr: relax.Tuple, old: list[relax.Expr], fields: list[relax.Expr]) -> relax.Tuple:
    """The tuple itself where no field changed, and its own type, which other passes may leave behind, fits them."""
    made = relax.Tuple(fields, expr.span)
    same = all(new is field for new, field in zip(fields, old, strict=True))
    return expr if same and same_devices(expr.ty, made.ty) else made
