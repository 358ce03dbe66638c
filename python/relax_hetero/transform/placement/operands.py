"""Operands of a function that is written: types with devices, and expressions on the device that a use needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import tvm
from tvm import relax

from ..ir.rewriting import handle
from .clones import Clone
from .graph import ANY, HOST, ConstLeaf, FuncTree, Tree, subtree
from .program import CallRef, Program, Unit
from .transfers import TransferPlan

# Types with devices.

Resolve = Callable[["int | ConstLeaf"], relax.VDevice]  # function that gives the vdevice of one tensor


def tensor_on(ty: relax.TensorType, vdevice: relax.VDevice) -> relax.TensorType:
    """The tensor type with a vdevice; the same type if it names this object."""
    old = ty.vdevice
    if old is not None and handle(old) == handle(vdevice):
        return ty
    shape = ty.shape
    if shape is not None:
        return relax.TensorType(shape, ty.dtype, vdevice, span=ty.span)
    return relax.TensorType(None, ty.dtype, vdevice, int(ty.ndim), ty.span)


def on_devices(ty: tvm.ir.Type, tree: Tree, resolve: Resolve) -> tvm.ir.Type:
    """A type with the device of every tensor in it, from a tree of the same structure.

    Returns the same type if nothing changes.
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
    """Return whether two types of the same structure name the same vdevice objects."""
    if isinstance(ty, relax.TensorType) and isinstance(other, relax.TensorType):
        vdevice, other_vdevice = ty.vdevice, other.vdevice
        if vdevice is None or other_vdevice is None:
            return vdevice is other_vdevice
        return handle(vdevice) == handle(other_vdevice)
    if isinstance(ty, tvm.ir.TupleType) and isinstance(other, tvm.ir.TupleType):
        return all(same_devices(sub, other_sub) for sub, other_sub in zip(ty.fields, other.fields, strict=True))
    return type(ty) is type(other)


_VARS = (relax.Var, relax.DataflowVar)


class PlacementNote(NamedTuple):
    """Note about one value for the placement report."""

    kind: str  # "op", "transfer", "param" or "constant"
    name: str  # variable; for a constant the variable that uses it first
    ty: tvm.ir.Type
    op: str
    device: int
    node: int  # node that explains the device; HOST for reads and results of the host, ANY if a use determines it
    reason: str  # reason as text; empty if it follows from `node`


