"""Write calls: operands on the device of the call, explicit result types, hints and transfers."""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.op_names import TRANSFER
from ..ir.rewriting import handle
from .graph import ANY, HOST, ConstLeaf, Tree, tensors_of
from .operands import Note, Operands
from .program import Record

# (scope, record index)
Place = tuple[int, int]


class CallWriter(Operands):
    """Writes one binding at a time into the open block."""

    def rebind(self, record: Record, value: relax.Expr, var: relax.Var | None = None) -> relax.Var:
        """Write a binding of the program with its new value; the very binding where nothing changed."""
        binding = record.binding
        if var is None:
            var = self.define(record.var, record.home)
        same = value is record.value and var is record.var
        if isinstance(binding, relax.MatchCast):
            old_ty = binding.ty
            ty = self.retyped(old_ty, record.home)
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
        wants = record.wants
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
        if made is record.home:
            self._note_op(record, self.rebind(record, value), made)
            return
        raw = self.bind(f"{record.var.name}_made", value, isinstance(record.var, relax.DataflowVar))
        self._note_op(record, raw, made)
        if made == HOST and isinstance(record.home, int):
            self.on_host[record.home] = raw
        var = self.rebind(record, self._brought_home(raw, record.home, made))
        self.note_brought_home(record, var, made)

    def note_brought_home(self, record: Record, var: relax.Var, made: Tree) -> None:
        """Report what a result needed to get from where it was made to where its variable lives."""
        for here, there in zip(tensors_of(record.home), tensors_of(made), strict=True):
            device, names = self.device(here), self.program.names
            if device != self.device(there) and here not in self.opaque:
                why = f"transfer: made on {names[self.device(there)]}, belongs on {names[device]}"
                self.notes.append(Note("transfer", var.name, var.ty, TRANSFER, device, ANY, why))

    def _note_op(self, record: Record, var: relax.Var, made: Tree) -> None:
        if record.host_read or record.produced == HOST:
            device = max(0, self.program.host)
            self.notes.append(Note("op", var.name, var.ty, record.op, device, HOST, ""))
        elif record.kind == "op" and record.site >= 0 and not isinstance(var.ty, (relax.ShapeType, tvm.ir.PrimType)):
            site = record.site
            self.notes.append(Note("op", var.name, var.ty, record.op, self.devices[site], site, ""))

    def _made(self, record: Record) -> Tree:
        """Where a call makes its result: a tree, `record.home` itself if the variable stays there."""
        home = record.home
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
        """Whether all tensors of a tree live on this device; an ``R.Object`` lives on none."""
        return all(self.device(leaf) == device or leaf in self.opaque for leaf in tensors_of(tree))

    def _brought_home(self, value: relax.Expr, home: Tree, made: Tree) -> relax.Expr:
        """What was made elsewhere, transferred tensor by tensor."""
        if isinstance(home, tuple) and isinstance(made, tuple):
            fields = []
            for index, (sub, sub_made) in enumerate(zip(home, made, strict=True)):
                item = self.bind(f"{value.name}_{index}", relax.TupleGetItem(value, index), self.dataflow)
                moved = self._brought_home(item, sub, sub_made)
                fields.append(moved if moved is item else self._named(f"{item.name}_moved", moved))
            return relax.Tuple(fields)
        if not isinstance(home, (int, ConstLeaf)) or not isinstance(made, (int, ConstLeaf)) or home in self.opaque:
            return value
        return value if self.device(home) == self.device(made) else self.transferred(value, self.device(home))

    def _named(self, name: str, value: relax.Expr) -> relax.Expr:
        return value if isinstance(value, relax.Tuple) else self.bind(name, value, self.dataflow)

    def _ty_args(self, ty_args: list[tvm.ir.Type], made: Tree) -> list[tvm.ir.Type]:
        """The explicit result types of ``call_tir`` and its kin; several of them are the fields of a tuple."""
        if len(ty_args) == 1:
            return [self.retyped(ty_args[0], made)]
        if isinstance(made, tuple) and len(made) == len(ty_args):
            return [self.retyped(ty, sub) for ty, sub in zip(ty_args, made, strict=True)]
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
        if isinstance(value, relax.Call):
            why = f"transfer: {record.op} to {self.program.names[device]}"
            self.notes.append(Note("transfer", var.name, var.ty, TRANSFER, device, ANY, why))

    def _crossed(self, record: Record, value: relax.Expr, tree: Tree) -> relax.Expr:
        device = record.device
        if isinstance(tree, ConstLeaf):
            return self.constant(tree.expr, device)
        if isinstance(tree, int):
            if self.devices[tree] == device:
                return value
            if tree in self.constants:
                return self.constant(self.constants[tree], device)
            call = record.value
            if record.kind == "to_vdevice" and value is record.args[0]:
                if handle(call.attrs.dst_vdevice) == handle(self.vdevices[device]):
                    ty = call.ty
                    if self.retyped(ty, record.home) is ty:
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
