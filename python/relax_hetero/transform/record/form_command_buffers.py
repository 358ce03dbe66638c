"""FormCommandBuffers: runs of kernels on one device become one host function, which calls them one after the other.

Before::

    lv = R.call_tir(cls.scale, (x, w), out_ty=R.Tensor((4,), "float32", "llvm:0"))
    gv = R.call_tir(cls.shift, (lv,), out_ty=R.Tensor((4,), "float32", "llvm:0"))

After::

    buffer = R.call_tir(cls.main_commands, (x, w), out_ty=[R.Tensor((4,), "float32", "llvm:0"),
                                                           R.Tensor((64,), "uint8", "llvm:0")])   # gv, and the arena
    gv = buffer[0]

`main_commands` is a PrimFunc with a target like any other. It takes what the run reads and nothing else gives, what
others read of the run, and an arena, where the run's transient values lie by lifetime; the kernels become plain
functions of pointers (`tir.core.raw_kernel`). Control flow, transfers of what the run made, work on another device and
calls of unknown functions end a run (`command_regions`). The module stays one that stock TVM can build.

What each buffer does stands on its host function as an attribute, as data (`artifact.commands.RegionSpec`).

Assumes FormDispatches: a module that has still to be formed is returned as it is. So is a lowered one, and one whose
runs are outlined.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import tvm
from tvm import relax, tirx
from tvm_ffi import structural_walk

from ...artifact.commands import SingleCall
from ...target.vdevice import vdevices_of
from ...tir.core.raw_kernel import RawSignature, raw_kernel
from ..dispatch.bind_targets import bind_targets
from ..dispatch.form_dispatches import is_formed
from ..ir.blocks import Block, Rewrite, rewrite_function, without_unused
from ..ir.declare import declare_pass
from ..ir.module_attrs import COMMANDS, is_lowered
from ..ir.op_names import CALL_TIR_OPS, RESHAPE, TRANSFER
from ..ir.remarks import with_remarks
from ..ir.rewriting import copy_module, fresh_global_var, op_name, relax_functions, typed
from ..ir.root_blocks import with_root_blocks
from .command_regions import MAX_CALLS, Run, RunFinder
from .donated import DonatedVariables
from .kernel_calls import KernelCalls
from .outline_run import RunOutliner
from .region_attrs import kernel_specs, region_spec, with_kernel, with_region
from .region_ir import OutlinedRegion

# Why runs of kernels end where they do, and kernels stay outside of runs, in words.

_CALL_PACKED = ("relax.call_packed", "relax.call_pure_packed", "relax.invoke_closure")


def why_ended(block: Block, run: Run) -> str:
    """Description of the binding that ended a run, since it could neither join nor move: ``a transfer (lv3)``."""
    if run.ended_by is None:
        return "end of block"
    if len(run.calls) >= MAX_CALLS:
        return f"length ({MAX_CALLS} kernels)"
    binding = block.bindings[run.ended_by]
    return f"{_what(binding)} ({binding.var.name})"


def single_calls(function: str, block: Block, order: list[int | Run], calls: KernelCalls) -> list[SingleCall]:
    """The kernels of a block that no run took."""
    found: list[SingleCall] = []
    for item in order:
        binding = None if isinstance(item, Run) else block.bindings[item]
        if binding is not None and op_name(binding.value) in CALL_TIR_OPS:
            call = calls.of(binding)
            why = "no other kernel to run with" if call is not None else "it cannot be called as a plain function"
            if call is not None and call.over:
                why = "it works in place"
            found.append(SingleCall(function, binding.var.name, binding.value.args[0].name_hint, why))
    return found


def _what(binding: relax.Binding) -> str:
    value = binding.value
    if isinstance(binding, relax.MatchCast):
        return "check of shapes"
    if isinstance(value, (relax.If, relax.Function)):
        return "control flow" if isinstance(value, relax.If) else "function"
    if not isinstance(value, relax.Call):
        return type(value).__name__
    name = op_name(value)
    if name == TRANSFER:
        return "transfer"
    in_args = name in CALL_TIR_OPS or name in _CALL_PACKED
    callee = value.args[0] if in_args else value.op
    if name in CALL_TIR_OPS:
        return f"kernel {callee.name_hint}"
    if isinstance(callee, tvm.ir.GlobalVar):
        return f"call of {callee.name_hint}"
    if isinstance(callee, relax.ExternFunc):
        return f"call of {callee.global_symbol}"
    return str(name or "call of a closure")


def form_command_buffers(mod: tvm.IRModule, separate_kernels: bool = False) -> tvm.IRModule:
    """See the module's docstring.

    Parameters
    ----------
    mod : tvm.IRModule
    separate_kernels : bool
        Whether kernels of llvm devices will be compiled apart from the host function, as ``rh.compile`` does. Only
        then kernels with temporaries in TVM's workspace join, which stock TVM cannot build.
    """
    if is_lowered(mod) or not vdevices_of(mod) or any(COMMANDS in func.attrs for func in mod.functions.values()):
        return mod
    bound = mod if all(map(_has_target, mod.functions.values())) else bind_targets(mod)
    if not is_formed(bound):  # FormDispatches would fuse buffers with what it has yet to make kernels of
        return mod
    # Views must be seen as such: a reshape that is a kernel copies.
    former = _Former(relax.transform.RewriteDataflowReshape()(with_root_blocks(bound)), separate_kernels)
    functions = {
        gv: rewrite_function(func, former.in_function(gv.name_hint, func)) for gv, func in relax_functions(former.mod)
    }
    return former.finish(functions) if former.outlined else mod


FormCommandBuffers = declare_pass("FormCommandBuffers", form_command_buffers)


class _Former:
    """Collects the command buffers of a module."""

    def __init__(self, mod: tvm.IRModule, separate_kernels: bool) -> None:
        self.mod = mod
        self.outlined: list[OutlinedRegion] = []
        self.single: list[SingleCall] = []
        self._finder = RunFinder(mod, separate_kernels)
        self._used_names = self._finder.calls.used_names

    def in_function(self, name: str, func: relax.Function) -> Rewrite:
        """Function that rewrites the blocks of a function."""
        variables = DonatedVariables(func)

        def rewrite(block: Block) -> list[relax.Binding] | None:
            free = variables.of(block)
            order = self._finder.cut(block, free)
            self.single += single_calls(name, block, order, self._finder.calls)
            if not any(isinstance(item, Run) for item in order):
                return None
            stay = {block.bindings[item].var for item in order if not isinstance(item, Run)}
            bindings: list[relax.Binding] = []
            for item in order:
                if isinstance(item, Run):
                    outliner = RunOutliner(block, item, stay, self._finder.calls, free)
                    bindings += self._outlined(name, outliner, why_ended(block, item))
                else:
                    bindings.append(block.bindings[item])
            # Views of what a buffer reads are of no use any more: it takes the tensor itself.
            return without_unused(bindings, block, _is_view)

        return rewrite

    def _outlined(self, function: str, outliner: RunOutliner, ended: str) -> list[relax.Binding]:
        gv = fresh_global_var(f"{function}_commands", tvm.ir.Type.missing(), self._used_names)
        outlined, bindings = outliner.record(function, gv)
        outlined.ended = ended
        if bindings:
            self.outlined.append(outlined)
        return bindings

    def finish(self, functions: Mapping[tvm.ir.GlobalVar, relax.Function]) -> tvm.IRModule:
        """The module with its command buffers; kernels that nobody else calls are raw ones only."""
        kernels = {**dict(self.mod.functions.items()), **self._finder.calls.functions}
        result = {**dict(self.mod.functions.items()), **functions}
        called = _called(result.values())
        replaced: dict[tvm.ir.GlobalVar, tvm.ir.GlobalVar] = {}
        signatures: dict[tvm.ir.GlobalVar, RawSignature] = {}
        for kernel in dict.fromkeys(gv for outlined in self.outlined for gv in outlined.kernels):
            func = kernels[kernel]
            stays = kernel.name_hint in called or "global_symbol" in func.attrs
            raw = fresh_global_var(f"{kernel.name_hint}_raw", kernel.ty, self._used_names) if stays else kernel
            replaced[kernel] = raw
            signature = self._finder.calls.signature(kernel)
            assert signature is not None, f"{kernel.name_hint} is no kernel of a run"
            result[raw] = raw_kernel(func, signature)
            signatures[kernel] = signature
        for kernel in self._finder.calls.replaced:
            is_kept = kernel in replaced or kernel.name_hint in called or "global_symbol" in kernels[kernel].attrs
            if not is_kept:
                del result[kernel]
        vdevices = vdevices_of(self.mod)
        for outlined in self.outlined:
            host = with_region(outlined.host_function(replaced), region_spec(outlined, vdevices))
            result[typed(outlined.gv, host.ty)] = host
            for kernel, spec in kernel_specs(outlined, kernels, signatures, vdevices).items():
                raw = replaced[kernel]
                result[raw] = with_kernel(result[raw], spec, raw.name_hint)
        return with_remarks(copy_module(self.mod, result), single_calls=self.single)


def _has_target(func: tvm.ir.BaseFunc) -> bool:
    return not isinstance(func, tirx.PrimFunc) or "target" in func.attrs


def _is_view(value: relax.Expr) -> bool:
    return isinstance(value, relax.Var) or op_name(value) == RESHAPE


def _called(functions: Iterable[tvm.ir.BaseFunc]) -> set[str]:
    """The names of functions that others refer to: by variable, or as PrimFuncs may, by name."""
    found: set[str] = set()
    seen = [
        (tvm.ir.GlobalVar, lambda gv: found.add(gv.name_hint)),
        (tvm.ir.StringImm, lambda text: found.add(text.value)),
    ]
    for func in functions:
        structural_walk(func.body, seen)
    return found
