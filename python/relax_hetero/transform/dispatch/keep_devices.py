"""Restores the devices that stock passes lose in a placed module.

LegalizeOps gives a kernel's result the device of its first operand: none if there is no operand, if the operand
is a literal, or if the result is a tuple. FoldConstant makes constants without a device, and a variable that it folds
leaves one constant to several readers.

Before::

    y: R.Tensor((4,), "float32") = R.call_tir(cls.add, (x, one), out_ty=R.Tensor((4,), "float32"))   # was on llvm:0
    z: R.Tensor((4,), "float32", "llvm:1") = R.to_vdevice(folded, "llvm:1")

After::

    y: R.Tensor((4,), "float32", "llvm:0") = R.call_tir(cls.add, (x, one), out_ty=R.Tensor((4,), "float32", "llvm:0"))
    z: R.Tensor((4,), "float32", "llvm:1") = folded                     # a constant lives where it is read
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

import tvm
from tvm import relax

from ...op.streamed import STREAM
from ...target.vdevice import default_vdevice, host_vdevice, vdevices_of
from ...tir.core.walks import replaced
from ..ir.op_names import TRANSFER
from ..ir.rewriting import (
    handle,
    is_tensor_constant,
    map_bindings,
    op_name,
    relax_functions,
    tensor_types,
    typed,
    walk_bindings,
    with_body,
    with_functions,
)
from ..placement.operands import same_devices, tensor_on
from ..placement.ops import HOST_READS, callee_name

Variables: TypeAlias = "Mapping[str, relax.Var]"  # variables by name, before they lost their devices

Location: TypeAlias = "relax.VDevice | tvm.ir.Type"
"""A device, or a type that has the devices of tensors."""


def keep_devices(mod: tvm.IRModule, variables: Mapping[str, Variables] | None = None) -> tvm.IRModule:
    """Give every tensor its device again: see the module's docstring.

    `mod`: result of stock passes on a placed module. `variables`: function name to the variables before the passes, by
    names that are unique in it: they keep their types. A new variable is on the device of its operands.
    """
    vdevices = vdevices_of(mod)
    if not vdevices:
        return mod
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    for gv, func in relax_functions(mod):
        placed = _Function(vdevices, (variables or {}).get(gv.name_hint, {})).placed(func)
        if not placed.same_as(func):
            functions[gv] = placed
    return with_functions(mod, functions) if functions else mod


class _Function:
    """One function: the types of its variables, and the constants made for it."""

    def __init__(self, vdevices: list[relax.VDevice], variables: Variables) -> None:
        self.default = default_vdevice(vdevices)
        self.vdevices = vdevices
        self.variables = variables
        self.renewed_vars: dict[relax.Var, relax.Var] = {}
        self.constants: dict[tuple[int, int], tvm.ir.GenericConst] = {}

    def placed(self, func: relax.Function) -> relax.Function:
        for binding in walk_bindings(func):
            var, ty = binding.var, self._type_of(binding)
            if not ty.same_as(var.ty):
                self.renewed_vars[var] = type(var)(var.name, ty, var.span)
        func = map_bindings(replaced(func, self.renewed_vars), self._change)
        body = _sequence(func.body)
        return func if body.same_as(func.body) else with_body(func, body)

    def _type_of(self, binding: relax.Binding) -> tvm.ir.Type:
        var, value = binding.var, binding.value
        old = self.variables.get(var.name)
        if old is not None:
            return old.ty
        if all(tensor.vdevice is not None for tensor in tensor_types(var.ty)):
            return var.ty
        if isinstance(value, relax.TupleGetItem):
            return _on(var.ty, self._renewed(value.tuple_value).ty.fields[value.index])
        return _on(var.ty, self._first_device(operand.ty for operand in self._operands(value)))

    def _operands(self, value: relax.Expr) -> Iterator[relax.Expr]:
        if isinstance(value, (relax.Call, relax.Tuple)):
            for operand in value.args if isinstance(value, relax.Call) else value.fields:
                yield from self._operands(operand)
        else:
            yield self._renewed(value)

    def _renewed(self, expr: relax.Expr) -> relax.Expr:
        return self.renewed_vars.get(expr, expr) if isinstance(expr, relax.Var) else expr

    def _change(self, binding: relax.Binding) -> relax.Binding:
        var, value = binding.var, binding.value
        new = value
        if isinstance(value, relax.Call):
            new = self._call(value, var.ty)
        elif isinstance(value, relax.TupleGetItem):
            new = value if same_devices(value.ty, var.ty) else relax.TupleGetItem(value.tuple_value, value.index)
        elif isinstance(value, relax.If):
            branches = _sequence(value.true_branch), _sequence(value.false_branch)
            new = value if same_devices(value.ty, var.ty) else typed(relax.If(value.cond, *branches), var.ty)
        elif not isinstance(binding, relax.MatchCast):
            new = self._operand(value, var.ty)
        return binding if new is value else relax.VarBinding(var, new, binding.span)

    def _call(self, call: relax.Call, ty: tvm.ir.Type) -> relax.Expr:
        if op_name(call) == TRANSFER and is_tensor_constant(call.args[0]):
            return self._operand(call.args[0], call.attrs.dst_vdevice)
        if op_name(call) == STREAM:
            return call
        if isinstance(call.op, tvm.ir.GlobalVar) and isinstance(call.op.ty, relax.FuncType):
            locations = list(call.op.ty.params)
        elif op_name(call) in HOST_READS or callee_name(call) in HOST_READS:
            locations = [self._host_of(arg.ty) for arg in call.args]
        else:
            locations = [self._first_device([ty, *(arg.ty for arg in call.args)])] * len(call.args)
        args = [self._operand(arg, location) for arg, location in zip(call.args, locations, strict=True)]
        results = list(ty.fields) if len(call.ty_args) > 1 else [ty]
        ty_args = [_on(old, result) for old, result in zip(call.ty_args, results, strict=False)]
        result = _on(call.ty, ty)
        pairs = zip([result, *args, *ty_args], [call.ty, *call.args, *call.ty_args], strict=True)
        if all(new.same_as(old) for new, old in pairs):
            return call
        return relax.Call(call.op, args, call.attrs, ty_args, call.span, ret_ty=result)

    def _host_of(self, ty: tvm.ir.Type) -> relax.VDevice:
        """The host device that reads a value of this type."""
        first = self._first_device([ty])
        return host_vdevice(self.vdevices, first) or first

    def _first_device(self, types: Iterable[tvm.ir.Type]) -> relax.VDevice:
        """The first device that types name."""
        named = (tensor.vdevice for ty in types for tensor in tensor_types(ty) if tensor.vdevice is not None)
        return next(named, self.default)

    def _operand(self, expr: relax.Expr, location: Location) -> relax.Expr:
        """An expression with its constants on a device: one object for all readers there."""
        if isinstance(expr, relax.Tuple):
            locations = (
                list(location.fields) if isinstance(location, tvm.ir.TupleType) else [location] * len(expr.fields)
            )
            fields = [self._operand(field, target) for field, target in zip(expr.fields, locations, strict=True)]
            is_same = all(new.same_as(old) for new, old in zip(fields, expr.fields, strict=True))
            if is_same and not self.renewed_vars:
                return expr
            rebuilt = relax.Tuple(fields, expr.span)
            return (
                expr if is_same and same_devices(expr.ty, rebuilt.ty) else rebuilt
            )  # new variables do not change its type
        if not is_tensor_constant(expr):
            return expr
        old_ty = expr.ty
        ty = _on(old_ty, location)
        if ty is old_ty:
            return expr
        key = (handle(expr), handle(ty.vdevice))
        return self.constants.setdefault(key, tvm.ir.GenericConst(expr.value, ty, expr.span))


def _sequence(expr: relax.SeqExpr) -> relax.SeqExpr:
    """A sequence with the type of its result, which may have a new device."""
    result = expr.body
    return expr if same_devices(expr.ty, result.ty) else typed(relax.SeqExpr(expr.blocks, result, expr.span), result.ty)


def _on(ty: tvm.ir.Type, location: Location) -> tvm.ir.Type:
    """A type on a device, or on the devices of a type of the same structure; itself if it is there already."""
    if isinstance(ty, tvm.ir.TupleType):
        locations = list(location.fields) if isinstance(location, tvm.ir.TupleType) else [location] * len(ty.fields)
        fields = [_on(field, target) for field, target in zip(ty.fields, locations, strict=True)]
        is_same = all(new.same_as(old) for new, old in zip(fields, ty.fields, strict=True))
        return ty if is_same else tvm.ir.TupleType(fields)
    vdevice = location.vdevice if isinstance(location, relax.TensorType) else location
    is_tensor = isinstance(ty, relax.TensorType) and isinstance(vdevice, relax.VDevice)
    return tensor_on(ty, vdevice) if is_tensor else ty
