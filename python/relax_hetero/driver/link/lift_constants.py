"""Lifting of constants out of the code, into a tuple that is the last parameter of every function that needs it.

TVM's virtual machine copies every constant to its first device and keeps the executable's own copy, too. A lifted
constant is stored once, on the device that uses it, and the file's bytes can be mapped instead of copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import tvm
from tvm import relax
from tvm_ffi import structural_map, structural_walk

from ...artifact.checks import RECORD, WORDS
from ...artifact.mailboxes import DATA, MailboxSpec
from ...artifact.metadata import ConstantSpec
from ...target.vdevice import vdevice_index, vdevices_of
from ...transform.ir.module_attrs import DEFAULTS
from ...transform.ir.rewriting import copy_module, is_tensor_constant, relax_functions, typed, with_body
from .address_table import AddressTable


@dataclass(frozen=True)
class LiftedConstants:
    """A module without constants, the constants in tuple order, and the functions that take the tuple."""

    mod: tvm.IRModule
    specs: list[ConstantSpec]
    tensors: list[tvm.runtime.Tensor]
    takers: set[str]
    defaults: dict[str, dict[str, int]]  # index of the default constant by function and parameter


class _ConstantTuple:
    """Distinct (tensor, device) pairs in order of first use."""

    def __init__(self, vdevices: list[relax.VDevice]):
        self.vdevices = vdevices
        self.index: dict[tuple[int, int], int] = {}
        self.types: list[relax.TensorType] = []
        self.specs: list[ConstantSpec] = []
        self.tensors: list[tvm.runtime.Tensor] = []

    def add(self, constant: tvm.ir.GenericConst) -> int:
        device = vdevice_index(constant.ty.vdevice or self.vdevices[0], self.vdevices)
        data = constant.value
        key = (device, hash(data))  # identity, which is unique because the table keeps the tensor alive
        if key not in self.index:
            self.index[key] = len(self.specs)
            shape = tuple(int(extent) for extent in data.shape)
            is_record = shape == (WORDS,) and str(data.dtype) == "int32" and data.numpy().tobytes() == RECORD
            name, dtype = f"constant_{len(self.specs)}", str(data.dtype)
            mailbox = MailboxSpec.of(data.numpy().tobytes()) if shape == (DATA,) and dtype == "uint8" else None
            self.specs.append(ConstantSpec(name, shape, dtype, device, is_record=is_record, mailbox=mailbox))
            self.types.append(constant.ty)
            self.tensors.append(data)
        return self.index[key]

    def add_table(self, direct: AddressTable) -> None:
        """Add an address table, after the constants that it refers to."""
        entries: list[int | str] = [*(self.add(constant) for constant in direct.constants), *direct.kernels]
        index = self.add(direct.tensor)
        self.specs[index] = replace(self.specs[index], addresses=tuple(entries), region=direct.region)


def lift_constants(mod: tvm.IRModule, tables: Sequence[AddressTable] = ()) -> LiftedConstants:
    """Lift every tensor constant of a lowered module (LowerToVM), and the constants of address tables."""
    functions = dict(relax_functions(mod))
    takers = _takers(mod, functions)
    table = _ConstantTuple(vdevices_of(mod))
    for direct in tables:
        table.add_table(direct)
    replaced = {gv: _replace(func, table) for gv, func in functions.items() if gv in takers}
    defaults = {gv.name_hint: _defaults(func, table) for gv, func in functions.items() if DEFAULTS in func.attrs}
    tuple_type = tvm.ir.TupleType(table.types)
    result = dict(mod.functions.items())
    for gv, (body, used) in replaced.items():
        constants = relax.Var("constants", tuple_type)
        body = structural_map(body, (relax.Call, lambda call, c=constants: _pass_on(call, takers, c)))
        fetches = [relax.VarBinding(var, _get_item(constants, i, var.ty)) for i, var in used.items()]
        if fetches:
            body = typed(relax.SeqExpr([relax.BindingBlock(fetches), *body.blocks], body.body, body.span), body.ty)
        result[gv] = with_body(functions[gv], body, [*functions[gv].params, constants])
    names = {gv.name_hint for gv in takers}
    return LiftedConstants(copy_module(mod, result), table.specs, table.tensors, names, defaults)


def _defaults(func: relax.Function, table: _ConstantTuple) -> dict[str, int]:
    types = {param.name: param.ty for param in func.params}
    return {
        str(name): table.add(
            tvm.ir.GenericConst(tensor, relax.TensorType(tensor.shape, str(tensor.dtype), types[str(name)].vdevice))
        )
        for name, tensor in func.attrs[DEFAULTS].items()
        if str(name) in types  # unless a pass of the caller's has bound or renamed the parameter
    }


def _get_item(constants: relax.Var, index: int, ty: relax.TensorType) -> relax.Call:
    operands = [constants, relax.prim_value(index)]
    return relax.Call(relax.ExternFunc("vm.builtin.tuple_getitem"), operands, None, [ty], ret_ty=ty)


def _takers(mod: tvm.IRModule, functions: dict[tvm.ir.GlobalVar, relax.Function]) -> set[tvm.ir.GlobalVar]:
    """Functions that contain a constant, or call one that does."""
    takers: set[tvm.ir.GlobalVar] = set()
    callers: dict[tvm.ir.GlobalVar, list[tvm.ir.GlobalVar]] = {}
    for gv, func in functions.items():

        def on_constant(constant: tvm.ir.GenericConst, gv: tvm.ir.GlobalVar = gv) -> None:
            if is_tensor_constant(constant):
                takers.add(gv)

        def on_global(callee: tvm.ir.GlobalVar, gv: tvm.ir.GlobalVar = gv) -> None:
            if callee in functions:
                callers.setdefault(callee, []).append(gv)

        structural_walk(func.body, [(tvm.ir.GenericConst, on_constant), (tvm.ir.GlobalVar, on_global)])
    pending = list(takers)
    while pending:
        for caller in callers.get(pending.pop(), []):
            if caller not in takers:
                takers.add(caller)
                pending.append(caller)
    return takers


def _replace(func: relax.Function, table: _ConstantTuple) -> tuple[relax.Expr, dict[int, relax.Var]]:
    used: dict[int, relax.Var] = {}

    def on_constant(constant: tvm.ir.GenericConst) -> relax.Expr:
        if not is_tensor_constant(constant):
            return constant
        index = table.add(constant)
        if index not in used:
            used[index] = relax.Var(f"constant_{index}", constant.ty)
        return used[index]

    return structural_map(func.body, (tvm.ir.GenericConst, on_constant)), used


def _pass_on(call: relax.Call, takers: set[tvm.ir.GlobalVar], constants: relax.Var) -> relax.Call:
    # A closure binds the last parameters of its function, so the constants come last there, too.
    is_closure = isinstance(call.op, relax.ExternFunc) and call.op.global_symbol == "vm.builtin.make_closure"
    callee = call.args[0] if is_closure else call.op
    if isinstance(callee, tvm.ir.GlobalVar) and callee in takers:
        return relax.Call(call.op, [*call.args, constants], call.attrs, call.ty_args, call.span, ret_ty=call.ty)
    return call
