"""Write one clone of a function: explicit devices in every type, transfers where they are planned, no hints.

Types are written, never inferred: stock inference refuses or forgets the device of n-ary ops.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import tvm
from tvm import relax

from ..ir.op_names import TRANSFER
from ..ir.rewriting import handle
from .clones import Clone
from .graph import ANY, HOST, Tree, tensors_of
from .operands import Note
from .program import CallRef, Program, Record, Scope, Unit
from .trampoline import run
from .transfers import Transfer, plan_transfers
from .types import same_devices
from .write_calls import CallWriter, Place

# The global variable that a mention of a function becomes.
Callee = Callable[[CallRef], tvm.ir.GlobalVar]


def rewrite(program: Program, unit: Unit, clone: Clone, callee: Callee) -> tuple[relax.Function, list[Note]]:
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
                self.notes.append(Note("param", var.name, var.ty, "parameter", self.devices[first], first, ""))
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
        body = self.coerce(scope.body, scope.body_tree, scope.body_want, place)
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
        self.define(record.var, record.home)  # a local function may call itself
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
        self.notes.append(Note("transfer", name, copy.ty, TRANSFER, device, ANY, why))

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
            want = None if isinstance(record.wants, int) else record.wants[0]
            self.rebind(record, self.coerce(record.value, record.trees[0], want, place))

    def _is_revealed_elsewhere(self, record: Record) -> bool:
        here, there = record.home, record.produced
        if not self.mixed or here is there or not isinstance(there, int):
            return False
        return not self.all_on(here, self.device(there))

    def _write_revealed(self, record: Record) -> None:
        """A match_cast of an object on one device, whose variable belongs on another."""
        binding = record.binding
        ty = self.retyped(binding.ty, record.produced)
        raw = (relax.DataflowVar if self.dataflow else relax.Var)(f"{record.var.name}_made", ty)
        self.out.append(relax.MatchCast(raw, self.mapped(record.value), ty, binding.span))
        var = self.define(record.var, record.home)
        assert isinstance(record.home, int)
        self.out.append(relax.VarBinding(var, self.transferred(raw, self.device(record.home)), binding.span))
        self.note_brought_home(record, var, record.produced)

    def _write_if(self, record: Record, inner: list[Any], place: Place) -> None:
        value = record.value
        cond = self.coerce(record.args[0], record.trees[0], HOST, place)
        old_ty = value.ty
        ty = self.retyped(old_ty, record.home)
        same = all(new is nested.seq for new, nested in zip(inner, record.scopes, strict=True))
        if not same or cond is not record.args[0] or ty is not old_ty:
            value = relax.If(cond, inner[0], inner[1], value.span)
            relax.expr._update_type(value, ty)
        self.rebind(record, value)
