"""Constant folding on the CPU that does not fill the memory.

TVM's FoldConstant evaluates every kernel call of constants, also a ``broadcast_to`` of a scalar to a terabyte, and
kernels that were written for a GPU, which may not be there. Both stay calls.
"""

from __future__ import annotations

from collections.abc import Collection

import tvm
from tvm import relax

from ...tir.commands.table_kernel import is_one_launch
from ..ir.blocks import Block, renamed, rewrite_blocks
from ..ir.constant_values import exceeds_growth_limit
from ..ir.kernels import tensor_bytes
from ..ir.op_names import CALL_TIR_OPS
from ..ir.rewriting import is_tensor_constant, op_name, tensor_types, typed

_WITHOUT_PATTERN = "relax.builtin.stop_lift_params"


def fold_constants(mod: tvm.IRModule) -> tvm.IRModule:
    """FoldConstant on kernel calls, without those whose results would be large or whose kernel is another device's."""
    foreign = {
        gv.name_hint for gv, func in mod.functions.items() if isinstance(func, tvm.tirx.PrimFunc) and _is_foreign(func)
    }
    hidden = rewrite_blocks(mod, lambda block: _hide(block, foreign))
    folded = relax.transform.FoldConstant()(hidden)
    return folded if hidden.same_as(mod) else rewrite_blocks(folded, _show)


def _is_foreign(kernel: tvm.tirx.PrimFunc) -> bool:
    """Return whether a kernel does not run on this CPU: it says so, or binds the threads of a GPU."""
    if "target" in kernel.attrs:
        return bool(kernel.attrs["target"].kind.name != "llvm")
    return is_one_launch(kernel)


def _hide(block: Block, foreign: Collection[str]) -> list[relax.Binding] | None:
    """Constants of calls that are not to be folded, behind an op that FoldConstant does not know."""
    origin: dict[relax.Var, int] = {}
    bindings: list[relax.Binding] = []
    is_changed = False
    for binding in block.bindings:
        value = binding.value
        root = _root(value, origin)
        is_foreign = root is not None and value.args[0].name_hint in foreign
        if root is not None and (is_foreign or exceeds_growth_limit(_bytes(binding.var.ty), root)):
            args = [_opaque(arg, binding.var.name, block, bindings) for arg in value.args[1].fields]
            call = relax.Call(
                value.op, [value.args[0], relax.Tuple(args), *value.args[2:]], value.attrs, value.ty_args, value.span
            )
            bindings.append(relax.VarBinding(binding.var, typed(call, value.ty), binding.span))
            is_changed = True
            continue
        if root is not None:
            origin[binding.var] = root
        bindings.append(binding)
    return bindings if is_changed else None


def _root(value: relax.Expr, origin: dict[relax.Var, int]) -> int | None:
    """The bytes of the constants that a call is made of, None where it is made of something else, or of nothing."""
    if op_name(value) not in CALL_TIR_OPS or not isinstance(value.args[1], relax.Tuple) or not value.args[1].fields:
        return None
    total = 0
    for arg in value.args[1].fields:
        if is_tensor_constant(arg):
            total += _bytes(arg.ty)
        elif isinstance(arg, relax.Var) and arg in origin:
            total += origin[arg]
        else:
            return None
    return total


def _opaque(arg: relax.Expr, name: str, block: Block, bindings: list[relax.Binding]) -> relax.Expr:
    if not is_tensor_constant(arg):
        return arg
    var = (relax.DataflowVar if block.is_dataflow else relax.Var)(f"{name}_constant", arg.ty)
    call = typed(relax.Call(tvm.ir.Op.get(_WITHOUT_PATTERN), [arg]), arg.ty)
    bindings.append(relax.VarBinding(var, call))
    return var


def _show(block: Block) -> list[relax.Binding] | None:
    """The constants where they were."""
    shown: dict[relax.Var, relax.Expr] = {}
    bindings: list[relax.Binding] = []
    for binding in block.bindings:
        value = binding.value
        if op_name(value) == _WITHOUT_PATTERN and is_tensor_constant(value.args[0]):
            shown[binding.var] = value.args[0]
        else:
            bindings.append(renamed(binding, shown))
    return bindings if shown else None


def _bytes(ty: tvm.ir.Type) -> int:
    """Bytes of tensors whose extents are all known; 0 for others, which FoldConstant leaves alone."""
    total = 0
    for tensor in tensor_types(ty):
        if not isinstance(tensor.shape, relax.ShapeExpr) or tensor.dtype is None:
            return 0
        if not all(isinstance(extent, tvm.tirx.IntImm) for extent in tensor.shape.values):
            return 0
        total += tensor_bytes([int(extent) for extent in tensor.shape.values], tensor.dtype.dtype)
    return total
