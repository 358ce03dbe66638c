"""Verifier of placed modules: every tensor type names its device, and only transfers cross devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import tvm
from tvm import relax

from ...errors import PlacementError
from ...target.vdevice import vdevices_of
from ..ir.op_names import HINT, TRANSFER
from ..ir.rewriting import handle
from . import ops
from .graph import location_text
from .program import Program


def verify_placement(mod: tvm.IRModule) -> None:
    """Check the types of a placed module: every tensor is on a device of the list, and only transfers cross devices.

    Parameters
    ----------
    mod : IRModule
        Module after `RealizeVDevice`; one without vdevices is not checked.

    Raises
    ------
    PlacementError
        For a tensor type without a device or with one that is not the list's own object; an op whose operands and
        results are on different devices; arguments that are not on their parameters' devices; a value that the host
        reads on another device; a hint. The message names function, variable and op.
    """
    if not vdevices_of(mod):
        return
    program = Program(mod)
    for unit in program.units.values():
        _Verifier(program, unit.name).function(unit.func)


class _Verifier:
    def __init__(self, program: Program, function: str) -> None:
        self.program = program
        self.function_name = function
        self.device_index = {handle(vdevice): index for index, vdevice in enumerate(program.vdevices)}
        self.op = ""
        self.variable = ""

    def function(self, func: relax.Function) -> None:
        """Check a function of the module, and its local functions."""
        pending = [func]
        while pending:
            current = pending.pop()
            self.op = "parameter"
            for param in current.params:
                self.variable = param.name
                self.devices(param.ty)
            pending += self._check_body(current.body)
            self.variable, self.op = "", "return"
            self._check_same_devices(current.ret_ty, current.body.ty, "its annotation", "the returned value")

    def _check_body(self, body: relax.Expr) -> list[relax.Function]:
        """Check a body, and return its local functions."""
        local_functions: list[relax.Function] = []
        pending = [body]
        while pending:
            seq = pending.pop()
            if not isinstance(seq, relax.SeqExpr):
                continue
            for block in seq.blocks:
                for binding in block.bindings:
                    value = binding.value
                    self._check_binding(binding, value)
                    if isinstance(value, relax.Function):
                        local_functions.append(value)
                    elif isinstance(value, relax.If):
                        pending += [value.true_branch, value.false_branch]
            self.variable, self.op = "", "return"
            self._check_constants(seq.body)
        return local_functions

    def _check_binding(self, binding: relax.Binding, value: relax.Expr) -> None:
        var = binding.var
        self.variable, self.op = var.name, "value"
        ty = var.ty
        kind = type(value)
        if isinstance(binding, relax.MatchCast):
            self.op = "match_cast"
            self._check_same_devices(ty, binding.ty, "the variable", "the type it is cast to")
            source = value.ty
            if not isinstance(source, relax.AnyType):
                self._check_same_devices(ty, source, "the variable", "the value")
        elif kind is relax.Call:
            self._check_call(ty, value)
        elif kind is relax.If:
            self.op = "If"
            self._check_on_host([value.cond])
            for branch in (value.true_branch, value.false_branch):
                self._check_same_devices(
                    ty, branch.body.ty if isinstance(branch, relax.SeqExpr) else branch.ty, "it", "a branch"
                )
        else:
            self.devices(ty)
            self._check_constants(value)
            if kind is not relax.Function:
                self._check_same_devices(ty, value.ty, "the variable", "the value")

    def _check_call(self, ty: tvm.ir.Type, call: relax.Call) -> None:
        op, args = call.op, call.args
        name = str(op.name) if isinstance(op, tvm.ir.Op) else ops.callee_name(call) or ""
        self.op = name or "call"
        if name == HINT:
            self.fail("found a hint; run RealizeVDevice first")
        self._check_same_devices(ty, call.ty, "the variable", "the call")
        if name == TRANSFER:
            self.devices(args[0].ty)
            target = self.device_index.get(handle(call.attrs.dst_vdevice))
            if target is None:
                self.fail("its destination is not the module's own vdevice object")
            if any(device != target for device in self.devices(ty)):
                self.fail(f"it copies to {self.name(target)}, but the variable is on another device")
            return
        packed_func = ops.callee_name(call)
        if name in ops.HOST_READS or packed_func in ops.HOST_READS:
            self._check_on_host(args)
            self.devices(ty)
            return
        if packed_func in ops.CROSSING:
            return
        callee = op.ty if isinstance(op, (tvm.ir.GlobalVar, relax.Var)) else None
        if isinstance(op, tvm.ir.GlobalVar) and str(op.name_hint) in self.program.units:
            self.op = f"call of '{op.name_hint}'"
            callee = self.program.units[str(op.name_hint)].func.ty
        if isinstance(callee, relax.FuncType) and callee.params is not None:
            for arg, param in zip(args, callee.params, strict=False):
                self._check_same_devices(param, arg.ty, "the parameter", f"the argument {_arg_text(arg)}")
            self._check_same_devices(ty, callee.ret, "the variable", "the callee's result")
        elif name not in ops.INVOKE_CLOSURE and name != ops.MAKE_CLOSURE:
            self._check_one_device(ty, call, name in ops.MADE_ON_HOST or packed_func in ops.MADE_ON_HOST)

    def _check_one_device(self, ty: tvm.ir.Type, call: relax.Call, is_on_host: bool) -> None:
        first_device: int | None = None
        first_text = ""
        for text, devices in self._operands_and_results(ty, call):
            for device in devices:
                if first_device is None:
                    first_device, first_text = device, text
                elif first_device != device:
                    self.fail(f"{first_text} is on {self.name(first_device)}, {text} on {self.name(device)}")
        if is_on_host and self.program.host >= 0 and first_device not in (None, self.program.host):
            self.fail(f"the host produces it, so it must be on {self.name(self.program.host)}")

    def _operands_and_results(self, ty: tvm.ir.Type, call: relax.Call) -> Iterator[tuple[str, list[int]]]:
        """Each operand and result as text, with the devices of its tensors."""
        for arg in call.args:
            if not isinstance(arg, (tvm.ir.GlobalVar, relax.ExternFunc)):
                self._check_constants(arg)
                yield f"operand {_arg_text(arg)}", self.devices(arg.ty)
        for ty_arg in call.ty_args:
            yield "out_ty", self.devices(ty_arg)
        yield "the result", self.devices(ty)

    def _check_on_host(self, args: list[relax.Expr]) -> None:
        for arg in args:
            for device in self.devices(arg.ty):
                host = self.program.reader(device)
                if host >= 0 and device != host:
                    self.fail(
                        f"the host reads {_arg_text(arg)}, which is on {self.name(device)}, not {self.name(host)}"
                    )

    def _check_constants(self, expr: relax.Expr) -> None:
        if isinstance(expr, tvm.ir.GenericConst):
            self.devices(expr.ty)
        elif isinstance(expr, relax.Tuple):
            for field in expr.fields:
                self._check_constants(field)

    def _check_same_devices(self, a: tvm.ir.Type, b: tvm.ir.Type, a_text: str, b_text: str) -> None:
        """Check that two types have the same devices, or, if their numbers of tensors differ, each type by itself."""
        a_devices, b_devices = self.devices(a), self.devices(b)
        if len(a_devices) != len(b_devices):
            return
        for a_device, b_device in zip(a_devices, b_devices, strict=True):
            if a_device != b_device:
                self.fail(f"{a_text} is on {self.name(a_device)}, {b_text} on {self.name(b_device)}")

    def devices(self, ty: tvm.ir.Type) -> list[int]:
        """Check that every tensor in a type names a device of the list, and return the devices."""
        if isinstance(ty, relax.TensorType):
            vdevice = ty.vdevice
            if vdevice is None:
                self.fail("a tensor lacks a device")
            index = self.device_index.get(handle(vdevice))
            if index is None:
                equal_device = self.program.index_of(vdevice, self.where())
                self.fail(f"its device equals {self.name(equal_device)} but is not the module's own vdevice object")
            return [index]
        if isinstance(ty, tvm.ir.TupleType):
            return [device for field in ty.fields for device in self.devices(field)]
        if isinstance(ty, relax.FuncType) and ty.params is not None:
            return [device for param in (*ty.params, ty.ret) for device in self.devices(param)]
        return []

    def name(self, device: int) -> str:
        """The name of a device, ``kind:i``."""
        return self.program.names[device]

    def where(self) -> str:
        """Op, variable and function, for messages."""
        return location_text(self.op, self.variable, self.function_name)

    def fail(self, message: str) -> NoReturn:
        """Raise a PlacementError about the current binding."""
        raise PlacementError(f"{self.where()}: {message}")


def _arg_text(expr: relax.Expr) -> str:
    if isinstance(expr, relax.Var):
        return f"'{expr.name}'"
    return "a constant" if isinstance(expr, tvm.ir.GenericConst) else "a tuple"
