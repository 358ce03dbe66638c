"""Constant folding on the CPU, with a limit on the size of results.

TVM's FoldConstant evaluates every kernel call of constants, also a ``broadcast_to`` of a scalar to a terabyte, and
kernels that were written for a GPU, which may be absent. Both stay calls. Its kernels rely on aligned memory, so
constants that are parts of others, as devices of a mesh have them, are copied first.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from ...tir.commands.table_kernel import is_one_launch
from ...vm.device.tensors import ALIGNMENT, copy_to
from ..ir.blocks import Block, renamed, rewrite_blocks
from ..ir.constant_values import exceeds_growth_limit
from ..ir.kernels import tensor_bytes
from ..ir.op_names import CALL_TIR_OPS
from ..ir.rewriting import is_tensor_constant, op_name, tensor_types, typed

_BARRIER = "relax.builtin.stop_lift_params"  # an op that FoldConstant does not evaluate


def fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """Run FoldConstant on kernel calls, except for those with large results or with kernels of another device."""
    foreign = {
        gv.name_hint for gv, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc) and _is_foreign(func)
    }
    hidden = rewrite_blocks(mod, lambda block: _with_barriers(block, foreign))
    folded = relax.transform.FoldConstant()(hidden)
    return folded if hidden.same_as(mod) else rewrite_blocks(folded, _without_barriers)


def _is_foreign(kernel: tvm.tirx.PrimFunc) -> bool:
    """Return whether a kernel cannot run on this CPU: by its target, or because it binds the threads of a GPU."""
    if "target" in kernel.attrs:
        return bool(kernel.attrs["target"].kind.name != "llvm")
    return is_one_launch(kernel)


def _with_barriers(block: Block, foreign: Collection[str]) -> list[relax.Binding] | None:
    """Pass constants of calls that must not be folded through `_BARRIER`, and align those of others."""
    nbytes: dict[relax.Var, int] = {}
    bindings: list[relax.Binding] = []
    is_changed = False
    for binding in block.bindings:
        value = binding.value
        constant_bytes = _constant_bytes(value, nbytes)
        if constant_bytes is None:
            bindings.append(binding)
            continue
        old = list(value.args[1].fields)
        if value.args[0].name_hint in foreign or exceeds_growth_limit(_bytes(binding.var.ty), constant_bytes):
            new = [_behind_barrier(arg, binding.var.name, block, bindings) for arg in old]
        else:
            nbytes[binding.var] = constant_bytes
            new = [_aligned(arg) for arg in old]
        if not all(a.same_as(b) for a, b in zip(new, old, strict=True)):
            args = [value.args[0], relax.Tuple(new), *value.args[2:]]
            call = relax.Call(value.op, args, value.attrs, value.ty_args, value.span)
            binding = relax.VarBinding(binding.var, typed(call, value.ty), binding.span)
            is_changed = True
        bindings.append(binding)
    return bindings if is_changed else None


def _constant_bytes(value: relax.Expr, nbytes: dict[relax.Var, int]) -> int | None:
    """Bytes of the constants that a call is computed from; None if it has other operands, or none."""
    if op_name(value) not in CALL_TIR_OPS or not isinstance(value.args[1], relax.Tuple) or not value.args[1].fields:
        return None
    total = 0
    for arg in value.args[1].fields:
        if is_tensor_constant(arg):
            total += _bytes(arg.ty)
        elif isinstance(arg, relax.Var) and arg in nbytes:
            total += nbytes[arg]
        else:
            return None
    return total


def _behind_barrier(arg: relax.Expr, name: str, block: Block, bindings: list[relax.Binding]) -> relax.Expr:
    if not is_tensor_constant(arg):
        return arg
    var = block.new_var(f"{name}_constant", arg.ty)
    call = typed(relax.Call(tvm.ir.Op.get(_BARRIER), [arg]), arg.ty)
    bindings.append(relax.VarBinding(var, call))
    return var


def _aligned(arg: relax.Expr) -> relax.Expr:
    """A constant in memory as kernels need it; other values as they are."""
    if not is_tensor_constant(arg) or arg.value.data_ptr() % ALIGNMENT == 0:
        return arg
    return tvm.ir.GenericConst(copy_to(arg.value, arg.value.device), arg.ty)


def _without_barriers(block: Block) -> list[relax.Binding] | None:
    """Remove the barriers."""
    constants: dict[relax.Var, relax.Expr] = {}
    bindings: list[relax.Binding] = []
    for binding in block.bindings:
        value = binding.value
        if op_name(value) == _BARRIER and is_tensor_constant(value.args[0]):
            constants[binding.var] = value.args[0]
        else:
            bindings.append(renamed(binding, constants))
    return bindings if constants else None


def _bytes(ty: tvm.ir.Type) -> int:
    """Bytes of tensors if all extents are known, else 0: FoldConstant leaves such calls alone."""
    total = 0
    for tensor in tensor_types(ty):
        if not isinstance(tensor.shape, relax.ShapeExpr) or tensor.dtype is None:
            return 0
        if not all(isinstance(extent, tvm.tirx.IntImm) for extent in tensor.shape.values):
            return 0
        total += tensor_bytes([int(extent) for extent in tensor.shape.values], tensor.dtype.dtype)
    return total
