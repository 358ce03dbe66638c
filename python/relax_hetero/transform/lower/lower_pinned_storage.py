"""LowerPinnedStorage: the run time allocates storage in pinned memory.

Before::

    s = R.memory.alloc_storage(R.shape([262144]), 0, "pinned", "uint8")
    a: R.Tensor((65536,), "float32") = R.memory.alloc_tensor(s, 0, R.shape([65536]), "float32", 0)

After::

    s = R.call_packed("relax_hetero.pinned_storage", R.shape([262144]), 0)
    a: R.Tensor((65536,), "float32") = R.call_packed("runtime.TVMTensorCreateView", s, R.shape([65536]), "float32", 0)

TVM's pool of a CPU lacks pinned memory.

Assumes PlanMemoryPerDevice and KillAfterLastUse, which decide when storage is freed. A second run changes nothing.
"""

from __future__ import annotations

import tvm
from tvm import relax

from ..ir.declare import declare_pass
from ..ir.rewriting import map_bindings, op_name, relax_functions, with_functions
from .pin_transferred import PINNED

_STORAGE, _VIEW = "relax_hetero.pinned_storage", "runtime.TVMTensorCreateView"


def lower_pinned_storage(mod: tvm.IRModule) -> tvm.IRModule:
    """See the module's docstring."""
    return with_functions(mod, {gv: _lowered(func) for gv, func in relax_functions(mod)})


LowerPinnedStorage = declare_pass("LowerPinnedStorage", lower_pinned_storage)


def _lowered(func: relax.Function) -> relax.Function:
    pinned: set[relax.Var] = set()

    def change(binding: relax.Binding) -> relax.Binding:
        value = binding.value
        if op_name(value) == "relax.memory.alloc_storage" and value.args[2].value == PINNED:
            pinned.add(binding.var)
            name, operands = _STORAGE, [value.args[0], value.args[1]]
        elif op_name(value) == "relax.memory.alloc_tensor" and value.args[0] in pinned:
            storage, offset, shape, dtype, _ = value.args
            name, operands = _VIEW, [storage, shape, dtype, offset]
        else:
            return binding
        ty = binding.var.ty
        call = relax.Call(relax.ExternFunc(name), operands, None, [ty], value.span, ret_ty=ty)
        return relax.VarBinding(binding.var, call, binding.span)

    return map_bindings(func, change)