class Operands:
    """State of a function that is written: replaced variables, and the bindings so far.

    Unchanged nodes keep their Python object (TVM makes a new one at every access), so that ``is`` detects changes.
    """

    def __init__(self, program: Program, unit: Unit, clone: Clone, plan: TransferPlan) -> None:
        self.program = program
        self.vdevices = program.vdevices
        self.unit = unit
        self.devices = clone.devices
        self.constants = clone.group.graph.constants
        self.opaque = clone.group.graph.opaque
        self.needs_transfers = clone.needs_transfers
        self.plan = plan
        self.env: dict[int, relax.Expr] = {}
        self.out: list[relax.Binding] = []  # bindings of the present block
        self.dataflow = False  # whether the present block is a dataflow block
        self.references: Iterator[CallRef] = iter(())  # references to Relax functions in the present binding, in order
        self.notes: list[PlacementNote] = []  # notes about transfers and copies, for the report
        self.current = "result"  # variable of the present binding
        # Variable on the host of each value that the host produced for another device.
        self.on_host: dict[int, relax.Var] = {}
        self._constants: dict[tuple[int, int], relax.Expr] = {}

    def callee(self, ref: CallRef) -> tvm.ir.GlobalVar:
        """The global variable of the clone that a reference needs."""
        raise NotImplementedError

    def device(self, leaf: int | ConstLeaf) -> int:
        """The device of a tensor."""
        if isinstance(leaf, int):
            return self.program.host if leaf == HOST else self.devices[leaf]
        if leaf.pinned >= 0:
            return leaf.pinned
        return max(0, self.program.required_device(self.devices, leaf.first_use))

    def vdevice(self, leaf: int | ConstLeaf) -> relax.VDevice:
        """The vdevice object of a tensor."""
        return self.vdevices[self.device(leaf)]

    def retyped(self, ty: tvm.ir.Type, tree: Tree) -> tvm.ir.Type:
        """The type with the devices of a tree."""
        return on_devices(ty, tree, self.vdevice)

    def define(self, var: relax.Var, tree: Tree) -> relax.Var:
        """The variable with its devices, which replaces the old variable in later uses."""
        old = var.ty
        ty = self.retyped(old, tree)
        if ty is old:
            return var
        new = type(var)(var.name, ty, var.span)
        self.env[handle(var)] = new
        return new

    def bind(self, name: str, value: relax.Expr, dataflow: bool) -> relax.Var:
        """Write a new binding of a value with a type."""
        var = (relax.DataflowVar if dataflow else relax.Var)(name, value.ty)
        self.out.append(relax.VarBinding(var, value))
        return var

    def transferred(self, value: relax.Expr, device: int) -> relax.Call:
        """A transfer of a tensor to a device, with its type."""
        vdevice = self.vdevices[device]
        call = relax.op.to_vdevice(value, vdevice)
        relax.expr._update_type(call, tensor_on(value.ty, vdevice))
        return call

    def constant(self, expr: relax.Expr, device: int) -> relax.Expr:
        """A constant on a device; uses on the device share the expression, and all devices the data."""
        key = (handle(expr), device)
        constant = self._constants.get(key)
        if constant is None:
            old = expr.ty
            ty = tensor_on(old, self.vdevices[device])
            constant = expr if ty is old else relax.expr._ffi_api.MakeTensorConst(expr.value, ty, expr.span)
            self._constants[key] = constant
            reason = f"constant: used by '{self.current}' on {self.program.names[device]}"
            self.notes.append(PlacementNote("constant", self.current, ty, "constant", device, ANY, reason))
        return expr if handle(constant) == key[0] else constant

    def mapped(self, expr: relax.Expr) -> relax.Expr:
        """An expression with the new variables, on the device that it is on."""
        kind = type(expr)
        if kind in _VARS:
            return self.env.get(handle(expr), expr)
        if kind is relax.Tuple:
            old = list(expr.fields)
            return _same_or_tuple(expr, old, [self.mapped(field) for field in old])
        if kind is relax.TupleGetItem:
            old_tuple = expr.tuple_value
            new_tuple = self.mapped(old_tuple)
            item = relax.TupleGetItem(new_tuple, int(expr.index), expr.span)
            return expr if new_tuple is old_tuple and same_devices(expr.ty, item.ty) else item
        if kind is tvm.ir.GlobalVar and str(expr.name_hint) in self.program.units:
            new = self.callee(next(self.references))
            return expr if handle(new) == handle(expr) else new
        return expr

    def coerce(
        self,
        # expr, tree: expression in the source module, and the nodes of its tensors.
        expr: relax.Expr,
        tree: Tree,
        required: Tree,  # node whose device is needed: one for all tensors, or a tree; None and ANY: the present device
        point: tuple[int, int],  # scope and record index of the use
    ) -> relax.Expr:
        """An operand with every tensor on the device that the use needs."""
        kind = type(expr)
        if kind is relax.Tuple and isinstance(tree, tuple):
            old = list(expr.fields)
            fields = [
                self.coerce(field, sub, subtree(required, index), point)
                for index, (field, sub) in enumerate(zip(old, tree, strict=True))
            ]
            return _same_or_tuple(expr, old, fields)
        if kind is tvm.ir.GenericConst and isinstance(tree, ConstLeaf):
            device = self.program.required_device(self.devices, required)
            return self.constant(expr, self.device(tree) if device < 0 else device)
        return self._on_required_device(self.mapped(expr), tree, required, point)

    def _on_required_device(self, value: relax.Expr, tree: Tree, required: Tree, point: tuple[int, int]) -> relax.Expr:
        if tree is None or isinstance(tree, FuncTree) or not self._differs(tree, required):
            return value
        if isinstance(tree, tuple):
            fields = []
            for index, sub in enumerate(tree):
                sub_required = subtree(required, index)
                if isinstance(sub, (int, ConstLeaf)) and self._differs(sub, sub_required):
                    fields.append(self._on_required_device(value, sub, sub_required, point))
                else:
                    item = self.bind(f"{value.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
                    fields.append(self._on_required_device(item, sub, sub_required, point))
            return relax.Tuple(fields)
        device = self.program.required_device(self.devices, required, self.device(tree))
        if isinstance(tree, ConstLeaf):
            return self.constant(tree.expr, device)
        if tree in self.constants:
            return self.constant(self.constants[tree], device)
        if device == self.program.host and tree in self.on_host:
            return self.on_host[tree]
        copy = self.plan.by_use[point[0], point[1], tree, device].var
        assert copy is not None, "a transfer is written before its uses"
        return copy

    def _differs(self, tree: Tree, required: Tree) -> bool:
        if isinstance(tree, tuple):
            return any(self._differs(sub, subtree(required, index)) for index, sub in enumerate(tree))
        if not isinstance(tree, (int, ConstLeaf)) or tree in self.opaque:
            return False
        device = self.device(tree)
        required_device = self.program.required_device(self.devices, required, device)
        return required_device >= 0 and required_device != device


def _same_or_tuple(expr: relax.Tuple, old: list[relax.Expr], fields: list[relax.Expr]) -> relax.Tuple:
    """The same tuple if no field changed and its type, which may be stale after other passes, has their devices."""
    new_tuple = relax.Tuple(fields, expr.span)
    is_same = all(new is field for new, field in zip(fields, old, strict=True))
    return expr if is_same and same_devices(expr.ty, new_tuple.ty) else new_tuple
