"""BindTargets: each PrimFunc carries the target of the device that calls it.

Before::

    lv1 = R.call_tir(cls.scale, (x,), out_ty=R.Tensor((4,), "float32", "llvm:0"))   # scale has no target,
    lv2 = R.call_tir(cls.scale, (y,), out_ty=R.Tensor((4,), "float32", "llvm:1"))   # or lost it in FuseTIR

After::

    lv1 = R.call_tir(cls.scale, ...)          # scale: target of llvm:0
    lv2 = R.call_tir(cls.scale_llvm_1, ...)   # a private copy with the target of llvm:1

Functions that other PrimFuncs call follow their callers.
A PrimFunc that nothing calls gets the default device's target; one written for another kind of target is refused.

Assumes a placed module (RealizeVDevice). A second run changes nothing.
"""

from __future__ import annotations

from functools import partial

import tvm
from tvm import relax, tirx

from ...errors import BuildError
from ...target.vdevice import default_vdevice, device_identifier, device_name, vdevices_of
from ...tir.core.walks import replaced
from ..ir.declare import declare_pass
from ..ir.kernels import call_vdevice, called_prim_func
from ..ir.rewriting import (
    copy_module,
    fresh_global_var,
    global_vars_in,
    map_bindings,
    relax_functions,
)


def bind_targets(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        A PrimFunc with a target of one kind is called on a device of another.
    """
    vdevices = vdevices_of(mod)
    if not vdevices:
        return mod
    binder = _Binder(mod, vdevices)
    retargeted = {gv: map_bindings(f, partial(binder.retarget, gv.name_hint)) for gv, f in relax_functions(mod)}
    functions = {**mod.functions, **retargeted, **binder.functions}
    default = default_vdevice(vdevices).target
    for gv, func in functions.items():
        if isinstance(func, tirx.PrimFunc) and gv not in binder.functions and "target" not in func.attrs:
            functions[gv] = func.with_attr("target", default)
    return copy_module(mod, functions)


BindTargets = declare_pass("BindTargets", bind_targets)


class _Binder:
    """Variants of PrimFuncs by original and target, made on first request: in program order, so names are stable."""

    def __init__(self, mod: tvm.IRModule, vdevices: list[relax.VDevice]):
        self.mod = mod
        self.vdevices = vdevices
        self.functions: dict[tvm.ir.GlobalVar, tirx.PrimFunc] = {}
        self.variants: dict[tuple[tvm.ir.GlobalVar, str], tvm.ir.GlobalVar] = {}
        self.used_names = {gv.name_hint for gv in mod.get_global_vars()}

    def retarget(self, function: str, binding: relax.Binding) -> relax.Binding:
        value = binding.value
        gv = called_prim_func(self.mod, value)
        if gv is None:
            return binding
        vdevice = call_vdevice(value) or default_vdevice(self.vdevices)
        new = self.variant(gv, vdevice, f"{binding.var.name!r} in function {function!r}")
        if new.same_as(gv):
            return binding
        op, args = value.op, list(value.args)
        if isinstance(op, tvm.ir.GlobalVar):
            op = new
        else:
            args[0] = new
        call = relax.Call(op, args, value.attrs, value.ty_args, value.span, ret_ty=value.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    def variant(self, gv: tvm.ir.GlobalVar, vdevice: relax.VDevice, where: str) -> tvm.ir.GlobalVar:
        key = (gv, str(vdevice.target))
        if key in self.variants:
            return self.variants[key]
        func = self.mod.functions[gv]
        target = func.attrs.get("target")
        if target is not None and target.kind.name != vdevice.target.kind.name:
            raise BuildError(
                f"PrimFunc {gv.name_hint!r}, called for {where}, is written for target kind {target.kind.name!r}, but "
                f"runs on {device_name(vdevice, self.vdevices)}, whose target kind is {vdevice.target.kind.name!r}"
            )
        new = gv if gv not in self.functions else self.fresh_var(gv, vdevice)
        self.variants[key] = new
        func = func.with_attr("target", vdevice.target)
        if not new.same_as(gv):
            func = func.without_attr("global_symbol")
        self.functions[new] = func  # before the callees: recursion ends here
        callees = _callees(self.mod, func)
        renamed = {callee: self.variant(callee, vdevice, f"PrimFunc {gv.name_hint!r}") for callee in callees}
        if any(not old.same_as(new_callee) for old, new_callee in renamed.items()):
            self.functions[new] = func.with_body(replaced(func.body, renamed, tvm.ir.GlobalVar))
        return new

    def fresh_var(self, gv: tvm.ir.GlobalVar, vdevice: relax.VDevice) -> tvm.ir.GlobalVar:
        base = f"{gv.name_hint}_{device_identifier(vdevice, self.vdevices)}"
        return fresh_global_var(base, gv.ty, self.used_names)


def _callees(mod: tvm.IRModule, func: tirx.PrimFunc) -> list[tvm.ir.GlobalVar]:
    return [gv for gv in global_vars_in(func.body) if isinstance(mod.functions.get(gv), tirx.PrimFunc)]
