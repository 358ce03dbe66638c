"""FormDispatches: a placed module's ops become kernels, fused within a device, each with its target.

Before::

    lv: R.Tensor((4,), "float32", "llvm:1") = R.exp(x)
    gv: R.Tensor((4,), "float32", "llvm:1") = R.add(lv, x)

After::

    gv = R.call_tir(cls.fused_exp_add, (x,), out_ty=R.Tensor((4,), "float32", "llvm:1"))   # target: that of llvm:1

Only `to_vdevice`, which is opaque, joins values of two devices, so no kernel spans two. Stock passes legalize and fuse;
what they lose is restored: devices of variables (LegalizeOps), of folded constants (FoldConstant makes new ones), and
targets of fused kernels (FuseTIR).

Assumes a placed module (RealizeVDevice). A lowered module is returned as it is; a second run changes nothing.
"""

from __future__ import annotations

import re

import tvm
from tvm import relax, tirx
from tvm_ffi import StructuralKey

from ...target.vdevice import vdevices_of
from ...tir.core.walks import replaced
from ..ir.blocks import with_root_blocks
from ..ir.callee_devices import with_callee_devices, without_callee_devices
from ..ir.declare import declare_pass
from ..ir.fused_names import Inside, with_fused_names
from ..ir.keep_unread_calls import keep_unread_calls
from ..ir.kernels import called_prim_func, fused_ops, with_ops
from ..ir.module_attrs import is_lowered
from ..ir.named_sizes import with_values
from ..ir.remarks import record_dispatches
from ..ir.rewriting import copy_module, fresh_global_var, op_name, relax_functions, walk_bindings
from .bind_targets import bind_targets
from .canonical_extents import canonical_extents, isolate_match_casts, scalars_as_sizes, widen_extents
from .clamp_indices import clamp_indices
from .folding import fold_constants
from .keep_devices import keep_devices
from .legalize import is_kept, legalize
from .name_kernel_variables import name_kernel_variables
from .reshaped_views import with_merged_reshapes, with_views
from .schedule_cpu import schedule_cpu
from .schedule_gpu import schedule_gpu
from .tied_operands import annotate_ties

_MAX_FUSED_OPTION = "relax.FuseOps.max_depth"
MAX_FUSED = 64
"""Ops in one kernel. Reading, scheduling and compiling a kernel takes time that grows faster than its length, and LLVM
recurses into it, so TVM's own bound of 256 is too high for long chains. Work that repeats in real models, such as gates
of recurrent cells and gelu, is shorter than 32 ops."""


def form_dispatches(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring.

    Raises
    ------
    BuildError
        When it runs: an op has no kernel, or a kernel with a target of one kind is called on a device of another.
    """
    if is_lowered(mod):
        return mod
    if is_formed(mod):
        return _for_devices(mod)
    if any(isinstance(b.value, relax.Function) for _, func in relax_functions(mod) for b in walk_bindings(func)):
        mod = keep_unread_calls(relax.transform.LambdaLift()(mod))
    written = {gv.name_hint for gv in mod.get_global_vars()}
    mod = without_callee_devices(mod)  # legalizing and folding make arguments without a device
    mod = clamp_indices(legalize(widen_extents(with_root_blocks(with_merged_reshapes(mod)))))
    mod = forget_targets(canonical_extents(mod), written)
    stock = relax.transform
    mod, inside = _with_fused_ops(fold_constants(stock.AnnotateTIROpPattern()(mod)))
    mod = scalars_as_sizes(mod)
    ops = fused_ops(mod)
    mod = stock.DeadCodeElimination()(with_values(stock.FuseTIR()(mod)))
    mod = with_ops(stock.CanonicalizeBindings()(mod), ops)
    return _for_devices(with_callee_devices(keep_devices(mod)), inside)  # folding made constants


FormDispatches = declare_pass("FormDispatches", form_dispatches)


def _with_fused_ops(mod: tvm.IRModule) -> tuple[tvm.IRModule, Inside]:
    """Run stock FuseOps with our bound on a kernel's ops, unless the caller's context has one."""
    context = tvm.transform.PassContext.current()
    config = {_MAX_FUSED_OPTION: MAX_FUSED, **dict(context.config)}
    with tvm.transform.PassContext(context.opt_level, context.required_pass, context.disabled_pass, config=config):
        mod = isolate_match_casts(mod)
        return with_fused_names(mod, relax.transform.FuseOps()(mod))


def _for_devices(mod: tvm.IRModule, inside: Inside | None = None) -> tvm.IRModule:
    mod = with_views(bind_targets(name_kernel_variables(mod)))
    mod = schedule_cpu(schedule_gpu(annotate_ties(mod)))
    record_dispatches(mod, inside or {})
    return mod


def is_formed(mod: tvm.IRModule) -> bool:
    """Return whether all ops are legal and every kernel has its target: fusing again would change the kernels."""
    for _, func in relax_functions(mod):
        for binding in walk_bindings(func):
            kernel = called_prim_func(mod, binding.value)
            if kernel is not None and "target" not in mod.functions[kernel].attrs:
                return False
            name = op_name(binding.value)
            if name is not None and not is_kept(name):
                return False
    return True


def forget_targets(mod: tvm.IRModule, written: set[str]) -> tvm.IRModule:
    """Remove targets from kernels, and merge kernels that differ in nothing else.

    LegalizeOps makes `add_llvm` and `add_cuda` of one addition. Without targets they are one `add` again, which folds
    on the CPU wherever it runs; BindTargets gives each device its own later. Functions named in `written`, the
    user's, are left alone.
    """
    suffix = re.compile(rf"_({'|'.join({v.target.kind.name for v in vdevices_of(mod)} or {'llvm'})})\d*$")
    functions: dict[tvm.ir.GlobalVar, tvm.ir.BaseFunc] = {}
    renamed: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
    merged: dict[StructuralKey, tvm.ir.GlobalVar] = {}
    used_names = set(written)
    for gv, func in sorted(mod.functions.items(), key=lambda pair: pair[0].name_hint):
        if isinstance(func, tirx.PrimFunc) and gv.name_hint not in written:
            func = func.without_attr("target") if "target" in func.attrs else func
            key = StructuralKey(func)
            if key not in merged:
                merged[key] = fresh_global_var(suffix.sub("", gv.name_hint), gv.ty, used_names)
            renamed[gv] = merged[key]
        functions[renamed.get(gv, gv)] = func
    for gv, func in functions.items():
        if isinstance(func, relax.Function):
            functions[gv] = replaced(func, renamed, tvm.ir.GlobalVar)
    return copy_module(mod, functions)
