"""The devices that stock passes lose on the way, written back. The module was placed before, so nothing is solved here.

LegalizeOps gives a kernel's result the device of its first operand: none where there is no operand, where the operand
is a literal, or where the result is a tuple. FoldConstant makes constants without a device, and a name that is folded
away leaves its constant to several readers.

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
from tvm_ffi import structural_map

from ...target.vdevice import default_vdevice, host_vdevice, vdevices_of
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

Variables: TypeAlias = "Mapping[str, relax.Var]"
"""Variables by name, as they were when every one of them had its device."""

Place: TypeAlias = "relax.VDevice | tvm.ir.Type"
"""Where tensors belong: on a device, or as a type says."""


def keep_devices(mod: tvm.IRModule, variables: Mapping[str, Variables] | None = None) -> tvm.IRModule:
    """The module with every tensor on a device again: see the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
        Made by stock passes from a placed module.
    variables : mapping, optional
        Function name to the variables it had, by names that are unique in it: those keep their types. A variable that
        is new is where its operands are.
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
        self.new: dict[relax.Var, relax.Var] = {}
        self.constants: dict[tuple[int, int], tvm.ir.GenericConst] = {}

    def placed(self, func: relax.Function) -> relax.Function:
        for binding in walk_bindings(func):
            var, ty = binding.var, self._type_of(binding)
            if not ty.same_as(var.ty):
                self.new[var] = type(var)(var.name, ty, var.span)
        if self.new:
            func = structural_map(func, (relax.Var, lambda var: self.new.get(var, var)))
        func = map_bindings(func, self._change)
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
            return _on(var.ty, self._known(value.tuple_value).ty.fields[value.index])
        return _on(var.ty, self._first(operand.ty for operand in self._operands(value)))

    def _operands(self, value: relax.Expr) -> Iterator[relax.Expr]:
        if isinstance(value, (relax.Call, relax.Tuple)):
            for operand in value.args if isinstance(value, relax.Call) else value.fields:
                yield from self._operands(operand)
        else:
            yield self._known(value)

    def _known(self, expr: relax.Expr) -> relax.Expr:
        return self.new.get(expr, expr) if isinstance(expr, relax.Var) else expr

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
        if isinstance(call.op, tvm.ir.GlobalVar) and isinstance(call.op.ty, relax.FuncType):
            wanted = list(call.op.ty.params)
        elif op_name(call) in HOST_READS or callee_name(call) in HOST_READS:
            wanted = [self._reader(arg.ty) for arg in call.args]
        else:
            wanted = [self._first([ty, *(arg.ty for arg in call.args)])] * len(call.args)
        args = [self._operand(arg, place) for arg, place in zip(call.args, wanted, strict=True)]
        results = list(ty.fields) if len(call.ty_args) > 1 else [ty]
        ty_args = [_on(old, result) for old, result in zip(call.ty_args, results, strict=False)]
        result = _on(call.ty, ty)
        parts = zip([result, *args, *ty_args], [call.ty, *call.args, *call.ty_args], strict=True)
        if all(new.same_as(old) for new, old in parts):
            return call
        return relax.Call(call.op, args, call.attrs, ty_args, call.span, ret_ty=result)

    def _reader(self, ty: tvm.ir.Type) -> relax.VDevice:
        """The CPU that reads a value of this type."""
        first = self._first([ty])
        return host_vdevice(self.vdevices, first) or first

    def _first(self, types: Iterable[tvm.ir.Type]) -> relax.VDevice:
        """The first device that types name."""
        named = (tensor.vdevice for ty in types for tensor in tensor_types(ty) if tensor.vdevice is not None)
        return next(named, self.default)

    def _operand(self, expr: relax.Expr, place: Place) -> relax.Expr:
        """An expression whose constants are on a device: one object for all that read it there."""
        if isinstance(expr, relax.Tuple):
            places = list(place.fields) if isinstance(place, tvm.ir.TupleType) else [place] * len(expr.fields)
            fields = [self._operand(field, one) for field, one in zip(expr.fields, places, strict=True)]
            same = all(new.same_as(old) for new, old in zip(fields, expr.fields, strict=True))
            if same and not self.new:
                return expr
            made = relax.Tuple(fields, expr.span)
            return expr if same and same_devices(expr.ty, made.ty) else made  # new variables leave it its old type
        if not is_tensor_constant(expr):
            return expr
        old_ty = expr.ty
        ty = _on(old_ty, place)
        if ty is old_ty:
            return expr
        key = (handle(expr), handle(ty.vdevice))
        return self.constants.setdefault(key, tvm.ir.GenericConst(expr.value, ty, expr.span))


def _sequence(expr: relax.SeqExpr) -> relax.SeqExpr:
    """A sequence with the type of its result, which may have a new device."""
    result = expr.body
    return expr if same_devices(expr.ty, result.ty) else typed(relax.SeqExpr(expr.blocks, result, expr.span), result.ty)


def _on(ty: tvm.ir.Type, place: Place) -> tvm.ir.Type:
    """A type on a device, or on the devices of another type of its structure; itself where it is there."""
    if isinstance(ty, tvm.ir.TupleType):
        places = list(place.fields) if isinstance(place, tvm.ir.TupleType) else [place] * len(ty.fields)
        fields = [_on(field, one) for field, one in zip(ty.fields, places, strict=True)]
        same = all(new.same_as(old) for new, old in zip(fields, ty.fields, strict=True))
        return ty if same else tvm.ir.TupleType(fields)
    vdevice = place.vdevice if isinstance(place, relax.TensorType) else place
    is_tensor = isinstance(ty, relax.TensorType) and isinstance(vdevice, relax.VDevice)
    return tensor_on(ty, vdevice) if is_tensor else ty
