"""FormDispatches: a placed module's ops become kernels, fused where their device allows, each with its target.

Before::

    lv: R.Tensor((4,), "float32", "llvm:1") = R.exp(x)
    gv: R.Tensor((4,), "float32", "llvm:1") = R.add(lv, x)

After::

    gv = R.call_tir(cls.fused_exp_add, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))   # target: that of llvm:1

Assumes a placed module (RealizeVDevice). Only `to_vdevice`, which is opaque, joins values of two devices, so no
kernel spans two. Stock passes do the legalizing and fusing; what they lose on the way is put back: the device of
ops without operands (LegalizeOps takes it from the first operand), of folded constants (FoldConstant makes new
ones), and the target of fused kernels (FuseTIR drops it).
"""

from __future__ import annotations

import re

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey, structural_map

from ..errors import BuildError
from ..vdevice import vdevices_of
from .bind_targets import bind_targets, called_prim_func
from .realize_vdevice import realize_vdevice
from .rewriting import copy_module, map_bindings, op_name, relax_functions, tensor_types, typed, walk_bindings
from .schedule_gpu import schedule_gpu
from .stage import is_lowered

# Relax ops that later passes or the VM itself carry out; anything else left after legalizing has no kernel.
_KEPT_OPS = frozenset(
    """relax.call_tir relax.call_tir_inplace relax.call_tir_with_grad relax.call_dps_packed relax.call_pure_packed
    relax.call_inplace_packed relax.call_builtin_with_ctx relax.call_py_func relax.to_vdevice relax.hint_on_device
    relax.shape_of relax.tensor_to_shape relax.shape_to_tensor relax.size relax.print relax.assert_op
    relax.make_closure relax.invoke_closure relax.invoke_pure_closure relax.null_value relax.reshape
    relax.memory.view relax.memory.ensure_zero_offset""".split()
)
_KEPT_PREFIXES = ("relax.builtin.", "relax.memory.", "relax.vm.", "relax.inspect.", "relax.hetero.")


def FormDispatches() -> tvm.transform.Pass:
    """Legalize, fold constants and fuse, keeping every kernel on its device.

    Returns
    -------
    tvm.transform.Pass
        Raises BuildError for an op that has no kernel, and where :func:`BindTargets` does.
    """

    @tvm.transform.module_pass(opt_level=0, name="FormDispatches")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        return form_dispatches(mod)

    return run


def form_dispatches(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    if is_lowered(mod):
        return mod
    if is_formed(mod):
        return schedule_gpu(bind_targets(mod))
    if any(isinstance(b.value, relax.Function) for _, func in relax_functions(mod) for b in walk_bindings(func)):
        mod = relax.transform.LambdaLift()(mod)
    written = {gv.name_hint for gv in mod.get_global_vars()}
    mod = legalize_creations(mod)
    mod = relax.transform.LegalizeOps()(mod)
    check_legalized(mod)
    mod = tvm.transform.Sequential(
        [
            relax.transform.AnnotateTIROpPattern(),
            relax.transform.FoldConstant(),
            relax.transform.FuseOps(),
            relax.transform.FuseTIR(),
            relax.transform.DeadCodeElimination(),
            relax.transform.CanonicalizeBindings(),
        ]
    )(forget_targets(mod, written))
    mod, _ = realize_vdevice(mod)  # places what folding made
    return schedule_gpu(bind_targets(mod))


def is_formed(mod: tvm.IRModule) -> bool:
    """Whether nothing is left to legalize and every kernel has its target: fusing again would change the kernels."""
    for _, func in relax_functions(mod):
        for binding in walk_bindings(func):
            kernel = called_prim_func(mod, binding.value)
            if kernel is not None and "target" not in mod.functions[kernel].attrs:
                return False
            if op_name(binding.value) is not None and not _is_kept(op_name(binding.value)):
                return False
    return True


def legalize_creations(mod: tvm.IRModule) -> tvm.IRModule:
    """Lower ops without operands but constants (zeros, full, arange) here, where their device is still known."""
    if not vdevices_of(mod):
        return mod
    builder = relax.BlockBuilder(mod)

    def change(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if not _is_creation(value):
            return binding
        call = value.op.get_attr("FLegalize")(builder, value)
        if not isinstance(call, relax.Call) or len(call.ty_args) != 1:
            return binding
        call = relax.Call(call.op, call.args, call.attrs, [binding.var.ty], call.span, ret_ty=binding.var.ty)
        return relax.VarBinding(binding.var, call, binding.span)

    changed = {gv: map_bindings(func, change) for gv, func in relax_functions(mod)}
    functions = dict(builder.get().functions.items())
    functions.update(changed)
    return copy_module(mod, functions)


def _is_creation(value: relax.Expr) -> bool:
    if op_name(value) is None or not value.op.has_attr("FLegalize"):
        return False
    shape = value.ty.shape if isinstance(value.ty, relax.TensorType) else None
    if not isinstance(shape, relax.ShapeExpr):
        return False
    return all(isinstance(arg, tvm.ir.GenericConst) or not any(tensor_types(arg.ty)) for arg in value.args)


def _is_kept(name: str) -> bool:
    return name in _KEPT_OPS or name.startswith(_KEPT_PREFIXES)


def check_legalized(mod: tvm.IRModule) -> None:
    """Refuse what would fail at run time: an op that is neither a kernel nor the VM's own.

    Raises
    ------
    BuildError
        Names the op, its variable and function, and the operand types.
    """
    for gv, func in relax_functions(mod):
        for binding in walk_bindings(func):
            value = binding.value
            name = op_name(value)
            if name is None or _is_kept(name):
                continue
            operands = ", ".join(str(arg.ty) for arg in value.args)
            raise BuildError(
                f"op {name} of variable {binding.var.name!r} in function {gv.name_hint!r} has no kernel for operands "
                f"({operands}): expected an op with a legalization and operand shapes that are known (or symbolic)"
            )


def forget_targets(mod: tvm.IRModule, written: set[str]) -> tvm.IRModule:
    """Take kernels' targets off, and merge those that differed in nothing else.

    LegalizeOps makes `add_llvm` and `add_cuda` of one addition. Without targets they are one `add` again, which folds
    on the CPU wherever it runs; BindTargets gives each device its own later. Functions named in `written`, the
    user's, are left alone.
    """
    suffix = re.compile(rf"_({'|'.join({v.target.kind.name for v in vdevices_of(mod)} or {'llvm'})})\d*$")
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    known: dict[StructuralKey, tvm.ir.GlobalVar] = {}
    taken = set(written)
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if isinstance(func, tirx.PrimFunc) and gv.name_hint not in written:
            func = func.without_attr("target") if "target" in func.attrs else func
            key = StructuralKey(func)
            if key not in known:
                known[key] = _fresh_name(gv, suffix.sub("", gv.name_hint), taken)
            renamed[gv] = known[key]
        functions[renamed.get(gv, gv)] = func
    for gv, func in functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = structural_map(func, (tvm.ir.GlobalVar, lambda old: renamed.get(old, old)))
    return copy_module(mod, functions)


def _fresh_name(gv: tvm.ir.GlobalVar, base: str, taken: set[str]) -> tvm.ir.GlobalVar:
    name, count = base, 0
    while name in taken:
        count += 1
        name = f"{base}{count}"
    taken.add(name)
    if name == gv.name_hint:
        return gv
    new = tvm.ir.GlobalVar(name)
    return typed(new, gv.ty)
