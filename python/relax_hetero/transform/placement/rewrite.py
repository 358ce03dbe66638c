"""Write one clone of a function: explicit devices in every type, transfers where they are planned, no hints.

Types are written, never inferred: stock inference refuses or forgets the device of n-ary ops.
"""

from __future__ import annotations

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

# (scope, record index)
Place = tuple[int, int]


class CallWriter(Operands):
    """Writes one binding at a time into the open block."""

    def rebind(self, record: Record, value: relax.Expr, var: relax.Var | None = None) -> relax.Var:
        """Write a binding of the program with its new value; the very binding where nothing changed."""
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

    def write_call(self, record: Record, place: Place) -> None:
        """Write an op, or a call of a Relax function."""
        call = record.value
        old_op, old_ty, old_ty_args = call.op, call.ty, list(call.ty_args)
        op = old_op if type(old_op) is tvm.ir.Op else self.mapped(old_op)
        wants = record.operand_devices
        args = []
        for position, (arg, tree) in enumerate(zip(record.args, record.trees, strict=True)):
            want = wants if isinstance(wants, int) else wants[position]
            args.append(self.mapped(arg) if tree is None else self.coerce(arg, tree, want, place))
        made = self._made(record)
        ty = self.retyped(old_ty, made)
        ty_args = self._ty_args(old_ty_args, made)
        parts = zip([op, ty, *args, *ty_args], [old_op, old_ty, *record.args, *old_ty_args], strict=True)
        changed = any(new is not old for new, old in parts)
        value = relax.Call(op, args, call.attrs, ty_args, call.span, ty) if changed else call
        if made is record.result_device:
            self._note_op(record, self.rebind(record, value), made)
            return
        raw = self.bind(f"{record.var.name}_made", value, isinstance(record.var, relax.DataflowVar))
        self._note_op(record, raw, made)
        if made == HOST and isinstance(record.result_device, int):
            self.on_host[record.result_device] = raw
        var = self.rebind(record, self._transferred(raw, record.result_device, made))
        self.record_transferred(record, var, made)

    def record_transferred(self, record: Record, var: relax.Var, value: Tree) -> None:
        """Report what a result needed to get from where it was made to where its variable lives."""
        for here, there in zip(tensors_of(record.result_device), tensors_of(value), strict=True):
            device, names = self.device(here), self.program.names
            if device != self.device(there) and here not in self.opaque:
                why = f"transfer: made on {names[self.device(there)]}, belongs on {names[device]}"
                self.notes.append(PlacementNote("transfer", var.name, var.ty, TRANSFER, device, ANY, why))

    def _note_op(self, record: Record, var: relax.Var, value: Tree) -> None:
        if record.host_read or record.produced == HOST:
            device = max(0, self.program.host)
            self.notes.append(PlacementNote("op", var.name, var.ty, record.op, device, HOST, ""))
        elif record.kind == "op" and record.site >= 0 and not isinstance(var.ty, (relax.ShapeType, tvm.ir.PrimType)):
            site = record.site
            self.notes.append(PlacementNote("op", var.name, var.ty, record.op, self.devices[site], site, ""))

    def _made(self, record: Record) -> Tree:
        """Where a call makes its result: a tree, `record.home` itself if the variable stays there."""
        home = record.result_device
        if record.produced == HOST:
            return home if self.all_on(home, self.program.host) else _everywhere(home, HOST)
        if not self.mixed:
            return home
        if record.kind == "call":
            here, there = list(tensors_of(home)), list(tensors_of(record.produced))
            same = [self.device(leaf) for leaf in here] == [self.device(leaf) for leaf in there]
            return home if same else record.produced
        if record.site < 0 or self.all_on(home, self.devices[record.site]):
            return home
        return _everywhere(home, record.site)

    def all_on(self, tree: Tree, device: int) -> bool:
        """Return whether all tensors of a tree live on this device; an ``R.Object`` lives on none."""
        return all(self.device(leaf) == device or leaf in self.opaque for leaf in tensors_of(tree))

    def _transferred(self, value: relax.Expr, device: Tree, written: Tree) -> relax.Expr:
        """Value that was made elsewhere, transferred tensor by tensor."""
        if isinstance(device, tuple) and isinstance(written, tuple):
            fields = []
            for index, (sub, sub_made) in enumerate(zip(device, written, strict=True)):
                item = self.bind(f"{value.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
                moved = self._transferred(item, sub, sub_made)
                fields.append(moved if moved is item else self._named(f"{item.name}_moved", moved))
            return relax.Tuple(fields)
        if (
            not isinstance(device, (int, ConstLeaf))
            or not isinstance(written, (int, ConstLeaf))
            or device in self.opaque
        ):
            return value
        return value if self.device(device) == self.device(written) else self.transferred(value, self.device(device))

    def _named(self, name: str, value: relax.Expr) -> relax.Expr:
        return value if isinstance(value, relax.Tuple) else self.bind(name, value, self.dataflow)

    def _ty_args(self, ty_args: list[tvm.ir.Type], value: Tree) -> list[tvm.ir.Type]:
        """The explicit result types of ``call_tir`` and its kin; several of them are the fields of a tuple."""
        if len(ty_args) == 1:
            return [self.retyped(ty_args[0], value)]
        if isinstance(value, tuple) and len(value) == len(ty_args):
            return [self.retyped(ty, sub) for ty, sub in zip(ty_args, value, strict=True)]
        return ty_args

    def write_crossing(self, record: Record, place: Place) -> None:
        """A hint or `to_vdevice`: an alias where the operand already is on the device, else a transfer."""
        arg, tree, device = record.args[0], record.trees[0], record.device
        transfer = None
        if isinstance(tree, int) and self.mixed:
            transfer = self.plan.by_use.get((place[0], place[1], tree, device))
        if transfer is not None and transfer.provider is not record:
            assert transfer.var is not None, "a transfer is written before its uses"
            self.rebind(record, transfer.var)
            return
        value = self._crossed(record, self.mapped(arg), tree)
        var = self.rebind(record, value)
        if transfer is not None:
            transfer.var = var
        if op_name(value) == TRANSFER:
            why = f"transfer: {record.op} to {self.program.names[device]}"
            self.notes.append(PlacementNote("transfer", var.name, var.ty, TRANSFER, device, ANY, why))

    def _crossed(self, record: Record, value: relax.Expr, tree: Tree) -> relax.Expr:
        device = record.device
        if isinstance(tree, ConstLeaf):
            return self.constant(tree.expr, device)
        if isinstance(tree, int):
            if self.devices[tree] == device:
                # An alias, unless one of the two may be overwritten while the other is read.
                is_own = record.kind == "to_vdevice" and self.program.writes_in_place
                return typed(copy(value), value.ty) if is_own else value
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
            moved = self._crossed(record, item, sub)
            fields.append(moved if moved is item else self._named(f"{item.name}_moved", moved))
        return relax.Tuple(fields)


def _everywhere(tree: Tree, node: int) -> Tree:
    if isinstance(tree, tuple):
        return tuple(_everywhere(sub, node) for sub in tree)
    return node if isinstance(tree, (int, ConstLeaf)) else tree


# The global variable that a mention of a function becomes.
Callee = Callable[[CallRef], tvm.ir.GlobalVar]


def rewrite(program: Program, unit: Unit, clone: Clone, callee: Callee) -> tuple[relax.Function, list[PlacementNote]]:
    """The function on the clone's devices, and what is to report about it.

    Returns
    -------
    func, notes
        The very function of the module if nothing changes.
    """
    writer = _Writer(program, unit, clone, callee)
    func = run(writer.function(unit.func, unit.scope, unit.tree.params, unit.tree.ret))
    return func, writer.notes


class _Writer(CallWriter):
    def __init__(self, program: Program, unit: Unit, clone: Clone, callee: Callee) -> None:
        super().__init__(program, unit, clone, plan_transfers(program, clone, unit.scope))
        self._callee = callee

    def callee(self, ref: CallRef) -> tvm.ir.GlobalVar:
        """The function that a mention means."""
        return self._callee(ref)

    def function(
        self, func: relax.Function, scope: Scope, params: tuple[Tree, ...], ret: Tree
    ) -> Generator[Any, Any, relax.Function]:
        """A function of the module, or a local one."""
        old_params = list(func.params)
        new_params = [self.define(param, tree) for param, tree in zip(old_params, params, strict=True)]
        for var, tree in zip(new_params, params, strict=True):
            first = next((leaf for leaf in tensors_of(tree) if isinstance(leaf, int)), None)
            if first is not None and not isinstance(var.ty, relax.AnyType):
                self.notes.append(PlacementNote("param", var.name, var.ty, "parameter", self.devices[first], first, ""))
        body = yield self._scope(scope)
        old_ret_ty = func.ret_ty
        ret_ty = self.retyped(old_ret_ty, ret)
        same = all(new is old for new, old in zip(new_params, old_params, strict=True))
        if same and body is scope.seq and ret_ty is old_ret_ty:
            return func
        return relax.Function(new_params, body, ret_ty, func.is_pure, func.attrs, func.span)

    def _scope(self, scope: Scope) -> Generator[Any, Any, relax.SeqExpr]:
        changed = False
        blocks: list[relax.BindingBlock] = []
        before = self.plan.before
        for block, start, stop in scope.blocks:
            bindings: list[relax.Binding] = []
            self._open(block, bindings)
            for record in scope.records[start:stop]:
                place = (id(scope), record.index)
                for transfer in before.get(place, ()):
                    self._insert(transfer)
                inner = []
                for nested in record.scopes:
                    inner.append((yield self._nested(record, nested)))
                    self._open(block, bindings)
                self.mentions = iter(record.callees)
                self._write(record, inner, place)
            old = [record.binding for record in scope.records[start:stop]]
            if len(bindings) != len(old) or any(new is not was for new, was in zip(bindings, old, strict=True)):
                changed = True
                block = type(block)(bindings, block.span)
            blocks.append(block)
        self.out, self.dataflow, self.current = [], False, "result"
        place = (id(scope), len(scope.records))
        for transfer in before.get(place, ()):
            self._insert(transfer)
        self.mentions = iter(scope.callees)
        body = self.coerce(scope.body, scope.body_tree, scope.body_device, place)
        if self.out:
            blocks.append(relax.BindingBlock(self.out))
        if not changed and not self.out and body is scope.body and same_devices(scope.seq.ty, body.ty):
            return scope.seq
        sequence = relax.SeqExpr(blocks, body, scope.seq.span)
        relax.expr._update_type(sequence, body.ty)
        return sequence

    def _open(self, block: relax.BindingBlock, bindings: list[relax.Binding]) -> None:
        self.out, self.dataflow = bindings, isinstance(block, relax.DataflowBlock)

    def _nested(self, record: Record, scope: Scope) -> Generator[Any, Any, Any]:
        if record.func is None:
            return self._scope(scope)
        self.define(record.var, record.result_device)  # a local function may call itself
        return self.function(record.value, scope, record.func.params, record.func.ret)

    def _insert(self, transfer: Transfer) -> None:
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
        why = f"transfer: needed by '{transfer.needed_by}' on {self.program.names[device]}"
        self.notes.append(PlacementNote("transfer", name, copy.ty, TRANSFER, device, ANY, why))

    def _write(self, record: Record, inner: list[Any], place: Place) -> None:
        self.current = record.var.name
        kind = record.kind
        if kind == "op" or kind == "call":
            self.write_call(record, place)
        elif kind == "hint" or kind == "to_vdevice":
            self.write_crossing(record, place)
        elif kind == "if":
            self._write_if(record, inner, place)
        elif kind == "function":
            self.rebind(record, inner[0], self.env.get(handle(record.var), record.var))
        elif self._is_revealed_elsewhere(record):
            self._write_revealed(record)
        else:
            want = None if isinstance(record.operand_devices, int) else record.operand_devices[0]
            self.rebind(record, self.coerce(record.value, record.trees[0], want, place))

    def _is_revealed_elsewhere(self, record: Record) -> bool:
        here, there = record.result_device, record.produced
        if not self.mixed or here is there or not isinstance(there, int):
            return False
        return not self.all_on(here, self.device(there))

    def _write_revealed(self, record: Record) -> None:
        """A match_cast of an object on one device, whose variable belongs on another."""
        binding = record.binding
        ty = self.retyped(binding.ty, record.produced)
        raw = (relax.DataflowVar if self.dataflow else relax.Var)(f"{record.var.name}_made", ty)
        self.out.append(relax.MatchCast(raw, self.mapped(record.value), ty, binding.span))
        var = self.define(record.var, record.result_device)
        assert isinstance(record.result_device, int)
        self.out.append(relax.VarBinding(var, self.transferred(raw, self.device(record.result_device)), binding.span))
        self.record_transferred(record, var, record.produced)

    def _write_if(self, record: Record, inner: list[Any], place: Place) -> None:
        value = record.value
        cond = self.coerce(record.args[0], record.trees[0], HOST, place)
        old_ty = value.ty
        ty = self.retyped(old_ty, record.result_device)
        same = all(new is nested.seq for new, nested in zip(inner, record.scopes, strict=True))
        if not same or cond is not record.args[0] or ty is not old_ty:
            value = relax.If(cond, inner[0], inner[1], value.span)
            relax.expr._update_type(value, ty)
        self.rebind(record, value)
