"""Writer of one clone of a function: explicit devices in every type, planned transfers, no hints.

Types are written, never inferred: TVM's inference rejects n-ary ops with devices, or loses the devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator
from typing import Any

import tvm
from tvm import relax

from ...op.copies import copy
from ..ir.op_names import TRANSFER
from ..ir.rewriting import handle, op_name, typed
from .clones import Clone
from .graph import ANY, HOST, ConstLeaf, Tree, tensors_of
from .operands import Operands, PlacementNote, same_devices
from .program import CallRef, Program, Record, Scope, Unit
from .transfers import Transfer, plan_transfers
from .trees import run

ProgramPoint = tuple[int, int]  # the `id` of a scope, and the index of a record in it


class CallWriter(Operands):
    """Writer of single bindings into the open block."""

    def rebind(self, record: Record, value: relax.Expr, var: relax.Var | None = None) -> relax.Var:
        """Write a binding of the program with its new value; the same binding if nothing changed."""
        binding = record.binding
        if var is None:
            var = self.define(record.var, record.result_device)
        same = value is record.value and var is record.var
        if isinstance(binding, relax.MatchCast):
            old_ty = binding.ty
            ty = self.retyped(old_ty, record.result_device)
            if not same or ty is not old_ty:
                binding = relax.MatchCast(var, value, ty, binding.span)
        elif not same:
            binding = relax.VarBinding(var, value, binding.span)
        self.out.append(binding)
        return var

    def write_call(self, record: Record, point: ProgramPoint) -> None:
        """Write an op, or a call of a Relax function."""
        call = record.value
        old_op, old_ty, old_ty_args = call.op, call.ty, list(call.ty_args)
        op = old_op if type(old_op) is tvm.ir.Op else self.mapped(old_op)
        required = record.operand_devices
        args = []
        for position, (arg, tree) in enumerate(zip(record.args, record.trees, strict=True)):
            node = required if isinstance(required, int) else required[position]
            args.append(self.mapped(arg) if tree is None else self.coerce(arg, tree, node, point))
        produced = self._production_tree(record)
        ty = self.retyped(old_ty, produced)
        ty_args = self._retyped_ty_args(old_ty_args, produced)
        old_parts = [old_op, old_ty, *record.args, *old_ty_args]
        changed = any(map(operator.is_not, [op, ty, *args, *ty_args], old_parts))
        value = relax.Call(op, args, call.attrs, ty_args, call.span, ty) if changed else call
        if produced is record.result_device:
            self._note_op(record, self.rebind(record, value))
            return
        raw = self.bind(f"{record.var.name}_made", value, isinstance(record.var, relax.DataflowVar))
        self._note_op(record, raw)
        if produced == HOST and isinstance(record.result_device, int):
            self.on_host[record.result_device] = raw
        var = self.rebind(record, self._transferred_tree(raw, record.result_device, produced))
        self.record_transferred(record, var, produced)

    def record_transferred(self, record: Record, var: relax.Var, produced: Tree) -> None:
        """Note, for the report, transfers of a result from the producing device to the device of its variable."""
        for target, source in zip(tensors_of(record.result_device), tensors_of(produced), strict=True):
            device, names = self.device(target), self.program.names
            if device != self.device(source) and target not in self.opaque:
                reason = f"transfer: made on {names[self.device(source)]}, belongs on {names[device]}"
                self.notes.append(PlacementNote("transfer", var.name, var.ty, TRANSFER, device, ANY, reason))

    def _note_op(self, record: Record, var: relax.Var) -> None:
        if record.host_read or record.produced == HOST:
            device = max(0, self.program.host)
            self.notes.append(PlacementNote("op", var.name, var.ty, record.op, device, HOST, ""))
        elif record.kind == "op" and record.site >= 0 and not isinstance(var.ty, (relax.ShapeType, tvm.ir.PrimType)):
            site = record.site
            self.notes.append(PlacementNote("op", var.name, var.ty, record.op, self.devices[site], site, ""))

    def _production_tree(self, record: Record) -> Tree:
        """Nodes on whose devices a call produces its result: those of the variable unless a transfer follows."""
        result = record.result_device
        if record.produced == HOST:
            return result if self.all_on(result, self.program.host) else _filled(result, HOST)
        if not self.needs_transfers:
            return result
        if record.kind == "call":
            devices, produced = ([self.device(x) for x in tensors_of(tree)] for tree in (result, record.produced))
            return result if devices == produced else record.produced
        if record.site < 0 or self.all_on(result, self.devices[record.site]):
            return result
        return _filled(result, record.site)

    def all_on(self, tree: Tree, device: int) -> bool:
        """Return whether all tensors of a tree are on a device; an ``R.Object`` does not have one."""
        return all(self.device(leaf) == device or leaf in self.opaque for leaf in tensors_of(tree))

    def _transferred_tree(self, value: relax.Expr, target: Tree, source: Tree) -> relax.Expr:
        """A value with every tensor transferred from the device of its `source` node to that of its `target` node."""
        if isinstance(target, tuple) and isinstance(source, tuple):
            fields = []
            for index, (sub_target, sub_source) in enumerate(zip(target, source, strict=True)):
                item = self.bind(f"{value.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
                copied = self._transferred_tree(item, sub_target, sub_source)
                fields.append(copied if copied is item else self._bind_unless_tuple(f"{item.name}_moved", copied))
            return relax.Tuple(fields)
        if (
            not isinstance(target, (int, ConstLeaf))
            or not isinstance(source, (int, ConstLeaf))
            or target in self.opaque
        ):
            return value
        return value if self.device(target) == self.device(source) else self.transferred(value, self.device(target))

    def _bind_unless_tuple(self, name: str, value: relax.Expr) -> relax.Expr:
        return value if isinstance(value, relax.Tuple) else self.bind(name, value, self.dataflow)

    def _retyped_ty_args(self, ty_args: list[tvm.ir.Type], tree: Tree) -> list[tvm.ir.Type]:
        """Explicit result types of ``call_tir`` etc. with the devices of a tree; several types are a tuple's fields."""
        if len(ty_args) == 1:
            return [self.retyped(ty_args[0], tree)]
        if isinstance(tree, tuple) and len(tree) == len(ty_args):
            return [self.retyped(ty, sub) for ty, sub in zip(ty_args, tree, strict=True)]
        return ty_args

    def write_crossing(self, record: Record, point: ProgramPoint) -> None:
        """Write a hint or `to_vdevice`: an alias if the operand is on the device already, else a transfer."""
        arg, tree, device = record.args[0], record.trees[0], record.device
        transfer = None
        if isinstance(tree, int) and self.needs_transfers:
            transfer = self.plan.by_use.get((point[0], point[1], tree, device))
        if transfer is not None and transfer.provider is not record:
            assert transfer.var is not None, "a transfer is written before its uses"
            self.rebind(record, transfer.var)
            return
        value = self._on_destination(record, self.mapped(arg), tree)
        var = self.rebind(record, value)
        if transfer is not None:
            transfer.var = var
        if op_name(value) == TRANSFER:
            reason = f"transfer: {record.op} to {self.program.names[device]}"
            self.notes.append(PlacementNote("transfer", var.name, var.ty, TRANSFER, device, ANY, reason))

    def _on_destination(self, record: Record, value: relax.Expr, tree: Tree) -> relax.Expr:
        """The operand of a hint or `to_vdevice` on its destination: itself, a copy or a transfer."""
        device = record.device
        if isinstance(tree, ConstLeaf):
            return self.constant(tree.expr, device)
        if isinstance(tree, int):
            if self.devices[tree] == device:
                # A copy if an op of the module may write to operand or result while the other is still read.
                needs_copy = record.kind == "to_vdevice" and self.program.writes_in_place
                return typed(copy(value), value.ty) if needs_copy else value
            if tree in self.constants:
                return self.constant(self.constants[tree], device)
            call = record.value
            if record.kind == "to_vdevice" and value is record.args[0]:
                if handle(call.attrs.dst_vdevice) == handle(self.vdevices[device]):
                    ty = call.ty
                    if self.retyped(ty, record.result_device) is ty:
                        return call
            return self.transferred(value, device)
        if not isinstance(tree, tuple):
            return value
        fields = []
        for index, sub in enumerate(tree):
            item = self.bind(f"{record.var.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
            copied = self._on_destination(record, item, sub)
            fields.append(copied if copied is item else self._bind_unless_tuple(f"{item.name}_moved", copied))
        return relax.Tuple(fields)


def _filled(tree: Tree, node: int) -> Tree:
    """A tree of the same structure with one node for all tensors."""
    if isinstance(tree, tuple):
        return tuple(_filled(sub, node) for sub in tree)
    return node if isinstance(tree, (int, ConstLeaf)) else tree


Callee = Callable[[CallRef], tvm.ir.GlobalVar]  # function that returns the global variable of the clone for a reference


def rewrite(program: Program, unit: Unit, clone: Clone, callee: Callee) -> tuple[relax.Function, list[PlacementNote]]:
    """Write a function for the devices of a clone.

    Returns
    -------
    func, notes
        Function, the same object if nothing changes, and notes for the report.
    """
    writer = _Writer(program, unit, clone, callee)
    func = run(writer.function(unit.func, unit.scope, unit.tree.params, unit.tree.ret))
    return func, writer.notes


class _Writer(CallWriter):
    def __init__(self, program: Program, unit: Unit, clone: Clone, callee: Callee) -> None:
        super().__init__(program, unit, clone, plan_transfers(program, clone, unit.scope))
        self._callee = callee

    def callee(self, ref: CallRef) -> tvm.ir.GlobalVar:
        """The global variable of the clone that a reference needs."""
        return self._callee(ref)

    def function(
        self, func: relax.Function, scope: Scope, params: tuple[Tree, ...], ret: Tree
    ) -> Generator[Any, Any, relax.Function]:
        """Write a function of the module, or a local function."""
        old_params = list(func.params)
        new_params = [self.define(param, tree) for param, tree in zip(old_params, params, strict=True)]
        for var, tree in zip(new_params, params, strict=True):
            first = next((leaf for leaf in tensors_of(tree) if isinstance(leaf, int)), None)
            if first is not None and not isinstance(var.ty, relax.AnyType):
                self.notes.append(PlacementNote("param", var.name, var.ty, "parameter", self.devices[first], first, ""))
        body = yield self._write_scope(scope)
        old_ret_ty = func.ret_ty
        ret_ty = self.retyped(old_ret_ty, ret)
        same = all(new is old for new, old in zip(new_params, old_params, strict=True))
        if same and body is scope.seq and ret_ty is old_ret_ty:
            return func
        return relax.Function(new_params, body, ret_ty, func.is_pure, func.attrs, func.span)

    def _write_scope(self, scope: Scope) -> Generator[Any, Any, relax.SeqExpr]:
        changed = False
        blocks: list[relax.BindingBlock] = []
        before = self.plan.before
        for block, start, stop in scope.blocks:
            bindings: list[relax.Binding] = []
            self._open_block(block, bindings)
            for record in scope.records[start:stop]:
                point = (id(scope), record.index)
                for transfer in before.get(point, ()):
                    self._write_transfer(transfer)
                inner = []
                for nested in record.scopes:
                    inner.append((yield self._write_nested(record, nested)))
                    self._open_block(block, bindings)
                self.references = iter(record.callees)
                self._write_record(record, inner, point)
            old_bindings = [record.binding for record in scope.records[start:stop]]
            if len(bindings) != len(old_bindings) or any(map(operator.is_not, bindings, old_bindings)):
                changed = True
                block = type(block)(bindings, block.span)
            blocks.append(block)
        self.out, self.dataflow, self.current = [], False, "result"
        point = (id(scope), len(scope.records))
        for transfer in before.get(point, ()):
            self._write_transfer(transfer)
        self.references = iter(scope.callees)
        body = self.coerce(scope.body, scope.body_tree, scope.body_device, point)
        if self.out:
            blocks.append(relax.BindingBlock(self.out))
        if not changed and not self.out and body is scope.body and same_devices(scope.seq.ty, body.ty):
            return scope.seq
        sequence = relax.SeqExpr(blocks, body, scope.seq.span)
        relax.expr._update_type(sequence, body.ty)
        return sequence

    def _open_block(self, block: relax.BindingBlock, bindings: list[relax.Binding]) -> None:
        self.out, self.dataflow = bindings, isinstance(block, relax.DataflowBlock)

    def _write_nested(self, record: Record, scope: Scope) -> Generator[Any, Any, Any]:
        if record.func is None:
            return self._write_scope(scope)
        self.define(record.var, record.result_device)  # a local function may call itself
        return self.function(record.value, scope, record.func.params, record.func.ret)

    def _write_transfer(self, transfer: Transfer) -> None:
        """Write a planned transfer."""
        var, path = self.unit.access[transfer.node]
        local = self.dataflow and transfer.is_local()
        value = self.env.get(handle(var), var)
        name = str(var.name)
        for index in path:
            name = f"{name}_{index}"
            value = self.bind(name, relax.TupleGetItem(value, index), self.dataflow)
        device = transfer.device
        name = f"{name}_{self.program.names[device].replace(':', '_')}"
        copy = self.bind(name, self.transferred(value, device), local)
        transfer.var = copy
        reason = f"transfer: needed by '{transfer.needed_by}' on {self.program.names[device]}"
        self.notes.append(PlacementNote("transfer", name, copy.ty, TRANSFER, device, ANY, reason))

    def _write_record(self, record: Record, inner: list[Any], point: ProgramPoint) -> None:
        self.current = record.var.name
        kind = record.kind
        if kind == "op" or kind == "call":
            self.write_call(record, point)
        elif kind == "hint" or kind == "to_vdevice":
            self.write_crossing(record, point)
        elif kind == "if":
            self._write_if(record, inner, point)
        elif kind == "function":
            self.rebind(record, inner[0], self.env.get(handle(record.var), record.var))
        elif self._is_cast_with_transfer(record):
            self._write_cast_with_transfer(record)
        else:
            required = None if isinstance(record.operand_devices, int) else record.operand_devices[0]
            self.rebind(record, self.coerce(record.value, record.trees[0], required, point))

    def _is_cast_with_transfer(self, record: Record) -> bool:
        result, source = record.result_device, record.produced
        if not self.needs_transfers or result is source or not isinstance(source, int):
            return False
        return not self.all_on(result, self.device(source))

    def _write_cast_with_transfer(self, record: Record) -> None:
        """Write a match_cast of an object on one device to a variable on another."""
        binding = record.binding
        ty = self.retyped(binding.ty, record.produced)
        raw = (relax.DataflowVar if self.dataflow else relax.Var)(f"{record.var.name}_made", ty)
        self.out.append(relax.MatchCast(raw, self.mapped(record.value), ty, binding.span))
        var = self.define(record.var, record.result_device)
        assert isinstance(record.result_device, int)
        self.out.append(relax.VarBinding(var, self.transferred(raw, self.device(record.result_device)), binding.span))
        self.record_transferred(record, var, record.produced)

    def _write_if(self, record: Record, inner: list[Any], point: ProgramPoint) -> None:
        value = record.value
        cond = self.coerce(record.args[0], record.trees[0], HOST, point)
        old_ty = value.ty
        ty = self.retyped(old_ty, record.result_device)
        same = all(new is nested.seq for new, nested in zip(inner, record.scopes, strict=True))
        if not same or cond is not record.args[0] or ty is not old_ty:
            value = relax.If(cond, inner[0], inner[1], value.span)
            relax.expr._update_type(value, ty)
        self.rebind(record, value)
