"""UpdateDonated: kernels outside of command buffers overwrite donated parameters.

Before, where an attribute marks `cache` as donated and the kernel ties it to its result (`tir.core.ties`)::

    new = R.call_tir(cls.write_row, (cache, row), out_ty=R.Tensor((64, 16), "float32", "llvm:0"))

After::

    new = R.call_tir_inplace(cls.write_row_in_place, (cache, row), inplace_indices=[0], out_ty=...)

FormCommandBuffers does the same for command buffers. TVM's DataflowUseInplaceCalls rewrites elementwise ops before
they are kernels, and overwrites only values of the function, not its parameters.

Assumes FormDispatches. A lowered module is returned as it is; a second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.blocks import Block, rewrite_function, same_shape
from ..ir.declare import declare_pass
from ..ir.module_attrs import is_lowered
from ..ir.rewriting import copy_module, global_vars_in, op_name, relax_functions, typed
from .donated import DonatedVariables
from .kernel_calls import KernelCalls


def update_donated(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring; returns the same module where nothing changes."""
    if is_lowered(mod):
        return mod
    kernels = KernelCalls(mod)
    functions = dict(mod.functions.items())
    for gv, func in relax_functions(mod):
        variables = DonatedVariables(func)

        def rewrite(block: Block, variables: DonatedVariables = variables) -> list[relax.Binding] | None:
            free = variables.of(block)
            return [_in_place(binding, block, free, kernels) for binding in block.bindings] if free else None

        functions[gv] = rewrite_function(func, rewrite)
    if not kernels.functions:
        return mod
    used = {gv for func in functions.values() for gv in global_vars_in(func.body)}
    for gv in kernels.replaced:
        if gv not in used and "global_symbol" not in functions[gv].attrs:
            del functions[gv]
    return copy_module(mod, {**functions, **kernels.functions})


UpdateDonated = declare_pass("UpdateDonated", update_donated)


def _in_place(binding: relax.Binding, block: Block, free: frozenset[relax.Var], kernels: KernelCalls) -> relax.Binding:
    call = binding.value
    if op_name(call) != "relax.call_tir" or not isinstance(call.ty, relax.TensorType):
        return binding
    kernel, args = call.args[0], call.args[1]
    for operand, result in kernels.ties(kernel):
        if result == len(args.fields) and _is_sole_use(args.fields[operand], args, call.ty, block, free):
            new = kernels.in_place(kernel, (operand, result))
            in_place_call = relax.call_tir_inplace(new, args, [operand], [call.ty_args[0]])
            return relax.VarBinding(binding.var, typed(in_place_call, call.ty), binding.span)
    return binding


def _is_sole_use(
    value: relax.Expr, args: relax.Tuple, result: relax.TensorType, block: Block, free: frozenset[relax.Var]
) -> bool:
    """Return whether a call is the only use of a parameter, as one operand, with the shape of the result."""
    if value not in free or len(block.users[value]) > 1 or list(args.fields).count(value) > 1:
        return False
    shapes = [ty.shape for ty in (value.ty, result)]
    return all(isinstance(shape, relax.ShapeExpr) for shape in shapes) and same_shape(*(s.values for s in shapes))
